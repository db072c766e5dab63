"""What was recorded is read, bit for bit."""

import dataclasses
import math
import pickle
import threading

import numpy as np
import pytest

from tests.store.support import record, same
from xorl_lab.errors import StoreError
from xorl_lab.store import Parent
from xorl_lab.types import Group, Rollout, StepRecord

PLAIN = Rollout([5, 6], [-0.5, -1.0], "hi", "stop", 1, 1.0)


def alone(rollout: Rollout, step: int = 1) -> StepRecord:
    return StepRecord(step, {}, [Group("p", [1], [rollout])])


def test_groups_come_back_as_they_were(store, writer):
    records = [record(step, groups=3, size=4, length=17) for step in (1, 2, 5)]
    for r in records:
        writer.step(r)
    reader = store.run("run")

    for r in records:
        assert reader.groups(r.step) == r.groups
    assert reader.groups(3) == []


ODD = {
    "no tokens": Rollout([], [], "", "stop", 0, 0.0, streams={"entropy": []}),
    "no logprobs": Rollout([1, 2], [], "x", "length", 0, 0.0),
    "reward failed": dataclasses.replace(PLAIN, reward=None, error="ValueError: <b>no</b>"),
    "reward is NaN": dataclasses.replace(PLAIN, reward=math.nan, advantage=math.nan),
    "infinite": dataclasses.replace(PLAIN, reward=math.inf, advantage=-math.inf),
    "parts": dataclasses.replace(PLAIN, reward_parts={"a": math.nan, "b": -math.inf, "": 0.1}),
    "streams": dataclasses.replace(
        PLAIN, streams={"kl": [math.nan, math.inf], "logprobs": [1.0, 2.0], "": [0.0, -0.0]}
    ),
    "text": dataclasses.replace(PLAIN, text="\0 </script> 日本 🙂 `%_' \x7f\r\n"),
    "largest id": dataclasses.replace(PLAIN, tokens=[0, 2**31 - 1]),
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_odd_rollouts_come_back_as_they_were(store, writer, odd):
    groups = [Group("p", [], [PLAIN, odd, PLAIN]), Group("q", [7], [odd]), Group("r", [7], [])]
    writer.step(StepRecord(1, {}, groups))

    assert same(store.run("run").groups(1), groups)


def test_rollouts_of_one_group_may_have_different_streams(store, writer):
    def one(*names, length=2):
        streams = {name: [0.5] * length for name in names}
        return Rollout([1] * length, [-1.0] * length, "", "stop", 0, 0.0, streams=streams)

    groups = [Group("p", [1], [one("a"), one("b", length=3), one(), one("b", "a", length=1)])]
    writer.step(StepRecord(1, {}, groups))

    assert store.run("run").groups(1) == groups


def test_a_rollout_has_arrays_and_what_its_group_knows(store, writer):
    writer.step(record(1))
    writer.step(r := record(2))
    reader = store.run("run")
    for i, number in enumerate(reader.rollouts(where=[("step", "=", 2)]).index):
        group, sample = divmod(i, 3)
        found, expected = reader.rollout(number), r.groups[group].rollouts[sample]

        assert (found.id, found.step, found.group, found.sample) == (number, 2, group, sample)
        assert found.rollout() == expected
        assert found.prompt == r.groups[group].prompt
        assert found.row == {"answer": group, "topic": "sums"}
        assert (found.tokens.dtype, found.prompt_tokens.dtype) == (np.int32, np.int32)
        assert {v.dtype for v in [found.logprobs, *found.streams.values()]} == {np.dtype("f4")}
        assert found.facts["answer"] == expected.reward_parts["answer"]


def test_values_per_token_are_float32_and_rewards_float64(store, writer):
    writer.step(alone(dataclasses.replace(PLAIN, logprobs=[0.1, -1e300], reward=0.1)))
    (found,) = store.run("run").groups(1)[0].rollouts

    assert found.logprobs == [float(np.float32(0.1)), -math.inf]
    assert found.reward == 0.1


def test_text_that_is_no_unicode_is_stored_with_a_sign_in_its_place(store, writer):
    writer.step(alone(dataclasses.replace(PLAIN, text="a\ud83d b", error="\udc00")))
    (found,) = store.run("run").groups(1)[0].rollouts

    assert (found.text, found.error) == ("a\ufffd b", "\ufffd")


def test_a_row_may_hold_what_json_lacks(store, writer):
    row = {"n": np.int64(3), "x": np.float32(0.5), "a": np.arange(2), 5: {("t",): {1}}, "o": 1j,
           "nan": math.nan}  # fmt: skip
    writer.step(StepRecord(1, {}, [Group("p", [1], [PLAIN], row)]))

    expected = {"n": 3, "x": 0.5, "a": [0, 1], "5": {"('t',)": [1]}, "o": "1j", "nan": math.nan}
    assert same(store.run("run").groups(1)[0].row, expected)


def test_metrics_keep_nan_and_infinity(store, writer):
    writer.step(StepRecord(1, {"a": math.nan, "b": math.inf, "c": 1}))
    writer.step(StepRecord(2, {"b": -math.inf, "d": np.float32(0.5)}))
    writer.step(StepRecord(4, {}))
    scalars = store.run("run").scalars()

    assert scalars.steps.tolist() == [1, 2, 4]
    expected = {
        "a": [math.nan] * 3,
        "b": [math.inf, -math.inf, math.nan],
        "c": [1.0, math.nan, math.nan],
        "d": [math.nan, 0.5, math.nan],
    }
    assert same({n: v.tolist() for n, v in scalars.columns.items()}, expected)
    assert store.run("run").scalars(after=2).columns == {}
    assert store.run("run").scalars(after=4).steps.tolist() == []
    assert store.run("run").metrics().shape == (3, 4)


REFUSED = {
    "metric": (StepRecord(1, {"a": "high"}), "metric 'a' of step 1 is 'high': pass a number"),
    "none": (StepRecord(1, {"a": None}), "metric 'a' of step 1 is None"),
    "reward": (alone(dataclasses.replace(PLAIN, reward="1")), "reward of rollout 0 of group 0"),
    "length": (
        alone(dataclasses.replace(PLAIN, streams={"kl": [0.0]})),
        "'kl' of group 0 of step 1, rollout 0, has 1 values but there are 2 tokens",
    ),
    "stream": (alone(dataclasses.replace(PLAIN, logprobs=["x", 1])), "is not all numbers"),
    "id": (alone(dataclasses.replace(PLAIN, tokens=[1, -1])), "reach from -1 to 1"),
}


@pytest.mark.parametrize(("bad", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused_and_nothing_of_it_recorded(store, writer, bad, message):
    with pytest.raises(StoreError) as error:
        writer.step(bad)

    assert message in str(error.value)
    reader = store.run("run")
    assert (reader.status().step, reader.events(), reader.count()) == (0, [], 0)
    writer.step(record(1))
    assert reader.status().step == 1


@pytest.mark.parametrize("step", [0, 1, 2])
def test_steps_only_grow(store, writer, step):
    writer.step(record(2))
    with pytest.raises(StoreError, match="step 2 was recorded before: steps only grow"):
        writer.step(record(step))
    assert store.run("run").scalars().steps.tolist() == [2]


def test_warnings_and_events_are_listed_in_order(store, writer):
    writer.event("start", "began", data={"lr": np.float64(0.5), "x": math.inf})
    writer.step(record(1))
    writer.event("checkpoint", "saved", step=1, data={"path": "xorl://a/weights/b"})
    reader = store.run("run")
    events = reader.events()

    assert [(e.kind, e.step, e.text) for e in events] == [
        ("start", None, "began"),
        ("warning", 1, "warning of step 1"),
        ("checkpoint", 1, "saved"),
    ]
    assert events[0].data == {"lr": 0.5, "x": math.inf}
    assert [e.id for e in events] == sorted(e.id for e in events)
    assert reader.events(after=events[1].id) == events[2:]
    assert reader.checkpoints() == events[2:]
    assert reader.events(kinds=["warning", "start"]) == events[:2]


def test_an_unknown_event_or_state_is_an_error(writer):
    with pytest.raises(StoreError, match="kind is 'party': choose from checkpoint, knob"):
        writer.event("party", "")
    with pytest.raises(StoreError, match="state is 'crashed': choose from running"):
        writer.status("crashed")


def test_any_thread_may_record(store, writer):
    texts = [f"{t}:{i}" for t in range(4) for i in range(25)]
    threads = [
        threading.Thread(target=lambda t=t: [writer.event("log", f"{t}:{i}") for i in range(25)])
        for t in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(e.text for e in store.run("run").events()) == sorted(texts)


def test_info_comes_back(store):
    parent = Parent("abc", "step-40", 40)
    settings = {"lr": 1e-4, "stop": None, "o": pytest}
    with store.create(name="a", kind="sft", model="m", settings=settings, total=7, parent=parent):
        info = store.run("a").info

    assert (info.name, info.kind, info.model, info.total) == ("a", "sft", "m", 7)
    assert info.parent == parent
    assert info.settings == {"lr": 1e-4, "stop": None, "o": str(pytest)}
    assert store.run(info.id).info == info
    assert store.runs() == [info]


def test_a_reader_goes_to_other_processes(store, writer):
    writer.step(record(1))
    again = pickle.loads(pickle.dumps(store.run("run")))

    assert again.groups(1) == record(1).groups
    assert pickle.loads(pickle.dumps(store)).runs() == store.runs()
