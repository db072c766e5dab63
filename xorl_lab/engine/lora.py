"""The adapted linear layer, y = x W' + b + s (x A') B', in three products without a copy between.

peft makes the layer and holds its weights; only its arithmetic is ours.  Autograd over the plain
formula writes and reads the (N, out) result three times; here the adapter's share is accumulated
into it, forward and backward.  W gets no gradient.
"""

from typing import Any, cast

import torch
from peft.tuners.lora import Linear as PeftLinear
from torch.autograd.function import once_differentiable

from xorl_lab.engine import products

ADAPTER = "default"
"""peft's name of the one adapter that each module tree has."""


class LoraLinear(PeftLinear):
    """peft's layer with one adapter and a frozen base layer.

    The adapter's weights are float32 at least and are rounded to the input's dtype at each use, so
    that the optimizer moves the exact values.
    """

    @property
    def pair(self) -> tuple[torch.nn.Linear, torch.nn.Linear]:
        """The layers A (r, in) and B (out, r)."""
        down, up = self.lora_A[ADAPTER], self.lora_B[ADAPTER]
        return cast("torch.nn.Linear", down), cast("torch.nn.Linear", up)

    def forward(self, x: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        """(…, in) -> (…, out)."""
        down, up = self.pair
        base = cast("torch.nn.Linear", self.base_layer)
        drop = self.lora_dropout[ADAPTER]
        a, b = down.weight.to(x.dtype), up.weight.to(x.dtype)
        scale = float(self.scaling[ADAPTER])
        if getattr(drop, "active", False):
            return base(x) + (drop(x) @ a.T) @ b.T * scale
        return cast("torch.Tensor", _Adapted.apply(x, base.weight, base.bias, a, b, scale))


class _Adapted(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,  # noqa: ANN401
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        a: torch.Tensor,
        b: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        down = rows @ a.T
        out = products.linear(rows, weight, bias).addmm_(down, b.T, alpha=scale)
        ctx.save_for_backward(rows, down, weight, a, b)
        ctx.scale, ctx.shape = scale, x.shape
        return out.view(*x.shape[:-1], out.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401  # pyright: ignore[reportIncompatibleMethodOverride]
        rows, down, weight, a, b = ctx.saved_tensors
        grad = grad.reshape(-1, grad.shape[-1])
        grad_down = (grad @ b).mul_(ctx.scale)
        grad_a = grad_down.T @ rows
        grad_b = (grad.T @ down).mul_(ctx.scale)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad @ weight).addmm_(grad_down, a).view(ctx.shape)
        return grad_x, None, None, grad_a, grad_b, None
