"""Clipped policy gradients without further options: ``ppo`` and ``drgrpo``.

Both are ``policy_loss`` with its options off, under the parameters that tinker and xorl give them.
``ppo`` bounds the ratio itself (0.8 to 1.2), ``drgrpo`` its distance from 1 (0.2 and 0.28).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from xorl_lab.losses.base import LossOutput, check_ranges, is_number
from xorl_lab.losses.ratio import (
    RatioParams,
    at_least_zero,
    clipped_objective,
    kl_type_rule,
    policy_ratio,
    with_penalty,
)
from xorl_lab.losses.reduction import weighted_sum


@dataclass(frozen=True, slots=True)
class PpoParams(RatioParams):
    """Parameters of ``ppo``."""

    clip_low_threshold: float = 0.8
    """Lower bound of the ratio, 0 to 1."""
    clip_high_threshold: float = 1.2
    """Upper bound of the ratio, >= 1."""

    def __post_init__(self) -> None:
        RatioParams.__post_init__(self)
        low, high = self.clip_low_threshold, self.clip_high_threshold
        # An eps of 0.2 given here would silently clip every token with a positive advantage.
        note = "(it bounds the ratio itself, not its distance from 1)"
        check_ranges(
            {
                "clip_low_threshold": (
                    low,
                    is_number(low) and 0 <= low <= 1,
                    f"a number from 0 to 1 {note}",
                ),
                "clip_high_threshold": (
                    high,
                    is_number(high) and high >= 1,
                    f"a number >= 1 {note}",
                ),
            }
        )


@dataclass(frozen=True, slots=True)
class DrgrpoParams(RatioParams):
    """Parameters of ``drgrpo``."""

    clip_low: float = 0.2
    """The ratio is clipped from below at 1 - clip_low, >= 0."""
    clip_high: float = 0.28
    """The ratio is clipped from above at 1 + clip_high, >= 0."""
    beta: float = 0.0
    """Coefficient of the KL penalty to the reference policy, >= 0; 0 = no penalty."""
    kl_type: str = "k3"
    """Estimator of that KL: k1 (no pull in expectation), k2 (gradient of KL(π‖ref)) or k3
    (gradient of KL(ref‖π)); see ``losses.kl``."""

    def __post_init__(self) -> None:
        RatioParams.__post_init__(self)
        check_ranges(
            {
                "clip_low": at_least_zero(self.clip_low),
                "clip_high": at_least_zero(self.clip_high),
                "beta": at_least_zero(self.beta, " (0 = no penalty)"),
                "kl_type": kl_type_rule(self.kl_type),
            }
        )

    def needs(self) -> tuple[str, ...]:
        """``ref_logprobs`` for the KL penalty."""
        return ("ref_logprobs",) if self.beta > 0 else ()


def ppo(
    logprobs: torch.Tensor, inputs: Mapping[str, torch.Tensor], params: PpoParams
) -> LossOutput:
    """Clipped policy gradient, with bounds of the ratio itself.

    r = exp(clamp(logprobs - old, -20, 20))
    loss = sum(weights * -min(r * A, clip(r, clip_low_threshold, clip_high_threshold) * A))

    Args:
        logprobs: (B, T) float, nats, of the policy.  The only input with gradient.
        inputs: (B, T) float each: ``logprobs`` (old policy, nats, same temperature),
            ``advantages`` (A, unitless), ``weights`` (0 = not trained).
        params: see ``PpoParams``.

    Returns:
        LossOutput: the sum over tokens; terms: ``ratio``, ``log_ratio``, ``old_logprobs``,
        ``entropy``, ``clipped`` (the clip is active: zero gradient).

    Source: Schulman et al. 2017 (PPO), eq. 7; parameters as tinker names them.
    """
    ratio, terms = policy_ratio(logprobs, inputs["logprobs"])
    low, high = params.clip_low_threshold, params.clip_high_threshold
    objective, terms["clipped"] = clipped_objective(ratio, inputs["advantages"], low, high)
    return weighted_sum(objective, inputs["weights"], terms)


def drgrpo(
    logprobs: torch.Tensor, inputs: Mapping[str, torch.Tensor], params: DrgrpoParams
) -> LossOutput:
    """Clipped policy gradient of GRPO without its division by the length of each sequence.

    r = exp(clamp(logprobs - old, -20, 20))
    pg = max(-r * A, -clip(r, 1 - clip_low, 1 + clip_high) * A)
    loss = sum(weights * (pg + beta * kl))

    Every token counts the same, however long its sequence: the sum is divided once, by the valid
    tokens of the whole optimizer step.  The other half of Dr. GRPO is in the advantages, which are
    not to be divided by the standard deviation of their group: use ``mean_centered``.

    Args:
        logprobs: (B, T) float, nats, of the policy.  The only input with gradient.
        inputs: (B, T) float each: ``logprobs`` (old policy, nats, same temperature),
            ``advantages`` (A, unitless), ``weights`` (0 = not trained), and with beta > 0
            ``ref_logprobs`` (nats).
        params: see ``DrgrpoParams``.

    Returns:
        LossOutput: the sum over tokens; terms: ``ratio``, ``log_ratio``, ``old_logprobs``,
        ``entropy``, ``clipped`` (the clip is active: no policy gradient), and ``kl`` with the
        penalty.

    Source: Dr. GRPO, arXiv:2503.20783, with two clip bounds; parameters as xorl names them.
    """
    ratio, terms = policy_ratio(logprobs, inputs["logprobs"])
    low, high = 1 - params.clip_low, 1 + params.clip_high
    objective, terms["clipped"] = clipped_objective(ratio, inputs["advantages"], low, high)
    objective = with_penalty(objective, logprobs, inputs, params.beta, params.kl_type, terms)
    return weighted_sum(objective, inputs["weights"], terms)
