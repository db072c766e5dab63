"""A process dies while it saves.  Each name then holds the old checkpoint or the new one, whole."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import xorl_lab as xl
from tests.engine.support import on_call, step, weights, works
from xorl_lab import checkpoints
from xorl_lab.engine import saving
from xorl_lab.errors import CheckpointError

KILLED = 9
WRITES = ("save_file", "write_text", "write_bytes")
WHATS = ("weights", "sampler_weights")


class Saver:
    """The other end of ``tests.api.saver``."""

    def __init__(self, root: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.api.saver"],
            cwd=root,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, **job: Any) -> int:  # noqa: ANN401 (JSON)
        """Begin a job; returns the id of the process that does it."""
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def wait(self) -> int | str:
        """How the job ended: its exit status, or ``killed``."""
        answer = self._process.stdout.readline().strip()
        return int(answer) if answer.isdigit() else answer

    def run(self, **job: Any) -> int | str:  # noqa: ANN401 (JSON)
        """Do a job."""
        self.start(**job)
        return self.wait()

    def close(self) -> None:
        """End it."""
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


@pytest.fixture(scope="module")
def saver(root) -> Generator[Saver]:
    made = Saver(root)
    yield made
    made.close()


def opened(home: Path) -> xl.ServiceClient:
    """The next start."""
    return xl.ServiceClient(home=home, device="cpu", dtype="float32")


def held(home: Path, what: str) -> int | None:
    """Number of the checkpoint that the name holds: the same in every tensor of it."""
    place = home / "checkpoints" / "m" / what / "a"
    if not place.exists():
        return None
    state = checkpoints.read(place)
    numbers = {float(state["steps"])}
    assert sorted(p.name for p in place.iterdir()) == sorted([*state["files"], "state.json"])
    for file in place.glob("*.safetensors"):
        for tensor in load_file(file).values():
            numbers |= set(tensor.unique().tolist())
    (number,) = numbers
    return int(number)


def litter(home: Path, what: str) -> list[str]:
    """What lies beside the checkpoint."""
    return sorted(p.name for p in (home / "checkpoints" / "m" / what).glob("*") if p.name != "a")


@pytest.fixture
def old(saver, tmp_path):
    """A function that copies a home with checkpoint number 1 in it."""
    prepared: dict[tuple[str, str], Path] = {}

    def copy(kind: str, what: str, name: str) -> Path:
        if (kind, what) not in prepared:
            made = tmp_path / f"old-{kind}-{what}"
            root = str(made / "checkpoints")
            assert saver.run(do="old", kind=kind, what=what, root=root) == 0
            prepared[kind, what] = made
        return Path(shutil.copytree(prepared[kind, what], tmp_path / name))

    return copy


def points(saver: Saver, home: Path, **job: Any) -> list[tuple[int, bool, str]]:  # noqa: ANN401
    """Where a job may die: before each of its calls, and half-way through each that writes."""
    events = home.with_suffix(".json")
    done = saver.run(**job, root=str(home / "checkpoints"), at=None, half=False, events=str(events))
    assert done == 0
    names = json.loads(events.read_text())
    before = [(k, False, name) for k, name in enumerate(names)]
    return before + [(k, True, name) for k, _, name in before if name in WRITES]


FULL = pytest.param("full", marks=pytest.mark.slow)


@pytest.mark.parametrize("what", WHATS)
@pytest.mark.parametrize("kind", ["lora", FULL])
def test_whenever_an_overwriting_save_dies_the_name_holds_the_old_or_the_new(
    saver, old, kind, what
):
    job = {"do": "overwrite", "kind": kind, "what": what}
    found: dict[tuple[int, bool], int | None] = {}
    everywhere = points(saver, old(kind, what, "count"), **job)
    assert {"save_file", "write_text", "fsync", "rename", "unlink", "rmdir"} <= {
        name for _, _, name in everywhere
    }
    for k, half, name in everywhere:
        home = old(kind, what, f"{k}-{half}")
        status = saver.run(**job, root=str(home / "checkpoints"), at=k, half=half, events="")
        assert status == KILLED, (k, name)
        opened(home)
        assert litter(home, what) == [], (k, half, name)
        found[k, half] = held(home, what)
    numbers = [found[k, False] for k, half, _ in everywhere if not half]
    assert numbers == sorted(numbers)
    assert set(numbers) == {1, 2}
    assert {number for (_, half), number in found.items() if half} == {1}
    renames = [k for k, half, name in everywhere if name == "rename" and not half]
    assert len(renames) == 2
    assert numbers.index(2) == renames[1] + 1


@pytest.mark.parametrize("what", WHATS)
def test_whenever_a_first_save_dies_the_name_holds_nothing_or_the_new(saver, tmp_path, what):
    job = {"do": "new", "kind": "lora", "what": what}
    found: list[int | None] = []
    everywhere = points(saver, tmp_path / "count", **job)
    for k, half, name in everywhere:
        home = tmp_path / f"{k}-{half}"
        status = saver.run(**job, root=str(home / "checkpoints"), at=k, half=half, events="")
        assert status == KILLED, (k, name)
        opened(home)
        assert litter(home, what) == [], (k, half, name)
        found.append(held(home, what))
    assert set(found) == {None, 2}


@pytest.mark.parametrize("what", WHATS)
def test_whenever_a_deletion_dies_the_name_holds_the_whole_or_nothing(saver, old, what):
    job = {"do": "delete", "kind": "lora", "what": what}
    found: list[int | None] = []
    for k, _, name in points(saver, old("lora", what, "count"), **job):
        home = old("lora", what, str(k))
        status = saver.run(**job, root=str(home / "checkpoints"), at=k, half=False, events="")
        assert status == KILLED, (k, name)
        opened(home)
        assert litter(home, what) == [], (k, name)
        found.append(held(home, what))
    assert set(found) == {1, None}


def test_what_is_left_can_be_trained_on(saver, old):
    """At each rename, and after the last: the checkpoint is continued, not only verified."""
    job = {"do": "overwrite", "kind": "lora", "what": "weights"}
    everywhere = points(saver, old("lora", "weights", "count"), **job)
    renames = [k for k, half, name in everywhere if name == "rename" and not half]
    for k in (*renames, renames[-1] + 1):
        home = old("lora", "weights", str(k))
        saver.run(**job, root=str(home / "checkpoints"), at=k, half=False, events="")
        client = opened(home).create_training_client_from_state_with_optimizer("xorl://m/weights/a")
        number = held(home, "weights")
        assert all((v == number).all() for v in weights(client).values())
        assert client.save_state("a", overwrite=True).result().path == "xorl://default/weights/a"


def kill(saver: Saver, home: Path, kind: str, what: str, seconds: float) -> None:
    child = saver.start(do="loop", kind=kind, what=what, root=str(home / "checkpoints"))
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    assert saver.wait() == "killed"


@pytest.mark.parametrize(
    "count", [5, pytest.param(20, marks=pytest.mark.slow)], ids=["few", "many"]
)
@pytest.mark.parametrize("kind", ["lora", FULL])
def test_a_process_that_is_killed_while_it_saves_in_a_loop(saver, old, kind, count):
    draw = random.Random(count)
    numbers: list[int | None] = []
    for i in range(count):
        what = WHATS[i % 2]
        home = old(kind, what, f"kill-{i}")
        kill(saver, home, kind, what, 0.05 + 0.2 * draw.random())
        opened(home)
        assert litter(home, what) == []
        numbers.append(held(home, what))
    assert None not in numbers
    assert max(numbers) > 1


def test_kills_one_after_another_leave_no_litter_behind(saver, old):
    home = old("lora", "weights", "again")
    for _ in range(3):
        kill(saver, home, "lora", "weights", 0.1)
    opened(home)
    assert litter(home, "weights") == []
    assert held(home, "weights") >= 1


LOOP = """
import sys
import xorl_lab as xl
from tests.engine.support import step
service = xl.ServiceClient(home=sys.argv[1], device="cpu", dtype="float32")
client = service.create_lora_training_client("tiny", rank=4, seed=1, model_id="m")
while True:
    step(client)
    client.save_state("a", overwrite=True)
    client.save_weights_for_sampler("a").result()
    print("saved", flush=True)
