"""Filter and sort: against the same done by hand."""

import dataclasses
import math
import weakref

import numpy as np
import pytest

from tests.closeness import assert_close
from tests.store.support import record, same
from xorl_lab.errors import StoreError
from xorl_lab.store import groups, walks
from xorl_lab.types import Group, Rollout, StepRecord

SCALARS = [
    "id", "step", "group", "sample", "reward", "advantage", "length", "prompt_length",
    "mean:logprobs", "version", "stop_reason", "failed", "reward:part:format",
    "reward:part:answer", "mean:trainer_logprobs", "mean:entropy",
]  # fmt: skip


@pytest.fixture
def reader(store, writer):
    """A run of 5 steps, one rollout of which failed, and another run beside it."""
    with store.create(name="other", kind="grpo", model="tiny") as other:
        for step in range(1, 6):
            r = record(step, groups=2, size=4, length=step + 2)
            first, *rest = r.groups[0].rollouts
            if step == 3:
                first = dataclasses.replace(first, reward=None, error="it failed", reward_parts={})
            groups = [dataclasses.replace(r.groups[0], rollouts=[first, *rest]), r.groups[1]]
            writer.step(dataclasses.replace(r, groups=groups))
            other.step(record(step + 10))
    return store.run("run")


def by_hand(reader):
    """Every rollout's scalars, from the records themselves."""
    found = []
    for step in range(1, 6):
        for g, group in enumerate(reader.groups(step)):
            for i, r in enumerate(group.rollouts):
                found.append(
                    {
                        "step": step,
                        "group": g,
                        "sample": i,
                        "reward": math.nan if r.reward is None else r.reward,
                        "advantage": r.advantage,
                        "length": len(r.tokens),
                        "prompt_length": len(group.prompt_tokens),
                        "mean:logprobs": float(np.mean(r.logprobs)),
                        "version": r.version,
                        "stop_reason": r.stop_reason,
                        "failed": r.reward is None,
                        "reward:part:format": r.reward_parts.get("format", math.nan),
                        "reward:part:answer": r.reward_parts.get("answer", math.nan),
                        "mean:trainer_logprobs": float(np.mean(r.streams["trainer_logprobs"])),
                        "mean:entropy": float(np.mean(r.streams["entropy"])),
                        "text": r.text,
                        "error": r.error,
                        "prompt": group.prompt,
                        "tags": (),
                        "note": "",
                    }
                )
    return found


def test_the_columns_are_these(reader):
    assert reader.rollout_columns() == SCALARS
    frame = reader.rollouts()
    assert {*SCALARS[1:], "text", "error", "prompt", "tags", "note"} == set(frame.columns)
    assert frame.index.name == "id"


def test_every_value_is_that_of_the_record(reader):
    frame, expected = reader.rollouts(), by_hand(reader)
    assert len(frame) == len(expected) == reader.count() == 40
    for name in frame.columns:
        wanted = [row[name] for row in expected]
        if name in ("stop_reason", "text", "error", "prompt", "tags", "note"):
            assert list(frame[name]) == wanted
        else:
            numbers = frame[name].to_numpy()
            there = ~np.isnan(np.array(wanted, float))
            assert (np.isnan(numbers.astype(float)) == ~there).all()
            assert_close(numbers[there].astype(float), np.array(wanted, float)[there], rtol=1e-6)


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("name", SCALARS)
def test_any_scalar_sorts_and_what_lacks_it_comes_last(reader, name, descending):
    whole = reader.rollouts().reset_index()
    found = reader.rollouts(order_by=name, descending=descending).reset_index()
    expected = whole.sort_values(
        [name, "id"], ascending=[not descending, True], na_position="last", kind="stable"
    )
    assert list(found["id"]) == list(expected["id"])
    page = reader.rollouts(order_by=name, descending=descending, limit=7, offset=5)
    assert list(page.index) == list(expected["id"])[5:12]


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        (("reward", ">", 0.5), lambda r: r["reward"] > 0.5),
        (("reward", "=", None), lambda r: math.isnan(r["reward"])),
        (("reward", "!=", None), lambda r: not math.isnan(r["reward"])),
        (("failed", "=", True), lambda r: r["failed"]),
        (("reward:part:answer", "<=", np.float64(0.3)), lambda r: r["reward:part:answer"] <= 0.3),
        (("mean:entropy", ">=", 0), lambda r: r["mean:entropy"] >= 0),
        (("stop_reason", "=", "length"), lambda r: r["stop_reason"] == "length"),
        (("stop_reason", "!=", "length"), lambda r: r["stop_reason"] != "length"),
        (("step", "in", [2, np.int64(4)]), lambda r: r["step"] in (2, 4)),
        (("step", "in", []), lambda _: False),
        (("length", "<", 5), lambda r: r["length"] < 5),
        (("error", "contains", "FAIL"), lambda r: r["error"] is not None),
        (("prompt", "contains", "prompt 1 of"), lambda r: r["group"] == 1),
        (("text", "=", ""), lambda r: r["text"] == ""),
    ],
)
def test_conditions_hold(reader, condition, holds):
    expected = [i for i, r in enumerate(by_hand(reader)) if holds(r)]
    everything = list(reader.rollouts().index)
    assert list(reader.rollouts(where=[condition]).index) == [everything[i] for i in expected]
    assert reader.count([condition]) == len(expected)


