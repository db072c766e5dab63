"""A training server: the calls of the clients, over the xorl protocol."""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from typing import Any, TypeVar

from xorl_lab.checkpoints import Address
from xorl_lab.checkpoints.names import check_model_id
from xorl_lab.client.answers import (
    checkpoints_response,
    made,
    runs_response,
)
from xorl_lab.client.encoding import encode
from xorl_lab.client.remote_sampling import RemoteSource
from xorl_lab.client.remote_session import RemoteSession, nothing
from xorl_lab.client.transport import PREFIX, Transport
from xorl_lab.errors import CheckpointError, ConfigError, DataError, EngineError
from xorl_lab.futures import APIFuture
from xorl_lab.samplers.wire import HTTPError
from xorl_lab.types import (
    LoraRunSpec,
)
from xorl_lab.types.checkpoints import (
    CheckpointsListResponse,
    DeleteCheckpointResponse,
    TrainingRunsResponse,
    WeightsInfoResponse,
)

CONFLICT = 409
"""HTTP status: the model is held with other settings."""
T = TypeVar("T")


class RemoteService:
    """A training server: makes sessions, and looks after what it keeps.

    Args:
        base_url: e.g. ``http://localhost:6000``.
        api_key: sent as a bearer token.
        timeout: seconds that an answer may take.
    """

    def __init__(self, base_url: str, api_key: str | None, timeout: float) -> None:
        self.transport = Transport(base_url, api_key, timeout)
        self.base_url = self.transport.base_url
        self._api_key = api_key
        self._timeout = timeout
        self._sources: weakref.WeakSet[RemoteSource] = weakref.WeakSet()

    def close(self) -> None:
        """End all connections; what is still awaited is cancelled."""
        for source in list(self._sources):
            source.close()
        self.transport.close()

    def create(self, base_model: str, model_id: str, spec: LoraRunSpec | None) -> RemoteSession:
        """Ask for a model by its name and shape.

        Raises:
            ConfigError: the server trains in another way, or finds fault with a setting.
            EngineError: the server refused; says why.
        """
        self._check_mode(base_model, spec)
        check_model_id(model_id)
        try:
            self._create(base_model, model_id, spec)
        except DataError as error:
            raise ConfigError(str(error)) from error
        session = RemoteSession(self, model_id, base_model, spec)
        if self.transport.ours:
            info = self.transport.post(f"{PREFIX}/get_info", {"model_id": model_id})
            session.version = int(info.get("version", 0))
        return session

    def _create(self, base_model: str, model_id: str, spec: LoraRunSpec | None) -> None:
        lora: dict[str, Any] = {"rank": 32}
        if spec is not None:
            lora = {k: v for k, v in asdict(spec).items() if v is not None}
        body = {"model_id": model_id, "base_model": base_model, "lora_config": lora}
        self.transport.submit("create_model", encode(body), nothing).result()

    def resume(
        self, path: str, base_model: str | None, model_id: str, *, with_optimizer: bool
    ) -> RemoteSession:
        """A model with a checkpoint's shape and weights.

        Raises:
            CheckpointError: the checkpoint is missing, damaged, or of another base model.
            ConfigError: the server trains in another way.
        """
        info = self.transport.post(f"{PREFIX}/weights_info", {"xorl_path": path})
        saved, spec = str(info["base_model"]), _spec_of(info)
        if self.transport.ours and base_model not in (None, saved):
            raise CheckpointError(
                "validation.checkpoint_config_mismatch",
                f"checkpoint {path} is of base model {saved!r}, but {base_model!r} was asked for: "
                "leave base_model out",
                {"base_model": {"checkpoint": saved, "requested": base_model}},
            )
        try:
            session = self.create(base_model or saved, model_id, spec)
        except HTTPError as error:
            if error.status != CONFLICT or spec is None:
                raise
            # A model that is held keeps its own seed, which is no part of what is restored.
            session = self.create(base_model or saved, model_id, replace(spec, seed=None))
        session.load_state(path, with_optimizer=with_optimizer).result()
        return session

    def _check_mode(self, base_model: str, spec: LoraRunSpec | None) -> None:
        is_lora = self.transport.health().get("is_lora")
        start = f"xorl-lab serve --model {base_model}"
        if is_lora is True and spec is None:
            raise ConfigError(
                f"full weights were asked for, but the server at {self.base_url} trains LoRA "
                f"adapters: start it with `{start} --full`, or use create_lora_training_client"
            )
        if is_lora is False and spec is not None:
            raise ConfigError(
                f"a LoRA adapter was asked for, but the server at {self.base_url} trains full "
                f"weights: start it with `{start}`, without --full, or use create_training_client"
            )

    def load_adapter(self, path: str) -> str:
        """Have the server's sampler load saved weights.

        Returns:
            What its ``/generate`` calls them.  Ours gives a name that goes on meaning these
            weights when the checkpoint is replaced.

        Raises:
            CheckpointError: the checkpoint is missing, damaged, or of another base model.
            EngineError: it was not loaded.
        """
        body = {"model_path": path, **({"bind": True} if self.transport.ours else {})}
        answer = self.transport.post(f"{PREFIX}/create_sampling_session", body)
        if not answer.get("success", False):
            raise EngineError(f"{path} was not loaded: {answer.get('message', answer)}")
        return str(answer.get("lora_name") or "")

    def source(self, path: str, base_url: str | None = None) -> RemoteSource:
        """Completions from saved weights, which are loaded first.

        Args:
            path: their URI.
            base_url: the sampler behind the server, if it is not that itself.

        Raises:
            CheckpointError: the checkpoint is missing, damaged, or of another base model.
            EngineError: it was not loaded.
        """
        name = self.load_adapter(path)
        # A name that our server gave is known to that alone; another of ours is asked for its own.
        known = not self.transport.ours or base_url in (None, self.base_url)
        source = RemoteSource(
            base_url or self.base_url,
            path,
            self._api_key,
            self._timeout,
            adapter=name if known and name else None,
        )
        self._sources.add(source)
        return source

    def list_checkpoints(self, model_id: str) -> APIFuture[CheckpointsListResponse]:
        """The checkpoints of a model."""
        return self.ask(f"{PREFIX}/list_checkpoints", {"model_id": model_id}, checkpoints_response)

    def delete_checkpoint(self, model_id: str, which: str) -> APIFuture[DeleteCheckpointResponse]:
        """Delete a checkpoint, given by URI or by ``KIND/NAME``."""
        if which.startswith("xorl://"):
            address = Address.parse(which)
            model_id, which = address.model_id, f"{address.kind}/{address.name}"
        body = {"model_id": model_id, "checkpoint_id": which}
        return self.ask(f"{PREFIX}/delete_checkpoint", body, DeleteCheckpointResponse)

    def weights_info(self, path: str) -> APIFuture[WeightsInfoResponse]:
        """What a checkpoint is of."""
        return self.ask(f"{PREFIX}/weights_info", {"xorl_path": path}, WeightsInfoResponse)

    def training_runs(self) -> APIFuture[TrainingRunsResponse]:
        """All models of the server."""
        return self.ask(f"{PREFIX}/training_runs", None, runs_response)

    def ask(
        self, path: str, body: Mapping[str, Any] | None, make: Callable[..., T]
    ) -> APIFuture[T]:
        """A request that is answered at once; its fields make the answer.

        Args:
            path: whole path.
            body: None asks by GET.
            make: called with those fields of the answer that it knows.
        """
        answer = self.transport.get(path) if body is None else self.transport.post(path, body)
        if not isinstance(answer, dict):
            raise EngineError(f"{path} was answered with {answer!r:.80}: an object was expected")
        return APIFuture.completed(made(make, answer))


def _spec_of(info: Mapping[str, Any]) -> LoraRunSpec | None:
    """Shape of a saved adapter; a server that is not ours tells the rank alone."""
    if not info.get("is_lora", True):
        return None
    lora: Mapping[str, Any] = info.get("lora") or {"rank": info.get("lora_rank") or 32}
    known = {field.name for field in fields(LoraRunSpec)}
    values = {name: value for name, value in lora.items() if name in known}
    if values.get("target_modules") is not None:
        values["target_modules"] = tuple(values["target_modules"])
    return LoraRunSpec(**values)
