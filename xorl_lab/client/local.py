"""The models of this process: engines, sessions that train on them, versions to sample from."""

import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from xorl_lab import checkpoints
from xorl_lab.checkpoints import Address, catalog
from xorl_lab.checkpoints.names import check_model_id
from xorl_lab.client.local_session import LocalSession
from xorl_lab.client.local_source import Embedded
from xorl_lab.engine import engine as engines
from xorl_lab.engine import saving
from xorl_lab.engine.engine import Engine
from xorl_lab.engine.versions import WeightsVersion
from xorl_lab.errors import CheckpointError
from xorl_lab.futures import APIFuture
from xorl_lab.samplers.embedded import EmbeddedSampler
from xorl_lab.types import LoraRunSpec
from xorl_lab.types.checkpoints import (
    CheckpointsListResponse,
    DeleteCheckpointResponse,
    TrainingRun,
    TrainingRunsResponse,
    WeightsInfoResponse,
)

if TYPE_CHECKING:
    from xorl_lab.client.outside import Outside

EMBEDDED = "embedded"
"""The sampler of this process."""
_lock = threading.Lock()


class LocalService:
    """The models of this process: makes sessions, and versions to sample from.

    Args:
        root: folder of all checkpoints.  What an interrupted write left there is cleared away, and
            what has expired is deleted.
        device: ``auto``, ``cpu``, ``cuda`` or ``mps``.
        dtype: ``auto``, ``float32`` or ``bfloat16``.
        sampler: ``embedded``, ``sglang`` or the URL of a SGLang server.
        sampler_key: bearer token of the server at that URL.
    """

    def __init__(
        self,
        root: Path,
        device: str = "auto",
        dtype: str = "auto",
        sampler: str = "embedded",
        sampler_key: str | None = None,
    ) -> None:
        self.root = root
        self._where = sampler
        self._key = sampler_key
        self._device = device
        self._dtype = dtype
        self._sessions: weakref.WeakValueDictionary[str, LocalSession] = (
            weakref.WeakValueDictionary()
        )
        checkpoints.recover(root)
        catalog.sweep(root)

    def open(self, base_model: str) -> tuple[Engine, EmbeddedSampler]:
        """The engine of a base model and the sampler on its thread; one each per process.

        Raises:
            ConfigError: the model, device or dtype is not to be had.
        """
        engine = engines.get(base_model, self._device, self._dtype)
        with _lock:
            attached = engine.scheduler.backgrounds
            found = [b for b in attached if isinstance(b, EmbeddedSampler)]
            return engine, found[0] if found else EmbeddedSampler(engine)

    def drawing(self, engine: Engine, sampler: EmbeddedSampler) -> "Embedded | Outside":
        """Where completions of an engine's weights are drawn."""
        if self._where == EMBEDDED:
            return Embedded(engine, sampler)
        from xorl_lab.client.outside import outside  # noqa: PLC0415 (as seldom as it is used)

        return outside(engine, sampler, self._where, self._key)

    def create(
        self,
        base_model: str,
        model_id: str,
        spec: LoraRunSpec | None,
        prepare: Callable[[LocalSession], object] = lambda _: None,
    ) -> LocalSession:
        """Make a session, prepare it, and only then put it in the place of an older one.

        Raises:
            CheckpointError: ``validation.invalid_model_id``.
            ConfigError: the model is unknown, or the adapter's shape does not fit it.
        """
        check_model_id(model_id)
        engine, sampler = self.open(base_model)
        drawing = self.drawing(engine, sampler)
        session = LocalSession(engine, sampler, model_id, spec, self.root, drawing)
        if spec is not None:
            drawing.expect(spec.rank)
        prepare(session)
        old = self._sessions.get(model_id)
        if old is not None:
            old.close(
                f"this client of model {model_id!r} was replaced by a newer one: use that, or give "
                "each client a model_id of its own"
            )
        self._sessions[model_id] = session
        return session

    def sampling_version(self, path: str) -> tuple[Engine, EmbeddedSampler, WeightsVersion]:
        """The weights of a checkpoint, to sample from.

        Raises:
            CheckpointError: it is missing, damaged, or does not fit its base model.
        """
        address = Address.parse(path)
        folder = address.folder(self.root)
        state = checkpoints.read(folder)
        engine, sampler = self.open(str(state["base_model"]))
        version = engine.scheduler.submit(
            lambda _: saving.load_version(engine.base, folder, state), name="load weights"
        )
        return engine, sampler, version.result()

    def resume(
        self, path: str, base_model: str | None, model_id: str, *, with_optimizer: bool
    ) -> LocalSession:
        """A session with a checkpoint's shape and weights.

        Raises:
            CheckpointError: it is missing, damaged, of another base model, or was trained in
                another dtype.
        """
        address = Address.parse(path)
        state = checkpoints.read(address.folder(self.root))
        saved = str(state["base_model"])
        if base_model is not None and base_model != saved:
            raise CheckpointError(
                "validation.checkpoint_config_mismatch",
                f"checkpoint {path} is of base model {saved!r}, but {base_model!r} was asked for: "
                "leave base_model out",
                {"base_model": {"checkpoint": saved, "requested": base_model}},
            )

        def load(session: LocalSession) -> None:
            session.load(address, with_optimizer=with_optimizer).result()

        return self.create(saved, model_id, saving.lora_spec(state), load)

    def list_checkpoints(self, model_id: str) -> APIFuture[CheckpointsListResponse]:
        """The checkpoints of a model, oldest first.

        Raises:
            CheckpointError: ``validation.invalid_model_id``.
        """
        found = catalog.listing(self.root, check_model_id(model_id))
        return APIFuture.completed(CheckpointsListResponse(found))

    def delete_checkpoint(self, model_id: str, which: str) -> APIFuture[DeleteCheckpointResponse]:
        """Delete a checkpoint, given by URI or by ``KIND/NAME``."""
        return APIFuture.completed(catalog.try_delete(self.root, model_id, which))

    def weights_info(self, path: str) -> APIFuture[WeightsInfoResponse]:
        """What a checkpoint is of.

        Raises:
            CheckpointError: it is missing.
        """
        state = checkpoints.glance(Address.parse(path).folder(self.root))
        spec = saving.lora_spec(state)
        rank = None if spec is None else spec.rank
        return APIFuture.completed(
            WeightsInfoResponse(str(state["base_model"]), spec is not None, rank)
        )

    def training_runs(self) -> APIFuture[TrainingRunsResponse]:
        """The models that are held, or of which there are checkpoints."""
        runs = {run.training_run_id: run for run in catalog.runs(self.root)}
        for model_id, session in self.live().items():
            spec = session.spec
            rank = None if spec is None else spec.rank
            known = runs.get(model_id)
            runs[model_id] = TrainingRun(
                model_id,
                session.base_model,
                "local",
                spec is not None,
                catalog.iso(time.time()),
                lora_rank=rank,
                last_checkpoint=known and known.last_checkpoint,
                last_sampler_checkpoint=known and known.last_sampler_checkpoint,
            )
        return APIFuture.completed(TrainingRunsResponse([runs[key] for key in sorted(runs)]))

    def live(self) -> dict[str, LocalSession]:
        """The sessions in use by model id."""
        return dict(self._sessions)