"""


@pytest.mark.slow
def test_a_training_client_that_is_killed_goes_on_from_its_checkpoint(root, tmp_path):
    draw = random.Random(1)
    for i in range(3):
        home = tmp_path / str(i)
        process = subprocess.Popen(
            [sys.executable, "-c", LOOP, str(home)], cwd=root, stdout=subprocess.PIPE, text=True
        )
        with process:
            assert process.stdout.readline() == "saved\n"
            time.sleep(0.3 * draw.random())
            process.kill()
        service = opened(home)
        for what in WHATS:
            assert litter(home, what) == []
        client = service.create_training_client_from_state_with_optimizer("xorl://m/weights/a")
        assert client.version >= 1
        assert works(client)
        sampler = service.create_sampling_client(model_path="xorl://m/sampler_weights/a")
        assert sampler.sample("a", xl.SamplingParams(max_tokens=2)).result().tokens


# The disk refuses, and the process lives.


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (os, "fsync"),
        (Path, "rename"),
        (Path, "mkdir"),
        (Path, "write_text"),
        (saving, "save_file"),
    ],
    ids=["fsync", "rename", "mkdir", "write_text", "save_file"],
)
def test_a_save_that_the_disk_refuses_fails_and_changes_nothing(service, client, owner, name):
    step(client)
    path = client.save_state("a").result().path
    place = service.root / "default" / "weights"
    before = {p.name: p.read_bytes() for p in (place / "a").iterdir()}
    step(client)
    now = weights(client)

    def refuse(call: int) -> None:
        if call == refused:
            raise OSError(28, "No space left on device")

    refused, failed = 0, 0
    while True:
        with pytest.MonkeyPatch.context() as patch:
            count = on_call(patch, owner, name, refuse)
            error = client.save_state("a", overwrite=True).exception()
        if count() <= refused:
            break
        assert isinstance(error, OSError), (name, refused)
        failed += 1
        after = {p.name: p.read_bytes() for p in (place / "a").iterdir()}
        # The flush of the parent folder comes when the new one is in its place.
        last = name == "fsync" and after != before
        assert after == before or last
        assert [p.name for p in place.iterdir() if p.name.startswith(".writing")] == []
        checkpoints.read(place / "a")
        refused += 1
        if last:
            break
    assert failed > 0
    assert all((now[k] == v).all() for k, v in weights(client).items())
    client.save_state("a", overwrite=True).result()
    again = service.create_training_client_from_state_with_optimizer(path, model_id="again")
    assert all((now[k] == v).all() for k, v in weights(again).items())
    assert works(client)


def test_a_full_disk_does_not_end_the_name(service, client, monkeypatch):
    def refuse(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        on_call(patch, saving, "save_file", refuse)
        with pytest.raises(OSError, match="No space left"):
            client.save_state("a").result()
    with pytest.raises(CheckpointError, match=r"^checkpoint\.not_found"):
        service.create_training_client_from_state("xorl://default/weights/a")
    assert client.save_state("a").result().path == "xorl://default/weights/a"


# The next start.


SAME_ID = """
import os, sys
from pathlib import Path
os.getpid = lambda: int(sys.argv[2])
from xorl_lab import checkpoints
root = Path(sys.argv[1])
if sys.argv[3] == "recover":
    checkpoints.recover(root)
