"""Writing, verifying and recovering a checkpoint's folder, with failures at every point."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from xorl_lab.checkpoints import folder
from xorl_lab.errors import CheckpointError

FILES = ("a.bin", "b.bin")


def exactly(message: str) -> str:
    """A pattern that this message alone matches.  (The killed processes must not load torch.)"""
    return f"^{re.escape(message)}$"


def write(target: Path, content: bytes, *, overwrite: bool = False) -> int:
    """A checkpoint whose files and state all hold the same content."""
    writers: dict[str, folder.Writer] = {n: lambda p: p.write_bytes(content) for n in FILES}
    return folder.write(target, writers, {"content": content.decode()}, overwrite=overwrite)


def content(target: Path) -> bytes | None:
    """What a complete checkpoint holds; None if there is none.  A mixture fails."""
    if not target.exists():
        return None
    values = {folder.read(target)["content"].encode()}
    values |= {(target / name).read_bytes() for name in FILES}
    (value,) = values
    return value


@pytest.fixture
def target(tmp_path) -> Path:
    return tmp_path / "model" / "weights" / "name"


def test_what_was_written_is_read(target):
    size = write(target, b"one")
    state = folder.read(target)
    assert state["content"] == "one"
    assert state["format"] == folder.FORMAT
    assert {n: f["bytes"] for n, f in state["files"].items()} == {"a.bin": 3, "b.bin": 3}
    assert size == sum(p.stat().st_size for p in target.iterdir())
    assert sorted(p.name for p in target.iterdir()) == ["a.bin", "b.bin", "state.json"]
    assert [p.name for p in target.parent.iterdir()] == ["name"]


def test_a_taken_name_is_an_error(target):
    write(target, b"one")
    message = exactly(
        "checkpoint.exists: there is a checkpoint 'name' of this model already: choose another "
        "name, or pass overwrite=True"
    )
    with pytest.raises(CheckpointError, match=message):
        write(target, b"two")
    assert content(target) == b"one"


def test_overwrite_replaces_it(target):
    write(target, b"one")
    write(target, b"two", overwrite=True)
    assert content(target) == b"two"
    assert [p.name for p in target.parent.iterdir()] == ["name"]


def test_a_name_taken_meanwhile_is_an_error_too(target):
    writers: dict[str, folder.Writer] = {"a.bin": lambda _: write(target, b"other")}
    writers["a.bin"] = lambda p: (p.write_bytes(b"mine"), write(target, b"other"))
    with pytest.raises(CheckpointError, match=r"^checkpoint\.exists"):
        folder.write(target, writers, {})
    assert content(target) == b"other"


def test_a_missing_checkpoint_lists_those_there_are(target):
    write(target.parent / "b", b"one")
    write(target.parent / "a", b"one")
    message = exactly(
        "checkpoint.not_found: there is no checkpoint 'name' of this model: choose from ['a', 'b']"
    )
    with pytest.raises(CheckpointError, match=message):
        folder.read(target)


@pytest.mark.parametrize("name", [*FILES, "state.json"])
def test_a_flipped_bit_in_any_byte_of_any_file_is_found(target, name):
    write(target, b"one")
    path = target / name
    whole = path.read_bytes()
    for i in range(len(whole)):
        spoilt = bytearray(whole)
        spoilt[i] ^= 1 << i % 8
        path.write_bytes(spoilt)
        with pytest.raises(CheckpointError) as caught:
            folder.read(target)
        assert caught.value.code == "checkpoint.damaged", (i, chr(whole[i]))
        assert caught.value.details == {"name": "name", "file": name}
        assert f"checkpoint 'name' cannot be trusted: {name}: " in str(caught.value)
    path.write_bytes(whole)
    assert content(target) == b"one"


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_found(target, name):
    write(target, b"one")
    (target / name).unlink()
    message = exactly(
        f"checkpoint.damaged: checkpoint 'name' cannot be trusted: {name}: it is missing; use an "
        "earlier checkpoint"
    )
    with pytest.raises(CheckpointError, match=message):
        folder.read(target)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"files": 3}', '{"files": {}}'])
def test_a_state_that_is_no_state_is_found(target, text):
    write(target, b"one")
    (target / "state.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"^checkpoint\.damaged: .*: state\.json: "):
        folder.read(target)


def test_state_is_json_that_others_can_read(target):
    write(target, b"one")
    assert json.loads((target / "state.json").read_text())["content"] == "one"


# Failures.  Each system call that changes the disk fails once.


def failing(call: int, error: BaseException) -> tuple[Callable[..., Callable[..., object]], list]:
    """Wrap functions so that their call number ``call``, counted together, raises."""
    seen: list[str] = []

    def wrap(function: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*args: object, **kwargs: object) -> object:
            seen.append(function.__name__)
            if len(seen) - 1 == call:
                raise error
            return function(*args, **kwargs)

        return wrapped

    return wrap, seen


def plant(patch: pytest.MonkeyPatch, call: int) -> list[str]:
    wrap, seen = failing(call, OSError(28, "No space left on device"))
    patch.setattr(os, "fsync", wrap(os.fsync))
    patch.setattr(Path, "rename", wrap(Path.rename))
    patch.setattr(Path, "mkdir", wrap(Path.mkdir))
    patch.setattr(Path, "write_bytes", wrap(Path.write_bytes))
    patch.setattr(Path, "write_text", wrap(Path.write_text))
    return seen


def calls(target: Path, *, overwrite: bool) -> int:
    """Number of calls that may fail in one write."""
    with pytest.MonkeyPatch.context() as patch:
        seen = plant(patch, -1)
        write(target, b"two", overwrite=overwrite)
    return len(seen)


@pytest.mark.parametrize("overwrite", [False, True])
def test_whatever_call_fails_the_name_holds_the_old_or_the_new(tmp_path, overwrite):
    count = calls(tmp_path / "count" / "name", overwrite=False) + overwrite
    for call in range(count):
        target = tmp_path / str(call) / "name"
        if overwrite:
            write(target, b"one")
        with pytest.MonkeyPatch.context() as patch:
            plant(patch, call)
            with pytest.raises(OSError, match="No space left"):
                write(target, b"two", overwrite=overwrite)
        # Only the flush of the parent folder comes after the new one is in its place.
        assert content(target) in {b"one" if overwrite else None, b"two"}
        names = {p.name.split("-")[0] for p in target.parent.glob("*")}
        assert ".writing" not in names
        write(target, b"three", overwrite=True)
        assert content(target) == b"three"


KILL = """
import os, sys
from pathlib import Path
import pytest
from tests.checkpoints import test_folder as m
target, call = Path(sys.argv[1]), int(sys.argv[2])
wrap, seen = m.failing(call, SystemExit())
def die(function):
    inner = wrap(function)
    def wrapped(*args, **kwargs):
        try:
            return inner(*args, **kwargs)
        except SystemExit:
            os._exit(9)
    return wrapped
