"""Matrix products with weights that stay: laid out once for the kernels of oneDNN where it pays."""

from collections.abc import Sequence

import torch

ROWS = 64
"""Rows that the layout is chosen for; other counts are right too, and hardly slower."""


class Product:
    """y = x W' + b for several linear layers with the same input, side by side.

    Args:
        layers: their outputs are laid next to each other in the order given.
    """

    def __init__(self, layers: Sequence[torch.nn.Linear]) -> None:
        stops = torch.tensor([len(layer.weight) for layer in layers]).cumsum(0).tolist()
        self.columns: list[tuple[int, int]] = list(zip([0, *stops], stops, strict=False))
        """Where each layer's outputs begin and end."""
        weights = [layer.weight.detach() for layer in layers]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        biases = [layer.bias for layer in layers if layer.bias is not None]
        # The layers of a group have biases all or none, in every family that is computed here.
        self._bias = torch.cat([b.detach() for b in biases]) if biases else None
        self._packed = _pack(weight)
        self._weight = weight if self._packed is None else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(N, in) -> (N, out)."""
        if self._packed is None:
            assert self._weight is not None
            return torch.nn.functional.linear(x, self._weight, self._bias)
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")


def _pack(weight: torch.Tensor) -> torch.Tensor | None:
    """The weight in oneDNN's own layout; None where this build or machine has none."""
    if weight.device.type != "cpu" or weight.dtype not in {torch.float32, torch.bfloat16}:
        return None
    if not torch.backends.mkldnn.is_available():
        return None
    try:
        return torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
    except (AttributeError, RuntimeError):
        return None
