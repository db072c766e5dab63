"""From the evidence to a cause, or to none."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from xorl_lab.lab.diagnosis.causes import DTYPE
from xorl_lab.lab.diagnosis.recorded import Gap
from xorl_lab.lab.diagnosis.reevaluate import Values

BARS = {"float32": 1e-4}
ROUNDING = 0.08
"""Nats: the mean gap that is healthy, by precision, and in those that are not named (DESIGN.md)."""
ALIKE = 1.25
"""Two hypotheses explain a gap equally well if what they leave differs by less than this factor."""
LEAST = 8
"""Tokens below which causes are not told apart."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A hypothesis, held against the record of one side."""

    cause: str
    """Its name."""
    value: str
    """The value that was tried."""
    side: str
    """``sampler`` or ``trainer``."""
    left: Gap
    """Between the record and the evaluation under the hypothesis."""
    share: float
    """1 - what is left over what was there before."""
    note: str = ""
    """What the numbers mean here."""
    certain: bool | None = None
    """Whether it explains the gap, where that is not for the numbers to say."""
    toward: float = field(default=0.0, compare=False)
    """Correlation of the gap with what the hypothesis changes."""


def bar_of(dtype: str) -> float:
    """Nats: up to which mean gap trainer and sampler agree.

    >>> bar_of("float32"), bar_of("bfloat16")
    (0.0001, 0.08)
    """
    return BARS.get(dtype, ROUNDING)


def outcome(
    cause: str, value: str, side: str, recorded: Values, plain: Values, tried: Values
) -> Outcome:
    """Hold a hypothesis against the record.

    Args:
        cause: its name.
        value: that was tried.
        side: whose numbers are to be explained.
        recorded: (N,) nats, of that side.
        plain: (N,) nats, evaluated without the hypothesis.
        tried: (N,) nats, evaluated with it; NaN where that cannot be told.
    """
    there = np.where(np.isfinite(tried), recorded, np.nan)
    left, before = Gap.between(there, tried), Gap.between(there, plain)
    share = 1 - left.mean / before.mean if left.tokens and before.mean > 0 else float("nan")
    return Outcome(
        cause, value, side, left, share, toward=_correlation(there - plain, tried - plain)
    )


def explains(found: Outcome, bar: float) -> bool:
    """True if next to nothing is left, or no more than rounding leaves of a wide gap.

    Args:
        found: the hypothesis.
        bar: nats, up to which trainer and sampler agree.
    """
    if found.certain is not None:
        return found.certain
    if not found.left.tokens:
        return False
    if found.cause == DTYPE:  # two kernels of one precision round differently
        return found.share >= 0.5
    exact = found.left.mean <= bar and found.share >= 0.5
    return exact or (found.share >= 0.8 and found.left.mean <= ROUNDING)


def best(outcomes: Sequence[Outcome], bar: float) -> list[Outcome]:
    """The hypotheses about one side that explain it, of each cause the best: equally well all.

    Args:
        outcomes: of that side.
        bar: nats, up to which trainer and sampler agree.
    """
    good = sorted((o for o in outcomes if explains(o, bar)), key=lambda o: o.left.mean)
    if not good:
        return []
    limit = max(ALIKE * good[0].left.mean, BARS["float32"])
    found: dict[str, Outcome] = {}
    for each in good:
        if each.left.mean <= limit:
            found.setdefault(each.cause, each)
    return list(found.values())


def by_cause(outcomes: Sequence[Outcome]) -> dict[str, Outcome]:
    """Of each cause the outcome that explains most."""
    found: dict[str, Outcome] = {}
    for each in outcomes:
        known = found.get(each.cause)
        if known is None or _rank(each) > _rank(known):
            found[each.cause] = each
    return found


def _rank(found: Outcome) -> float:
    return found.share if np.isfinite(found.share) else -np.inf


def _correlation(one: Values, other: Values) -> float:
    both = np.isfinite(one) & np.isfinite(other)
    if both.sum() < LEAST or not one[both].std() or not other[both].std():
        return 0.0
    return float(np.corrcoef(one[both], other[both])[0, 1])
