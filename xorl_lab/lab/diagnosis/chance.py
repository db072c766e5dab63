"""Gaps that are drawn at random: whether they have the size and the pattern of some noise."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xorl_lab.lab.diagnosis.reevaluate import Values

SURE = 3.3
"""Standard deviations: chance exceeds it once in two thousand times."""


@dataclass(frozen=True, slots=True)
class Likeness:
    """How a gap compares with a noise."""

    ratio: float
    """Mean size of the gap over that of the noise."""
    rank: float
    """Correlation of the ranks of the tokens by gap and by noise."""
    sign: float
    """Correlation of gap and mean noise: rounded weights are the same in every draw."""
    tokens: int
    """Tokens compared."""
    left: float
    """Nats: difference between the two mean sizes."""
    largest: float
    """Nats: difference between the two largest."""

    def sized(self, factor: float) -> bool:
        """True if the sizes agree up to a factor."""
        return 1 / factor <= self.ratio <= factor

    @property
    def patterned(self) -> bool:
        """True if the gap is wide, or has its sign, where the noise would have it so."""
        return max(self.rank, self.sign) * max(self.tokens - 1, 0) ** 0.5 >= SURE


def likeness(gap: Values, noise: NDArray[np.float64]) -> Likeness:
    """Compare a gap with draws of a noise.

    Args:
        gap: (N,) nats, recorded less evaluated; what is not finite is left out.
        noise: (K, N) nats, K evaluations with the noise less the one without.
    """
    known = np.isfinite(gap)
    apart, drawn = np.abs(gap[known]), np.abs(noise[:, known])
    if not len(apart) or not drawn.any():
        return Likeness(float("inf"), 0.0, 0.0, len(apart), float("nan"), float("nan"))
    size = float(drawn.mean())
    return Likeness(
        float(apart.mean()) / size,
        _correlation(_ranks(apart), _ranks(np.sqrt((drawn**2).mean(0)))),
        _correlation(gap[known], noise[:, known].mean(0)),
        len(apart),
        abs(float(apart.mean()) - size),
        abs(float(apart.max()) - float(drawn.max(1).mean())),
    )


def _ranks(values: Values) -> Values:
    return np.argsort(np.argsort(values)).astype(np.float64)


def _correlation(one: Values, other: Values) -> float:
    if len(one) < 3 or not one.std() or not other.std():
        return 0.0
    return float(np.corrcoef(one, other)[0, 1])
