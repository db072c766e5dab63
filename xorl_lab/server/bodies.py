"""The bodies of requests.

What a model is asked to compute (``forward_backward_input``, ``adam_params``) is checked only when
its turn comes: whoever sent it waits at ``retrieve_future`` and must learn there what is wrong.
"""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SkipValidation


def _encodable(text: str) -> str:
    """JSON can write half a character (a lone surrogate), which no answer could repeat."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("the text has half a character in it") from None
    return text


Text = Annotated[str, AfterValidator(_encodable)]
"""A string that can be written as UTF-8."""
TokenId = Annotated[int, Field(ge=-(2**31), lt=2**31)]
"""An id that fits the arrays; whether it is in the vocabulary is checked with the model."""
Number = Annotated[int, Field(ge=-(2**63), lt=2**63)] | float
SeqId = Annotated[int, Field(ge=0, lt=2**53)] | None


class Body(BaseModel):
    """Any request body: types are taken as they are sent, further keys are left alone."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())


class ForModel(Body):
    """A request about one model."""

    model_id: Text = "default"


class LoraConfigIn(Body):
    """Shape of an adapter; only what is given is compared with a model that is there already."""

    rank: int = 32
    alpha: float | None = None
    dropout: float = 0.0
    target_modules: list[Text] | None = None
    seed: int | None = None
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = False


class CreateModelIn(ForModel):
    """``create_model``."""

    base_model: Text
    lora_config: LoraConfigIn | None = None


class TensorIn(Body):
    """Numbers of a loss input."""

    data: list[Number]
    dtype: Text = "float32"
    shape: list[int] | None = None


class ModelInputIn(Body):
    """Token ids of a datum."""

    input_ids: list[TokenId]


class DatumIn(Body):
    """One sequence to train on."""

    model_input: ModelInputIn
    loss_fn_inputs: dict[Text, TensorIn | list[Number]]
    routed_experts: list[list[list[int]]] | None = None


class ForwardIn(Body):
    """Data and loss of ``forward`` and ``forward_backward``."""

    data: list[DatumIn]
    loss_fn: Text = "cross_entropy"
    loss_fn_params: dict[Text, Any] | None = None
    loss_fn_config: dict[Text, Any] | None = None
    routed_experts: list[list[list[list[int]]] | None] | None = None


class Sequenced(ForModel):
    """A request that takes its turn among those of its model."""

    seq_id: SeqId = None


class ForwardBody(Sequenced):
    """``forward``."""

    forward_input: SkipValidation[ForwardIn]


class ForwardBackwardBody(Sequenced):
    """``forward_backward``."""

    forward_backward_input: SkipValidation[ForwardIn]


class AdamIn(Body):
    """Settings of one optimizer step."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 5.0


class OptimStepBody(Sequenced):
    """``optim_step``."""

    adam_params: SkipValidation[AdamIn]


class SaveWeightsBody(Sequenced):
    """``save_weights``."""

    path: Text | None = None
    ttl_seconds: float | None = None
    overwrite: bool = False


class SaveForSamplerBody(Sequenced):
    """``save_weights_for_sampler``."""

    name: Text
    ttl_seconds: float | None = None


class LoadWeightsBody(Sequenced):
    """``load_weights``."""

    path: Text
    optimizer: bool = False
    load_optimizer: bool = False


class RetrieveFutureIn(Body):
    """``retrieve_future``."""

    request_id: Text


class CheckpointIn(ForModel):
    """``delete_checkpoint``."""

    checkpoint_id: Text


class WeightsInfoIn(Body):
    """``weights_info``."""

    xorl_path: Text


class KillSessionIn(ForModel):
    """``kill_session``."""

    save_checkpoint: bool = True


class SamplingSessionIn(Body):
    """``create_sampling_session``."""

    model_path: Text
    bind: bool = False
    """Answer with a name that goes on meaning these weights when the checkpoint is replaced."""


class EndpointIn(Body):
    """``remove_inference_endpoint``."""

    host: Text
    port: Annotated[int, Field(ge=1, le=65535)]


class AddEndpointIn(EndpointIn):
    """``add_inference_endpoint``."""

    worker_port: int | None = None
    world_size: Annotated[int, Field(ge=1)] = 1
    sync_weights: bool = False


class SyncIn(Body):
    """``sync_inference_weights``."""

    model_id: Text | None = None


class SessionIn(Body):
    """``session_heartbeat`` and ``session_info``."""

    session_id: Text | None = None


class AbortIn(Body):
    """``abort_request``."""

    rid: Text = ""
    abort_all: bool = False
