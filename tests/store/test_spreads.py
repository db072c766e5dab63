"""Groups at a glance: against the same done by hand."""

import dataclasses
import math

import numpy as np
import pytest

from tests.closeness import assert_close
from tests.store.support import record
from xorl_lab.errors import StoreError
from xorl_lab.types import Group, Rollout, StepRecord

COLUMNS = ["step", "group", "n", "matches", "reward:mean", "reward:std", "reward:min", "reward:max",
           "spread", "failed", "length:mean", "prompt", "ids"]  # fmt: skip


def one(reward, length=1):
    return Rollout([1] * length, [], "", "stop", 0, reward)


@pytest.fixture
def reader(store, writer):
    """Groups of 1 to 4 rollouts, some of which failed, and another run beside it."""
    with store.create(name="other", kind="grpo", model="tiny") as other:
        for step in range(1, 6):
            r = record(step, groups=3, size=4, length=step)
            small = dataclasses.replace(r.groups[0], rollouts=r.groups[0].rollouts[: step - 1 or 1])
            failed = [
                dataclasses.replace(x, reward=None, error="no") if i < step - 1 else x
                for i, x in enumerate(r.groups[1].rollouts)
            ]
            groups = [small, dataclasses.replace(r.groups[1], rollouts=failed), r.groups[2]]
            writer.step(dataclasses.replace(r, groups=groups))
            other.step(record(step + 10))
    return store.run("run")


def test_every_value_is_that_of_the_rollouts(reader):
    table = reader.group_table()
    assert list(table.columns) == COLUMNS
    rollouts = list(reader.walk())
    assert [i for ids in table["ids"] for i in ids] == [r.id for r in rollouts]
    assert len(table) == 15
    for row in table.to_dict("records"):
        own = [r for r in rollouts if r.id in row["ids"]]
        assert {(r.step, r.group, r.prompt) for r in own} == {
            (row["step"], row["group"], row["prompt"])
        }
        assert [r.sample for r in own] == list(range(row["n"]))
        assert row["matches"] == row["n"]
        rewards = [r.reward for r in own if r.reward is not None]
        assert row["failed"] == len(own) - len(rewards)
        assert_close(row["length:mean"], np.mean([len(r.tokens) for r in own]), rtol=1e-12)
        if not rewards:
            assert all(math.isnan(row[n]) for n in COLUMNS[4:9])
            continue
        expected = [np.mean(rewards), np.std(rewards), min(rewards), max(rewards)]
        assert_close(np.array([row[n] for n in COLUMNS[4:8]]), np.array(expected), rtol=1e-9)
        assert_close(row["spread"], max(rewards) - min(rewards), rtol=1e-12)
    assert table["failed"].tolist()[1::3] == [0, 1, 2, 3, 4]
    assert table["reward:mean"].isna().sum() == 1


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("name", [n for n in COLUMNS if n not in ("prompt", "ids")])
def test_any_number_sorts_and_what_lacks_it_comes_last(reader, name, descending):
    whole = reader.group_table()
    expected = whole.sort_values(name, ascending=not descending, kind="stable", na_position="last")
    found = reader.group_table(order_by=name, descending=descending)
    assert list(found.index) == list(expected.index)
    assert list(found["ids"]) == list(expected["ids"])
    assert list(found["prompt"]) == list(expected["prompt"])


