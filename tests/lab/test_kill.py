"""A kernel dies at any point of a run: nothing that was committed is lost, and the run goes on."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from tests.lab.kernel import RATE, TURNED, turn
from tests.lab.support import grpo, lab_in, numbers, resume, same, saved, tensors
from xorl_lab.checkpoints import read
from xorl_lab.checkpoints.folder import STATE
from xorl_lab.errors import ConfigError
from xorl_lab.lab.loop import Loop

STEPS = 6
CONDUCT = {"steps": STEPS, "save_every": 2, "keep": 2}

BEFORE, BEHIND = False, True
POINTS = [
    ("create", 1, BEHIND),
    ("event", 1, BEHIND),  # begun
    ("preflight", 1, BEHIND),
    ("draw", 4, BEFORE),
    ("backward", 3, BEFORE),
    ("backward", 3, BEHIND),
    ("optimize", 4, BEFORE),
    ("optimize", 4, BEHIND),
    ("snapshot", 5, BEHIND),
    ("step", 3, BEFORE),
    ("step", 3, BEHIND),
    ("step", 4, BEHIND),  # and not yet saved
    ("save", 2, BEFORE),
    ("mkdir", 6, BEHIND),
    ("file", 3, BEHIND),
    ("fsync", 5, BEFORE),
    ("rename", 2, BEFORE),
    ("rename", 2, BEHIND),  # and not yet reported
    ("drop", 1, BEFORE),
    ("remove", 1, BEFORE),
    ("taken", 6, BEHIND),  # all done, and not yet ended
    ("status", 1, BEFORE),
    ("status", 1, BEHIND),
    ("close", 1, BEFORE),
]
FEW = {POINTS[i] for i in (1, 7, 10, 14, 17)}


class Kernels:
    """The other end of ``tests.lab.kernel``."""

    def __init__(self, root):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.lab.kernel"],
            cwd=root,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, folder, **job) -> int:
        """Begin a job; the id of its process, once its lab is there."""
        line = {"settings": CONDUCT, **job, "folder": str(folder)}
        self._process.stdin.write(json.dumps(line) + "\n")
        self._process.stdin.flush()
        lines = {self._process.stdout.readline(), self._process.stdout.readline()}
        assert "begun\n" in lines
        (child,) = lines - {"begun\n"}
        return int(child)

    def wait(self) -> int | str:
        answer = self._process.stdout.readline().strip()
        return int(answer) if answer.isdigit() else answer

    def run(self, folder, **job) -> int | str:
        self.start(folder, **job)
        return self.wait()

    def close(self):
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


@pytest.fixture(scope="module")
def kernels(root):
    made = Kernels(root)
    yield made
    made.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run as it is when nothing happens, and its last weights."""
    lab = lab_in(tmp_path_factory.mktemp("whole"))
    run = grpo(lab, preflight=True, **CONDUCT)
    assert saved(lab, run.name) == ["step-4", "step-6"]
    return run, tensors(lab, run.name, "step-6")


def agree(lab, run, whole):
    """Record and folders are whole, and those of the run that nothing happened to."""
    done = run.status.step
    steps = [row["step"] for row in numbers(run)]
    assert steps == list(range(1, done + 1))
    assert numbers(run) == numbers(whole)[:done]
    for name in saved(lab, run.name):
        assert int(name.rpartition("-")[2]) <= done
        read(lab.folder / "checkpoints" / run.name / "weights" / name)
    folder = lab.folder / "checkpoints" / run.name / "weights"
    assert all((p / STATE).exists() for p in folder.glob("*")), "there is litter"
    with lab._store._database.read() as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def goes_on(lab, whole):
    """A run that crashed ends as the one that nothing happened to."""
    run, weights = whole
    crashed = lab.run("grpo-1")
    agree(lab, crashed, run)
    if crashed.status.state == "finished":
        with pytest.raises(ConfigError, match="has 6 steps behind it"):
            resume(lab, "grpo-1")
        again = crashed
    else:
        assert crashed.status.state == "crashed"
        assert "ended without closing" in crashed.status.message
        again = resume(lab, "grpo-1", save_every=2, keep=2)
        assert again.status.state == "finished"
    same(again, run)
    assert tensors(lab, "grpo-1", "step-6") == weights
    assert saved(lab, "grpo-1")[-2:] == ["step-4", "step-6"]
    assert len(saved(lab, "grpo-1")) <= 3, "one that was to be deleted may be left"


