"""One writer per run, and when a writer counts as gone."""

import gc
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.store.support import record
from xorl_lab.errors import StoreError
from xorl_lab.store import Store, lease

HOLD = """
import sys, time
from xorl_lab.store import Store
writer = Store(sys.argv[1]).create(name="run", kind="grpo", model="tiny")
print("ready", flush=True)
time.sleep(60)
"""


def wait_for(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


@pytest.fixture
def elsewhere(tmp_path):
    """A process that writes the run "run", and a store in this process."""
    folder = tmp_path / "lab"
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    yield process, Store(folder)
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_second_writer_in_this_process_is_refused(store, writer):
    with pytest.raises(StoreError, match=r"run 'run' is being written by this process on .* stop"):
        store.resume("run", after=0)
    writer.step(record(1))
    assert store.run("run").scalars().attempt == 1


def test_a_second_writer_in_another_process_is_refused_with_the_holder_named(elsewhere):
    process, store = elsewhere
    with pytest.raises(StoreError, match=f"is being written by process {process.pid} on "):
        store.resume("run", after=0)
    assert store.run("run").status().state == "running"


def test_a_killed_writer_counts_as_crashed_at_once_even_before_its_parent_notices(elsewhere):
    process, store = elsewhere
    reader = store.run("run")
    _, seen = reader.changed(None)
    process.kill()
    wait_for(lambda: reader.status().state == "crashed", 5)
    assert process.returncode is None
    assert reader.status().message == f"its process {process.pid} ended without closing it"
    assert reader.changed(seen)[0]
    store.resume("run", after=0).close()
    assert reader.status().state == "stopped"


def test_a_halted_writer_counts_as_crashed_when_it_is_silent_for_long(elsewhere, monkeypatch):
    process, store = elsewhere
    os.kill(process.pid, signal.SIGSTOP)
    assert store.run("run").status().state == "running"
    monkeypatch.setattr(lease, "STALE", 0.3)
    wait_for(lambda: store.run("run").status().state == "crashed")
    assert "has been silent for" in store.run("run").status().message


def held(**changes):
    here = lease.Holder(
        "token", os.getpid(), "host", lease.place(), lease.process_start(os.getpid()), time.time()
    )
    return replace(here, **changes)


def test_when_a_holder_is_gone():
    assert held().gone() is None
    assert held(renewed=time.time() - lease.STALE + 5).gone() is None
    assert "silent" in str(held(renewed=time.time() - lease.STALE - 5).gone())
    assert "ended" in str(held(started="1").gone()), "the pid was used again"
    assert "ended" in str(held(pid=2**22 + 1).gone())
    assert held(place="another machine", pid=2**22 + 1).gone() is None
    assert held(place="another machine", renewed=time.time() - 60).gone() is not None


def test_the_start_of_a_process_tells_it_from_a_later_one():
    first = subprocess.Popen(["sleep", "60"])
    began = lease.process_start(first.pid)
    assert began
    assert lease.process_start(first.pid) == began
    time.sleep(0.05)
    second = subprocess.Popen(["sleep", "60"])
    assert lease.process_start(second.pid) != began
    for process in (first, second):
        process.kill()
    wait_for(lambda: lease.process_start(first.pid) == "")  # a zombie
    for process in (first, second):
        process.wait()
    assert lease.process_start(first.pid) == ""


def test_without_proc_the_system_is_asked(monkeypatch):
    monkeypatch.setattr(lease, "_PROC", Path("/nowhere"))
    answers = iter(["Ss   Mon Nov 30 01:02:03 2026\n", "Z    Mon Nov 30 01:02:03 2026\n", ""])

    def ps(command, **_):
        assert command[-1] == "77"
        return subprocess.CompletedProcess(command, 0, stdout=next(answers))

    monkeypatch.setattr(subprocess, "run", ps)
    assert lease.process_start(77) == "Mon Nov 30 01:02:03 2026"
    assert lease.process_start(77) == ""
    assert lease.process_start(77) == ""


def test_the_lease_is_renewed_while_a_step_takes_long(store, monkeypatch):
    monkeypatch.setattr(lease, "RENEW", 0.05)
    monkeypatch.setattr(lease, "STALE", 1.0)
    with store.create(name="run", kind="grpo", model="tiny"):
        for _ in range(15):
            time.sleep(0.1)
            assert store.run("run").status().state == "running"


def test_renewals_are_no_news(store, monkeypatch):
    monkeypatch.setattr(lease, "RENEW", 0.02)
    with store.create(name="run", kind="grpo", model="tiny"):
        reader = store.run("run")
        _, seen = reader.changed(None)
        time.sleep(0.2)
        assert reader.changed(seen) == (False, seen)


def test_a_writer_that_lost_its_lease_records_nothing_more(store, monkeypatch):
    monkeypatch.setattr(lease, "RENEW", 60.0)
    monkeypatch.setattr(lease, "STALE", 0.05)
    first = store.create(name="run", kind="grpo", model="tiny")
    first.step(record(1))
    time.sleep(0.1)
    assert store.run("run").status().state == "crashed"
    monkeypatch.setattr(lease, "STALE", 30.0)
    first.event("log", "a late sign of life: nobody has taken over yet")
    assert store.run("run").status().state == "running"

    monkeypatch.setattr(lease, "STALE", 0.05)
    time.sleep(0.1)
    second = store.resume("run", after=1)
    with pytest.raises(StoreError, match="was taken over by process"):
        first.step(record(2))
    with pytest.raises(StoreError, match="was taken over by process"):
        first.close()
    second.step(record(2))
    second.close()
    assert store.run("run").scalars().steps.tolist() == [1, 2]
    assert store.run("run").status().state == "stopped"


def test_a_dropped_writer_gives_the_run_up(store, monkeypatch):
    monkeypatch.setattr(lease, "RENEW", 0.05)
    writer = store.create(name="run", kind="grpo", model="tiny")
    writer.step(record(1))
    del writer
    gc.collect()
    wait_for(lambda: store.run("run").status().state == "crashed")
    assert store.run("run").status().message == "its writer was dropped without being closed"
    store.resume("run", after=1).close()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_process_may_read_and_may_not_write(store, writer):
    writer.step(record(1))
    reader = store.run("run")
    assert reader.count() == 6
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            message = f"{reader.count()} {len(store.runs())} "
            writer.step(record(2))
        except StoreError as error:
            message += str(error)
        os.write(into, message.encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(into)
    answer = os.read(out, 1000).decode()
    os.close(out)
    assert re.match(rf"6 1 the writer of run 'run' belongs to process {os.getpid()} ", answer)
    writer.step(record(2))
    assert reader.count() == 12
