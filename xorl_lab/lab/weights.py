"""References to weights: which checkpoints a run has, and what to sample from."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xorl_lab.checkpoints import catalog
from xorl_lab.checkpoints.names import MODEL_ID, Address
from xorl_lab.errors import CheckpointError, ConfigError
from xorl_lab.lab import active
from xorl_lab.lab.autosave import step_of
from xorl_lab.recipes.settings import suggest
from xorl_lab.store import Reader, RunInfo, Store
from xorl_lab.types.checkpoints import Checkpoint

if TYPE_CHECKING:
    import pandas as pd

    from xorl_lab.client import SamplingClient, ServiceClient

BASE = "base"
"""Refers to the base model."""
COLUMNS = ("run", "name", "step", "kind", "megabytes", "created", "path")


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint of a run."""

    run: str
    """Name of the run; of the trained model where no run made it."""
    step: int | None
    """The step behind which it was saved; None for one that the caller named."""
    entry: Checkpoint
    """What the folder says of it."""

    @property
    def address(self) -> Address:
        """Where it lies."""
        return Address.parse(self.entry.path)

    @property
    def resumable(self) -> bool:
        """True if training can go on from it, rather than sampling alone."""
        return self.address.kind == "weights"


class Weights:
    """The checkpoints of a lab, by run and name.  The folders are the truth.

    Args:
        service: keeps them.
        store: knows the runs.
        base: samples from the base model.
    """

    def __init__(self, service: "ServiceClient", store: Store, base: "SamplingClient") -> None:
        self._service = service
        self._store = store
        self._base = base

    def of(self, info: RunInfo) -> list[Saved]:
        """The checkpoints of one run, oldest first."""
        told = self._told(info)
        homes = dict.fromkeys((info.name, *(Address.parse(path).model_id for path in told)))
        return [
            Saved(info.name, told.get(c.path, step_of(Address.parse(c.path).name)), c)
            for home in homes
            for c in self._listed(home)
            if home == info.name or c.path in told
        ]

    def everything(self) -> list[Saved]:
        """All checkpoints, oldest first, those that no run made too."""
        runs = self._store.runs()
        found = [saved for info in reversed(runs) for saved in self.of(info)]
        if self._service.root is None:
            return found
        known = {saved.entry.path for saved in found}
        others = [c for c in catalog.listing(self._service.root) if c.path not in known]
        mine = [Saved(Address.parse(c.path).model_id, None, c) for c in others]
        return sorted((*found, *mine), key=lambda saved: saved.entry.time)

    def frame(self, run: str | None) -> "pd.DataFrame":
        """The checkpoints as a table.

        Raises:
            StoreError: there is no such run.
        """
        import pandas as pd  # noqa: PLC0415 (takes a second)

        found = self.everything() if run is None else self.of(self._store.run(run).info)
        return pd.DataFrame([_row(saved) for saved in found], columns=list(COLUMNS))

    def last(self, reader: Reader) -> Saved | None:
        """The latest step of a run that is both recorded and saved."""
        info = reader.info
        recorded = max(reader.status().step, info.parent.step if info.parent else 0)
        there = {step: saved for step, saved in self.steps(info).items() if step <= recorded}
        return there[max(there)] if there else None

    def steps(self, info: RunInfo) -> dict[int, Saved]:
        """The checkpoints of a run from which training can go on, by step."""
        found = self.of(info)
        return {s.step: s for s in found if s.resumable and s.step is not None}

    def named(self, info: RunInfo, checkpoint: str) -> Saved:
        """One checkpoint of a run.

        Raises:
            CheckpointError: ``checkpoint.not_found``; names the nearest.
        """
        found = {saved.address.name: saved for saved in self.of(info) if saved.resumable}
        if checkpoint not in found:
            hint = suggest(checkpoint, found) if found else ", and no other yet"
            raise CheckpointError(
                "checkpoint.not_found", f"run {info.name!r} has no checkpoint {checkpoint!r}{hint}"
            )
        return found[checkpoint]

    def client(self, reference: str) -> "SamplingClient":
        """What samples from ``base``, ``RUN``, ``RUN/NAME`` or ``NAME``.

        Raises:
            ConfigError, StoreError, CheckpointError: it refers to nothing, or to several.
        """
        if reference == BASE:
            return self._base
        for run in active.others(self._store.path):
            if run.name == reference:
                return run.client.save_weights_and_get_sampling_client()
        if not isinstance(reference, str):
            raise ConfigError(f"{reference!r} names no weights: pass 'base' or 'RUN/CHECKPOINT'")
        known = {info.name: info for info in self._store.runs()}
        if "/" in reference:
            run, name = reference.split("/", 1)
            return self._saved(self.named(self._store.run(run).info, name))
        if reference in known:
            last = self.last(self._store.run(reference))
            if last is None:
                raise ConfigError(f"run {reference!r} has no checkpoint yet: wait, or name another")
            return self._saved(last)
        return self._saved(self._alone(reference, list(known.values())))

    def _alone(self, name: str, runs: list[RunInfo]) -> Saved:
        having = [
            saved
            for info in runs
            for saved in self.of(info)
            if saved.resumable and saved.address.name == name
        ]
        if len(having) == 1:
            return having[0]
        what = f"runs {', '.join(s.run for s in having)} have" if having else "no run has"
        raise ConfigError(
            f"{what} a checkpoint {name!r}: name one as RUN/CHECKPOINT, a run, or base"
        )

    def _saved(self, saved: Saved) -> "SamplingClient":
        return self._service.create_sampling_client(model_path=saved.entry.path)

    def _told(self, info: RunInfo) -> dict[str, int | None]:
        """What the run reported: paths, each with its step."""
        events = self._store.run(info.id).checkpoints()
        return {str(e.data["path"]): e.step for e in events if "path" in e.data}

    def _listed(self, model_id: str) -> list[Checkpoint]:
        if not MODEL_ID.fullmatch(model_id):  # of a run that was imported, which has none
            return []
        if self._service.root is not None:
            return catalog.listing(self._service.root, model_id)
        return self._service.create_rest_client(model_id).list_checkpoints().result().checkpoints


def _row(saved: Saved) -> dict[str, Any]:
    return {
        "run": saved.run,
        "name": saved.address.name,
        "step": saved.step,
        "kind": saved.address.kind,
        "megabytes": round((saved.entry.size_bytes or 0) / 1e6, 1),
        "created": saved.entry.time,
        "path": saved.entry.path,
    }
