"""What is known of saved weights, of trained models and of the servers that sample from them."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One saved checkpoint."""

    checkpoint_id: str
    """``weights/NAME`` or ``sampler_weights/NAME``."""
    checkpoint_type: str
    """``training`` (with optimizer state) or ``sampler`` (weights only)."""
    time: str
    """When it was saved, ISO 8601 in UTC."""
    path: str
    """URI, ``xorl://MODEL/weights/NAME``."""
    size_bytes: int | None = None
    """Bytes on disk."""
    expires_at: str | None = None
    """When it is going to be deleted, ISO 8601 in UTC; None = never."""


@dataclass(frozen=True, slots=True)
class CheckpointsListResponse:
    """Answer to ``list_checkpoints``."""

    checkpoints: list[Checkpoint] = field(default_factory=list)
    """Oldest first."""


@dataclass(frozen=True, slots=True)
class DeleteCheckpointResponse:
    """Answer to ``delete_checkpoint``."""

    success: bool
    """True if it was there and is gone."""
    deleted_path: str | None = None
    """URI of what was deleted."""
    error: str | None = None
    """Why nothing was deleted."""


@dataclass(frozen=True, slots=True)
class WeightsInfoResponse:
    """What is needed to continue from a checkpoint."""

    base_model: str
    """Name of the base model."""
    is_lora: bool = True
    """True for an adapter, False for full weights."""
    lora_rank: int | None = None
    """Rank of the adapter."""


@dataclass(frozen=True, slots=True)
class SaveWeightsForSamplerResponse:
    """Answer to ``save_weights_for_sampler``."""

    path: str
    """URI, ``xorl://MODEL/sampler_weights/NAME``."""
    model: str = ""
    """The model id."""
    size: int | None = None
    """Bytes of the weights on disk."""
    model_path: str | None = None
    """``sampler_weights/NAME``."""


@dataclass(frozen=True, slots=True)
class UnloadModelResponse:
    """Answer to ``unload``."""

    model_id: str
    """The model that is no longer held."""


@dataclass(frozen=True, slots=True)
class KillSessionResponse:
    """Answer to ``kill_session``."""

    success: bool
    """True if the model is no longer held."""
    message: str
    """What was done."""
    checkpoint_path: str | None = None
    """Where it was saved before, if that was asked for."""


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """A model that is held, or of which checkpoints are."""

    training_run_id: str
    """The model id."""
    base_model: str
    """Name of the base model."""
    model_owner: str
    """Who made it; ``local`` here."""
    is_lora: bool
    """True for an adapter, False for full weights."""
    last_request_time: str
    """When it was last used, ISO 8601 in UTC."""
    corrupted: bool = False
    """True if it can no longer be used."""
    lora_rank: int | None = None
    """Rank of the adapter."""
    last_checkpoint: Checkpoint | None = None
    """The newest checkpoint to resume from."""
    last_sampler_checkpoint: Checkpoint | None = None
    """The newest checkpoint to sample from."""
    user_metadata: dict[str, str] | None = None
    """Whatever its user attached."""


@dataclass(frozen=True, slots=True)
class TrainingRunsResponse:
    """Answer to ``list_training_runs``."""

    training_runs: list[TrainingRun] = field(default_factory=list)
    """In order of model id."""


@dataclass(frozen=True, slots=True)
class InferenceEndpoint:
    """A sampler that a training server sends weights to."""

    host: str
    """Host name or address."""
    port: int
    """Port of its HTTP interface."""
    worker_port: int
    """Port of its workers; the same one here."""
    world_size: int = 1
    """Number of its processes."""
    healthy: bool = True
    """True if it answered when last asked."""
    server_info: dict[str, Any] | None = None
    """What it says of itself."""


@dataclass(frozen=True, slots=True)
class InferenceEndpointResponse:
    """Answer to ``add_inference_endpoint`` and ``remove_inference_endpoint``."""

    success: bool
    """True if it was done."""
    message: str
    """What was done, or why not."""
    endpoint: InferenceEndpoint | None = None
    """The endpoint that was added."""


@dataclass(frozen=True, slots=True)
class ListInferenceEndpointsResponse:
    """Answer to ``list_inference_endpoints``."""

    endpoints: list[InferenceEndpoint] = field(default_factory=list)
    """In the order in which they were added."""
    count: int = 0
    """How many there are."""


@dataclass(frozen=True, slots=True)
class SyncWeightsResponse:
    """Answer to ``sync_inference_weights``."""

    success: bool
    """True if every endpoint samples from the new weights."""
    message: str
    """What was done, or why not."""
    transfer_time: float = 0.0
    """Seconds."""
    total_bytes: int = 0
    """Bytes that were sent."""
    num_parameters: int = 0
    """Tensors that were sent."""
    num_buckets: int = 0
    """Messages in which they were sent."""
    endpoints_synced: list[dict[str, Any]] = field(default_factory=list)
    """Per endpoint: host, port, success, message."""
