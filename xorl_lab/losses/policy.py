"""Policy gradients with xorl's options: KL penalty, dual clip, IcePop mask, TIS."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from xorl_lab.losses.base import LossOutput, check_ranges, flag, is_number
from xorl_lab.losses.ratio import (
    RatioParams,
    at_least_zero,
    bounded_exp,
    clipped_objective,
    kl_type_rule,
    policy_ratio,
    upper_bound,
    with_penalty,
)
from xorl_lab.losses.reduction import weighted_sum


@dataclass(frozen=True, slots=True)
class ImportanceSamplingParams(RatioParams):
    """Parameters of ``importance_sampling``, which ``policy_loss`` has too."""

    kl_coef: float = 0.0
    """Coefficient of the KL penalty to the reference policy, >= 0; 0 = no penalty."""
    kl_type: str = "k3"
    """Estimator of that KL: k1 (no pull in expectation), k2 (gradient of KL(π‖ref)) or k3
    (gradient of KL(ref‖π)); see ``losses.kl``."""

    def __post_init__(self) -> None:
        RatioParams.__post_init__(self)
        check_ranges(
            {
                "kl_coef": at_least_zero(self.kl_coef, " (0 = no penalty)"),
                "kl_type": kl_type_rule(self.kl_type),
            }
        )

    def needs(self) -> tuple[str, ...]:
        """``ref_logprobs`` for the KL penalty."""
        return ("ref_logprobs",) if self.kl_coef > 0 else ()


@dataclass(frozen=True, slots=True)
class PolicyLossParams(ImportanceSamplingParams):
    """Parameters of ``policy_loss``."""

    eps_clip: float = 0.2
    """The ratio is clipped from below at 1 - eps_clip, >= 0."""
    eps_clip_high: float = 0.2
    """The ratio is clipped from above at 1 + eps_clip_high, >= 0."""
    eps_clip_c: float | None = None
    """Dual clip: where the advantage A < 0 the loss is at most -cA, c > 1; None = no bound."""
    icepop_beta: float | None = None
    """Tokens with a ratio outside [1/beta, beta] are masked, beta > 1; None = no mask."""
    use_tis: bool = False
    """Weight each token by the truncated ratio of the old policy to the rollout policy."""
    tis_clip_low: float = 0.1
    """Lower bound of that weight, >= 0."""
    tis_clip_high: float = 2.0
    """Upper bound of that weight, >= tis_clip_low and > 0."""

    def __post_init__(self) -> None:
        ImportanceSamplingParams.__post_init__(self)
        check_ranges(
            {
                "eps_clip": at_least_zero(self.eps_clip),
                "eps_clip_high": at_least_zero(self.eps_clip_high),
                "eps_clip_c": _above_one_or_none(self.eps_clip_c),
                "icepop_beta": _above_one_or_none(self.icepop_beta),
                "use_tis": flag(self.use_tis),
                "tis_clip_low": at_least_zero(self.tis_clip_low),
                "tis_clip_high": upper_bound(self.tis_clip_high, self.tis_clip_low, "tis_clip_low"),
            }
        )

    def needs(self) -> tuple[str, ...]:
        """``ref_logprobs`` for the KL penalty, ``rollout_logprobs`` for TIS."""
        rollout = ("rollout_logprobs",) if self.use_tis else ()
        return (*ImportanceSamplingParams.needs(self), *rollout)


def importance_sampling(
    logprobs: torch.Tensor, inputs: Mapping[str, torch.Tensor], params: ImportanceSamplingParams
) -> LossOutput:
    """Policy gradient, corrected for samples of an older policy, without a clip.

    loss = sum(weights * (-r * A + kl_coef * kl)),  r = exp(clamp(logprobs - old, -20, 20))

    Args:
        logprobs: (B, T) float, nats, of the policy.  The only input with gradient.
        inputs: (B, T) float each: ``logprobs`` (old policy, nats, same temperature),
            ``advantages`` (A, unitless), ``weights`` (0 = not trained), and with kl_coef > 0
            ``ref_logprobs`` (nats).
        params: see ``ImportanceSamplingParams``.

    Returns:
        LossOutput: the sum over tokens; terms: ``ratio``, ``log_ratio``, ``old_logprobs``,
        ``entropy``, and ``kl`` with the penalty.

    Source: Schulman et al. 2017 (PPO), eq. 6; the penalty as in Shao et al. 2024 (GRPO), eq. 3.
    """
    ratio, terms = policy_ratio(logprobs, inputs["logprobs"])
    objective = -ratio * inputs["advantages"]
    objective = with_penalty(objective, logprobs, inputs, params.kl_coef, params.kl_type, terms)
    return weighted_sum(objective, inputs["weights"], terms)


def policy_loss(
    logprobs: torch.Tensor, inputs: Mapping[str, torch.Tensor], params: PolicyLossParams
) -> LossOutput:
    """Clipped policy gradient (PPO) with optional dual clip, IcePop mask, TIS and KL penalty.

    r = exp(clamp(logprobs - old, -20, 20))
    pg = max(-r * A, -clip(r, 1 - eps_clip, 1 + eps_clip_high) * A)
    pg = min(-eps_clip_c * A, pg) where A < 0                          (dual clip)
    w = stop_grad(clip(exp(old - rollout), tis_clip_low, tis_clip_high)), without TIS 1
    m = 0 where r is outside [1 / icepop_beta, icepop_beta], else 1
    loss = sum(weights * m * (w * pg + kl_coef * kl))

    w is a ratio of two fixed policies, so that r * w is the ratio of the new policy to the rollout
    policy wherever nothing clips.  A masked token gives no gradient at all, the penalty's included,
    but stays a valid token of the denominator.

    Args:
        logprobs: (B, T) float, nats, of the policy.  The only input with gradient.
        inputs: (B, T) float each: ``logprobs`` (old policy, that of the last train step; nats, same
            temperature), ``advantages`` (A, unitless), ``weights`` (0 = not trained), with use_tis
            ``rollout_logprobs`` (nats), with kl_coef > 0 ``ref_logprobs`` (nats).
        params: see ``PolicyLossParams``.

    Returns:
        LossOutput: the sum over tokens; terms: ``ratio``, ``log_ratio``, ``old_logprobs``,
        ``entropy``, ``clipped`` (a clip, dual clip included, changed value or gradient), with
        IcePop ``masked``, with TIS ``tis_weight`` and ``tis_clipped``, with the penalty ``kl``.

    Source: Schulman et al. 2017 (PPO), eq. 7; Ye et al. 2020 (dual clip); IcePop as in
        arXiv:2602.15763; truncated importance sampling as in Ionides 2008.
    """
    ratio, terms = policy_ratio(logprobs, inputs["logprobs"])
    objective, terms["clipped"] = _dual_clipped(ratio, inputs["advantages"], params)
    if params.use_tis:
        terms |= _truncated_weight(inputs["logprobs"], inputs["rollout_logprobs"], params)
        objective = terms["tis_weight"] * objective
    objective = with_penalty(objective, logprobs, inputs, params.kl_coef, params.kl_type, terms)
    if params.icepop_beta is not None:
        masked = (ratio < 1 / params.icepop_beta) | (ratio > params.icepop_beta)
        terms["masked"] = masked
        objective = torch.where(masked, 0.0, objective)
    return weighted_sum(objective, inputs["weights"], terms)


def _dual_clipped(
    ratio: torch.Tensor, advantages: torch.Tensor, params: PolicyLossParams
) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = 1 - params.eps_clip, 1 + params.eps_clip_high
    objective, clipped = clipped_objective(ratio, advantages, low, high)
    if params.eps_clip_c is None:
        return objective, clipped
    bound = -params.eps_clip_c * advantages
    dual = (advantages < 0) & (objective > bound)
    return torch.where(dual, bound, objective), clipped | dual


def _truncated_weight(
    old_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, params: PolicyLossParams
) -> dict[str, torch.Tensor]:
    raw = bounded_exp(old_logprobs - rollout_logprobs)
    low, high = params.tis_clip_low, params.tis_clip_high
    return {"tis_weight": raw.clamp(low, high), "tis_clipped": (raw < low) | (raw > high)}


def _above_one_or_none(value: object) -> tuple[object, bool, str]:
    valid = value is None or (is_number(value) and value > 1)
    return value, valid, "a number > 1, or None to leave it out"
