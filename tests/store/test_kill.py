"""Writers killed at many points: whatever was committed is there, whole."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from tests.store.support import record
from xorl_lab.store import Store

SIZE = {"groups": 4, "size": 4, "length": 60}

# Kills itself at the n-th statement that SQLite begins after step 1, inside transactions too.
AT_A_STATEMENT = f"""
import os, signal, sys
from tests.store.support import record
from xorl_lab.store import Store

writer = Store(sys.argv[1]).create(name="run", kind="grpo", model="tiny")
writer.step(record(1, **{SIZE}))
left = int(sys.argv[2])

def failpoint(statement):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)

connection = writer._database._open()
connection.execute("PRAGMA cache_size = 10")  # uncommitted pages are written to the file, too
connection.set_trace_callback(failpoint)
for step in range(2, 5):
    writer.step(record(step, **{SIZE}))
    print(step, flush=True)
writer.close()
"""

# Goes on for ever.
UNTIL_KILLED = f"""
import sys
from tests.store.support import record
from xorl_lab.store import Store

store, after = Store(sys.argv[1]), int(sys.argv[2])
if after == 0:
    writer = store.create(name="run", kind="grpo", model="tiny")
else:
    writer = store.resume("run", after=after)
for step in range(after + 1, 100_000):
    writer.step(record(step, **{SIZE}))
    print(step, flush=True)
"""


def check(folder, reported):
    """The store is whole: at least the reported steps, at most one more, each as it was."""
    store = Store(folder)
    reader = store.run("run")
    status = reader.status()
    steps = reader.scalars().steps.tolist()
    assert status.state == "crashed", status
    assert status.step == (steps[-1] if steps else 0)
    assert status.step in (reported, reported + 1)
    assert steps == list(range(1, status.step + 1))
    for step in steps[-3:]:
        assert reader.groups(step) == record(step, **SIZE).groups
    assert [e.step for e in reader.events(kinds=["warning"])] == steps
    assert reader.count() == 16 * status.step
    with store._database.read() as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        for table in ("texts", "rollouts"):
            (count,) = connection.execute(f"SELECT count(*) FROM {table}").fetchone()
            assert count == 16 * status.step
    return status.step


def killed_at(root, folder, point):
    done = subprocess.run(
        [sys.executable, "-c", AT_A_STATEMENT, str(folder), str(point)], cwd=root,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode, max((int(line) for line in done.stdout.split()), default=1)


# A step is about 130 statements; these are its beginning, many of its middle, and its commit.
@pytest.mark.parametrize("point", [0, 1, 2, 3, 4, 5, 7, 11, 25, 60, 110, 124, 125, 126, 127, 200])
def test_a_kill_at_a_statement_leaves_every_committed_step(root, tmp_path, point):
    code, reported = killed_at(root, tmp_path, point)
    assert code == -signal.SIGKILL
    last = check(tmp_path, reported)
    with Store(tmp_path).resume("run", after=last) as writer:
        writer.step(record(last + 1, **SIZE))
    reader = Store(tmp_path).run("run")
    assert reader.scalars().steps.tolist() == list(range(1, last + 2))
    assert reader.status().state == "finished"


@pytest.mark.slow
def test_a_kill_at_every_statement_leaves_every_committed_step(root, tmp_path):
    point = 0
    while True:
        folder = tmp_path / str(point)
        code, reported = killed_at(root, folder, point)
        if code == 0:
            break
        check(folder, reported)
        point += 3
    assert point > 300, "three steps have more statements than that"


def kill_and_resume(root, folder, times, seconds):
    """Kill a writer again and again; each next one resumes."""
    last = 0
    chance = random.Random(0)
    for _ in range(times):
        process = subprocess.Popen(
            [sys.executable, "-c", UNTIL_KILLED, str(folder), str(last)], cwd=root,
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        reported = int(process.stdout.readline())  # it has begun
        time.sleep(chance.random() * seconds)
        os.kill(process.pid, signal.SIGKILL)
        rest = process.stdout.read()
        lines = rest.splitlines() if rest.endswith("\n") else rest.splitlines()[:-1]
        reported = int(lines[-1]) if lines else reported
        process.stdout.close()
        last = check(folder, reported)
        process.wait()
    assert Store(folder).run("run").scalars().attempt == times


def test_kills_at_random_moments_leave_every_committed_step(root, tmp_path):
    kill_and_resume(root, tmp_path, 5, 0.3)


@pytest.mark.slow
def test_many_kills_at_random_moments_leave_every_committed_step(root, tmp_path):
    kill_and_resume(root, tmp_path, 50, 0.5)


MAKE = """
import sys
from xorl_lab.store import opening
for folder in range(1000):
    opening.prepare(__import__("pathlib").Path(sys.argv[1]) / str(folder) / "runs.sqlite")
    if folder == 0:
        print("ready", flush=True)
"""


def test_a_kill_while_stores_are_made_leaves_stores(root, tmp_path):
    for round_ in range(4):
        folder = tmp_path / str(round_)
        process = subprocess.Popen(
            [sys.executable, "-c", MAKE, str(folder)], cwd=root, stdout=subprocess.PIPE, text=True
        )
        process.stdout.readline()
        time.sleep(0.02 + 0.017 * round_)
        process.kill()
        process.wait()
        process.stdout.close()
        for made in folder.iterdir():
            assert Store(made).runs() == []
