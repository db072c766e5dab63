"""From the bodies of requests to what the client API takes, and from its answers to JSON."""

import json
import math
import secrets
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from xorl_lab.client.service import DEFAULT_ALPHA
from xorl_lab.errors import CheckpointError, ConfigError, DataError, LabError
from xorl_lab.server.bodies import ForwardIn, LoraConfigIn, Number, TensorIn
from xorl_lab.types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    LoraRunSpec,
    LossFnOutput,
    ModelInput,
    OptimStepResponse,
    TensorData,
)
from xorl_lab.types.data import INTEGER_INPUTS

B = TypeVar("B", bound=BaseModel)


def read(kind: type[B], value: object, where: str) -> B:
    """Check a part of a body whose turn has come.

    Raises:
        DataError: it is not of the form; the message says where.
    """
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise DataError(f"{where} cannot be used: {explain(error.errors())}") from None


def explain(errors: Any) -> str:  # noqa: ANN401  (pydantic's and FastAPI's lists of errors)
    """The first few mistakes of a body, without the values that were sent."""
    parts = [f"{'.'.join(str(p) for p in e['loc'])}: {e['msg']}" for e in list(errors)[:3]]
    more = len(errors) - len(parts)
    return "; ".join(parts) + (f"; and {more} more" if more > 0 else "")


def data_of(body: ForwardIn) -> list[Datum]:
    """The datums of a request.

    Raises:
        DataError: a datum cannot be used; says which.
    """
    routed = body.routed_experts or [None] * len(body.data)
    if len(routed) != len(body.data):
        raise DataError(
            f"routed_experts has {len(routed)} entries but there are {len(body.data)} datums: "
            "pass one per datum"
        )
    data: list[Datum] = []
    for index, (datum, experts) in enumerate(zip(body.data, routed, strict=True)):
        try:
            inputs = {name: _tensor(name, value) for name, value in datum.loss_fn_inputs.items()}
        except (DataError, OverflowError) as error:
            raise DataError(f"data[{index}]: {error}") from None
        tokens = ModelInput(tuple(datum.model_input.input_ids))
        data.append(Datum(tokens, inputs, datum.routed_experts or experts))
    return data


def params_of(body: ForwardIn) -> dict[str, Any] | None:
    """The loss's parameters, under whichever name they were sent.

    Raises:
        ConfigError: both names were used.
    """
    if body.loss_fn_params and body.loss_fn_config:
        raise ConfigError(
            "loss_fn_params and loss_fn_config are two names of one setting: pass one of them"
        )
    return body.loss_fn_params or body.loss_fn_config


def adam_of(value: object) -> AdamParams:
    """Settings of an optimizer step.

    Raises:
        ConfigError: a name is unknown, or a value of the wrong type or out of range.
    """
    if not isinstance(value, Mapping):
        raise ConfigError(f"adam_params is a {type(value).__name__}: pass an object")
    return AdamParams.of({str(name): entry for name, entry in value.items()})


def spec_of(config: LoraConfigIn | None) -> LoraRunSpec:
    """Shape of an adapter, with this package's defaults.

    Raises:
        ConfigError: a setting is out of range.
    """
    config = config or LoraConfigIn()
    targets = config.target_modules
    return LoraRunSpec(
        rank=config.rank,
        alpha=DEFAULT_ALPHA if config.alpha is None else config.alpha,
        dropout=config.dropout,
        seed=secrets.randbits(31) if config.seed is None else config.seed,
        train_mlp=config.train_mlp,
        train_attn=config.train_attn,
        train_unembed=config.train_unembed,
        target_modules=None if targets is None else tuple(targets),
    )


def forward_json(output: ForwardBackwardOutput) -> dict[str, Any]:
    """``forward`` and ``forward_backward`` as the protocol has them."""
    return {
        "loss_fn_output_type": output.loss_fn_output_type,
        "loss_fn_outputs": [_loss_json(o) for o in output.loss_fn_outputs],
        "metrics": dict(output.metrics),
        "info": dict(output.info),
    }


def step_json(response: OptimStepResponse) -> dict[str, Any]:
    """``optim_step`` as the protocol has it."""
    return {"metrics": dict(response.metrics), "info": dict(response.info)}


def error_json(error: BaseException) -> dict[str, str]:
    """A failure as ``retrieve_future`` has it."""
    if isinstance(error, ValueError | CheckpointError) and isinstance(error, LabError):
        return {"error": str(error), "category": "user"}
    if isinstance(error, LabError):
        return {"error": str(error), "category": "server"}
    return {
        "error": f"internal error ({type(error).__name__}): the server's log has the details",
        "category": "unknown",
    }


def to_json(value: dict[str, Any]) -> bytes:
    """Encode an answer.  NaN and infinity, which JSON lacks, become null, and ``info`` says where.

    >>> to_json({"metrics": {"a": float("nan")}})
    b'{"metrics": {"a": null}, "info": {"warnings": ["not finite, sent as null: metrics.a"]}}'
    """
    try:
        return json.dumps(value, allow_nan=False).encode()
    except ValueError:
        odd: list[str] = []
        clean: dict[str, Any] = _finite(value, "", odd.append)
        shown = ", ".join(odd[:10]) + (f" and {len(odd) - 10} more" if len(odd) > 10 else "")
        info = clean.setdefault("info", {})
        info["warnings"] = [*info.get("warnings", []), f"not finite, sent as null: {shown}"]
        return json.dumps(clean, allow_nan=False).encode()


def _finite(value: Any, where: str, note: Callable[[str], object]) -> Any:  # noqa: ANN401
    if isinstance(value, float) and not math.isfinite(value):
        note(where)
        return None
    if isinstance(value, Mapping):
        prefix = f"{where}." if where else ""
        return {key: _finite(entry, f"{prefix}{key}", note) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry, f"{where}[{i}]", note) for i, entry in enumerate(value)]
    return value


def _tensor(name: str, value: TensorIn | list[Number]) -> TensorData:
    """Token ids stay integers whatever they are typed: xorl_client types ``labels`` float32."""
    tensor = TensorIn(data=value) if isinstance(value, list) else value
    whole = name in INTEGER_INPUTS and all(float(v).is_integer() for v in tensor.data)
    if whole:
        return TensorData([int(v) for v in tensor.data], "int64", tensor.shape)
    return TensorData([float(v) for v in tensor.data], "float32", tensor.shape)


def _loss_json(output: LossFnOutput) -> dict[str, Any]:
    return {
        name: value.to_dict() if isinstance(value, TensorData) else value
        for name, value in output.items()
    }
