"""Root mean square norm in few operations, as each takes longer to start than to run."""

import functools
from typing import Any

import torch


def norm(module: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ANN401 (each family has its own)
    """Root mean square norm (Zhang & Sennrich 2019) along the last dimension, in float32.

    Args:
        module: with ``weight``, (H,), and ``variance_epsilon``.
        x: (…, H).
    """
    fine = x if x.dtype == torch.float32 else x.float()
    length = torch.linalg.vector_norm(fine, dim=-1, keepdim=True)
    epsilon = _number(module.variance_epsilon, x.device)
    scale = torch.addcmul(epsilon, length, length, value=1 / x.shape[-1]).rsqrt_()
    scaled = fine * scale
    return (scaled if x.dtype == torch.float32 else scaled.to(x.dtype)).mul_(module.weight)


@functools.cache
def _number(value: float, device: torch.device) -> torch.Tensor:
    return torch.full((), value, device=device)