os.fsync = die(os.fsync)
Path.rename = die(Path.rename)
m.write(target, b"two", overwrite=True)
"""


@pytest.mark.parametrize("call", range(8))
def test_a_process_killed_at_any_call_leaves_old_or_new(root, tmp_path, call):
    target = tmp_path / "model" / "weights" / "name"
    write(target, b"one")
    done = subprocess.run(
        [sys.executable, "-c", KILL, str(target), str(call)], cwd=root, check=False
    )
    # Flushes of two files, of the state and of the folder; two renames; the parent folder's flush.
    assert done.returncode == (9 if call < 7 else 0)
    folder.recover(tmp_path)
    assert content(target) == (b"one" if call < 6 else b"two")
    assert [p.name for p in target.parent.iterdir()] == ["name"]


def test_recover_leaves_a_live_process_alone(tmp_path):
    place = tmp_path / "model" / "weights"
    mine = place / f".writing-{os.getpid()}-{folder._TOKEN}0a1b2c3d-name"
    mine.mkdir(parents=True)
    folder.recover(tmp_path)
    assert mine.is_dir()


def test_recover_clears_what_dead_processes_left_and_nothing_else(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    place = tmp_path / "model" / "weights"
    write(place / "kept", b"one")
    write(place / "lost", b"two")
    (place / "lost").rename(place / f".replaced-{dead.pid}-000000000a1b2c3d-lost")
    write(place / "older", b"three")
    (place / "older").rename(place / f".replaced-{dead.pid}-000000000a1b2c3e-kept")
    (place / f".writing-{dead.pid}-000000000a1b2c3d-new").mkdir()
    (place / ".writing-of-mine").mkdir()
    (place / ".replaced").mkdir()
    folder.recover(tmp_path)
    assert sorted(p.name for p in place.iterdir()) == [
        ".replaced",
        ".writing-of-mine",
        "kept",
        "lost",
    ]
    assert content(place / "kept") == b"one"
    assert content(place / "lost") == b"two"


def test_recover_of_nothing_is_fine(tmp_path):
    folder.recover(tmp_path / "absent")


def test_what_an_earlier_process_of_the_same_id_left_is_restored(tmp_path):
    place = tmp_path / "model" / "weights"
    folder.write(place / "a", {"x": lambda p: p.write_bytes(b"old")}, {})
    (place / "a").rename(place / f".replaced-{os.getpid()}-0000000000000000-a")
    folder.recover(tmp_path)
    assert [p.name for p in place.iterdir()] == ["a"]
    assert (place / "a" / "x").read_bytes() == b"old"


def test_an_expired_checkpoint_is_not_read(tmp_path):
    target = tmp_path / "model" / "weights" / "a"
    folder.write(target, {"x": lambda p: p.write_bytes(b"1")}, {"expires_at": 1.0})
    with pytest.raises(CheckpointError) as caught:
        folder.read(target)
    assert caught.value.code == "checkpoint.not_found"
    assert "has expired" in str(caught.value)