@pytest.mark.parametrize(
    "point",
    [p if p in FEW else pytest.param(p, marks=pytest.mark.slow) for p in POINTS],
    ids=lambda p: f"{p[0]}-{p[1]}-{'behind' if p[2] else 'before'}",
)
def test_a_kernel_that_dies_at_a_point_leaves_a_run_that_goes_on(kernels, tmp_path, whole, point):
    settings = {**CONDUCT, "preflight": True}
    assert kernels.run(tmp_path, at=point, settings=settings) == "killed"
    goes_on(lab_in(tmp_path), whole)


def test_there_are_twenty_points():
    assert len(POINTS) >= 20


@pytest.mark.parametrize("count", [2, pytest.param(12, marks=pytest.mark.slow)])
def test_a_kernel_that_is_killed_at_random_moments(kernels, tmp_path, whole, count):
    chance = random.Random(count)
    killed = 0
    for i in range(count):
        folder = tmp_path / str(i)
        child = kernels.start(folder)
        time.sleep(0.02 + 0.4 * chance.random())
        with suppress(ProcessLookupError):  # it may have ended
            os.kill(child, signal.SIGKILL)
        killed += kernels.wait() == "killed"
        lab = lab_in(folder)
        if lab.runs().empty:
            continue
        goes_on(lab, whole)
    assert killed


def test_a_knob_turned_in_steps_that_are_lost_is_turned_again_at_the_same_step(
    kernels, tmp_path, monkeypatch
):
    monkeypatch.setattr(Loop, "taken", Loop.taken)  # put back at the end
    lab = lab_in(tmp_path / "whole")
    turn()
    whole = grpo(lab, steps=STEPS, save_every=0)
    monkeypatch.undo()
    settings = {"steps": STEPS, "save_every": 0}
    point = ("optimize", 6, BEFORE)
    assert kernels.run(tmp_path / "a", at=point, settings=settings, turn=True) == "killed"
    again = resume(lab_in(tmp_path / "a"), "grpo-1")
    same(again, whole)
    knobs = [(e.step, e.data["new"]) for e in again.reader.events(kinds=["knob"])]
    assert knobs == [(TURNED, RATE)] * 2, "of both attempts"
    # A rate that the caller chooses is not turned back.
    assert kernels.run(tmp_path / "b", at=point, settings=settings, turn=True) == "killed"
    chosen = resume(lab_in(tmp_path / "b"), "grpo-1", learning_rate=2e-3)
    assert set(chosen.metrics["learning_rate"]) == {2e-3}


def test_the_end_of_the_process_saves_a_run_under_way_and_marks_it_stopped(kernels, tmp_path):
    settings = {"steps": 10_000, "save_every": 0}
    assert kernels.run(tmp_path, settings=settings, leave=True) == 0
    lab = lab_in(tmp_path)
    run = lab.run("grpo-1")
    assert run.status.state == "stopped"
    done = run.status.step
    assert saved(lab, "grpo-1") == ([f"step-{done}"] if done else [])


SCRIPT = """
import sys
from tests.lab.support import grpo, lab_in
lab = lab_in(sys.argv[1])
run = grpo(lab, steps=100000, background=True)
while run.status.step < 3:
    pass
print(run.name)
"""


def test_a_script_that_ends_with_a_run_under_way_saves_it(root, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], cwd=root, capture_output=True, text=True,
        timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not re.search("Traceback|Exception", done.stderr)
    lab = lab_in(tmp_path)
    run = lab.run("grpo-1")
    assert run.status.state == "stopped"
    assert saved(lab, "grpo-1") == [f"step-{run.status.step}"]
    assert run.status.step >= 3
