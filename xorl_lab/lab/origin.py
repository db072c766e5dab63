"""Where a run begins: at nothing, at its own last checkpoint, or at one of another run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from xorl_lab.errors import ConfigError
from xorl_lab.lab.control import Change
from xorl_lab.lab.weights import Weights
from xorl_lab.store import Event, Parent, Reader, RunInfo, Store


@dataclass(frozen=True, slots=True)
class Origin:
    """What lies behind the first step that is to be taken."""

    done: int = 0
    """Number of the last step taken."""
    path: str | None = None
    """Checkpoint with the weights behind it; None = the untrained model."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the recipe, with knobs as they stood."""
    adapter: Mapping[str, Any] | None = None
    """Shape of the trained weights; None = the lab's."""
    planned: tuple[Change, ...] = ()
    """Knobs turned in steps that are lost, to be turned again."""
    reader: Reader | None = None
    """Of the run that goes on."""
    parent: Parent | None = None
    """Of a branch."""
    earlier: tuple[int, ...] = ()
    """Steps of the checkpoints that the run has."""
    warnings: tuple[str, ...] = ()
    """What the person should know of where it begins, in sentences."""

    def chosen(self, settings: Mapping[str, Any]) -> "Origin":
        """The same, where some settings are chosen anew and nothing is to turn them back."""
        left = tuple(change for change in self.planned if change.name not in settings)
        return replace(self, planned=left)


def resumed(store: Store, weights: Weights, run: str) -> Origin:
    """A run that is to go on.

    Raises:
        StoreError: there is no such run.
        CheckpointError: none of its checkpoints is whole; or it was branched from one that is gone,
            and has none of its own.
    """
    reader = store.run(run)
    info, status = reader.info, reader.status()
    last, damaged = weights.sound(reader)
    done, path = (0, None) if last is None else (last.step or 0, last.entry.path)
    if last is None and info.parent is not None and info.parent.run is not None:
        done = info.parent.step
        path = weights.named(store.run(info.parent.run).info, info.parent.checkpoint).entry.path
    # Where nothing is done again, a knob turned while the last step was given up counts at once.
    lost = status.state == "crashed" or done < status.step
    return Origin(
        done,
        path,
        _settings(reader, done if lost else None),
        info.settings.get("adapter"),
        tuple(_changes(reader, done)) if lost else (),
        reader=reader,
        earlier=tuple(sorted(s for s in weights.steps(info) if s <= done)),
        warnings=tuple(f"{why}: going on from step {done} instead" for why in damaged),
    )


def branched(store: Store, weights: Weights, run: str, checkpoint: str) -> Origin:
    """A run that is to begin from a checkpoint of another.

    Raises:
        StoreError: there is no such run.
        CheckpointError: it has no such checkpoint.
    """
    reader = store.run(run)
    saved = weights.named(reader.info, checkpoint)
    done = saved.step or 0
    return Origin(
        done,
        saved.entry.path,
        _settings(reader, done),
        reader.info.settings.get("adapter"),
        parent=Parent(reader.info.id, checkpoint, done),
    )


def require_fit(origin: Reader, kind: str, model: str, data: str | None) -> None:
    """Raise a ConfigError if a run cannot be taken up, or branched from, with these.

    Args:
        origin: of the run.
        kind: of the recipe.
        model: name of the base model.
        data: fingerprint of the data; None for a branch, which may have others.
    """
    info = origin.info
    if info.kind != kind:
        call = f"call lab.{info.kind}" if info.kind in ("grpo", "sft") else "load its checkpoint"
        raise ConfigError(f"run {info.name!r} is of kind {info.kind!r}, not {kind!r}: {call}")
    if info.model != model:
        raise ConfigError(
            f"run {info.name!r} trains {info.model!r}, and this lab is of {model!r}: make "
            f"Lab({info.model!r})"
        )
    if data is not None and info.settings.get("data") not in (None, data):
        raise ConfigError(
            f"run {info.name!r} was begun on other data ({info.settings.get('examples')} "
            "examples): pass the same to resume it, or branch from one of its checkpoints"
        )


def settings_behind(info: RunInfo, events: Sequence[Event], step: int | None) -> dict[str, Any]:
    """Settings of the recipe as they stood behind a step; None = at last.

    Args:
        info: of the run.
        events: of the run; at least those of the kinds ``start`` and ``knob``.
        step: number of the step.
    """
    settings = dict(info.settings.get("recipe", {}))
    for event in events:
        if event.superseded or (step is not None and _at(event) > step):
            continue
        if event.kind == "start":
            settings = dict(event.data.get("settings", settings))
        elif event.kind == "knob":
            settings[event.data["name"]] = event.data["new"]
    return settings


def _settings(reader: Reader, step: int | None) -> dict[str, Any]:
    return settings_behind(reader.info, reader.events(kinds=("start", "knob")), step)


def _changes(reader: Reader, step: int) -> list[Change]:
    """Knobs turned behind a step, those that an earlier attempt was to turn again too."""
    found: list[Change] = []
    for event in reader.events(kinds=("start", "knob")):
        if event.superseded:
            continue
        if event.kind == "start":
            found += [c for c in _planned(event) if c not in found]
            continue
        change = Change(_at(event), event.data["name"], event.data["old"], event.data["new"])
        if change not in found:  # the person's own: it takes the place of what was planned
            found = [c for c in found if c.name != change.name or c.after < change.after]
            found.append(change)
    return [change for change in found if change.after > step]


def _planned(event: Event) -> list[Change]:
    return [Change(**facts) for facts in event.data.get("planned", ())]


def _at(event: Event) -> int:
    return event.step or 0
