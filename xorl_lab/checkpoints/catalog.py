"""Which checkpoints there are, which have expired, and what they take on the disk."""

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from xorl_lab.checkpoints.folder import STATE, discard, glance
from xorl_lab.checkpoints.names import KINDS, Address
from xorl_lab.errors import CheckpointError
from xorl_lab.types.checkpoints import Checkpoint, DeleteCheckpointResponse, TrainingRun

TYPES = {"weights": "training", "sampler_weights": "sampler"}


def listing(root: Path, model_id: str | None = None) -> list[Checkpoint]:
    """All readable checkpoints under a root, oldest first.

    Args:
        root: folder of all checkpoints.
        model_id: only those of this model.
    """
    found: list[tuple[float, Checkpoint]] = []
    for path in root.glob(f"{model_id or '*'}/*/*/{STATE}"):
        folder = path.parent
        if folder.name.startswith(".") or folder.parent.name not in KINDS:
            continue
        try:
            state = glance(folder)
        except CheckpointError:
            continue
        address = Address(folder.parent.parent.name, folder.parent.name, folder.name)
        found.append((float(state.get("created", 0.0)), _describe(address, folder, state)))
    return [checkpoint for _, checkpoint in sorted(found, key=lambda pair: (pair[0], pair[1].path))]


def delete(root: Path, address: Address) -> None:
    """Delete a checkpoint.

    Raises:
        CheckpointError: ``checkpoint.not_found``.
    """
    discard(address.folder(root))


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


def disk_use(root: Path) -> int:
    """Bytes of all checkpoints."""
    return sum(file.stat().st_size for file in root.rglob("*") if file.is_file())


def _describe(address: Address, folder: Path, state: dict[str, Any]) -> Checkpoint:
    expires = state.get("expires_at")
    return Checkpoint(
        checkpoint_id=f"{address.kind}/{address.name}",
        checkpoint_type=TYPES[address.kind],
        time=iso(float(state.get("created", 0.0))),
        path=address.uri,
        size_bytes=sum(int(facts["bytes"]) for facts in state["files"].values()),
        expires_at=None if expires is None else iso(float(expires)),
    )


def iso(seconds: float) -> str:
    """A moment, given in seconds since the epoch, as ISO 8601 in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
