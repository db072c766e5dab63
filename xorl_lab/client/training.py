"""The training client: one trained model, driven call by call."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from xorl_lab.client.arguments import one_of_two, shifted
from xorl_lab.client.async_names import with_async
from xorl_lab.client.sampling import SamplingClient
from xorl_lab.client.session import Session
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
    import torch
    from transformers import PreTrainedTokenizerBase

    from xorl_lab.samplers.sync.report import SyncReport

    CustomLoss = Callable[[list[Datum], list[torch.Tensor]], tuple[torch.Tensor, dict[str, float]]]


@with_async(
    "forward",
    "forward_base",
    "forward_backward",
    "forward_backward_custom",
    "optim_step",
    "save_state",
    "load_state",
    "load_state_with_optimizer",
    "save_weights_for_sampler",
    "create_sampling_client!",
    "save_weights_and_get_sampling_client!",
    "list_checkpoints",
    "delete_checkpoint",
    "delete_checkpoint_from_xorl_path",
    "unload",
    "kill_session",
    "add_inference_endpoint",
    "sync_inference_weights",
    "list_inference_endpoints",
    "remove_inference_endpoint",
    "health_check!",
)
class TrainingClient:
    """Trains one model.  Made by :class:`~xorl_lab.client.service.ServiceClient`.

    Every call is checked and submitted at once and returns a future; the calls of a client take
    effect in the order in which they were made.  Each method ``x`` has a twin ``x_async``.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def base_model(self) -> str:
        """Name of the base model."""
        return self._session.base_model

    @property
    def model_id(self) -> str:
        """Name of the trained model."""
        return self._session.model_id

    @property
    def task_id(self) -> str:
        """Another name of ``model_id`` (pytrio's)."""
        return self._session.model_id

    @property
    def lora(self) -> LoraRunSpec | None:
        """Shape of the adapter; None if the full weights are trained."""
        return self._session.spec

    @property
    def version(self) -> int:
        """Number of the current weights: +1 at each optimizer step and each load."""
        return self._session.version

    @property
    def device(self) -> str:
        """``cpu``, ``cuda`` or ``mps``; ``remote`` if a server trains."""
        return self._session.device

    @property
    def dtype(self) -> str:
        """In which the base model computes; ``remote`` if a server trains."""
        return self._session.dtype

    @property
    def context_length(self) -> int:
        """Longest sequence in tokens, prompt and completion together."""
        return self._session.context_length

    @property
    def vocab_size(self) -> int:
        """V; valid token ids are 0 … V - 1."""
        return self._session.vocab_size

    def get_tokenizer(self) -> "PreTrainedTokenizerBase":
        """The base model's tokenizer."""
        return self._session.tokenizer()

    def forward(
        self,
        data: Sequence[Datum],
        loss_fn: str = "cross_entropy",
        loss_fn_params: Mapping[str, Any] | None = None,
        auto_shift: bool = False,
        *,
        loss_fn_config: Mapping[str, Any] | None = None,
    ) -> APIFuture[ForwardBackwardOutput]:
        """Evaluate a loss without accumulating a gradient.

        Args:
            data: at least one datum.
            loss_fn: name of the loss; see :func:`xorl_lab.losses.names`.
            loss_fn_params: its parameters, and ``logprob_temperature``, ``return_terms``.
            auto_shift: ``target_tokens`` are the tokens themselves: the last input and the first
                target of each datum are dropped.
            loss_fn_config: another name of ``loss_fn_params`` (pytrio's).

        Returns:
            Future of per-datum logprobs and loss terms, and metrics over all trained tokens.

        Raises:
            DataError: a datum cannot be used.
            ConfigError: the loss or a parameter is unknown or out of range.
        """
        params = one_of_two(loss_fn_params, loss_fn_config)
        return self._session.forward(shifted(data, auto_shift), loss_fn, params)

    def forward_base(
        self, data: Sequence[Datum], loss_fn_params: Mapping[str, Any] | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        """The base model's logprobs of the same targets: adapters off, or the untrained weights.

        Args:
            data: at least one datum; its loss inputs decide only what is masked.
            loss_fn_params: ``logprob_temperature``, ``return_terms``.

        Returns:
            As :meth:`forward` with ``cross_entropy``.

        Raises:
            ConfigError: a server trains; it has no such call: train a second, untouched adapter.
        """
        return self._session.forward_base(data, loss_fn_params)

    def forward_backward(
        self,
        data: Sequence[Datum],
        loss_fn: str = "cross_entropy",
        loss_fn_params: Mapping[str, Any] | None = None,
        auto_shift: bool = False,
        *,
        loss_fn_config: Mapping[str, Any] | None = None,
    ) -> APIFuture[ForwardBackwardOutput]:
        """Evaluate a loss and add the gradient of its sum to what is accumulated.

        A call that fails or is cancelled leaves what was accumulated before as it was.

        Args:
            data: at least one datum.
            loss_fn: name of the loss; see :func:`xorl_lab.losses.names`.
            loss_fn_params: its parameters, and ``logprob_temperature``, ``return_terms``.
            auto_shift: as for :meth:`forward`.
            loss_fn_config: another name of ``loss_fn_params`` (pytrio's).

        Returns:
            Future of per-datum logprobs and loss terms, and metrics over all trained tokens.

        Raises:
            DataError: a datum cannot be used.
            ConfigError: the loss or a parameter is unknown or out of range.
        """
        params = one_of_two(loss_fn_params, loss_fn_config)
        return self._session.forward_backward(shifted(data, auto_shift), loss_fn, params)

    def forward_backward_custom(
        self, data: Sequence[Datum], loss_fn: "CustomLoss"
    ) -> APIFuture[ForwardBackwardOutput]:
        """Evaluate a loss of your own and add its gradient, undivided, to what is accumulated.

        Args:
            data: at least one datum.
            loss_fn: called with the data and one (T,) tensor of logprobs per datum (nats, with
                gradient, 0.0 where nothing is trained); returns a scalar tensor and a dict of
                metrics.  It runs on the worker thread; what it raises fails this call alone.

        Returns:
            Future of the logprobs and of the metrics that the loss returned.

        Raises:
            DataError: a datum cannot be used.
            ConfigError: a server trains; a function cannot be sent to it.
        """
        return self._session.forward_backward_custom(data, loss_fn)

    def optim_step(
        self, adam_params: AdamParams | Mapping[str, Any]
    ) -> APIFuture[OptimStepResponse]:
        """Divide the accumulated gradient by its trained tokens, apply one AdamW update, clear it.

        Args:
            adam_params: settings of this step.

        Returns:
            Future of ``grad_norm`` (before clipping), ``learning_rate``, ``step`` and
            ``valid_tokens``.  It fails, and changes no weights, if nothing was accumulated, if the
            gradient is not finite, or if a forward_backward submitted before it failed unseen.

        Raises:
            ConfigError: a setting is out of range.
        """
        return self._session.optim_step(AdamParams.of(adam_params))

    def save_state(
        self, name: str | None = None, ttl_seconds: float | None = None, overwrite: bool = False
    ) -> APIFuture[SaveWeightsResponse]:
        """Save weights, optimizer state, random state and step count.

        Args:
            name: name of the checkpoint; None means ``step-N``.
            ttl_seconds: how long it is to be kept; None = for ever.
            overwrite: replace a checkpoint of this name.

        Returns:
            Future of the checkpoint's path.  It fails with ``checkpoint.exists`` if the name is
            taken.

        Raises:
            CheckpointError: ``validation.invalid_checkpoint_name``.
        """
        return self._session.save_state(name, ttl_seconds, overwrite)

    def load_state(self, path: str) -> APIFuture[dict[str, Any]]:
        """Load a checkpoint's weights; the optimizer starts afresh.

        In this process only before the first call that trains, saves or loads.

        Args:
            path: what save_state returned as its path.

        Returns:
            Future of an empty dict.

        Raises:
            CheckpointError: ``validation.already_initialized``;
                ``validation.checkpoint_config_mismatch`` with all differences; the checkpoint is
                missing or damaged.
        """
        return self._session.load_state(path, with_optimizer=False)

    def load_state_with_optimizer(self, path: str) -> APIFuture[dict[str, Any]]:
        """Load a checkpoint's weights and optimizer state; otherwise as :meth:`load_state`."""
        return self._session.load_state(path, with_optimizer=True)

    def save_weights_for_sampler(
        self, name: str, ttl_seconds: float | None = None
    ) -> APIFuture[SaveWeightsForSamplerResponse]:
        """Save the weights alone, to sample from: a PEFT or a Hugging Face folder.

        Args:
            name: name of the checkpoint; one that has it already is replaced.
            ttl_seconds: how long it is to be kept; None = for ever.

        Returns:
            Future of path, model id and size in bytes.

        Raises:
            CheckpointError: ``validation.invalid_checkpoint_name``.
        """
        return self._session.save_weights_for_sampler(name, ttl_seconds)

    def create_sampling_client(self, model_path: str) -> SamplingClient:
        """A sampling client on saved weights.

        Args:
            model_path: what save_weights_for_sampler, or save_state, returned as its path.

        Raises:
            CheckpointError: the checkpoint is missing, damaged, or does not fit its base model.
        """
        return SamplingClient.of(self._session.source(model_path))

    def save_weights_and_get_sampling_client(
        self, name: str | None = None, inference_base_url: str | None = None
    ) -> SamplingClient:
        """A sampling client on the weights as they are after all calls made so far.

        Waits for these calls.  Later steps do not change what the client samples from.

        Args:
            name: save the weights under this name too; None keeps them in memory (a server: under
                a name of its own, for six hours).
            inference_base_url: the sampler behind the training server, if it is not that itself.

        Raises:
            ConfigError: ``inference_base_url`` was given, but this process trains.
        """
        return SamplingClient.of(self._session.current_source(name, inference_base_url))

    def take_syncs(self) -> "list[SyncReport]":
        """What became of sending weights to a sampler elsewhere, since this was last asked."""
        syncs = getattr(self._session, "syncs", None)
        return [syncs.popleft() for _ in range(len(syncs))] if syncs else []

    def list_checkpoints(self) -> APIFuture[CheckpointsListResponse]:
        """The checkpoints of this model, oldest first."""
        return self._session.list_checkpoints()

    def delete_checkpoint(self, checkpoint_id: str) -> APIFuture[DeleteCheckpointResponse]:
        """Delete a checkpoint of this model.

        Args:
            checkpoint_id: ``weights/NAME`` or ``sampler_weights/NAME``.
        """
        return self._session.delete_checkpoint(checkpoint_id)

    def delete_checkpoint_from_xorl_path(self, path: str) -> APIFuture[DeleteCheckpointResponse]:
        """Delete a checkpoint by its URI."""
        return self._session.delete_checkpoint(path)

    def unload(self) -> APIFuture[UnloadModelResponse]:
        """Let go of the model behind all calls made so far; the client cannot be used after it."""
        return self._session.unload()

    def kill_session(self, save_checkpoint: bool = True) -> APIFuture[KillSessionResponse]:
        """Let go of the model, having saved it first if asked to."""
        return self._session.kill_session(save_checkpoint)

    def add_inference_endpoint(
        self, host: str, port: int, world_size: int = 1
    ) -> APIFuture[InferenceEndpointResponse]:
        """Register a sampler to which the training server sends weights.

        Raises:
            ConfigError: this process trains; its own sampler needs no registration.
        """
        return self._session.add_inference_endpoint(host, port, world_size)

    def sync_inference_weights(
        self,
        master_address: str | None = None,
        master_port: int = 29600,
        group_name: str = "weight_sync_group",
        buffer_size_mb: int = 1024,
    ) -> APIFuture[SyncWeightsResponse]:
        """Have the training server send the present weights to all registered samplers.

        Args:
            master_address: rendezvous address of a multi-process sampler; not used by ours.
            master_port: its port.
            group_name: its process group.
            buffer_size_mb: size of one message.

        Raises:
            ConfigError: this process trains; its own sampler has the weights already.
        """
        body = {
            "master_address": master_address,
            "master_port": master_port,
            "group_name": group_name,
            "buffer_size_mb": buffer_size_mb,
        }
        return self._session.sync_inference_weights(body)

    def list_inference_endpoints(self) -> APIFuture[ListInferenceEndpointsResponse]:
        """The registered samplers."""
        return self._session.list_inference_endpoints()

    def remove_inference_endpoint(
        self, host: str, port: int
    ) -> APIFuture[InferenceEndpointResponse]:
        """Forget a registered sampler."""
        return self._session.remove_inference_endpoint(host, port)

    def health_check(self) -> dict[str, Any]:
        """What is known of the state of the trainer; ``status`` is ``healthy`` if it works."""
        return self._session.health()

    def __repr__(self) -> str:
        spec = self.lora
        shape = "full weights" if spec is None else f"LoRA rank {spec.rank}"
        version = f"version {self.version}"
        return f"TrainingClient({self.base_model}, {self.model_id!r}, {shape}, {version})"
