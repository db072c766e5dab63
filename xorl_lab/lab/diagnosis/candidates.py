"""Weights that a run's rollouts may have been drawn from, and bringing them into memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from xorl_lab import checkpoints
from xorl_lab.checkpoints import Address
from xorl_lab.engine import adapters, saving
from xorl_lab.engine.engine import Engine
from xorl_lab.engine.versions import WeightsVersion
from xorl_lab.errors import CheckpointError, StoreError
from xorl_lab.lab.weights import BASE, Saved, Weights
from xorl_lab.store import RunInfo, Store
from xorl_lab.types import LoraRunSpec

NEAR = 4
"""Other versions of a run that are tried."""
FOREIGN = 3
"""Checkpoints of other runs that are tried."""


@dataclass(frozen=True, slots=True)
class Reference:
    """Weights that can be brought into memory."""

    name: str
    """``base``, or ``RUN/step-40``."""
    step: int | None = None
    """The step of the run behind which they were saved; None for those of other runs."""
    path: str | None = None
    """Address of the checkpoint; None = the base model."""
    mark: str = ""
    """The same for the same weights."""
    dtype: str = ""
    """In which they were trained; empty where that is not known."""


@dataclass(frozen=True, slots=True)
class Subject:
    """Weights in memory."""

    model: PreTrainedModel
    """As the trainer computes with them, in eval mode."""
    version: WeightsVersion
    """As the sampler reads them."""
    spec: LoraRunSpec | None = None
    """Shape of the adapter, if there is one."""

    def place(self) -> "Subject":
        """Put the adapter into its module tree.  Worker thread only."""
        if self.version.adapter is not None:
            fill(self.model, self.version.adapter)
        return self


class Shelf:
    """The weights that are at hand for one run.

    Args:
        root: folder of all checkpoints.
        store: knows the runs.
        weights: knows the checkpoints.
        info: the run.
    """

    def __init__(self, root: Path, store: Store, weights: Weights, info: RunInfo) -> None:
        self._root = root
        self._store = store
        self._weights = weights
        self._info = info
        self._trees: dict[LoraRunSpec, PreTrainedModel] = {}

    def behind(self) -> dict[int, Reference]:
        """By step, the weights behind it, which drew the rollouts of the next one."""
        found = self._inherited()
        if self._info.parent is None:
            found[0] = Reference(BASE, 0, mark=BASE)
        for step, saved in sorted(self._weights.steps(self._info).items()):
            reference = self._reference(saved, step)
            if reference is not None:
                found[step] = reference
        return found

    def versions(self, of: Mapping[int, Reference], step: int) -> list[Reference]:
        """The versions nearest to the one behind a step, that and the base model left out."""
        near = sorted((s for s in of if s != step), key=lambda s: (abs(s - step), s))
        other = [of[s] for s in near if of[s].mark not in (BASE, of[step].mark)]
        return _distinct(other)[:NEAR]

    def foreign(self, own: Sequence[Reference], step: int) -> list[Reference]:
        """Checkpoints of other runs on the same base model, of each the one nearest to a step."""
        known = {reference.mark for reference in own}
        nearest: dict[str, Saved] = {}
        for saved in self._weights.everything():
            if not saved.resumable or saved.run == self._info.name:
                continue
            best = nearest.get(saved.run)
            if best is None or _distance(saved, step) <= _distance(best, step):
                nearest[saved.run] = saved
        newest = sorted(nearest.values(), key=lambda saved: saved.entry.time, reverse=True)
        found = [self._reference(saved, None) for saved in newest]
        return _distinct([f for f in found if f is not None and f.mark not in known])[:FOREIGN]

    def load(self, engine: Engine, reference: Reference) -> Subject:
        """Bring weights into memory.  Worker thread only.

        Adapters of one shape share a module tree: only the last one that was loaded or put in place
        by :meth:`Subject.place` is there.

        Raises:
            CheckpointError: the checkpoint is gone, damaged, or does not fit.
        """
        if reference.path is None:
            return Subject(engine.base, engine.base_version)
        folder = Address.parse(reference.path).folder(self._root)
        state = checkpoints.read(folder)
        spec = saving.lora_spec(state)
        if spec is None:
            version = saving.load_version(engine.base, folder, state)
            assert version.full is not None
            return Subject(version.full.requires_grad_(False), version)
        shape = replace(spec, dropout=0.0, seed=0)
        if shape not in self._trees:
            tree = adapters.inject(engine.base, shape, torch.Generator())
            self._trees[shape] = tree.requires_grad_(False)
        tree = self._trees[shape]
        tensors = saving.load_adapter(folder, adapters.parameters(tree))
        version = WeightsVersion(
            str(state["model_id"]), int(state["version"]), tensors, spec.alpha / spec.rank
        )
        return Subject(tree, version, spec)

    def _inherited(self) -> dict[int, Reference]:
        """What a branch has of the run that it was branched from."""
        parent = self._info.parent
        if parent is None or parent.run is None:
            return {}
        try:
            info = self._store.run(parent.run).info
            first = self._weights.named(info, parent.checkpoint)
        except (StoreError, CheckpointError):  # it was deleted
            return {}
        earlier = {s: c for s, c in self._weights.steps(info).items() if s < parent.step}
        found = {s: self._reference(c, s) for s, c in {**earlier, parent.step: first}.items()}
        return {step: reference for step, reference in found.items() if reference is not None}

    def _reference(self, saved: Saved, step: int | None) -> Reference | None:
        """None for a checkpoint of another base model."""
        state = saved.state
        if state.get("base_model") != self._info.model:
            return None
        name = f"{saved.run}/{saved.address.name}"
        return Reference(name, step, saved.entry.path, _mark(state), str(state["dtype"]))


def adapted(
    base: PreTrainedModel,
    version: WeightsVersion,
    spec: LoraRunSpec,
    generator: torch.Generator,
    dropout: float = 0.0,
) -> PreTrainedModel:
    """A module tree with an adapter as the trainer has it.

    Args:
        base: the base model.
        version: of the adapter.
        spec: its shape.
        generator: of the dropout, which draws only where it is switched on.
        dropout: share of the adapter's inputs that it zeroes.
    """
    model = adapters.inject(base, replace(spec, dropout=dropout, seed=0), generator)
    fill(model, version.adapter or {})
    return model.requires_grad_(False)


def fill(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy an adapter's weights into a module tree."""
    with torch.no_grad():
        for name, parameter in adapters.parameters(model).items():
            parameter.copy_(tensors[name])


def _mark(state: Mapping[str, Any]) -> str:
    """Hash of the weights' file."""
    name = saving.MODEL_FILE if state["lora"] is None else saving.ADAPTER_FILE
    return str(state["files"][name]["sha256"])


def _distance(saved: Saved, step: int) -> int:
    return abs(saved.step - step) if saved.step is not None else 1 << 30


def _distinct(references: Sequence[Reference]) -> list[Reference]:
    """The first of each that are the same weights."""
    found: dict[str, Reference] = {}
    for reference in references:
        found.setdefault(reference.mark, reference)
    return list(found.values())
