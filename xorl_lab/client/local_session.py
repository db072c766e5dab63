"""A model that this process trains: what a client asks for, as jobs on the worker thread."""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from xorl_lab import checkpoints, losses
from xorl_lab.checkpoints import Address, catalog, check_name
from xorl_lab.client.arguments import check_ttl
from xorl_lab.client.local_source import Embedded, LocalSource
from xorl_lab.client.no_endpoints import NoEndpoints, own_sampler
from xorl_lab.engine import saving
from xorl_lab.engine.batches import Batch, align, known_inputs
from xorl_lab.engine.engine import Engine
from xorl_lab.engine.routing import experts_of
from xorl_lab.engine.scheduler import Ticket
from xorl_lab.engine.trainer import Trained
from xorl_lab.engine.versions import WeightsVersion
from xorl_lab.errors import CheckpointError, EngineError
from xorl_lab.futures import APIFuture
from xorl_lab.samplers.embedded import EmbeddedSampler
from xorl_lab.types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    LoraRunSpec,
    OptimStepResponse,
    SaveWeightsResponse,
)
from xorl_lab.types.checkpoints import (
    CheckpointsListResponse,
    DeleteCheckpointResponse,
    KillSessionResponse,
    SaveWeightsForSamplerResponse,
    UnloadModelResponse,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from xorl_lab.client.outside import Outside, OutsideSource
    from xorl_lab.samplers.sync.report import SyncReport

SYNCS_KEPT = 64
"""Reports of syncs that are kept until somebody takes them."""
T = TypeVar("T")
CustomLoss = Callable[[list[Datum], list["torch.Tensor"]], object]
"""A loss of the caller's own: (data, logprobs) -> (scalar tensor, metrics)."""


class LocalSession(NoEndpoints):
    """One trained model on an engine.

    Calls validate on the caller's thread and raise at once; what is left to fail, fails the future.

    Args:
        engine: the base model and its thread.
        sampler: the sampler on the same thread.
        model_id: name of the trained model, a part of its checkpoints' addresses.
        spec: shape of the adapter; None trains the full weights.
        root: folder of all checkpoints.
        drawing: where completions are drawn; None = by ``sampler``.
    """

    def __init__(
        self,
        engine: Engine,
        sampler: EmbeddedSampler,
        model_id: str,
        spec: LoraRunSpec | None,
        root: Path,
        drawing: "Embedded | Outside | None" = None,
    ) -> None:
        self.engine = engine
        self.sampler = sampler
        self.drawing = drawing or Embedded(engine, sampler)
        self.syncs: deque[SyncReport] = deque(maxlen=SYNCS_KEPT)
        """What became of sending weights to a sampler elsewhere, oldest first."""
        self.model_id = model_id
        self.spec = spec
        self.root = root
        self.closed: str | None = None
        self.parent: str | None = None
        self.metrics: dict[str, float] = {}
        self.started = False
        """True once something was trained, saved or loaded."""
        self._window: list[APIFuture[ForwardBackwardOutput]] = []
        self._order = threading.Lock()
        base = engine.base
        self._last_version = 0
        self._trained: Trained | None = None
        self._trained = self._submit(lambda _: Trained(model_id, base, spec), "create").result()

    @property
    def base_model(self) -> str:
        """Name of the base model."""
        return self.engine.loaded.name

    @property
    def version(self) -> int:
        """Number of the present weights; of the last ones if the model is no longer held."""
        return self._last_version if self._trained is None else self._trained.version

    @property
    def trained(self) -> Trained:
        """The model.

        Raises:
            EngineError: it is no longer held.
        """
        if self._trained is None:
            raise EngineError(self.closed or "the model is no longer held")
        return self._trained

    @property
    def device(self) -> str:
        """``cpu``, ``cuda`` or ``mps``."""
        return self.engine.loaded.device

    @property
    def dtype(self) -> str:
        """In which the base model computes."""
        return self.engine.loaded.dtype

    @property
    def context_length(self) -> int:
        """Longest sequence in tokens."""
        return self.engine.loaded.context_length

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.engine.loaded.vocab_size

    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The base model's tokenizer."""
        return self.engine.loaded.tokenizer

    def health(self) -> dict[str, Any]:
        """State of the session."""
        status = "healthy" if self.closed is None else self.closed
        return {"status": status, "engine_running": self.closed is None}

    def forward(
        self, data: Sequence[Datum], loss_fn: str, params: Mapping[str, Any] | None
    ) -> APIFuture[ForwardBackwardOutput]:
        """Queue a forward pass."""
        return self._forward(data, loss_fn, params, adapters_off=False)

    def forward_base(
        self, data: Sequence[Datum], params: Mapping[str, Any] | None
    ) -> APIFuture[ForwardBackwardOutput]:
        """Queue a forward pass through the base model."""
        return self._forward(data, "cross_entropy", params, adapters_off=True)

    def _forward(
        self,
        data: Sequence[Datum],
        loss_fn: str,
        params: Mapping[str, Any] | None,
        *,
        adapters_off: bool,
    ) -> APIFuture[ForwardBackwardOutput]:
        batch, checked = self._prepare(data, loss_fn, params)

        def run(ticket: Ticket) -> ForwardBackwardOutput:
            return self.trained.forward(
                batch, loss_fn, checked, ticket.tick, adapters_off=adapters_off
            )

        return self._submit(run, "forward")

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: str, params: Mapping[str, Any] | None
    ) -> APIFuture[ForwardBackwardOutput]:
        """Queue a forward and backward pass."""
        batch, checked = self._prepare(data, loss_fn, params)

        def run(ticket: Ticket) -> ForwardBackwardOutput:
            output = self.trained.forward_backward(
                batch, loss_fn, checked, ticket.tick, ticket.commit
            )
            self.metrics |= output.metrics
            return output

        self.started = True
        with self._order:
            future = self._submit(run, "forward_backward")
            self._window.append(future)
        return future

    def forward_backward_custom(
        self, data: Sequence[Datum], loss: CustomLoss
    ) -> APIFuture[ForwardBackwardOutput]:
        """Queue a forward and backward pass with a loss of the caller's own."""
        plain = [known_inputs(d) if isinstance(d, Datum) else d for d in data]
        batch, _ = self._prepare(plain, "cross_entropy", None)

        def run(ticket: Ticket) -> ForwardBackwardOutput:
            return self.trained.forward_backward_custom(
                batch, lambda logprobs: loss(list(data), logprobs), ticket.tick, ticket.commit
            )

        self.started = True
        with self._order:
            future = self._submit(run, "forward_backward_custom")
            self._window.append(future)
        return future

    def optim_step(self, adam: AdamParams) -> APIFuture[OptimStepResponse]:
        """Queue an optimizer step, bound to the calls that it is to apply.

        If one of them fails whose failure the caller has not seen by now, the caller still counts
        on it, and the step must not be taken without it.
        """

        def run(ticket: Ticket) -> OptimStepResponse:
            ticket.commit()
            response = self.trained.optim_step(adam)
            self.metrics |= response.metrics
            return response

        self.started = True
        with self._order:
            guards, later = self._window, list[APIFuture[ForwardBackwardOutput]]()
            guards[:] = [future for future in guards if not future.observed]
            self._window = later
            step = self._submit(run, "optim_step", guards)

        def hand_on(step: APIFuture[OptimStepResponse]) -> None:
            # What a cancelled step was to apply is left to the next one, and so are its guards.
            if step.cancelled():
                later[:0] = guards
            guards.clear()

        step.add_done_callback(hand_on)
        return step

    def save_state(
        self, name: str | None, ttl_seconds: float | None, overwrite: bool
    ) -> APIFuture[SaveWeightsResponse]:
        """Queue a checkpoint of weights, optimizer and random state."""
        checked = None if name is None else check_name(name)
        check_ttl(ttl_seconds)

        def run(ticket: Ticket) -> SaveWeightsResponse:
            ticket.commit()
            chosen = checked or f"step-{self.trained.steps}"
            address = Address(self.model_id, "weights", chosen)
            folder, facts = address.folder(self.root), self._facts(ttl_seconds)
            saving.save(self.trained, folder, facts, overwrite=overwrite)
            self.parent = address.uri
            return SaveWeightsResponse(address.uri, self.model_id)

        self.started = True
        return self._submit(run, "save_state")

    def save_weights_for_sampler(
        self, name: str, ttl_seconds: float | None
    ) -> APIFuture[SaveWeightsForSamplerResponse]:
        """Queue the saving of weights to sample from; what had the name before is replaced."""
        address = Address(self.model_id, "sampler_weights", check_name(name))
        check_ttl(ttl_seconds)

        def run(ticket: Ticket) -> SaveWeightsForSamplerResponse:
            ticket.commit()
            folder, facts = address.folder(self.root), self._facts(ttl_seconds)
            tokenizer = self.engine.loaded.tokenizer
            size = saving.save_for_sampler(self.trained, tokenizer, folder, facts)
            return SaveWeightsForSamplerResponse(
                address.uri, self.model_id, size, f"{address.kind}/{address.name}"
            )

        self.started = True
        return self._submit(run, "save_weights_for_sampler")

    def load(self, address: Address, *, with_optimizer: bool) -> APIFuture[dict[str, Any]]:
        """Queue the loading of a checkpoint."""
        before = self.started

        def run(ticket: Ticket) -> dict[str, Any]:
            ticket.commit()
            folder = address.folder(self.root)
            try:
                saving.load(self.trained, folder, with_optimizer=with_optimizer)
            except BaseException:
                self.started = before  # the model is as it was
                raise
            self.parent = address.uri
            return {}

        self.started = True
        return self._submit(run, "load_state")

    def load_state(self, path: str, *, with_optimizer: bool) -> APIFuture[dict[str, Any]]:
        """Queue the loading of a checkpoint, by pytrio's rules: only at first, only what fits.

        Raises:
            CheckpointError: ``validation.already_initialized``,
                ``validation.checkpoint_config_mismatch``; it is missing or damaged.
        """
        address = Address.parse(path)
        if self.started:
            raise CheckpointError(
                "validation.already_initialized",
                f"model {self.model_id!r} has trained, saved or loaded already: use "
                "ServiceClient.create_training_client_from_state(path), which makes a client with "
                "these weights",
                {"model_id": self.model_id},
            )
        saving.check_shape(address.folder(self.root), self.base_model, self.spec)
        return self.load(address, with_optimizer=with_optimizer)

    def list_checkpoints(self) -> APIFuture[CheckpointsListResponse]:
        """The checkpoints of this model, behind all saves made so far."""
        return self._submit(
            lambda _: CheckpointsListResponse(catalog.listing(self.root, self.model_id)),
            "list_checkpoints",
        )

    def delete_checkpoint(self, which: str) -> APIFuture[DeleteCheckpointResponse]:
        """Queue the deletion of a checkpoint, given by URI or by ``KIND/NAME``."""

        def run(ticket: Ticket) -> DeleteCheckpointResponse:
            ticket.commit()
            return catalog.try_delete(self.root, self.model_id, which)

        return self._submit(run, "delete_checkpoint")

    def unload(self) -> APIFuture[UnloadModelResponse]:
        """Queue the end of this session."""

        def run(ticket: Ticket) -> UnloadModelResponse:
            ticket.commit()
            self._let_go(f"model {self.model_id!r} was unloaded: create a client for it again")
            return UnloadModelResponse(self.model_id)

        return self._submit(run, "unload")

    def kill_session(self, save_checkpoint: bool) -> APIFuture[KillSessionResponse]:
        """Queue a checkpoint, if asked for, and the end of this session."""
        name = f"kill-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
        saved = self.save_state(name, None, overwrite=True) if save_checkpoint else None

        def run(ticket: Ticket) -> KillSessionResponse:
            ticket.commit()
            path = None if saved is None else saved.result(0).path
            self._let_go(f"model {self.model_id!r} was ended: create a client for it again")
            return KillSessionResponse(True, "the model is no longer held", path)

        return self._submit(run, "kill_session", [] if saved is None else [saved])

    def source(self, path: str) -> "LocalSource | OutsideSource":
        """Saved weights, to sample from."""
        address = Address.parse(path)
        folder = address.folder(self.root)
        state = checkpoints.read(folder)
        saving.check_base(state, self.base_model)
        load = self._submit(
            lambda _: saving.load_version(self.engine.base, folder, state), "load weights"
        )
        return self.drawing.source(load.result())

    def current_source(
        self, name: str | None, inference_base_url: str | None
    ) -> "LocalSource | OutsideSource":
        """The weights behind all calls made so far.

        Raises:
            ConfigError: ``inference_base_url`` was given.
        """
        if inference_base_url is not None:
            raise own_sampler(f"inference_base_url={inference_base_url!r}")
        saved = None if name is None else self.save_weights_for_sampler(name, None)
        version = self.snapshot()
        if saved is not None:
            saved.result()
        source = self.drawing.source(version.result())
        if not isinstance(source, LocalSource) and source.report is not None:
            self.syncs.append(source.report)
        return source

    def snapshot(self) -> APIFuture[WeightsVersion]:
        """Queue the making of an immutable version of the weights."""
        return self._submit(lambda _: self.trained.snapshot(), "snapshot")

    def _let_go(self, reason: str) -> None:
        self._last_version = self.version
        self.close(reason)
        self._trained = None

    def close(self, reason: str) -> None:
        """Refuse further calls."""
        self.closed = reason

    def _facts(self, ttl_seconds: float | None) -> dict[str, Any]:
        """What a checkpoint says of where it comes from."""
        return {
            "base_model": self.engine.loaded.name,
            "device": self.engine.loaded.device,
            "ttl_seconds": ttl_seconds,
            "expires_at": None if ttl_seconds is None else time.time() + ttl_seconds,
            "parent": self.parent,
            "metrics": self.metrics,
        }

    def _prepare(
        self, data: Sequence[Datum], loss_fn: str, params: Mapping[str, Any] | None
    ) -> tuple[Batch, dict[str, Any]]:
        checked = losses.check_params(loss_fn, params)
        self.drawing.rest()
        loaded = self.engine.loaded
        batch = align(
            data,
            required=losses.required_inputs(loss_fn, params),
            loss_fn=losses.get(loss_fn).name,
            vocab_size=loaded.vocab_size,
            context_length=loaded.context_length,
            experts=lambda: experts_of(self.engine.base),
        )
        return batch, checked

    def _submit(
        self, run: Callable[[Ticket], T], name: str, guards: Sequence[APIFuture[Any]] = ()
    ) -> APIFuture[T]:
        if self.closed is not None:
            raise EngineError(self.closed)
        return self.engine.scheduler.submit(
            run, name=name, guards=guards, on_skip=lambda: self.trained.drop_window()
        )
