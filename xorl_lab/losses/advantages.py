"""Advantages from the rewards of one group: the rollouts of one prompt.

A reward of None marks a rollout that failed (its reward function raised, timed out or gave NaN): it
is left out of the statistics and gets advantage 0.  A group whose rewards are all equal, or that
has one rollout left, carries no signal: all its advantages are 0.
"""

import math
from collections.abc import Sequence
from typing import SupportsFloat

from xorl_lab.errors import DataError

EQUAL_WITHIN = 1e-12
"""Rewards closer to each other than this part of the largest one differ by rounding only."""


def group_normalized(rewards: Sequence[SupportsFloat | None]) -> list[float]:
    """Advantages of GRPO: standardised within the group.

    A_i = (r_i - mean(r)) / std(r), with the population standard deviation.

    Args:
        rewards: G rewards of one group, any unit; None = failed.

    Returns:
        G advantages, unitless; they sum to 0.

    Raises:
        DataError: a reward is not a finite number.

    Source: Shao et al. 2024 (GRPO), sec. 4.1.2.

    >>> group_normalized([1.0, 0.0, None, 1.0, 0.0])
    [1.0, -1.0, 0.0, 1.0, -1.0]
    """
    deviations = _deviations(rewards)
    present = [value for value in deviations if value is not None]
    std = math.hypot(*present) / math.sqrt(max(len(present), 1))
    return [value / std if value is not None and std > 0 else 0.0 for value in deviations]


def mean_centered(rewards: Sequence[SupportsFloat | None]) -> list[float]:
    """Advantages of Dr. GRPO: centred, not scaled, so that easy and hard prompts count alike.

    A_i = r_i - mean(r)

    Args:
        rewards: G rewards of one group, any unit; None = failed.

    Returns:
        G advantages in the unit of the rewards; they sum to 0.

    Raises:
        DataError: a reward is not a finite number.

    Source: Liu et al. 2025 (Dr. GRPO).

    >>> mean_centered([1.0, 0.0, None])
    [0.5, -0.5, 0.0]
    """
    return [0.0 if value is None else value for value in _deviations(rewards)]


def leave_one_out(rewards: Sequence[SupportsFloat | None]) -> list[float]:
    """Advantages of RLOO: against the mean of the other rollouts, an unbiased baseline.

    A_i = r_i - mean(r_j, j != i) = G / (G - 1) * (r_i - mean(r)), G without the failed ones

    Args:
        rewards: G rewards of one group, any unit; None = failed.

    Returns:
        G advantages in the unit of the rewards; they sum to 0.

    Raises:
        DataError: a reward is not a finite number.

    Source: Ahmadian et al. 2024 (RLOO).

    >>> leave_one_out([1.0, 0.0, None])
    [1.0, -1.0, 0.0]
    """
    deviations = _deviations(rewards)
    count = sum(value is not None for value in deviations)
    scale = count / max(count - 1, 1)
    return [0.0 if value is None else scale * value for value in deviations]


def _deviations(rewards: Sequence[SupportsFloat | None]) -> list[float | None]:
    values = [_checked(index, reward) for index, reward in enumerate(rewards)]
    present = [value for value in values if value is not None]
    if not present or _all_equal(present):
        return [None if value is None else 0.0 for value in values]
    mean = math.fsum(value / len(present) for value in present)
    return [None if value is None else value - mean for value in values]


def _all_equal(values: list[float]) -> bool:
    # The mean of equal floats need not equal them: [0.1] * 3 would get a spread of 1e-17, which
    # normalising blows up to advantages of the order of 1.
    return max(values) - min(values) <= EQUAL_WITHIN * max(map(abs, values))


def _checked(index: int, reward: SupportsFloat | None) -> float | None:
    if reward is None:
        return None
    number = math.nan if isinstance(reward, str) else float(reward)
    if not math.isfinite(number):
        raise DataError(
            f"reward {index} is {reward!r}: pass a finite number, or None for a failed rollout"
        )
    return number
