"""One model that a training server holds: the calls of a training client, over HTTP."""

import secrets
import threading
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Any, Never, TypeVar

from xorl_lab.checkpoints import check_name
from xorl_lab.client.answers import (
    endpoint_response,
    endpoints_response,
    forward_output,
    metrics_of,
)
from xorl_lab.client.encoding import encode, numbered
from xorl_lab.client.remote_sampling import RemoteSource
from xorl_lab.client.transport import Sequence
from xorl_lab.errors import ConfigError, DataError, EngineError
from xorl_lab.futures import APIFuture
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
    InferenceEndpointResponse,
    KillSessionResponse,
    ListInferenceEndpointsResponse,
    SaveWeightsForSamplerResponse,
    SyncWeightsResponse,
    UnloadModelResponse,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from xorl_lab.client.remote import RemoteService

ANONYMOUS_SECONDS = 6 * 3600
"""Life of weights that are saved without a name."""
UNLIMITED = 2**31 - 1
"""Where a server does not tell its limits, its own checks have to do."""
T = TypeVar("T")
Params = Mapping[str, Any] | None


class RemoteSession:
    """One trained model on a server.

    Args:
        service: the server.
        model_id: its name there.
        base_model: name of the base model, which also names its tokenizer.
        spec: shape of the adapter; None for full weights.
    """

    def __init__(
        self, service: "RemoteService", model_id: str, base_model: str, spec: LoraRunSpec | None
    ) -> None:
        self.service = service
        self.model_id = model_id
        self.base_model = base_model
        self.spec = spec
        self.version = 0
        self.device = self.dtype = "remote"
        self._order = Sequence()
        self._versions = threading.Lock()
        self._told = 0
        """Number of the last request whose answer said what version it has made."""
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._info: dict[str, Any] | None = None

    @property
    def context_length(self) -> int:
        """Longest sequence in tokens, as far as the server tells."""
        return int(self._facts().get("context_length") or UNLIMITED)

    @property
    def vocab_size(self) -> int:
        """V, as far as the server tells."""
        return int(self._facts().get("vocab_size") or UNLIMITED)

    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The base model's tokenizer, from this machine."""
        if self._tokenizer is None:
            from xorl_lab.engine.models import tokenizer  # noqa: PLC0415 (brings torch with it)

            self._tokenizer = tokenizer(self.base_model)
        return self._tokenizer

    def health(self) -> dict[str, Any]:
        """What the server says of itself."""
        return dict(self.service.transport.get("/health"))

    def forward_base(self, data: SequenceOf[Datum], params: Params) -> Never:
        """Not over HTTP."""
        raise ConfigError(
            f"forward_base ({len(data)} datums, {params}) has no counterpart on a training server: "
            "create a second LoRA client with a model_id of its own, never train it, and call "
            "its forward"
        )

    def forward_backward_custom(self, data: SequenceOf[Datum], loss: object) -> Never:
        """Not over HTTP."""
        raise ConfigError(
            f"forward_backward_custom ({len(data)} datums) runs {loss!r} beside the model, which a "
            "training server does not do: leave base_url out to train in this process"
        )

    def _facts(self) -> dict[str, Any]:
        if self._info is None:
            try:
                self._info = dict(self.service.transport.get("/model_info"))
            except EngineError:
                self._info = {}  # xorl's own server has no such page
        return self._info

    def forward(
        self, data: SequenceOf[Datum], loss_fn: str, params: Mapping[str, Any] | None
    ) -> APIFuture[ForwardBackwardOutput]:
        """Queue a forward pass."""
        body = {"forward_input": _loss_input(data, loss_fn, params)}
        return self._submit("forward", body, forward_output)

    def forward_backward(
        self, data: SequenceOf[Datum], loss_fn: str, params: Mapping[str, Any] | None
    ) -> APIFuture[ForwardBackwardOutput]:
        """Queue a forward and backward pass."""
        body = {"forward_backward_input": _loss_input(data, loss_fn, params)}
        return self._submit("forward_backward", body, forward_output)

    def optim_step(self, adam: AdamParams) -> APIFuture[OptimStepResponse]:
        """Queue an optimizer step."""

        def parse(answer: Mapping[str, Any]) -> OptimStepResponse:
            info = dict(answer.get("info") or {})
            return OptimStepResponse(metrics_of(answer.get("metrics")), info)

        body = {"adam_params": adam.to_dict()}
        return self._submit("optim_step", body, parse, changes_weights=True)

    def save_state(
        self, name: str | None, ttl_seconds: float | None, overwrite: bool
    ) -> APIFuture[SaveWeightsResponse]:
        """Queue a checkpoint."""
        body: dict[str, Any] = {"path": None if name is None else check_name(name)}
        body |= {"ttl_seconds": ttl_seconds} if ttl_seconds is not None else {}
        body |= {"overwrite": True} if overwrite else {}
        return self._submit(
            "save_weights", body, lambda a: SaveWeightsResponse(str(a["path"]), self.model_id)
        )

    def save_weights_for_sampler(
        self, name: str, ttl_seconds: float | None
    ) -> APIFuture[SaveWeightsForSamplerResponse]:
        """Queue the saving of weights to sample from."""
        body: dict[str, Any] = {"name": check_name(name)}
        body |= {"ttl_seconds": ttl_seconds} if ttl_seconds is not None else {}
        return self._submit(
            "save_weights_for_sampler",
            body,
            lambda a: SaveWeightsForSamplerResponse(
                str(a["path"]), self.model_id, a.get("size"), a.get("model_path")
            ),
        )

    def load_state(self, path: str, *, with_optimizer: bool) -> APIFuture[dict[str, Any]]:
        """Queue the loading of a checkpoint."""
        body = {"path": path, "optimizer": with_optimizer}
        return self._submit("load_weights", body, nothing, changes_weights=True)

    def list_checkpoints(self) -> APIFuture[CheckpointsListResponse]:
        """The checkpoints of this model."""
        return self.service.list_checkpoints(self.model_id)

    def delete_checkpoint(self, which: str) -> APIFuture[DeleteCheckpointResponse]:
        """Delete a checkpoint, given by URI or by ``KIND/NAME``."""
        return self.service.delete_checkpoint(self.model_id, which)

    def source(self, path: str) -> RemoteSource:
        """Saved weights, to sample from where the server's own sampler is."""
        return self.service.source(path)

    def current_source(self, name: str | None, inference_base_url: str | None) -> RemoteSource:
        """The present weights, saved for sampling; without a name for six hours."""
        chosen = name or f"anonymous-{secrets.token_hex(6)}"
        ttl = None if name else ANONYMOUS_SECONDS
        path = self.save_weights_for_sampler(chosen, ttl).result().path
        return self.service.source(path, inference_base_url)

    def unload(self) -> APIFuture[UnloadModelResponse]:
        """Queue the end of the model on the server."""
        return self._submit("unload_model", {}, lambda _: UnloadModelResponse(self.model_id))

    def kill_session(self, save_checkpoint: bool) -> APIFuture[KillSessionResponse]:
        """End the model on the server."""
        body = {"model_id": self.model_id, "save_checkpoint": save_checkpoint}
        return self.service.ask("/api/v1/kill_session", body, KillSessionResponse)

    def add_inference_endpoint(
        self, host: str, port: int, world_size: int
    ) -> APIFuture[InferenceEndpointResponse]:
        """Register a sampler."""
        body = {"host": host, "port": port, "worker_port": port, "world_size": world_size}
        return self.service.ask("/add_inference_endpoint", body, endpoint_response)

    def sync_inference_weights(self, body: Mapping[str, Any]) -> APIFuture[SyncWeightsResponse]:
        """Send the weights to all registered samplers."""
        whole = {"model_id": self.model_id, **body}
        return self.service.ask("/api/v1/sync_inference_weights", whole, SyncWeightsResponse)

    def list_inference_endpoints(self) -> APIFuture[ListInferenceEndpointsResponse]:
        """The registered samplers."""
        return self.service.ask("/list_inference_endpoints", None, endpoints_response)

    def remove_inference_endpoint(
        self, host: str, port: int
    ) -> APIFuture[InferenceEndpointResponse]:
        """Forget a registered sampler."""
        body = {"host": host, "port": port}
        return self.service.ask("/remove_inference_endpoint", body, endpoint_response)

    def _submit(
        self,
        path: str,
        body: Mapping[str, Any],
        parse: Callable[[Any], T],
        *,
        changes_weights: bool = False,
    ) -> APIFuture[T]:
        transport = self.service.transport
        # Before it takes a number: what cannot be sent must not leave a gap.
        content = encode({"model_id": self.model_id, **body})

        def send(number: int) -> APIFuture[T]:
            def arrive(answer: Any) -> T:  # noqa: ANN401 (JSON)
                if changes_weights:
                    self._note_version(number, answer)
                return parse(answer)

            return transport.submit(path, numbered(content, number), arrive)

        return self._order.run(send, recognises=lambda: transport.ours)

    def _note_version(self, number: int, answer: Mapping[str, Any]) -> None:
        """The number of the weights, as the server tells it; answers may arrive in any order."""
        version = (answer.get("info") or {}).get("version")
        with self._versions:
            if version is None:
                self.version += 1
            elif number > self._told:
                self.version, self._told = int(version), number


def nothing(_: object) -> dict[str, Any]:
    """What an answer without content becomes."""
    return {}


def _loss_input(
    data: SequenceOf[Datum], loss_fn: str, params: Mapping[str, Any] | None
) -> dict[str, Any]:
    if isinstance(data, str | bytes) or not isinstance(data, SequenceOf):
        raise DataError(f"data is a {type(data).__name__}: pass a list of Datum")
    if not data:
        raise DataError("data is an empty list: pass at least one Datum")
    for index, datum in enumerate(data):
        if not isinstance(datum, Datum):
            raise DataError(f"data[{index}] is a {type(datum).__name__}: pass a list of Datum")
    documents = [datum.to_dict() for datum in data]
    experts = [document.pop("routed_experts", None) for document in documents]
    result: dict[str, Any] = {"data": documents, "loss_fn": loss_fn}
    if params is not None:
        if not isinstance(params, Mapping):
            raise ConfigError(f"loss_fn_params is a {type(params).__name__}: pass a dict or None")
        result["loss_fn_params"] = dict(params)
    if any(e is not None for e in experts):
        result["routed_experts"] = experts
    return result
