import itertools
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.closeness import assert_close
from tests.widgets import runs
from xorl_lab.errors import StoreError
from xorl_lab.types import StepRecord
from xorl_lab.widgets.fallback import fallback_html
from xorl_lab.widgets.feed import LINES_KEPT, MARKS_KEPT, UNKNOWN, Feed


def test_what_is_there_is_read_at_once(reader, writer):
    for step in range(1, 6):
        runs.record(writer, step)
    feed = Feed(reader)
    assert feed.history.last == 5
    assert feed.status["state"] == "running"
    assert feed.status["left"] > 0
    assert feed.poll() is None


def test_then_only_what_is_new(reader, writer):
    feed = Feed(reader)
    runs.record(writer, 1)
    news = feed.poll()
    assert news.after == 0
    assert news.table.steps.tolist() == [1]
    assert news.status["step"] == 1
    runs.record(writer, 2)
    runs.record(writer, 3)
    news = feed.poll()
    assert news.after == 1
    assert news.table.steps.tolist() == [2, 3]
    writer.event("checkpoint", "saved", step=3)
    news = feed.poll()
    assert news.table is None
    assert [e[3:] for e in news.entries] == [["checkpoint", "saved"]]
    assert feed.marks[-1][2] == 3


def test_nan_and_infinity_survive(reader, writer):
    feed = Feed(reader)
    writer.step(StepRecord(1, {"a": float("nan"), "b": float("inf")}))
    table = feed.poll().table
    found = dict(zip(table.names, table.values[0], strict=True))
    assert np.isnan(found["a"])
    assert np.isposinf(found["b"])


def test_a_resumed_run_is_shown_anew(store, reader, writer):
    feed = Feed(reader)
    for step in range(1, 6):
        runs.record(writer, step)
    feed.poll()
    writer.close()
    with store.resume(reader.info.id, after=2) as again:
        runs.record(again, 3, seed=9)
        news = feed.poll()
        assert news.restarted
        assert feed.history.steps.tolist() == [1, 2, 3]


KILLED = """
import os, sys
from pathlib import Path
from tests.widgets import runs
from xorl_lab.store import Store
writer = Store(Path(sys.argv[1])).create(name="killed", kind="grpo", model="tiny")
runs.record(writer, 1)
os._exit(9)
"""


def test_a_run_whose_process_is_gone_has_crashed(root, store):
    command = [sys.executable, "-c", KILLED, str(store.path.parent)]
    subprocess.run(command, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, check=False)
    feed = Feed(store.run("killed"))
    assert feed.status["state"] == "crashed"
    assert feed.status["left"] is None


def test_a_store_that_cannot_be_read_is_said_once(store, reader, writer):
    feed = Feed(reader)
    writer.status("finished")
    writer.close()
    store.delete(reader.info.id)
    before = time.time()
    news = feed.poll()
    _, when, _, kind, text = news.entries[0]
    assert kind == "error"
    assert "cannot be read" in text
    assert before <= when <= time.time()
    assert feed.poll() is None


def test_a_run_that_was_never_read_says_why(store, reader, writer):
    writer.close()
    store.delete(reader.info.id)
    feed = Feed(reader)
    assert feed.status["state"] == UNKNOWN
    assert "was deleted" in feed.lines[-1][4]
    assert "unknown, step 0 of 100 (the run cannot be read" in fallback_html(reader)


def failing_once(reader, monkeypatch, name):
    """The next call of a reader's method fails."""
    real, left = getattr(reader, name), iter([True])

    def call(*args):
        if next(left, False):
            raise StoreError("busy")
        return real(*args)

    monkeypatch.setattr(reader, name, call)


@pytest.mark.parametrize("name", ["changed", "scalars", "events", "status"])
def test_nothing_is_lost_to_one_error(reader, writer, monkeypatch, name):
    for step in (1, 2, 3):
        runs.record(writer, step)
    feed = Feed(reader)
    runs.record(writer, 4)
    writer.event("checkpoint", "saved", step=4)
    writer.status("finished")
    writer.close()
    failing_once(reader, monkeypatch, name)
    assert [e[4] for e in feed.poll().entries] == ["the run cannot be read: busy"]
    assert feed.status["state"] == "running"
    news = feed.poll()
    assert (news.after, news.table.steps.tolist()) == (3, [4])
    assert [e[4] for e in news.entries] == ["saved", "the run can be read again"]
    assert (news.status["state"], news.status["step"]) == ("finished", 4)
    assert feed.poll() is None
    lines = [e[4] for e in feed.lines]
    assert lines == ["the run cannot be read: busy", "saved", "the run can be read again"]
    assert len({e[0] for e in feed.lines}) == len(lines)


