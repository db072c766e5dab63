"""Which checkpoints are in use, so that deleting them would take something from a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from xorl_lab.lab.weights import Saved, Weights, by_step
from xorl_lab.store import Event, Reader, RunInfo, RunStatus
from xorl_lab.store.records import ACTIVE


@dataclass(frozen=True, slots=True)
class Known:
    """A run, read once."""

    reader: Reader
    """Of its record."""
    status: RunStatus
    """How it stands."""
    events: list[Event]
    """Its checkpoints, and with which settings it went on."""

    @property
    def info(self) -> RunInfo:
        """What it was begun with."""
        return self.reader.info


def look(weights: Weights) -> tuple[dict[str, Known], list[Saved]]:
    """All runs by name, the newest first, and all checkpoints, the oldest first."""
    store = weights.store
    runs: dict[str, Known] = {}
    for info in store.runs():
        reader = Reader(store.path, info)
        events = reader.events(kinds=("checkpoint", "start", "knob"))
        runs[info.name] = Known(reader, reader.status(), events)
    return runs, weights.everything({name: known.events for name, known in runs.items()})


def in_use(runs: Mapping[str, Known], everything: Sequence[Saved]) -> dict[str, str]:
    """Checkpoints that cannot be deleted now.

    Args:
        runs: all runs by name.
        everything: all checkpoints.

    Returns:
        By path the reason, in words.
    """
    of_run = by_run(everything)
    names = {known.info.id: name for name, known in runs.items()}
    held: dict[str, str] = {}
    for known in runs.values():
        held |= _by_run(known.info, known.status, of_run, names)
    return held


def by_run(everything: Sequence[Saved]) -> dict[str, list[Saved]]:
    """Checkpoints by name of the run, in their order."""
    found: dict[str, list[Saved]] = {}
    for saved in everything:
        found.setdefault(saved.run, []).append(saved)
    return found


def _by_run(
    info: RunInfo,
    status: RunStatus,
    of_run: Mapping[str, Sequence[Saved]],
    names: Mapping[str, str],
) -> dict[str, str]:
    """What one run holds: what it would go on from."""
    steps = [s for s in by_step(of_run.get(info.name, ())).items() if s[0] <= status.step]
    if steps:
        _, last = max(steps, key=lambda pair: pair[0])
        if status.state not in ACTIVE:
            return {}
        return {last.entry.path: f"run {info.name!r} is {status.state} and would go on from it"}
    parent = info.parent
    if parent is None or parent.run is None or parent.run not in names:
        return {}
    if status.state not in ACTIVE and status.step <= parent.step:  # nothing of its own is lost
        return {}
    origin = of_run.get(names[parent.run], ())
    return {
        s.entry.path: f"run {info.name!r} was branched off it and has no checkpoint of its own yet"
        for s in origin
        if s.resumable and s.address.name == parent.checkpoint
    }