else:
    first = Path.rename
    def rename(*args):
        first(*args)
        os._exit(9)
    Path.rename = rename
    checkpoints.write(root / "m" / "weights" / "a", {}, {}, overwrite=True)
"""


def test_what_an_earlier_process_of_the_same_id_left_is_cleared_away(saver, old, root):
    """As in a container, where ids are few: a restarted process may have that of the killed one."""
    home = old("lora", "weights", "same")
    command = [sys.executable, "-c", SAME_ID, str(home / "checkpoints"), str(os.getpid())]
    assert subprocess.run([*command, "die"], cwd=root, check=False).returncode == KILLED
    assert held(home, "weights") is None
    assert len(litter(home, "weights")) == 2
    subprocess.run([*command, "recover"], cwd=root, check=True)
    assert litter(home, "weights") == []
    assert held(home, "weights") == 1


def test_what_this_process_is_writing_is_left_alone(client, service, home, monkeypatch):
    """A second service opens in the middle of a save, at every rename and write of it."""
    client.save_state("a").result()
    step(client)
    for name in ("write_text", "rename"):
        with monkeypatch.context() as patch:
            on_call(patch, Path, name, lambda _: opened(home))
            client.save_state("a", overwrite=True).result()
    place = service.root / "default" / "weights"
    assert [p.name for p in place.iterdir()] == ["a"]
    assert checkpoints.read(place / "a")["steps"] == 1
