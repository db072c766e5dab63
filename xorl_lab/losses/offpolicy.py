"""Policy gradients through the logprob itself: ``cispo`` and ``dro``.

In a clipped loss a token beyond a bound may give no gradient.  Here every token with an advantage
keeps one, and its size is bounded in another way: by a constant clipped weight (``cispo``) or by a
quadratic pull towards the policy that sampled (``dro``).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from xorl_lab.losses.base import LossOutput, check_ranges
from xorl_lab.losses.ratio import RatioParams, at_least_zero, policy_ratio, upper_bound
from xorl_lab.losses.reduction import weighted_sum


@dataclass(frozen=True, slots=True)
class CispoParams(RatioParams):
    """Parameters of ``cispo``."""

    clip_low_threshold: float = 0.0
    """Lower bound of the weight, >= 0; 0 = none."""
    clip_high_threshold: float = 4.0
    """Upper bound of the weight, >= clip_low_threshold and > 0."""

    def __post_init__(self) -> None:
        RatioParams.__post_init__(self)
        low, high = self.clip_low_threshold, self.clip_high_threshold
        check_ranges(
            {
                "clip_low_threshold": at_least_zero(low),
                "clip_high_threshold": upper_bound(high, low, "clip_low_threshold"),
            }
        )


@dataclass(frozen=True, slots=True)
class DroParams(RatioParams):
    """Parameters of ``dro``."""

    beta: float = 0.05
    """Strength of the pull towards the old policy, >= 0; 0 = none.  tinker's documentation states
    no default; 0.05 is the value of its example.  The pull balances an advantage A once the logprob
    has moved by A / beta nats: by 20 where A = 1."""

    def __post_init__(self) -> None:
        RatioParams.__post_init__(self)
        check_ranges({"beta": at_least_zero(self.beta, " (0 = no pull)")})


def cispo(
    logprobs: torch.Tensor, inputs: Mapping[str, torch.Tensor], params: CispoParams
) -> LossOutput:
    """Policy gradient with a clipped importance weight: the weight is clipped, not the token.

    r = exp(clamp(logprobs - old, -20, 20))
    w = stop_grad(clip(r, clip_low_threshold, clip_high_threshold))
    loss = sum(weights * -w * A * logprobs)

    The gradient at a token is -w * A: where nothing clips that is the one of
    ``importance_sampling``.  The value is not comparable with that of other losses.

    Args:
        logprobs: (B, T) float, nats, of the policy.  The only input with gradient.
        inputs: (B, T) float each: ``logprobs`` (old policy, nats, same temperature),
            ``advantages`` (A, unitless), ``weights`` (0 = not trained).
        params: see ``CispoParams``.

    Returns:
        LossOutput: the sum over tokens; terms: ``ratio`` (before the clip), ``log_ratio``,
        ``old_logprobs``, ``entropy``, ``clipped`` (the clip changed the gradient: r is beyond a
        bound and A is not 0).

    Source: arXiv:2506.13585 (CISPO); bounds and their defaults as xorl has them.
    """
    ratio, terms = policy_ratio(logprobs, inputs["logprobs"])
    low, high = params.clip_low_threshold, params.clip_high_threshold
    weight = ratio.detach().clamp(low, high)
    terms["clipped"] = ((ratio < low) | (ratio > high)) & (inputs["advantages"] != 0)
    objective = -weight * inputs["advantages"] * logprobs
    return weighted_sum(objective, inputs["weights"], terms)


def dro(
    logprobs: torch.Tensor, inputs: Mapping[str, torch.Tensor], params: DroParams
) -> LossOutput:
    """Direct reward optimisation: policy gradient with a quadratic pull towards the old policy.

    loss = sum(weights * -(logprobs * A - beta / 2 * (logprobs - old)²))

    There is no ratio and no clip, so that it also learns from samples of a policy far away.  A
    token is at rest where its logprob is old + A / beta.  Where A is 0 the pull alone acts.

    Args:
        logprobs: (B, T) float, nats, of the policy.  The only input with gradient.
        inputs: (B, T) float each: ``logprobs`` (old policy, nats, same temperature),
            ``advantages`` (A, unitless), ``weights`` (0 = not trained).
        params: see ``DroParams``.

    Returns:
        LossOutput: the sum over tokens; terms: ``ratio`` (to watch; the loss does not use it),
        ``log_ratio``, ``old_logprobs``, ``entropy``.

    Source: Richemond et al. 2024, arXiv:2405.19107, token by token as in tinker's documentation.
    """
    _, terms = policy_ratio(logprobs, inputs["logprobs"])
    pull = params.beta / 2 * terms["log_ratio"].square()
    objective = pull - logprobs * inputs["advantages"]
    return weighted_sum(objective, inputs["weights"], terms)
