"""The engine behind the clients: what a training client asks for, as jobs on the worker thread."""

import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from xorl_lab import checkpoints, losses
from xorl_lab.checkpoints import Address, catalog, check_name
from xorl_lab.checkpoints.names import check_model_id
from xorl_lab.engine import engine as engines
from xorl_lab.engine import saving
from xorl_lab.engine.batches import Batch, align
from xorl_lab.engine.engine import Engine
from xorl_lab.engine.scheduler import Ticket
from xorl_lab.engine.trainer import Trained
from xorl_lab.engine.versions import WeightsVersion
from xorl_lab.errors import ConfigError, EngineError
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
from xorl_lab.types.checkpoints import SaveWeightsForSamplerResponse

_samplers: "weakref.WeakKeyDictionary[Engine, EmbeddedSampler]" = weakref.WeakKeyDictionary()
_lock = threading.Lock()
T = TypeVar("T")


class LocalService:
    """The models of this process: makes sessions, and versions to sample from.

    Args:
        root: folder of all checkpoints.  What an interrupted write left there is cleared away, and
            what has expired is deleted.
        device: ``auto``, ``cpu``, ``cuda`` or ``mps``.
        dtype: ``auto``, ``float32`` or ``bfloat16``.
    """

    def __init__(self, root: Path, device: str = "auto", dtype: str = "auto") -> None:
        self.root = root
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
            if engine not in _samplers:
                _samplers[engine] = EmbeddedSampler(engine)
            return engine, _samplers[engine]

    def create(
        self,
        base_model: str,
        model_id: str,
        spec: LoraRunSpec | None,
        prepare: Callable[["LocalSession"], object] = lambda _: None,
    ) -> "LocalSession":
        """Make a session, prepare it, and only then put it in the place of an older one.

        Raises:
            CheckpointError: ``validation.invalid_model_id``.
            ConfigError: the model is unknown, or the adapter's shape does not fit it.
        """
        check_model_id(model_id)
        engine, sampler = self.open(base_model)
        session = LocalSession(engine, sampler, model_id, spec, self.root)
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

    def live(self) -> dict[str, "LocalSession"]:
        """The sessions in use by model id."""
        return dict(self._sessions)


class LocalSession:
    """One trained model on an engine.

    Calls validate on the caller's thread and raise at once; what is left to fail, fails the future.

    Args:
        engine: the base model and its thread.
        sampler: the sampler on the same thread.
        model_id: name of the trained model, a part of its checkpoints' addresses.
        spec: shape of the adapter; None trains the full weights.
        root: folder of all checkpoints.
    """

    def __init__(
        self,
        engine: Engine,
        sampler: EmbeddedSampler,
        model_id: str,
        spec: LoraRunSpec | None,
        root: Path,
    ) -> None:
        self.engine = engine
        self.sampler = sampler
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
        self.trained = self._submit(lambda _: Trained(model_id, base, spec), "create").result()

    def forward(
        self,
        data: Sequence[Datum],
        loss_fn: str,
        params: Mapping[str, Any] | None,
        *,
        adapters_off: bool = False,
    ) -> APIFuture[ForwardBackwardOutput]:
        """Queue a forward pass."""
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
        _check_ttl(ttl_seconds)

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
        _check_ttl(ttl_seconds)

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

        def run(ticket: Ticket) -> dict[str, Any]:
            ticket.commit()
            folder = address.folder(self.root)
            saving.load(self.trained, folder, with_optimizer=with_optimizer)
            self.parent = address.uri
            return {}

        self.started = True
        return self._submit(run, "load_state")

    def snapshot(self) -> APIFuture[WeightsVersion]:
        """Queue the making of an immutable version of the weights."""
        return self._submit(lambda _: self.trained.snapshot(), "snapshot")

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
        loaded = self.engine.loaded
        batch = align(
            data,
            required=losses.required_inputs(loss_fn, params),
            loss_fn=losses.get(loss_fn).name,
            vocab_size=loaded.vocab_size,
            context_length=loaded.context_length,
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


def _check_ttl(ttl_seconds: object) -> None:
    number = isinstance(ttl_seconds, int | float) and not isinstance(ttl_seconds, bool)
    if ttl_seconds is not None and not (number and cast("float", ttl_seconds) > 0):
        raise ConfigError(f"ttl_seconds is {ttl_seconds!r}: pass a number > 0, or None to keep it")
