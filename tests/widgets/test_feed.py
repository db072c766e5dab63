import os
import subprocess
import sys

import numpy as np

from tests.widgets import runs
from xorl_lab.types import StepRecord
from xorl_lab.widgets.feed import LINES_KEPT, Feed


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
    news = feed.poll()
    assert news.entries[0][3] == "error"
    assert "cannot be read" in news.entries[0][4]
    assert feed.poll() is None


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
