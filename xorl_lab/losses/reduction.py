"""From a per-token objective to the loss: the one place where weights are applied."""

import torch

from xorl_lab.losses.base import LossOutput


def weighted_sum(
    objective: torch.Tensor, weights: torch.Tensor, terms: dict[str, torch.Tensor]
) -> LossOutput:
    """Weight the objective and sum it.

    Nothing is divided here: the optimizer step divides once, by all valid tokens of its window, so
    that the gradient does not depend on how a batch was cut into micro-batches.

    Args:
        objective: (B, T) float, to be minimised, unweighted.
        weights: (B, T) float; 0 = not trained.
        terms: further (B, T) tensors to report.

    Returns:
        LossOutput with ``elementwise_loss`` = weights * objective added to the detached terms.
    """
    elementwise = weights * objective
    reported = {"elementwise_loss": elementwise, **terms}
    return LossOutput(elementwise.sum(), {name: term.detach() for name, term in reported.items()})