def test_all_conditions_must_hold_and_several_parts_may_be_asked_for(reader):
    where = [
        ("reward:part:answer", ">", 0.2),
        ("reward:part:format", "<", 0.8),
        ("mean:entropy", "!=", None),
        ("text", "contains", "completion"),
        ("prompt", "contains", "step"),
    ]
    whole = reader.rollouts()
    kept = whole[
        (whole["reward:part:answer"] > 0.2)
        & (whole["reward:part:format"] < 0.8)
        & whole["text"].str.contains("completion")
    ].sort_values("reward:part:answer", ascending=False)
    found = reader.rollouts(where=where, order_by="reward:part:answer", descending=True)
    assert list(found.index) == list(kept.index)
    assert reader.count(where) == len(kept)


@pytest.mark.parametrize("sign", ["%", "_", "\\", "'", '"', ";"])
def test_signs_of_sql_are_plain_text(store, sign):
    def one(text):
        return Rollout([1], [0.0], text, "stop", 0, 0.0, {sign: 1.0})

    with store.create(name=sign, kind="grpo", model="tiny") as writer:
        texts = [f"a{sign}b", "axb", "ab"]
        writer.step(StepRecord(1, {}, [Group("p", [1], [one(t) for t in texts])]))
    reader = store.run(sign)
    assert list(reader.rollouts(where=[("text", "contains", f"a{sign}b")])["text"]) == texts[:1]
    assert len(reader.rollouts(where=[(f"reward:part:{sign}", "=", 1)])) == 3


@pytest.mark.parametrize(
    ("where", "order", "message"),
    [
        ([("rewards", ">", 1)], "id", "there is no scalar 'rewards': choose from id, step"),
        ([], "text", "there is no scalar 'text'"),
        ([], "1; DROP TABLE runs", "there is no scalar"),
        ([("reward", "like", 1)], "id", "operator is 'like': choose from =, !="),
        (["reward"], "id", "a condition is 'reward'"),
        ([("tags", "=", "a")], "id", 'ask ("tags", "has", "a-tag")'),
        ([("tags", "in", ["a"])], "id", 'ask ("tags", "has", "a-tag")'),
        ([("note", "has", "a")], "id", 'ask ("tags", "has", "a-tag")'),
        ([], "tags", "there is no scalar 'tags'"),
        ([("reward", "=", [1])], "id", "a condition compares with [1]: pass a number or text"),
    ],
)
def test_what_cannot_be_asked(reader, where, order, message):
    with pytest.raises(StoreError) as error:
        reader.rollouts(where=where, order_by=order)
    assert message in str(error.value)


def test_text_that_is_no_unicode_can_be_asked_for(reader):
    assert reader.count([("text", "contains", "\ud800")]) == 0
    assert reader.count([("text", "=", "\ud800")]) == 0


def test_a_table_without_rows_has_the_same_types(reader, store):
    whole, none = reader.rollouts(), reader.rollouts(where=[("step", "=", 99)])
    assert len(none) == 0
    assert dict(whole.dtypes) == dict(none.dtypes)
    with store.create(name="empty", kind="sft", model="tiny"):
        assert len(store.run("empty").rollouts()) == 0


def test_a_rollout_of_another_run_is_not_there(reader, store):
    strange = int(store.run("other").rollouts().index[0])
    with pytest.raises(StoreError, match=f"the run has no rollout {strange}"):
        reader.rollout(strange)


