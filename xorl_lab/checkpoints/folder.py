"""A checkpoint is a folder: written aside, flushed to disk, renamed into place, verified when read.

The folder is the truth.  ``state.json`` holds what is not a tensor, and size and SHA-256 of every
other file.  At any moment a name holds the old checkpoint, the new one, or none.
"""

import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from xorl_lab.errors import CheckpointError

STATE = "state.json"
FORMAT = 1
_ASIDE = ".writing"
_OLD = ".replaced"
_LITTER = re.compile(r"\.(?:writing|replaced)-(\d+)-([0-9a-f]{8})[0-9a-f]{8}-(.+)")
_TOKEN = secrets.token_hex(4)
"""Marks what this process is writing."""
_SEAL = "state_sha256"

Writer = Callable[[Path], object]


def write(
    target: Path,
    writers: Mapping[str, Writer],
    state: Mapping[str, Any],
    *,
    overwrite: bool = False,
) -> int:
    """Write a checkpoint.

    Args:
        target: the folder to make.
        writers: file name to a function that writes that file at the path it is given.
        state: JSON values for ``state.json``; ``format`` and ``files`` are added.
        overwrite: replace a checkpoint of this name.

    Returns:
        Bytes of all files.

    Raises:
        CheckpointError: ``checkpoint.exists`` if the name is taken and ``overwrite`` is False.
        OSError: the disk refused; the name holds what it held before.
    """
    if target.exists() and not overwrite:
        raise _taken(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = _beside(target, _ASIDE)
    try:
        aside.mkdir()
        files: dict[str, dict[str, Any]] = {}
        for name, writer in writers.items():
            writer(aside / name)
            files[name] = {"bytes": (aside / name).stat().st_size, "sha256": _flush(aside / name)}
        document = {"format": FORMAT, **state, "files": files}
        _write_state(aside, document)
        _flush_folder(aside)
        _rename(aside, target, overwrite)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return sum(f.stat().st_size for f in target.iterdir())


def read(target: Path) -> dict[str, Any]:
    """Verify a checkpoint and return its ``state.json``.

    Raises:
        CheckpointError: ``checkpoint.not_found``, or ``checkpoint.damaged`` naming the file.
    """
    state = glance(target)
    expires = state.get("expires_at")
    if expires is not None and expires <= time.time():
        raise CheckpointError(
            "checkpoint.not_found",
            f"checkpoint {target.name!r} has expired: it was saved with a life of ttl_seconds",
            {"name": target.name},
        )
    for name, facts in state["files"].items():
        path = target / name
        if not path.is_file():
            raise _damaged(target, name, "it is missing")
        if _digest(path) != facts["sha256"]:
            raise _damaged(target, name, "its SHA-256 is not the one recorded")
    return state


def glance(target: Path) -> dict[str, Any]:
    """Return a checkpoint's ``state.json`` without verifying the other files.

    Raises:
        CheckpointError: ``checkpoint.not_found``, or ``checkpoint.damaged``.
    """
    try:
        text = (target / STATE).read_text(encoding="utf-8")
    except FileNotFoundError:
        there = (
            sorted(p.name for p in target.parent.glob("[!.]*")) if target.parent.is_dir() else []
        )
        raise CheckpointError(
            "checkpoint.not_found",
            f"there is no checkpoint {target.name!r} of this model: choose from {there}",
            {"name": target.name, "available": there},
        ) from None
    except UnicodeDecodeError as error:
        raise _damaged(target, STATE, "it is not text") from error
    try:
        state: dict[str, Any] = json.loads(text)
        state["files"].items()
        intact = state.pop(_SEAL) == _seal(state)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(target, STATE, "it cannot be read") from error
    if not intact:
        raise _damaged(target, STATE, "its SHA-256 is not the one recorded")
    return state


def amend(target: Path, changes: Mapping[str, Any]) -> None:
    """Change values of a checkpoint's ``state.json``; at any moment it is the old or the new one.

    Args:
        target: the checkpoint.
        changes: JSON values by name.

    Raises:
        CheckpointError: ``checkpoint.not_found``, or ``checkpoint.damaged``.
    """
    document = {**glance(target), **changes}
    aside = _beside(target, _ASIDE)
    try:
        aside.mkdir()
        _write_state(aside, document)
        try:
            (aside / STATE).replace(target / STATE)
        except FileNotFoundError:  # it was deleted meanwhile
            glance(target)
            raise
        _flush_folder(target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def discard(target: Path) -> None:
    """Delete a checkpoint, a damaged one too.

    Its name is free at once; a crash half-way leaves no half checkpoint.

    Raises:
        CheckpointError: ``checkpoint.not_found``.
    """
    if not target.is_dir():
        glance(target)
    aside = _beside(target, _ASIDE)
    target.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def recover(root: Path) -> None:
    """Clear away what an interrupted write left behind under ``root``.

    A checkpoint that was moved aside and not yet replaced is moved back.  What a live process is
    writing is left alone.
    """
    for path in list(root.glob("*/*/.*")):
        match = _LITTER.fullmatch(path.name)
        if match is None or _in_use(int(match[1]), match[2]):
            continue
        if path.name.startswith(_OLD) and not (path.parent / match[3]).exists():
            path.rename(path.parent / match[3])
        else:
            shutil.rmtree(path, ignore_errors=True)


def _write_state(folder: Path, document: Mapping[str, Any]) -> None:
    sealed = {**document, _SEAL: _seal(document)}
    (folder / STATE).write_text(json.dumps(sealed, indent=1, sort_keys=True), encoding="utf-8")
    _flush(folder / STATE)


def _rename(aside: Path, target: Path, overwrite: bool) -> None:
    old = _beside(target, _OLD)
    if overwrite and target.exists():
        target.rename(old)
    try:
        aside.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        if target.exists() and not overwrite:
            raise _taken(target) from None
        raise
    _flush_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _beside(target: Path, what: str) -> Path:
    """A hidden name beside the target, from which :func:`recover` can tell whose it is."""
    return target.parent / f"{what}-{os.getpid()}-{_TOKEN}{secrets.token_hex(4)}-{target.name}"


def _flush(path: Path) -> str:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return _digest(path)


def _flush_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _seal(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _in_use(pid: int, token: str) -> bool:
    """True if the process that made the name still runs.

    In a container every process may have the same id: the token tells this one from an earlier one.
    """
    return token == _TOKEN if pid == os.getpid() else _alive(pid)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _taken(target: Path) -> CheckpointError:
    return CheckpointError(
        "checkpoint.exists",
        f"there is a checkpoint {target.name!r} of this model already: choose another name, or "
        "pass overwrite=True",
        {"name": target.name},
    )


def _damaged(target: Path, file: str, why: str) -> CheckpointError:
    return CheckpointError(
        "checkpoint.damaged",
        f"checkpoint {target.name!r} cannot be trusted: {file}: {why}; use an earlier checkpoint",
        {"name": target.name, "file": file},
    )
