"""References to weights: which checkpoints a run has, and what to sample from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from xorl_lab import checkpoints
from xorl_lab.checkpoints import catalog
from xorl_lab.checkpoints.names import MODEL_ID, Address
from xorl_lab.errors import CheckpointError, ConfigError
from xorl_lab.lab import active
from xorl_lab.lab.autosave import step_of
from xorl_lab.recipes.settings import suggest
from xorl_lab.store import Event, Reader, RunInfo, Store
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
    address: Address
    """Where it lies."""
    automatic: bool = False
    """True if the run saved it by itself."""
    state: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Its ``state.json``; empty if a server keeps it."""

    @property
    def resumable(self) -> bool:
        """True if training can go on from it, rather than sampling alone."""
        return self.address.kind == "weights"

    @property
    def reference(self) -> str:
        """``RUN/NAME``; ``RUN/sampler_weights/NAME`` where only sampling is possible."""
        name = self.address.name
        return f"{self.run}/{name}" if self.resumable else f"{self.run}/{self.address.kind}/{name}"


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

    @property
    def store(self) -> Store:
        """The record."""
        return self._store

    @property
    def service(self) -> "ServiceClient":
        """What keeps the checkpoints."""
        return self._service

    def of(self, info: RunInfo) -> list[Saved]:
        """The checkpoints of one run, oldest first."""
        told = self._told(info)
        homes = dict.fromkeys((info.name, *(Address.parse(path).model_id for path in told)))
        there = [found for home in homes for found in self._listed(home)]
        untold = {e.path for a, e, _ in there if e.path not in told and a.model_id == info.name}
        if untold:  # of nobody's own, or of another run that trained the same model
            untold -= self._told_by_others(info)
        return [
            _saved(info.name, address, entry, state, told)
            for address, entry, state in there
            if entry.path in told or entry.path in untold
        ]

    def everything(self, events: Mapping[str, Sequence[Event]] | None = None) -> list[Saved]:
        """All checkpoints, oldest first, those that no run made too.

        Args:
            events: by name of the run, where they were read already.
        """
        infos = self._store.runs()
        root = self._service.root
        if root is None:
            return [saved for info in reversed(infos) for saved in self.of(info)]
        known = events or {}
        told = {
            info.name: _paths(known[info.name]) if info.name in known else self._told(info)
            for info in reversed(infos)
        }
        owners = {path: run for run, paths in told.items() for path in paths}
        found: list[Saved] = []
        for address, state in catalog.states(root):
            run = owners.get(address.uri, address.model_id)
            entry = catalog.described(address, state)
            found.append(_saved(run, address, entry, state, told.get(run)))
        return found

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
        there = self._behind(reader)
        return there[0] if there else None

    def sound(self, reader: Reader) -> tuple[Saved | None, list[str]]:
        """The latest step of a run that is recorded, saved, and whole on the disk.

        Returns:
            It, None if nothing was saved; and what is wrong with later ones, in sentences.

        Raises:
            CheckpointError: there are some, and none is whole.
        """
        there = self._behind(reader)
        root = self._service.root
        if root is None:
            return (there[0] if there else None), []
        troubles: list[CheckpointError] = []
        for saved in there:
            try:
                checkpoints.read(saved.address.folder(root))
            except CheckpointError as error:
                troubles.append(error)
            else:
                return saved, [error.message for error in troubles]
        if troubles:
            raise troubles[0]
        return None, []

    def steps(self, info: RunInfo) -> dict[int, Saved]:
        """The checkpoints of a run from which training can go on, by step."""
        return by_step(self.of(info))

    def named(self, info: RunInfo, checkpoint: str) -> Saved:
        """One checkpoint of a run from which training can go on.

        Raises:
            CheckpointError: ``checkpoint.not_found``; names the nearest.
        """
        found = {saved.address.name: saved for saved in self.of(info) if saved.resumable}
        return _chosen(found, checkpoint, info.name)

    def find(self, reference: str) -> Saved:
        """The checkpoint behind ``RUN/NAME``, ``RUN/sampler_weights/NAME``, ``RUN`` or ``NAME``.

        Raises:
            ConfigError, StoreError, CheckpointError: it refers to nothing, or to several.
        """
        if not isinstance(reference, str) or reference == BASE:
            raise ConfigError(f"{reference!r} names no checkpoint: pass 'RUN/CHECKPOINT'")
        known = {info.name: info for info in self._store.runs()}
        if "/" in reference:
            run, name = reference.split("/", 1)
            return _chosen(self._all_of(run, known), name, run)
        if reference in known:
            last = self.last(self._store.run(reference))
            if last is None:
                raise ConfigError(f"run {reference!r} has no checkpoint yet: wait, or name another")
            return last
        return self._alone(reference, list(known.values()))

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
        return self._service.create_sampling_client(model_path=self.find(reference).entry.path)

    def _all_of(self, run: str, known: Mapping[str, RunInfo]) -> dict[str, Saved]:
        """What a name behind a run's may mean; that of a model without a run will do too."""
        if run not in known and self._service.root is not None and MODEL_ID.fullmatch(run):
            listed = [_saved(run, *facts, None) for facts in self._listed(run)]
        else:
            listed = []
        saved = listed or self.of(self._store.run(run).info)
        named = {s.reference.split("/", 1)[1]: s for s in saved}
        return {s.address.name: s for s in saved} | named

    def _behind(self, reader: Reader) -> list[Saved]:
        """What a run can go on from: recorded and saved, the latest first."""
        info = reader.info
        recorded = max(reader.status().step, info.parent.step if info.parent else 0)
        steps = self.steps(info)
        return [steps[step] for step in sorted(steps, reverse=True) if step <= recorded]

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

    def _told_by_others(self, info: RunInfo) -> set[str]:
        others = [other for other in self._store.runs() if other.id != info.id]
        return {path for other in others for path in self._told(other)}

    def _told(self, info: RunInfo) -> dict[str, int | None]:
        """What the run reported: paths, each with its step."""
        return _paths(self._store.run(info.id).checkpoints())

    def _listed(self, model_id: str) -> list[tuple[Address, Checkpoint, Mapping[str, Any]]]:
        if not MODEL_ID.fullmatch(model_id):  # of a run that was imported, which has none
            return []
        root = self._service.root
        if root is not None:
            return [(a, catalog.described(a, s), s) for a, s in catalog.states(root, model_id)]
        rest = self._service.create_rest_client(model_id)
        found = rest.list_checkpoints().result().checkpoints
        return [(Address.parse(c.path), c, {}) for c in found]