def test_a_condition_on_rollouts_keeps_groups_that_have_one_and_counts_them(reader):
    where = [("reward", ">", 0.6), ("step", "in", [2, 3, 4])]
    found = reader.group_table(where=where)
    matching = set(reader.ids(where=where).tolist())
    whole = reader.group_table()
    counts = [len(matching & set(ids)) for ids in whole["ids"]]
    assert 0 < sum(c > 0 for c in counts) < 15
    assert found["matches"].tolist() == [c for c in counts if c]
    kept = whole[[c > 0 for c in counts]]
    assert list(found.index) == list(kept.index)
    assert list(found["reward:mean"]) == list(kept["reward:mean"])  # of all its rollouts
    assert [len(i) for i in found["ids"]] == found["n"].tolist()


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        (("n", "=", 2), lambda g: g["n"] == 2),
        (("n", "!=", 4), lambda g: g["n"] != 4),
        (("spread", ">", np.float64(0.5)), lambda g: g["spread"] > 0.5),
        (("spread", "=", 0), lambda g: g["spread"] == 0),
        (("reward:mean", "<=", 0.5), lambda g: g["reward:mean"] <= 0.5),
        (("reward:mean", "!=", 0.5), lambda g: g["reward:mean"].notna()),
        (("reward:std", "=", None), lambda g: g["reward:std"].isna()),
        (("reward:max", "!=", None), lambda g: g["reward:max"].notna()),
        (("length:mean", ">=", 4), lambda g: g["length:mean"] >= 4),
        (("failed", "=", True), lambda g: g["failed"] > 0),
        (("prompt", "contains", "PROMPT 2"), lambda g: g["group"] == 2),
    ],
)
def test_conditions_hold(reader, condition, holds):
    whole = reader.group_table()
    expected = whole[holds(whole)]
    assert 0 < len(expected) < 15
    assert list(reader.group_table(where=[condition]).index) == list(expected.index)


def test_conditions_on_groups_and_rollouts_must_all_hold(reader):
    where = [("spread", ">", 0.2), ("reward", "<", 0.5), ("matches", ">", 1)]
    whole = reader.group_table(where=[("reward", "<", 0.5)])
    expected = whole[(whole["spread"] > 0.2) & (whole["matches"] > 1)]
    assert 0 < len(expected) < len(whole)
    assert list(reader.group_table(where=where).index) == list(expected.index)


def test_rewards_that_are_no_numbers_or_infinite_warn_of_nothing(store, writer):
    rewards = [[math.nan, 1.0, 3.0], [math.inf, 1.0], [math.inf, -math.inf], [math.nan], [None], []]
    groups = [Group(str(i), [1], [one(r) for r in own]) for i, own in enumerate(rewards)]
    writer.step(StepRecord(1, {}, groups))
    table = store.run("run").group_table()
    assert table["group"].tolist() == [0, 1, 2, 3, 4]  # one without rollouts has no row
    nan = math.nan
    expected = {
        "reward:mean": [2.0, math.inf, nan, nan, nan],
        "reward:std": [1.0, nan, nan, nan, nan],
        "reward:min": [1.0, 1.0, -math.inf, nan, nan],
        "reward:max": [3.0, math.inf, math.inf, nan, nan],
        "spread": [2.0, math.inf, math.inf, nan, nan],
        "failed": [0, 0, 0, 0, 1],
    }
    for name, values in expected.items():
        np.testing.assert_array_equal(table[name].to_numpy(), values, name)


def test_prompts_are_cut_where_that_is_asked(reader):
    assert set(reader.group_table(chars=8)["prompt"]) == {"prompt 0", "prompt 1", "prompt 2"}
    assert set(reader.group_table(chars=0)["prompt"]) == {""}


def test_superseded_steps_are_left_out(store, reader, writer):
    writer.close()
    with store.resume("run", after=2):
        pass
    assert reader.group_table()["step"].tolist() == [1, 1, 1, 2, 2, 2]


def test_a_table_without_rows_has_the_same_types(store, reader):
    with store.create(name="empty", kind="sft", model="tiny"):
        empty = store.run("empty").group_table()
    none = reader.group_table(where=[("step", "=", 99)])
    whole = reader.group_table()
    for table in (empty, none):
        assert len(table) == 0
        assert dict(table.dtypes) == dict(whole.dtypes)
        assert table.index.dtype == whole.index.dtype


@pytest.mark.parametrize(
    ("where", "order", "message"),
    [
        ([], "reward", "order_by is 'reward': choose from step, group, n, matches"),
        ([], "prompt", "order_by is 'prompt': choose from"),
        ([("rewards", ">", 1)], "step", "there is no scalar 'rewards'"),
        (["spread"], "step", "a condition is 'spread': pass"),
        ([("spread", "like", 1)], "step", "operator is 'like'"),
        ([("spread", "contains", 1)], "step", "spread is compared by = != < <= > >= to a number"),
        ([("n", "=", "2")], "step", "n is compared by = != < <= > >= to a number"),
    ],
)
def test_what_cannot_be_asked(reader, where, order, message):
    with pytest.raises(StoreError) as error:
        reader.group_table(where=where, order_by=order)
    assert message in str(error.value)
