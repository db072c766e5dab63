"""Answers of a training server, from JSON to the types of the client API."""

import dataclasses
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any, TypeVar, cast

from xorl_lab.types import ForwardBackwardOutput, LossFnOutput, TensorData
from xorl_lab.types.checkpoints import (
    Checkpoint,
    CheckpointsListResponse,
    InferenceEndpoint,
    InferenceEndpointResponse,
    ListInferenceEndpointsResponse,
    TrainingRun,
    TrainingRunsResponse,
)

_XORL_SUFFIXES = (":mean", ":min", ":max", ":sum")
T = TypeVar("T")


def made(make: Callable[..., T], answer: Mapping[str, Any]) -> T:
    """Call a dataclass with those fields of an answer that it has, anything else with the whole."""
    if not dataclasses.is_dataclass(make):
        return cast("Callable[[Mapping[str, Any]], T]", make)(answer)
    known = {f.name for f in dataclasses.fields(cast("Any", make))}
    return cast("Callable[..., T]", make)(
        **{name: value for name, value in answer.items() if name in known}
    )


def checkpoints_response(answer: Mapping[str, Any]) -> CheckpointsListResponse:
    """``list_checkpoints``."""
    return CheckpointsListResponse([made(Checkpoint, c) for c in answer.get("checkpoints") or ()])


def endpoint_response(answer: Mapping[str, Any]) -> InferenceEndpointResponse:
    """``add_inference_endpoint`` and ``remove_inference_endpoint``."""
    endpoint = answer.get("endpoint")
    return InferenceEndpointResponse(
        bool(answer.get("success")),
        str(answer.get("message", "")),
        None if endpoint is None else made(InferenceEndpoint, endpoint),
    )


def endpoints_response(answer: Mapping[str, Any]) -> ListInferenceEndpointsResponse:
    """``list_inference_endpoints``."""
    endpoints = [made(InferenceEndpoint, e) for e in answer.get("endpoints") or ()]
    return ListInferenceEndpointsResponse(endpoints, int(answer.get("count", len(endpoints))))


def runs_response(answer: Mapping[str, Any]) -> TrainingRunsResponse:
    """``training_runs``."""
    runs: list[TrainingRun] = []
    for run in answer.get("training_runs") or ():
        nested = {
            key: None if run.get(key) is None else made(Checkpoint, run[key])
            for key in ("last_checkpoint", "last_sampler_checkpoint")
        }
        runs.append(made(TrainingRun, {**run, **nested}))
    return TrainingRunsResponse(runs)


def forward_output(answer: Mapping[str, Any]) -> ForwardBackwardOutput:
    """The answer to ``forward`` and ``forward_backward`` from its JSON."""
    outputs = [_loss_output(output) for output in answer.get("loss_fn_outputs") or ()]
    return ForwardBackwardOutput(
        outputs,
        metrics_of(answer.get("metrics")),
        str(answer.get("loss_fn_output_type") or ""),
        dict(answer.get("info") or {}),
    )


def metrics_of(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Metrics by the names of the seeds; null, which stands for NaN, becomes NaN.

    >>> metrics_of({"is_ratio_mean:mean": 1.0, "loss:mean": None})
    {'ratio_mean': 1.0, 'loss:mean': nan}
    """
    return {
        _plain(name): float("nan") if value is None else float(value)
        for name, value in (metrics or {}).items()
        if value is None or isinstance(value, int | float)
    }


def _plain(name: str) -> str:
    """A live xorl server reports ``is_ratio_mean:mean`` for ``ratio_mean``."""
    if not name.startswith("is_"):
        return name
    stem = name.removeprefix("is_")
    return next((stem.removesuffix(s) for s in _XORL_SUFFIXES if stem.endswith(s)), stem)


def _loss_output(output: Mapping[str, Any]) -> LossFnOutput:
    tensors = {
        key: TensorData.from_dict({**value, "data": _numbers(value["data"])})
        for key, value in output.items()
        if isinstance(value, Mapping) and "data" in value
    }
    empty = TensorData([], "float32", [0])
    loss = output.get("loss")
    return LossFnOutput(
        float("nan") if loss is None else float(loss),
        tensors.pop("logprobs", empty),
        tensors.pop("elementwise_loss", empty),
        tensors,
    )


def _numbers(values: SequenceOf[float | None]) -> list[float]:
    return [float("nan") if v is None else v for v in values]
