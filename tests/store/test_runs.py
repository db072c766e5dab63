"""The list of runs: names, how they stand, deletion, space."""

import math

import pandas as pd
import pytest

from tests.store.support import record
from xorl_lab.errors import StoreError
from xorl_lab.store import Store
from xorl_lab.types import StepRecord


def begun(store, name):
    return store.create(name=name, kind="grpo", model="tiny")


def test_names_are_unique(store):
    names = []
    for _ in range(3):
        with begun(store, "a") as writer:
            names.append(writer.info.name)
    with begun(store, "a-2") as writer:
        names.append(writer.info.name)
    assert names == ["a", "a-2", "a-3", "a-2-2"]
    assert [r.name for r in store.runs()] == names[::-1]
    with pytest.raises(StoreError, match="name is ' '"):
        begun(store, " ")


def test_an_unknown_run_is_an_error_that_lists_those_there_are(store):
    with pytest.raises(StoreError, match=r"no run 'a' in .*: there are none yet"):
        store.run("a")
    begun(store, "b").close()
    with pytest.raises(StoreError, match="the newest are b"):
        store.run("a")


def test_a_run_ends_as_its_block_does(store):
    with begun(store, "fine"):
        assert store.run("fine").status().state == "running"
    with pytest.raises(ValueError, match="no"), begun(store, "fails"):
        raise ValueError("no")
    with pytest.raises(KeyboardInterrupt), begun(store, "interrupted"):
        raise KeyboardInterrupt
    with begun(store, "own words") as writer:
        writer.status("paused", "by hand")
        assert store.run("own words").status().state == "paused"
        writer.status("failed", "out of memory", total=3)
    begun(store, "closed").close()

    stands = {r.name: store.run(r.name).status() for r in store.runs()}
    assert {n: (s.state, s.message) for n, s in stands.items()} == {
        "fine": ("finished", ""),
        "fails": ("failed", "ValueError: no"),
        "interrupted": ("stopped", "interrupted by KeyboardInterrupt"),
        "own words": ("failed", "out of memory"),
        "closed": ("stopped", ""),
    }
    assert stands["own words"].total == 3


def test_a_closed_writer_says_so(store):
    writer = begun(store, "a")
    writer.close()
    writer.close()
    with pytest.raises(StoreError, match="the writer of run 'a' was closed: resume the run"):
        writer.event("log", "")


def test_the_table_of_runs(store):
    assert store.frame().empty
    with begun(store, "a") as writer:
        writer.step(record(1))
        writer.step(record(2))
    with begun(store, "b") as writer:
        writer.step(StepRecord(1, {"x": 1.0}))
        frame = store.frame().set_index("name")
    assert list(frame.index) == ["b", "a"]
    assert frame.loc["a", "reward"] == 0.2
    assert frame.loc["a", "loss:mean"] == 0.5
    assert math.isnan(frame.loc["b", "reward"])
    assert list(frame["state"]) == ["running", "finished"]
    assert list(frame["step"]) == [1, 2]
    assert isinstance(frame.loc["a", "created"], pd.Timestamp)


def test_deleting_gives_space_back_and_leaves_the_others(store):
    with begun(store, "small") as writer:
        writer.step(record(1))
    small = store.disk_bytes()
    with begun(store, "big") as writer:
        for step in range(1, 20):
            writer.step(record(step, groups=8, size=8, length=100))
    reader, large = store.run("big"), store.disk_bytes()
    store.delete("big")

    assert large > small + 500_000
    assert store.disk_bytes() < small + 200_000
    assert [r.name for r in store.runs()] == ["small"]
    assert store.run("small").groups(1) == record(1).groups
    with pytest.raises(StoreError, match="run 'big' was deleted from"):
        reader.status()


def test_a_running_run_cannot_be_deleted(store, writer):
    with pytest.raises(StoreError, match="is being written by this process"):
        store.delete("run")
    writer.step(record(1))


def test_a_poll_says_whether_anything_is_new(store, writer):
    reader = store.run("run")
    changed, seen = reader.changed(None)
    assert changed
    assert reader.changed(seen) == (False, seen)
    for act in (
        lambda: writer.step(record(1)),
        lambda: writer.event("log", "a"),
        lambda: writer.status("paused"),
        lambda: writer.close(),
        lambda: store.resume("run", after=1).close(),
    ):
        act()
        changed, now = reader.changed(seen)
        assert changed
        assert reader.changed(now) == (False, now)
        seen = now
    begun(store, "other").close()
    assert reader.changed(seen) == (False, seen)


def test_a_second_store_sees_the_same(store, writer):
    writer.step(record(1))
    assert Store(store.path.parent).run("run").groups(1) == record(1).groups
    assert repr(store) == f"Store({str(store.path.parent)!r})"
    assert repr(store.run("run")) == f"Reader('run', {str(store.path)!r})"
    store.close()
    assert len(store.runs()) == 1
