"""The training client: one trained model, driven call by call."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from xorl_lab.client.local import LocalSession
from xorl_lab.client.sampling import SamplingClient
from xorl_lab.futures import APIFuture
from xorl_lab.types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    LoraRunSpec,
    OptimStepResponse,
    SaveWeightsResponse,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TrainingClient:
    """Trains one model.  Made by :class:`~xorl_lab.client.service.ServiceClient`.

    Every call is checked and submitted at once and returns a future; the calls of a client take
    effect in the order in which they were made.
    """

    def __init__(self, session: LocalSession) -> None:
        self._session = session

    @property
    def base_model(self) -> str:
        """Name of the base model."""
        return self._session.engine.loaded.name

    @property
    def model_id(self) -> str:
        """Name of the trained model."""
        return self._session.model_id

    @property
    def lora(self) -> LoraRunSpec | None:
        """Shape of the adapter; None if the full weights are trained."""
        return self._session.spec

    @property
    def version(self) -> int:
        """Number of the current weights: +1 at each optimizer step and each load."""
        return self._session.trained.version

    @property
    def device(self) -> str:
        """``cpu``, ``cuda`` or ``mps``."""
        return self._session.engine.loaded.device

    @property
    def dtype(self) -> str:
        """``float32`` or ``bfloat16``: in which the base model computes."""
        return self._session.engine.loaded.dtype

    @property
    def context_length(self) -> int:
        """Longest sequence in tokens, prompt and completion together."""
        return self._session.engine.loaded.context_length

    @property
    def vocab_size(self) -> int:
        """V; valid token ids are 0 … V - 1."""
        return self._session.engine.loaded.vocab_size

    def get_tokenizer(self) -> "PreTrainedTokenizerBase":
        """The base model's tokenizer."""
        return self._session.engine.loaded.tokenizer

    def forward(
        self,
        data: Sequence[Datum],
        loss_fn: str = "cross_entropy",
        loss_fn_params: Mapping[str, Any] | None = None,
    ) -> APIFuture[ForwardBackwardOutput]:
        """Evaluate a loss without accumulating a gradient.

        Args:
            data: at least one datum.
            loss_fn: name of the loss; see :func:`xorl_lab.losses.names`.
            loss_fn_params: its parameters, and ``logprob_temperature``, ``return_terms``.

        Returns:
            Future of per-datum logprobs and loss terms, and metrics over all trained tokens.

        Raises:
            DataError: a datum cannot be used.
            ConfigError: the loss or a parameter is unknown or out of range.
        """
        return self._session.forward(data, loss_fn, loss_fn_params)

    def forward_base(
        self, data: Sequence[Datum], loss_fn_params: Mapping[str, Any] | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        """The base model's logprobs of the same targets: adapters off, or the untrained weights.

        Args:
            data: at least one datum; its loss inputs decide only what is masked.
            loss_fn_params: ``logprob_temperature``, ``return_terms``.

        Returns:
            As :meth:`forward` with ``cross_entropy``.
        """
        return self._session.forward(data, "cross_entropy", loss_fn_params, adapters_off=True)

    def forward_backward(
        self,
        data: Sequence[Datum],
        loss_fn: str = "cross_entropy",
        loss_fn_params: Mapping[str, Any] | None = None,
    ) -> APIFuture[ForwardBackwardOutput]:
        """Evaluate a loss and add the gradient of its sum to what is accumulated.

        A call that fails or is cancelled leaves what was accumulated before as it was.

        Args:
            data: at least one datum.
            loss_fn: name of the loss; see :func:`xorl_lab.losses.names`.
            loss_fn_params: its parameters, and ``logprob_temperature``, ``return_terms``.

        Returns:
            Future of per-datum logprobs and loss terms, and metrics over all trained tokens.

        Raises:
            DataError: a datum cannot be used.
            ConfigError: the loss or a parameter is unknown or out of range.
        """
        return self._session.forward_backward(data, loss_fn, loss_fn_params)

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
        self, name: str | None = None, ttl_seconds: int | None = None, overwrite: bool = False
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

    def save_weights_and_get_sampling_client(self) -> SamplingClient:
        """A sampling client on the weights as they are after all calls made so far.

        Waits for these calls.  Later steps do not change what the client samples from.
        """
        version = self._session.snapshot().result()
        return SamplingClient(self._session.engine, self._session.sampler, version)

    def __repr__(self) -> str:
        spec = self.lora
        shape = "full weights" if spec is None else f"LoRA rank {spec.rank}"
        return (
            f"TrainingClient({self.base_model}, {self.model_id!r}, {shape}, version {self.version})"
        )
