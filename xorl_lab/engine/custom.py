"""What a loss of the caller's own is given, and what may come back from it."""

import math
from collections.abc import Mapping, Sequence
from numbers import Real

import torch

from xorl_lab.engine.batches import Batch
from xorl_lab.engine.selection import Selected
from xorl_lab.errors import DataError, EngineError
from xorl_lab.types import ForwardBackwardOutput, LossFnOutput, TensorData

NAME = "custom"
"""``loss_fn_output_type`` of a custom loss."""


def per_datum(batch: Batch, selected: Sequence[Selected]) -> list[torch.Tensor]:
    """Logprobs as a custom loss gets them.

    Args:
        batch: the data.
        selected: all its packed rows, evaluated.

    Returns:
        Per datum, in the order of the data, (T,) nats with gradient; 0.0 where nothing is trained.
    """
    result = [torch.zeros(length) for length in batch.lengths]
    for part in selected:
        for i, row in enumerate(part.rows):
            mine = part.where[0] == i
            empty = part.logprobs.new_zeros(batch.lengths[row.datum])
            result[row.datum] = empty.index_put((part.where[1][mine],), part.logprobs[mine])
    return result


def check_custom(answer: object) -> tuple[torch.Tensor, dict[str, float]]:
    """Make sure that a custom loss returned (scalar tensor, dict of numbers).

    Raises:
        DataError: it did not; says what came back.
        EngineError: the loss is not finite.
    """
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise DataError(
            f"the custom loss returned a {type(answer).__name__}: return (loss, metrics), a scalar "
            "tensor and a dict of numbers"
        )
    loss, metrics = answer
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise DataError(f"the custom loss is {shape}: return a tensor with one number")
    if not isinstance(metrics, Mapping):
        raise DataError(
            f"the metrics of the custom loss are a {type(metrics).__name__}: pass a dict"
        )
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        plain = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        if not isinstance(plain, Real):
            raise DataError(f"metric {name!r} of the custom loss is {value!r:.80}: pass a number")
        numbers[str(name)] = float(plain)
    if not math.isfinite(float(loss.detach())):
        raise EngineError(
            f"the custom loss is {float(loss.detach())}, so its gradient was not accumulated"
        )
    return loss.reshape(()), numbers


def custom_output(
    loss: float, logprobs: Sequence[torch.Tensor], metrics: Mapping[str, float], batch: Batch
) -> ForwardBackwardOutput:
    """The answer to a call with a custom loss.  Its loss belongs to the call, not to a datum."""
    nothing = TensorData([], "float32", [0])
    outputs = [
        LossFnOutput(math.nan, TensorData.from_torch(values), nothing) for values in logprobs
    ]
    own = {
        "loss:sum": loss,
        "valid_tokens": float(batch.valid_tokens),
        "rows_without_signal": float(batch.rows_without_signal),
    }
    return ForwardBackwardOutput(outputs, {**own, **metrics}, NAME)
