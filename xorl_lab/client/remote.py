"""A model that a training server holds: the calls of a training client, over the xorl protocol."""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Any

from xorl_lab.checkpoints.names import check_name
from xorl_lab.client.transport import PREFIX, Sequence, Transport
from xorl_lab.errors import ConfigError, DataError
from xorl_lab.futures import APIFuture
from xorl_lab.types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    LossFnOutput,
    OptimStepResponse,
    SaveWeightsResponse,
    TensorData,
)
from xorl_lab.types.checkpoints import SaveWeightsForSamplerResponse

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_XORL_SUFFIXES = (":mean", ":min", ":max", ":sum")


class RemoteSession:
    """One trained model on a server.

    Args:
        transport: the server.
        model_id: its name there.
        base_model: name of the base model, which also names its tokenizer.
    """

    def __init__(self, transport: Transport, model_id: str, base_model: str) -> None:
        self.transport = transport
        self.model_id = model_id
        self.base_model = base_model
        self._order = Sequence()
        self._tokenizer: PreTrainedTokenizerBase | None = None

    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The base model's tokenizer, from this machine."""
        if self._tokenizer is None:
            from xorl_lab.engine.models import tokenizer  # noqa: PLC0415 (brings torch with it)

            self._tokenizer = tokenizer(self.base_model)
        return self._tokenizer

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
        return self._submit(
            "optim_step",
            {"adam_params": adam.to_dict()},
            lambda a: OptimStepResponse(metrics_of(a.get("metrics")), dict(a.get("info") or {})),
        )

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

    def load(self, path: str, *, with_optimizer: bool) -> APIFuture[dict[str, Any]]:
        """Queue the loading of a checkpoint."""
        body = {"path": path, "optimizer": with_optimizer}
        return self._submit("load_weights", body, lambda _: {})

    def unload(self) -> APIFuture[dict[str, Any]]:
        """Queue the end of the model on the server."""
        return self._submit("unload_model", {}, dict)

    def call(self, path: str, body: Mapping[str, Any], *, root: bool = False) -> dict[str, Any]:
        """A request that is answered at once."""
        answer = self.transport.post(path if root else f"{PREFIX}/{path}", body)
        if not isinstance(answer, dict):
            raise DataError(f"{path} was answered with {answer!r:.80}: an object was expected")
        return answer

    def _submit(self, path: str, body: Mapping[str, Any], parse: Any) -> APIFuture[Any]:  # noqa: ANN401
        return self._order.run(
            lambda number: self.transport.submit(
                path, {"model_id": self.model_id, "seq_id": number, **body}, parse
            )
        )


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
