"""Does a sampler run the weights that it was sent?  Told from the logprobs of a fixed text.

The trainer evaluates the text under the new weights and under those before them, the sampler under
what it serves now.  A sampler is never closer to the trainer than its own noise (another dtype,
other kernels), which is measured on weights known to be equal.  Means are over the text's tokens:

    gap    = mean |sampler - new|
    change = mean |new - previous|
    noise  = mean |sampler - trainer| on equal weights

- ``agrees``: gap < 0.1 * change + noise, and change >= 3 * noise;
- ``inconclusive``: change < 3 * noise: the update is too small for the text to tell; but not where
  gap > change + 3 * noise, as then the sampler has neither the new nor the previous weights;
- ``disagrees``: otherwise.

A sampler that has kept the previous weights has a gap of at least change - noise, which is at least
twice the noise, so it never agrees; one that has the new ones has a gap of about the noise.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from xorl_lab.errors import DataError, SamplerError, ShapeError

Verdict = Literal["agrees", "disagrees", "inconclusive"]

SHARE = 0.1
"""Share of the change that may be missing beyond the noise."""
TELLING = 3.0
"""How many times the noise a change has to be before it can be told from it."""
FLOOR = 2e-6
"""Least noise in nats that is believed: rounding of logprobs of some nats in float32."""
TEXT = (
    "The quick brown fox jumps over the lazy dog. 17 + 25 = 42, and Paris is the capital of "
    "France. Once upon a time there was a happy little robot that liked to count: 1, 2, 3."
)
"""What is evaluated, encoded with the model's tokenizer."""
TOKENS = 64
"""Most tokens of it that are used."""


@dataclass(frozen=True, slots=True)
class Canary:
    """What the logprobs of a fixed text say of a sampler's weights."""

    verdict: Verdict
    """``agrees``, ``disagrees`` or ``inconclusive``."""
    gap: float
    """Mean distance of the sampler from the trainer's new weights, nats."""
    change: float
    """Mean distance of the new weights from the previous ones, nats."""
    noise: float
    """Mean distance of sampler and trainer on equal weights, nats."""

    def __str__(self) -> str:
        return (
            f"{self.verdict} (gap {self.gap:.2g}, change {self.change:.2g}, "
            f"noise {self.noise:.2g} nats)"
        )


def judge(
    sampler: Sequence[float], new: Sequence[float], previous: Sequence[float], noise: float
) -> Canary:
    """Compare a sampler with the weights that it should have, and with those it had before.

    Args:
        sampler: T logprobs of the text, by the sampler now, nats.
        new: T, by the trainer with the new weights.
        previous: T, by the trainer with the weights that were in use before.
        noise: from :func:`measured_noise`, nats.

    Raises:
        ShapeError: the lengths differ, or there is nothing.
        DataError: the trainer's values are not finite.
        SamplerError: the sampler's are not.

    >>> judge([-1.0, -2.0], [-1.0, -2.0], [-1.5, -2.5], 1e-5).verdict
    'agrees'
    >>> judge([-1.5, -2.5], [-1.0, -2.0], [-1.5, -2.5], 1e-5).verdict
    'disagrees'
    >>> judge([-1.0, -2.0], [-1.0, -2.0], [-1.00001, -2.0], 1e-5).verdict
    'inconclusive'
    """
    gap, change = distance(sampler, new), distance(new, previous)
    noise = max(noise, FLOOR)
    if not math.isfinite(change):
        raise DataError("the trainer's logprobs are not finite, so nothing can be compared")
    if not math.isfinite(gap):
        raise SamplerError("the sampler's logprobs of the canary text are not finite")
    verdict: Verdict
    if change < TELLING * noise:
        verdict = "inconclusive" if gap <= change + TELLING * noise else "disagrees"
    else:
        verdict = "agrees" if gap < SHARE * change + noise else "disagrees"
    return Canary(verdict, gap, change, noise)


def measured_noise(sampler: Sequence[float], trainer: Sequence[float]) -> float:
    """Mean distance of sampler and trainer on weights known to be equal, at least the floor.

    Args:
        sampler: T logprobs of a text, nats.
        trainer: T, of the same text and the same weights.

    Raises:
        ShapeError: the lengths differ, or there is nothing.
    """
    return max(distance(sampler, trainer), FLOOR)


def distance(left: Sequence[float], right: Sequence[float]) -> float:
    """Mean |left - right|, nats.

    Raises:
        ShapeError: the lengths differ, or there is nothing.
    """
    if len(left) != len(right) or not left:
        raise ShapeError(
            f"there are {len(left)} and {len(right)} logprobs to compare: pass as many of each, "
            "and at least one"
        )
    return math.fsum(abs(a - b) for a, b in zip(left, right, strict=True)) / len(left)
