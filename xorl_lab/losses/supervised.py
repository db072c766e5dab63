"""Losses on given targets."""

from collections.abc import Mapping

import torch

from xorl_lab.losses.base import LossOutput, LossParams
from xorl_lab.losses.reduction import weighted_sum


def cross_entropy(
    logprobs: torch.Tensor, inputs: Mapping[str, torch.Tensor], params: LossParams
) -> LossOutput:
    """Negative log-likelihood of the target tokens.

    loss = -sum(weights * logprobs)

    Args:
        logprobs: (B, T) float, nats, of the targets.  The only input with gradient.
        inputs: ``weights`` (B, T) float, 0 = not trained.
        params: none.

    Returns:
        LossOutput: the sum over tokens, nats; terms: ``elementwise_loss``.
    """
    del params
    return weighted_sum(-logprobs, inputs["weights"], {})


causallm_loss = cross_entropy
"""The name that xorl has for the same loss."""