def by_step(found: Sequence[Saved]) -> dict[int, Saved]:
    """Of some checkpoints those from which training can go on, by step."""
    return {s.step: s for s in found if s.resumable and s.step is not None}


def _paths(events: Sequence[Event]) -> dict[str, int | None]:
    """Paths of the checkpoints in what a run recorded, each with its step."""
    told = (event for event in events if event.kind == "checkpoint")
    return {str(event.data["path"]): event.step for event in told if "path" in event.data}


def _saved(
    run: str,
    address: Address,
    entry: Checkpoint,
    state: Mapping[str, Any],
    told: Mapping[str, int | None] | None,
) -> Saved:
    """A checkpoint with what its run said of it; ``told`` is None where no run made it."""
    if told is None:
        return Saved(run, None, entry, address, state=state)
    step = told.get(entry.path, step_of(address.name))
    automatic = told.get(entry.path) is not None and address.kind == "weights"
    return Saved(run, step, entry, address, automatic, state)


def _chosen(found: Mapping[str, Saved], checkpoint: str, run: str) -> Saved:
    if checkpoint not in found:
        hint = suggest(checkpoint, found) if found else ", and no other yet"
        raise CheckpointError(
            "checkpoint.not_found", f"run {run!r} has no checkpoint {checkpoint!r}{hint}"
        )
    return found[checkpoint]


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
