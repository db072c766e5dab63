"""Readers and writers in several processes at once."""

import select
import subprocess
import sys
import threading
import time

from tests.store.support import record
from xorl_lab.store import Store

# Reads until the run ends; every look must be a whole one.
READ = """
import sys, time
from tests.store.support import record
from xorl_lab.store import Store

reader = Store(sys.argv[1]).run("run")
print("ready", flush=True)
looks, full, seen, last = 0, 0, None, 0
while reader.status().state == "running":
    changed, seen = reader.changed(seen)
    scalars = reader.scalars(after=last)
    if len(scalars.steps):
        assert scalars.steps.tolist() == list(range(last + 1, last + 1 + len(scalars.steps)))
        last = int(scalars.steps[-1])
        assert reader.groups(last) == record(last).groups
        assert reader.rollouts(where=[("step", "=", last)]).shape[0] == 6
        assert reader.count() >= 6 * last
        full += 1
        if full == 4:
            print("four", flush=True)
    looks += 1
print(looks, last)
"""

WRITE = """
import sys
from tests.store.support import record
from xorl_lab.store import Store
with Store(sys.argv[1]).create(name=sys.argv[2], kind="grpo", model="tiny") as writer:
    for step in range(1, 61):
        writer.step(record(step))
"""


def start(root, code, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], cwd=root, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def has_said_more(process):
    return bool(select.select([process.stdout], [], [], 0)[0])


def test_readers_of_other_processes_see_whole_steps_and_do_not_hold_up_the_writer(root, store):
    folder = store.path.parent
    with store.create(name="run", kind="grpo", model="tiny") as writer:
        readers = [start(root, READ, folder) for _ in range(2)]
        for reader in readers:
            assert reader.stdout.readline() == "ready\n", reader.stderr.read()
        began, step = time.monotonic(), 0
        while time.monotonic() < began + 2 or not all(map(has_said_more, readers)):
            step += 1
            writer.step(record(step))
    for reader in readers:
        out, err = reader.communicate(timeout=60)
        assert reader.returncode == 0, err
        looks, last = map(int, out.split()[-2:])
        assert looks > 3
        assert last > 0
    assert store.run("run").status().step == step


def test_a_reader_that_rests_in_a_transaction_does_not_hold_up_the_writer(store, writer):
    writer.step(record(1))
    reader = store.run("run")
    with reader._database.read() as connection:
        connection.execute("SELECT count(*) FROM steps").fetchone()
        began = time.monotonic()
        for step in range(2, 30):
            writer.step(record(step))
        assert time.monotonic() - began < 10
        assert connection.execute("SELECT count(*) FROM steps").fetchone() == (1,)
    assert reader.status().step == 29


def test_writers_of_different_runs_take_turns(root, store):
    folder = store.path.parent
    writers = [start(root, WRITE, folder, "same name") for _ in range(4)]
    for writer in writers:
        _, err = writer.communicate(timeout=120)
        assert writer.returncode == 0, err
    names = sorted(r.name for r in store.runs())
    assert names == ["same name", "same name-2", "same name-3", "same name-4"]
    for name in names:
        reader = store.run(name)
        assert reader.scalars().steps.tolist() == list(range(1, 61))
        for step in (1, 30, 60):
            assert reader.groups(step) == record(step).groups


def test_many_processes_may_make_the_store_at_once(root, tmp_path):
    for i in range(3):
        makers = [start(root, WRITE, tmp_path / str(i), "run") for _ in range(4)]
        for maker in makers:
            _, err = maker.communicate(timeout=120)
            assert maker.returncode == 0, err
        assert len(Store(tmp_path / str(i)).runs()) == 4


def test_one_reader_serves_many_threads(store, writer):
    for step in range(1, 11):
        writer.step(record(step))
    reader, wrong = store.run("run"), []

    def look(step):
        for _ in range(5):
            if reader.groups(step) != record(step).groups or len(reader.scalars().steps) < 10:
                wrong.append(step)

    threads = [threading.Thread(target=look, args=(step,)) for step in range(1, 11)]
    for thread in threads:
        thread.start()
    for step in range(11, 20):
        writer.step(record(step))
    for thread in threads:
        thread.join()
    assert not wrong
