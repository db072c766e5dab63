"""Why trainer and sampler disagree: what was found, and the evidence for it."""

import html
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("hypothesis", "value", "side", "mean", "max", "share", "tokens", "note")
"""Of the table of evidence."""
_HEADS = ("hypothesis", "best value", "in the", "mean gap", "max gap", "explained", "tokens", "")


@dataclass(frozen=True, slots=True)
class Evidence:
    """One hypothesis about the gap, held against the record."""

    hypothesis: str
    """What may have been different, such as ``temperature``."""
    value: str = ""
    """The value of it that comes nearest, such as ``0.7``."""
    side: str = ""
    """``sampler`` or ``trainer``: whose numbers it is to explain."""
    mean: float = math.nan
    """Nats: mean |recorded - evaluated under the hypothesis|; NaN where it was not evaluated."""
    max: float = math.nan
    """Nats: the largest."""
    share: float = math.nan
    """1 - mean / (the same without the hypothesis): 1 = all is explained, below 0 = it is worse."""
    tokens: int = 0
    """Tokens that were compared."""
    note: str = ""
    """Why it was not evaluated, or what the numbers mean here."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why the logprobs of trainer and sampler differ, as far as evaluating them again tells."""

    cause: str
    """``healthy``; what explains the gap, such as ``temperature``, or two of them that explain it
    equally well, ``top-k or temperature``; ``unexplained``; ``not measured``."""
    sentence: str
    """The cause in words, and what to do about it."""
    step: int | None
    """The step whose rollouts were looked at."""
    mean: float
    """Nats: mean |sampler's - trainer's logprob| of these rollouts."""
    max: float
    """Nats: the largest."""
    tokens: int
    """Tokens that have both."""
    evidence: tuple[Evidence, ...] = ()
    """The hypotheses, those that explain most first."""

    @property
    def healthy(self) -> bool:
        """True if there is nothing to explain."""
        return self.cause == "healthy"

    def frame(self) -> "pd.DataFrame":
        """The evidence, one row per hypothesis."""
        import pandas as pd  # noqa: PLC0415 (takes a second)

        return pd.DataFrame([asdict(e) for e in self.evidence], columns=list(COLUMNS))

    def __repr__(self) -> str:
        lines = [f"{self.cause}: {self.sentence}"]
        if self.evidence:
            rows = [_HEADS, *(_cells(e) for e in self.evidence)]
            wide = [max(len(row[i]) for row in rows) for i in range(len(_HEADS))]
            lines += [
                "  ".join(c.ljust(w) for c, w in zip(row, wide, strict=True)).rstrip()
                for row in rows
            ]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        text = f"<p><b>{html.escape(self.cause)}</b>: {html.escape(self.sentence)}</p>"
        if not self.evidence:
            return text
        heads = "".join(f"<th>{html.escape(h)}</th>" for h in _HEADS)
        rows = "".join(
            f"<tr>{''.join(f'<td>{html.escape(c)}</td>' for c in _cells(e))}</tr>"
            for e in self.evidence
        )
        return f"{text}<table><tr>{heads}</tr>{rows}</table>"


def nats(value: float) -> str:
    """A gap for people to read.

    >>> nats(0.03456), nats(2e-06), nats(math.nan)
    ('0.035', '2e-06', '')
    """
    return "" if math.isnan(value) else f"{value:.2g}"


def percent(share: float) -> str:
    """A share for people to read.

    >>> percent(0.996), percent(math.nan)
    ('99.6 %', '')
    """
    return "" if math.isnan(share) else f"{100 * share:.1f} %"


def _cells(e: Evidence) -> tuple[str, ...]:
    tokens = str(e.tokens) if e.tokens else ""
    return (
        e.hypothesis, e.value, e.side, nats(e.mean), nats(e.max), percent(e.share), tokens, e.note
    )  # fmt: skip
