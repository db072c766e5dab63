"""Which checkpoints are in use, so that deleting them would take something from a run."""

from collections.abc import Mapping, Sequence

from xorl_lab.lab.weights import Saved, by_step
from xorl_lab.store import RunInfo, RunStatus, Store
from xorl_lab.store.records import ACTIVE


def statuses_of(store: Store) -> dict[str, tuple[RunInfo, RunStatus]]:
    """All runs by name, with how they stand, the newest first."""
    return {info.name: (info, store.run(info.id).status()) for info in store.runs()}


def in_use(
    runs: Mapping[str, tuple[RunInfo, RunStatus]], everything: Sequence[Saved]
) -> dict[str, str]:
    """Checkpoints that cannot be deleted now.

    Args:
        runs: all runs by name; see :func:`statuses_of`.
        everything: all checkpoints.

    Returns:
        By path the reason, in words.
    """
    of_run = by_run(everything)
    names = {info.id: name for name, (info, _) in runs.items()}
    held: dict[str, str] = {}
    for info, status in runs.values():
        held |= _by_run(info, status, of_run, names)
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
