"""All checkpoints, their lineage and the disk, as JSON values."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from xorl_lab.checkpoints import catalog
from xorl_lab.lab.holding import Known, by_run, in_use, look
from xorl_lab.lab.origin import settings_behind
from xorl_lab.lab.weights import Saved, Weights
from xorl_lab.store import Event, RunInfo


def tree(weights: Weights, budget: int | None) -> dict[str, Any]:
    """What :class:`~xorl_lab.types.commands.CheckpointCommands` calls a tree.

    Args:
        weights: the checkpoints.
        budget: bytes that they may take; None = any.
    """
    root = weights.service.root
    runs, everything = look(weights)
    held = in_use(runs, everything)
    infos = {name: known.info for name, known in runs.items()}
    of_run = by_run(everything)
    parents = {name: _parent(info, infos, of_run) for name, info in infos.items()}
    found: list[dict[str, Any]] = []
    for name, mine in of_run.items():
        found += _of_run(mine, runs.get(name), parents.get(name), held)
    there = {facts["name"] for facts in found}
    for facts in found:
        if facts["parent"] not in there:
            facts["parent"] = None
    return {
        "checkpoints": sorted(found, key=lambda facts: (facts["created"], facts["name"])),
        "runs": [_run(known, parents[name]) for name, known in runs.items()],
        "disk": {"used": 0 if root is None else catalog.disk_use(root), "budget": budget},
    }


def _parent(
    info: RunInfo, infos: Mapping[str, RunInfo], of_run: Mapping[str, Sequence[Saved]]
) -> str | None:
    """Name of the checkpoint that a run was branched off, of one that is gone too."""
    if info.parent is None:
        return None
    names = {other.id: name for name, other in infos.items()}
    if info.parent.run not in names:  # the run is gone as well: its checkpoint's folder may not be
        named = f"/weights/{info.parent.checkpoint}"
        mine = [s.state.get("parent") or "" for s in of_run.get(info.name, ())]
        uris = [uri for uri in mine if uri.endswith(named)]
        return uris[0].removeprefix("xorl://").replace("/weights/", "/") if uris else None
    return f"{names[info.parent.run]}/{info.parent.checkpoint}"


def _of_run(
    mine: Sequence[Saved], known: Known | None, parent: str | None, held: Mapping[str, str]
) -> list[dict[str, Any]]:
    """The checkpoints of one run, each behind the one before it."""
    rows: dict[int, int] = {}
    columns: Mapping[str, Sequence[float]] = {}
    if known is not None:
        scalars = known.reader.scalars()
        rows = {step: i for i, step in enumerate(scalars.steps.tolist())}
        columns = {name: values.tolist() for name, values in scalars.columns.items()}
    turns = [] if known is None else [e for e in known.events if e.kind != "checkpoint"]
    found: list[dict[str, Any]] = []
    before = parent
    # Those of the run's own steps in their order; what the caller named hangs on what was there.
    for saved in sorted(mine, key=lambda s: (math.inf if s.step is None else s.step, s.entry.time)):
        settings = _settings(saved, known, turns)
        row = rows.get(saved.step or 0)
        metrics = saved.state.get("metrics", {}) if row is None else {
            name: values[row] for name, values in columns.items()
        }  # fmt: skip
        found.append(_facts(saved, before, metrics, settings, held))
        if saved.step is not None and saved.resumable:
            before = saved.reference
    return found


def _facts(
    saved: Saved,
    parent: str | None,
    metrics: Mapping[str, float],
    settings: Mapping[str, Any],
    held: Mapping[str, str],
) -> dict[str, Any]:
    state = saved.state
    own = {n: v for n, v in metrics.items() if isinstance(v, int | float) and math.isfinite(v)}
    return {
        "name": saved.reference,
        "run": saved.run,
        "step": saved.step,
        "kind": str(state.get("kind", "")) + ("" if saved.resumable else " (sampling alone)"),
        "parent": parent,
        "megabytes": round((saved.entry.size_bytes or 0) / 1e6, 3),
        "created": float(state.get("created", 0.0)),
        "expires": state.get("expires_at"),
        "metrics": own,
        "settings": dict(settings),
        "held": held.get(saved.entry.path, ""),
    }


def _settings(saved: Saved, known: Known | None, turns: Sequence[Event]) -> dict[str, Any]:
    """Of the recipe, as they stood then, and of the adapter."""
    adapter = {k: v for k, v in (saved.state.get("lora") or {}).items() if v is not None}
    if known is None:
        return adapter
    return {**settings_behind(known.info, turns, saved.step), **adapter}


def _run(known: Known, parent: str | None) -> dict[str, Any]:
    info = known.info
    return {
        "name": info.name,
        "kind": info.kind,
        "state": known.status.state,
        "parent": parent,
        "model": info.model,
    }