def test_rewards_may_be_infinite_and_nan_is_not_failed(store, writer):
    rewards = [1.0, math.inf, None, -math.inf, math.nan]
    drawn = [Rollout([1], [], "", "stop", 0, r) for r in rewards]
    writer.step(StepRecord(1, {}, [Group("p", [1], drawn)]))
    frame = store.run("run").rollouts(order_by="reward")
    assert list(frame["sample"]) == [3, 0, 1, 2, 4]
    assert list(frame["failed"]) == [False, False, False, True, False]
    assert frame["mean:logprobs"].isna().all()


# Pages


def test_ids_are_those_of_the_table_in_order(reader):
    where = [("reward:part:answer", ">", 0.2), ("prompt", "contains", "prompt 1")]
    for descending in (False, True):
        asked = {"where": where, "order_by": "mean:entropy", "descending": descending}
        found = reader.ids(**asked)
        assert found.dtype == np.int64
        assert found.tolist() == list(reader.rollouts(**asked).index)
    assert len(found) > 5
    assert reader.ids(where=[("step", "=", 99)]).tolist() == []


def test_a_page_has_the_columns_of_the_table_in_the_order_of_its_ids(reader):
    frame = reader.rollouts()
    ids = list(frame.index[[7, 30, 2, 2, 16]])  # the last one failed
    page = reader.table(ids)
    assert list(page) == ["id", *frame.columns]
    assert page.pop("id") == ids
    for name, values in page.items():
        expected = frame[name].loc[ids]
        assert values == [None if v is None or v != v else v for v in expected], name
    assert page["reward"][4] is None
    assert page["failed"] == [False, False, False, False, True]
    assert reader.table(np.array(ids)) == page | {"id": ids}
    assert set(map(len, reader.table([]).values())) == {0}


@pytest.mark.parametrize("chars", [0, 1, 2, 3, 100])
def test_texts_of_a_page_are_cut_between_characters(store, writer, chars):
    texts = ["a\0bc", "😀é漢x", "\0\0\0\0", "", "e\u0301" * 200]
    drawn = [Rollout([1], [], t, "stop", 0, None, error=t) for t in texts]
    writer.step(StepRecord(1, {}, [Group(texts[1], [1], drawn)]))
    reader = store.run("run")
    page = reader.table(reader.ids(), chars)
    assert page["text"] == page["error"] == [t[:chars] for t in texts]
    assert page["prompt"] == [texts[1][:chars]] * 5


def test_a_page_of_what_is_not_there_is_an_error(reader, store):
    mine, strange = int(reader.ids()[0]), int(store.run("other").ids()[0])
    for ids in ([mine, strange], [10**9]):
        for ask in (reader.table, lambda i: next(reader.stored(i))):
            with pytest.raises(StoreError, match=f"has no rollout {ids[-1]}: take ids from ids"):
                ask(ids)


def test_stored_rollouts_come_in_the_order_of_their_ids_each_group_unpacked_once(
    reader, monkeypatch
):
    everything = {r.id: r for r in reader.walk()}
    unpacked, own = [], groups.rollouts_of

    def counted(connection, group):
        unpacked.append(group)
        return own(connection, group)

    monkeypatch.setattr(groups, "rollouts_of", counted)
    chance = np.random.default_rng(0)
    for ids in (
        list(everything),
        chance.permutation(list(everything)),
        chance.choice(list(everything), 30),
    ):
        unpacked.clear()
        found = list(reader.stored(ids))
        assert [r.id for r in found] == list(ids)
        assert all(same(r, everything[r.id]) for r in found)
        assert len(unpacked) == len(set(unpacked))
    assert list(reader.stored([])) == []


def test_a_rollout_waits_in_memory_only_until_it_was_asked_for_last(reader):
    ids = reader.ids().tolist()
    by_group = {i: n // 4 for n, i in enumerate(ids)}  # groups have four
    alive = weakref.WeakSet()

    class Light:
        def __init__(self, number):
            self.id = number
            alive.add(self)

    def unpack(group):
        return [Light(i) for i in ids if by_group[i] == group]

    most = 0
    for _ in walks.in_order(ids, by_group, unpack):
        most = max(most, len(alive))
    assert most <= 5
    few = [i for i in ids if i % 4 == 0]
    assert len(few) == 10
    for _ in walks.in_order(few, by_group, unpack):
        assert len(alive) <= 2
