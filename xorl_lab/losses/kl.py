"""Estimates of the KL divergence between two policies from the sampled tokens alone.

Of the three estimates of KL(π‖ref) all are usable as a number to watch.  As a term of a loss they
differ, because a loss is driven by the gradient of the estimate, not by the estimate of a gradient
(expectations on-policy, that is over samples of π itself):

    k1 = d               zero: it only adds noise and pulls towards nothing
    k2 = d² / 2          the gradient of KL(π‖ref)
    k3 = exp(-d) + d - 1 the gradient of KL(ref‖π)

with d = logprobs - ref_logprobs.

Source: Schulman 2020, "Approximating KL divergence".
"""

from collections.abc import Callable

import torch

from xorl_lab.errors import ConfigError

LOG_RATIO_LIMIT = 20.0
"""Log ratios are clamped to ± this many nats before exp, so that no ratio overflows."""


def k1(d: torch.Tensor) -> torch.Tensor:
    """Log ratio: unbiased, high variance, may be negative.

    k1 = d.  As a loss term on-policy its expected gradient is zero: never what a penalty wants.

    Args:
        d: any shape, float, nats: logprobs - ref_logprobs.

    Returns:
        Same shape and dtype, nats.

    Source: Schulman 2020.
    """
    return d


def k2(d: torch.Tensor) -> torch.Tensor:
    """Half the squared log ratio: biased as a number, low variance, never negative.

    k2 = d² / 2.  As a loss term on-policy its expected gradient is that of KL(π‖ref).

    Args:
        d: any shape, float, nats: logprobs - ref_logprobs.

    Returns:
        Same shape and dtype, nats.

    Source: Schulman 2020.
    """
    return d.square() / 2


def k3(d: torch.Tensor) -> torch.Tensor:
    """Log ratio with a control variate: unbiased, low variance, never negative.

    k3 = exp(-d) + d - 1.  As a loss term on-policy its expected gradient is that of KL(ref‖π), the
    other direction than the one that it estimates.

    Args:
        d: any shape, float, nats: logprobs - ref_logprobs.

    Returns:
        Same shape and dtype, nats.

    Source: Schulman 2020; Shao et al. 2024 (GRPO), eq. 4.
    """
    return torch.expm1(-d) + d


ESTIMATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""The estimates of KL(π‖ref) by the name that ``kl_type`` uses."""


def reference_kl(
    logprobs: torch.Tensor, ref_logprobs: torch.Tensor, kl_type: str = "k3"
) -> torch.Tensor:
    """Estimate KL(π‖ref) token by token.

    Args:
        logprobs: (B, T) float, nats, of the policy; gradients flow through it.
        ref_logprobs: (B, T) float, nats, of the reference for the same tokens.
        kl_type: ``k1``, ``k2`` or ``k3``; the head of this module says how their gradients differ.

    Returns:
        (B, T), nats.

    Raises:
        ConfigError: the kl_type is unknown.

    Source: Schulman 2020.
    """
    if kl_type not in ESTIMATORS:
        raise ConfigError(f"kl_type is {kl_type!r}: pass one of {sorted(ESTIMATORS)}")
    return ESTIMATORS[kl_type](logprobs - ref_logprobs)


def kl_sample_train_k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """Estimate KL(old‖new), how far training has moved from the policy that sampled.

    mean(r - log r - 1), with r = exp(log_ratio) and samples of the old policy.

    Args:
        log_ratio: any shape, at least one element, float, nats: new - old logprobs.

    Returns:
        0-d, nats, >= 0.

    Source: Schulman 2020.
    """
    bounded = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (torch.expm1(bounded) - bounded).mean()
