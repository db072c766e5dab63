"""What stands behind a training client: a model in this process, or on a server."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

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

    from xorl_lab.client.sampling import Source

Params = Mapping[str, Any] | None


class Session(Protocol):
    """One trained model.  The methods are those of :class:`TrainingClient`, checked less."""

    model_id: str
    spec: LoraRunSpec | None

    @property
    def base_model(self) -> str: ...  # noqa: D102 (as are all below: see TrainingClient)
    @property
    def version(self) -> int: ...  # noqa: D102
    @property
    def device(self) -> str: ...  # noqa: D102
    @property
    def dtype(self) -> str: ...  # noqa: D102
    @property
    def context_length(self) -> int: ...  # noqa: D102
    @property
    def vocab_size(self) -> int: ...  # noqa: D102

    def tokenizer(self) -> "PreTrainedTokenizerBase": ...  # noqa: D102
    def health(self) -> dict[str, Any]: ...  # noqa: D102

    def forward(  # noqa: D102
        self, data: Sequence[Datum], loss_fn: str, params: Params
    ) -> APIFuture[ForwardBackwardOutput]: ...
    def forward_base(  # noqa: D102
        self, data: Sequence[Datum], params: Params
    ) -> APIFuture[ForwardBackwardOutput]: ...
    def forward_backward(  # noqa: D102
        self, data: Sequence[Datum], loss_fn: str, params: Params
    ) -> APIFuture[ForwardBackwardOutput]: ...
    def forward_backward_custom(  # noqa: D102
        self, data: Sequence[Datum], loss: Callable[..., object]
    ) -> APIFuture[ForwardBackwardOutput]: ...
    def optim_step(self, adam: AdamParams) -> APIFuture[OptimStepResponse]: ...  # noqa: D102

    def save_state(  # noqa: D102
        self, name: str | None, ttl_seconds: float | None, overwrite: bool
    ) -> APIFuture[SaveWeightsResponse]: ...
    def save_weights_for_sampler(  # noqa: D102
        self, name: str, ttl_seconds: float | None
    ) -> APIFuture[SaveWeightsForSamplerResponse]: ...
    def load_state(  # noqa: D102
        self, path: str, *, with_optimizer: bool
    ) -> APIFuture[dict[str, Any]]: ...
    def list_checkpoints(self) -> APIFuture[CheckpointsListResponse]: ...  # noqa: D102
    def delete_checkpoint(self, which: str) -> APIFuture[DeleteCheckpointResponse]: ...  # noqa: D102

    def source(self, path: str) -> "Source": ...  # noqa: D102
    def current_source(  # noqa: D102
        self, name: str | None, inference_base_url: str | None
    ) -> "Source": ...

    def unload(self) -> APIFuture[UnloadModelResponse]: ...  # noqa: D102
    def kill_session(self, save_checkpoint: bool) -> APIFuture[KillSessionResponse]: ...  # noqa: D102

    def add_inference_endpoint(  # noqa: D102
        self, host: str, port: int, world_size: int
    ) -> APIFuture[InferenceEndpointResponse]: ...
    def sync_inference_weights(  # noqa: D102
        self, body: Mapping[str, Any]
    ) -> APIFuture[SyncWeightsResponse]: ...
    def list_inference_endpoints(self) -> APIFuture[ListInferenceEndpointsResponse]: ...  # noqa: D102
    def remove_inference_endpoint(  # noqa: D102
        self, host: str, port: int
    ) -> APIFuture[InferenceEndpointResponse]: ...
