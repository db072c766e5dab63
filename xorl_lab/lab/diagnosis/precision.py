"""The same weights in another precision: computed in it, or with its rounding drawn at random."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from xorl_lab.engine.lora import LoraLinear

BITS = {torch.bfloat16: 16, torch.float16: 13}
"""Bits of a float32 that the format drops (of its mantissa, in the normal range)."""


def cast(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A copy that computes in another precision; tables of angles stay as exact as they are."""
    return _copied(model, lambda weight: weight.to(dtype))


def noisy(
    model: PreTrainedModel, dtype: torch.dtype, generator: torch.Generator
) -> PreTrainedModel:
    """A copy that rounds weights and activations to a format, up or down at random, unbiased.

    Two evaluations differ by about as much as those of two kernels of that precision.

    Args:
        model: float32.
        dtype: bfloat16 or float16.
        generator: on the CPU; draws the roundings.
    """
    result = _copied(model, lambda weight: weight.to(dtype).to(weight.dtype))

    def rounded(value: Any) -> Any:  # noqa: ANN401 (whatever modules hand on)
        if isinstance(value, tuple):
            return tuple(rounded(part) for part in value)
        if isinstance(value, torch.Tensor) and value.dtype == torch.float32:
            return _stochastic(value, BITS[dtype], generator)
        return value

    for module in result.modules():
        if isinstance(module, LoraLinear) or not any(True for _ in module.children()):
            module.register_forward_pre_hook(lambda _, inputs: rounded(inputs))
            module.register_forward_hook(lambda _, __, output: rounded(output))
    return result


def _copied(
    model: PreTrainedModel, change: Callable[[torch.Tensor], torch.Tensor]
) -> PreTrainedModel:
    """A module tree with changed weights; tied ones stay tied."""
    memo: dict[int, Any] = {
        id(p): torch.nn.Parameter(change(p.detach()), requires_grad=False)
        for p in model.parameters()
    }
    memo |= {id(b): b for b in model.buffers()}
    return copy.deepcopy(model, memo)


def _stochastic(value: torch.Tensor, bits: int, generator: torch.Generator) -> torch.Tensor:
    """Round to a multiple of 2**bits units in the last place, up with the chance of the rest."""
    below = torch.randint(0, 1 << bits, value.shape, generator=generator, dtype=torch.int32)
    raised = value.contiguous().view(torch.int32) + below.to(value.device)
    return (raised & -(1 << bits)).view(torch.float32)
