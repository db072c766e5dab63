"""Root mean square norm in few operations, as each takes longer to start than to run."""

import functools
from typing import Any

import torch


class Norm:
    """Root mean square norm (Zhang & Sennrich 2019) along the last dimension, in float32.

    Args:
        module: of transformers; its weight, of the dtype of what is normed, may change in place.
        weight: (H,), to use another one.
    """

    def __init__(self, module: Any, weight: torch.Tensor | None = None) -> None:  # noqa: ANN401
        self._weight: torch.Tensor = module.weight if weight is None else weight
        self._epsilon = _number(module.variance_epsilon, self._weight.device)
        self._share = 1 / len(self._weight)
        self._single = self._weight.dtype == torch.float32

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(…, H) in the dtype of the weight."""
        fine = x if self._single else x.float()
        length = torch.linalg.vector_norm(fine, dim=-1, keepdim=True)
        scale = torch.addcmul(self._epsilon, length, length, value=self._share).rsqrt_()
        scaled = fine * scale
        return (scaled if self._single else scaled.to(x.dtype)).mul_(self._weight)


@functools.cache  # for good: recorded steps go on reading it when these weights are gone
def _number(value: float, device: torch.device) -> torch.Tensor:
    return torch.full((), value, dtype=torch.float32, device=device)