@pytest.mark.parametrize("name", ["scalars", "events", "status"])
def test_an_error_while_a_run_is_resumed_costs_nothing(store, reader, writer, monkeypatch, name):
    for step in range(1, 6):
        runs.record(writer, step)
    feed = Feed(reader)
    writer.close()
    with store.resume(reader.info.id, after=2) as again:
        runs.record(again, 3, seed=9)
        failing_once(reader, monkeypatch, name)
        feed.poll()
        news = feed.poll()
        assert news.restarted
        assert feed.history.steps.tolist() == [1, 2, 3]


def test_time_left_of_a_loop_of_ones_own(reader, writer):
    for step, seconds in enumerate((9.0, 2.0, 2.0), 1):
        writer.step(StepRecord(step, {"seconds:step": seconds}))
    assert Feed(reader).status["left"] == 2.0 * 97


def test_time_between_a_crash_and_its_resumption_is_not_counted(store, monkeypatch):
    now = itertools.count(1000.0)
    clock = [next(now)]
    monkeypatch.setattr("time.time", lambda: clock[0])
    writer = store.create(name="resumed", kind="grpo", model="tiny", total=9)
    reader = store.run(writer.info.id)
    writer.event("start", "begun")
    for step in (1, 2, 3):
        clock[0] += 5
        writer.step(StepRecord(step, {"seconds:total": 5.0}))
    assert Feed(reader).status["seconds"] == 15.0
    writer.close()
    clock[0] += 3600
    with store.resume(writer.info.id, after=2) as again:
        again.event("start", "going on behind step 2", step=2)
        clock[0] += 7
        again.step(StepRecord(3, {"seconds:total": 7.0}))
        assert_close(Feed(reader).status["seconds"], 10.0 + 7.0, rtol=1e-9)


def test_what_has_no_step_is_marked_behind_the_last_one(reader, writer):
    feed = Feed(reader)
    writer.event("knob", "before the first step")
    feed.poll()
    runs.record(writer, 1)
    runs.record(writer, 2)
    writer.event("pause", "paused")
    writer.event("resume", "going on")
    feed.poll()
    assert [(e[2], e[3]) for e in feed.marks] == [(0, "knob"), (2, "pause")]


def test_what_has_no_step_is_marked_so_when_it_is_read_later(reader, writer):
    writer.event("knob", "before the first step")
    for step in range(1, 6):
        runs.record(writer, step)
    writer.event("checkpoint", "saved", step=5)
    writer.event("pause", "paused")
    for step in range(6, 10):
        runs.record(writer, step)
    assert [(e[2], e[3]) for e in Feed(reader).marks] == [
        (0, "knob"),
        (5, "checkpoint"),
        (5, "pause"),
    ]


def test_what_happens_at_every_step_drives_out_nothing(reader, writer):
    writer.event("knob", "turned", step=1)
    writer.event("warning", "careful", step=1)
    for step in range(1, MARKS_KEPT + LINES_KEPT):
        writer.event("sync", f"weights of step {step}", step=step)
    feed = Feed(reader)
    assert [e[3] for e in feed.lines] == ["knob", "warning"]
    kinds = [e[3] for e in feed.marks]
    assert kinds == ["knob", *["sync"] * MARKS_KEPT]
    assert feed.event == feed.snapshot()["event"] == MARKS_KEPT + LINES_KEPT + 1


def test_texts_and_their_number_are_limited(reader, writer):
    feed = Feed(reader)
    for i in range(LINES_KEPT + 10):
        writer.event("log", f"{i} " + "x" * 5000)
    feed.poll()
    assert len(feed.lines) == LINES_KEPT
    assert len(feed.lines[-1][4]) == 2000


def test_a_snapshot_says_where_a_branch_began(store, reader, writer):
    for step in range(1, 31):
        runs.record(writer, step)
    name = runs.branched(store, writer.info.name, 30)
    snapshot = Feed(store.run(name)).snapshot()
    assert snapshot["parent"] == {"run": writer.info.id, "checkpoint": "step-20"}
    assert snapshot["rows"] == 10
    assert snapshot["status"]["state"] == "stopped"
