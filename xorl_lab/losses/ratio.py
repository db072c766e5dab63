"""What losses of a policy share: the ratio to the old policy, its clip, the penalty, parameters."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from xorl_lab.losses.base import LossParams, check_ranges, flag, is_number
from xorl_lab.losses.kl import ESTIMATORS, LOG_RATIO_LIMIT, reference_kl


@dataclass(frozen=True, slots=True)
class RatioParams(LossParams):
    """Parameters that every loss with an old policy has."""

    compute_kl_stats: bool = False
    """Report ``kl_sample_train_k3`` and ``entropy_sample``."""

    def __post_init__(self) -> None:
        check_ranges({"compute_kl_stats": flag(self.compute_kl_stats)})


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return exp(clamp(log_ratio, -20, 20)), which no dtype overflows.

    Args:
        log_ratio: any shape, float, nats.

    Returns:
        Same shape and dtype; no gradient beyond the bounds.
    """
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def policy_ratio(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compare the policy with the old one.

    r = exp(clamp(logprobs - old, -20, 20))

    Args:
        logprobs: (B, T) float, nats, of the policy; carries the gradient.
        old_logprobs: (B, T) float, nats, of the old policy, at the same temperature.

    Returns:
        r, with gradient, and the terms ``ratio``, ``log_ratio``, ``old_logprobs``, ``entropy``.
    """
    log_ratio = logprobs - old_logprobs
    ratio = bounded_exp(log_ratio)
    terms = {
        "ratio": ratio,
        "log_ratio": log_ratio,
        "old_logprobs": old_logprobs,
        "entropy": -old_logprobs,
    }
    return ratio, terms


def clipped_objective(
    ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Clip the ratio wherever that makes the objective worse.

    max(-r * A, -clip(r, low, high) * A)

    Args:
        ratio: (B, T) float, r, with gradient.
        advantages: (B, T) float, A, unitless.
        low: lower bound of the ratio.
        high: upper bound of the ratio, >= low.

    Returns:
        The objective, to be minimised, and where the clip is active (bool): r > high with A > 0,
        r < low with A < 0.  There the gradient is zero.

    Source: Schulman et al. 2017 (PPO), eq. 7.
    """
    objective = torch.maximum(-ratio * advantages, -ratio.clamp(low, high) * advantages)
    clipped = ((ratio > high) & (advantages > 0)) | ((ratio < low) & (advantages < 0))
    return objective, clipped


def with_penalty(
    objective: torch.Tensor,
    logprobs: torch.Tensor,
    inputs: Mapping[str, torch.Tensor],
    coefficient: float,
    kl_type: str,
    terms: dict[str, torch.Tensor],
) -> torch.Tensor:
    """Add a KL penalty to the reference policy: objective + coefficient * kl.

    Args:
        objective: (B, T) float.
        logprobs: (B, T) float, nats, of the policy; the penalty's gradient flows through it.
        inputs: holds ``ref_logprobs``, (B, T) float, nats, unless the coefficient is 0.
        coefficient: >= 0.
        kl_type: the estimate: k1, k2 or k3; see ``losses.kl``.
        terms: gets ``kl``, unless the coefficient is 0.

    Returns:
        (B, T) float; with coefficient 0 the objective itself.

    Source: Shao et al. 2024 (GRPO), eq. 3.
    """
    if coefficient == 0:
        return objective
    terms["kl"] = reference_kl(logprobs, inputs["ref_logprobs"], kl_type)
    return objective + coefficient * terms["kl"]


def at_least_zero(value: object, note: str = "") -> tuple[object, bool, str]:
    """Return the rule for a parameter that must be a number >= 0."""
    return value, is_number(value) and value >= 0, f"a number >= 0{note}"


def upper_bound(value: object, low: object, low_name: str) -> tuple[object, bool, str]:
    """Return the rule for a parameter that bounds a weight from above.

    A lower bound that is not a number is for its own rule to refuse.
    """
    valid = is_number(value) and value > 0 and not (is_number(low) and value < low)
    return value, valid, f"a number > 0 and >= {low_name} ({low!r})"


def kl_type_rule(value: object) -> tuple[object, bool, str]:
    """Return the rule for a parameter that names an estimate of the reference KL."""
    return value, value in tuple(ESTIMATORS), f"one of {sorted(ESTIMATORS)}"
