"""Which checkpoints there are, which have expired, and what they take on the disk."""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from xorl_lab.checkpoints.folder import STATE, amend, discard, glance
from xorl_lab.checkpoints.names import KINDS, Address
from xorl_lab.errors import CheckpointError
from xorl_lab.types.checkpoints import Checkpoint, DeleteCheckpointResponse, TrainingRun

TYPES = {"weights": "training", "sampler_weights": "sampler"}
_KEPT = 16384
"""States that are remembered at most."""
_seen: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {}
"""By folder: what the state's file looked like, and what it said."""


def states(root: Path, model_id: str | None = None) -> list[tuple[Address, Mapping[str, Any]]]:
    """All readable checkpoints under a root with what each says of itself, oldest first.

    What did not change since it was last read is not read again.

    Args:
        root: folder of all checkpoints.
        model_id: only those of this model.

    Returns:
        Addresses, each with its ``state.json``, which is shared: not to be written to.
    """
    models = _names(root) if model_id is None else [model_id]
    found: list[tuple[Address, Mapping[str, Any]]] = []
    for model in models:
        for kind in KINDS:
            for name in _names(root / model / kind):
                with suppress(CheckpointError, OSError):
                    state = _known(os.path.join(root, model, kind, name))
                    found.append((Address(model, kind, name), state))
    return sorted(found, key=lambda pair: (float(pair[1].get("created", 0.0)), pair[0].uri))


def listing(root: Path, model_id: str | None = None) -> list[Checkpoint]:
    """All readable checkpoints under a root, oldest first.

    Args:
        root: folder of all checkpoints.
        model_id: only those of this model.
    """
    return [described(address, state) for address, state in states(root, model_id)]


def delete(root: Path, address: Address) -> None:
    """Delete a checkpoint.

    Raises:
        CheckpointError: ``checkpoint.not_found``.
    """
    discard(address.folder(root))


def expire(root: Path, address: Address, seconds: float | None) -> None:
    """Let a checkpoint expire.

    Args:
        root: folder of all checkpoints.
        address: of the checkpoint.
        seconds: from now; None = never.

    Raises:
        CheckpointError: ``checkpoint.not_found``, or ``checkpoint.damaged``.
    """
    moment = None if seconds is None else time.time() + seconds
    amend(address.folder(root), {"ttl_seconds": seconds, "expires_at": moment})


def try_delete(root: Path, model_id: str, which: str) -> DeleteCheckpointResponse:
    """Delete a checkpoint, given by URI or by ``KIND/NAME``; failing is an answer, not an error.

    Raises:
        CheckpointError: ``which`` is not of that form.
    """
    address = Address.parse(which if which.startswith("xorl://") else f"xorl://{model_id}/{which}")
    try:
        delete(root, address)
    except CheckpointError as error:
        return DeleteCheckpointResponse(False, None, str(error))
    return DeleteCheckpointResponse(True, address.uri)


def runs(root: Path) -> list[TrainingRun]:
    """The models of which there are checkpoints, in order of model id."""
    found: dict[str, dict[str, Checkpoint]] = {}
    for checkpoint in listing(root):
        model_id = Address.parse(checkpoint.path).model_id
        found.setdefault(model_id, {})[checkpoint.checkpoint_type] = checkpoint
    result: list[TrainingRun] = []
    for model_id, newest in sorted(found.items()):
        last = max(newest.values(), key=lambda c: c.time)
        state = glance(Address.parse(last.path).folder(root))
        lora = state.get("lora")
        result.append(
            TrainingRun(
                model_id,
                str(state.get("base_model", "")),
                "local",
                lora is not None,
                last.time,
                lora_rank=None if lora is None else int(lora["rank"]),
                last_checkpoint=newest.get("training"),
                last_sampler_checkpoint=newest.get("sampler"),
            )
        )
    return result


def sweep(root: Path, now: float | None = None) -> list[str]:
    """Delete what has expired.

    Args:
        root: folder of all checkpoints.
        now: seconds since the epoch; None = the clock's.

    Returns:
        URIs of what was deleted.
    """
    moment = time.time() if now is None else now
    gone: list[str] = []
    for checkpoint in listing(root):
        address = Address.parse(checkpoint.path)
        try:
            expires = glance(address.folder(root)).get("expires_at")
            if expires is not None and expires <= moment:
                delete(root, address)
                gone.append(checkpoint.path)
        except (CheckpointError, FileNotFoundError):
            continue  # another process was quicker
    return gone


def disk_use(root: Path | os.DirEntry[str]) -> int:
    """Bytes of all checkpoints; of those that are deleted meanwhile, what was there to be seen."""
    total = 0
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(root) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                total += disk_use(entry)
                continue
            with suppress(FileNotFoundError):
                total += entry.stat(follow_symlinks=False).st_size
    return total


def size_of(state: Mapping[str, Any]) -> int:
    """Bytes of a checkpoint's files but for its state, as it says itself."""
    return sum(int(facts["bytes"]) for facts in state["files"].values())


def described(address: Address, state: Mapping[str, Any]) -> Checkpoint:
    """A checkpoint from its ``state.json``."""
    expires = state.get("expires_at")
    return Checkpoint(
        checkpoint_id=f"{address.kind}/{address.name}",
        checkpoint_type=TYPES[address.kind],
        time=iso(float(state.get("created", 0.0))),
        path=address.uri,
        size_bytes=size_of(state),
        expires_at=None if expires is None else iso(float(expires)),
    )


def iso(seconds: float) -> str:
    """A moment, given in seconds since the epoch, as ISO 8601 in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _known(folder: str) -> Mapping[str, Any]:
    facts = os.stat(os.path.join(folder, STATE))
    mark = (facts.st_mtime_ns, facts.st_size, facts.st_ino)
    seen = _seen.get(folder)
    if seen is not None and seen[0] == mark:
        return seen[1]
    state = glance(Path(folder))
    if len(_seen) >= _KEPT:
        _seen.clear()
    _seen[folder] = (mark, state)
    return state


def _names(folder: Path) -> Iterator[str]:
    """Visible entries of a folder, none if there is no such folder."""
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries]
    except (FileNotFoundError, NotADirectoryError):
        return
    yield from (name for name in names if not name.startswith("."))
