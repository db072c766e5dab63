"""The maths of the tables: medians, ratios, and how far they can be trusted."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.channel import Sample


@dataclass(frozen=True, slots=True)
class Spread:
    """The middle and the ends of some numbers.

    >>> str(Spread.of([2.0, 1.0, 4.0]))
    '2.00 [1.00..4.00]'
    """

    median: float
    """Half of them lie below."""
    low: float
    """The least."""
    high: float
    """The greatest."""

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Of at least one number."""
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{short(self.median)} [{short(self.low)}..{short(self.high)}]"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two sides, measured in turns; ratios above 1 mean that ours is better."""

    ours: Spread
    """Seconds of a round."""
    peer: Spread
    """Seconds of a round."""
    ratio: float
    """Median of the peer's seconds in ours."""
    per_token: float
    """The same of the seconds per token: sides may draw unequal numbers of them."""
    busy: float
    """The same of the seconds of processor time."""
    by_round: Spread
    """The ratios of the single rounds."""

    @classmethod
    def of(cls, ours: Sequence[Sample], peer: Sequence[Sample]) -> "Comparison":
        """Compare the rounds of both sides; pairs of rounds were run one behind the other."""
        a, b = Spread.of([s.seconds for s in ours]), Spread.of([s.seconds for s in peer])
        each = [q.seconds / p.seconds for p, q in zip(ours, peer, strict=True)]
        per_token = seconds_per_token(peer) / seconds_per_token(ours)
        busy = statistics.median(s.busy for s in peer) / statistics.median(s.busy for s in ours)
        return cls(a, b, b.median / a.median, per_token, busy, Spread.of(each))

    @property
    def judged(self) -> float:
        """What is held against a goal: the less favourable of both ratios."""
        return min(self.ratio, self.per_token)


@dataclass(frozen=True, slots=True)
class Memory:
    """Peaks of two sides in bytes, and their share beyond the loaded model."""

    ours: int
    """Largest of all rounds."""
    peer: int
    """Largest of all rounds."""
    ours_growth: int
    """Beyond what was resident once the model was loaded."""
    peer_growth: int
    """Beyond what was resident once the model was loaded."""

    @property
    def ratio(self) -> float:
        """Ours in the peer's; below 1 is better."""
        return self.ours / self.peer

    @property
    def growth_ratio(self) -> float:
        """The same of the growth alone."""
        return self.ours_growth / max(1, self.peer_growth)


@dataclass(frozen=True, slots=True)
class Agreement:
    """Two sides that should have the same mean, each known from some seeds."""

    ours: float
    """Mean over seeds."""
    peer: float
    """Mean over seeds."""
    error: float
    """Standard error of the difference: sqrt(s1^2 / n1 + s2^2 / n2)."""

    @classmethod
    def of(cls, ours: Sequence[float], peer: Sequence[float]) -> "Agreement":
        """Of one number per seed and side, at least two of each."""
        error = math.sqrt(sum(statistics.variance(v) / len(v) for v in (ours, peer)))
        return cls(statistics.mean(ours), statistics.mean(peer), error)

    @property
    def holds(self) -> bool:
        """True if the difference is within two standard errors."""
        return abs(self.ours - self.peer) <= 2 * self.error


def seconds_per_token(samples: Sequence[Sample]) -> float:
    """Median over rounds."""
    return statistics.median(s.seconds / s.tokens for s in samples)


def peak(samples: Sequence[Sample]) -> int | None:
    """Largest over rounds, in bytes; None if it was not measured."""
    peaks = [s.peak for s in samples if s.peak is not None]
    return max(peaks) if peaks else None


def short(value: float) -> str:
    """Three digits that count.

    >>> short(0.012345), short(12.345), short(1234.5)
    ('0.0123', '12.3', '1234')
    """
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{digits}f}"
