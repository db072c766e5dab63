"""Old and new rewards of recorded rollouts, side by side."""

import html
import math
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from xorl_lab.recipes.rewards import Score
from xorl_lab.types import Rollout

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

LARGEST = 5
"""Changes that a summary shows."""
EXCERPT = 300
"""Characters of a text that a summary shows."""
_STYLE = "white-space:pre-wrap;text-align:left;vertical-align:top"


@dataclass(frozen=True, slots=True)
class Scored:
    """One rollout with its recorded reward and another."""

    id: int
    """Of the rollout, in the store."""
    step: int
    """Number of the step."""
    group: int
    """Position of its group in the step."""
    sample: int
    """Position in its group."""
    prompt: str
    """The text that the model was shown."""
    old: Rollout
    """As it was recorded, without values per token."""
    new: Score
    """What the other function says."""
    advantage: float
    """The advantage that it would have had."""

    @property
    def change(self) -> float:
        """New reward minus old; NaN if one of them failed."""
        if self.old.reward is None or self.new.total is None:
            return math.nan
        return self.new.total - self.old.reward


class Rescored:
    """Recorded rollouts, scored again.

    Args:
        run: name of the run.
        scored: the rollouts in order, at least one.
    """

    def __init__(self, run: str, scored: list[Scored]) -> None:
        self.run = run
        """Name of the run."""
        self.scored = scored
        """The rollouts, in order."""

    def __len__(self) -> int:
        return len(self.scored)

    def frame(self) -> "pd.DataFrame":
        """One row per rollout, its id as the index.

        Beside ``old``, ``new`` and ``change``: advantages of both, ``sign_changed`` (it was pushed
        up and would be pushed down, or the like), the named parts of both as ``old:NAME`` and
        ``new:NAME``, and ``error`` where the new function failed.  NaN where a value is missing.
        """
        import pandas as pd  # noqa: PLC0415 (takes a second)

        rows = self.scored
        index = pd.Index([s.id for s in rows], name="id", dtype="int64")
        plain: dict[str, list[Any]] = {
            **{n: [getattr(s, n) for s in rows] for n in ("step", "group", "sample", "prompt")},
            "text": [s.old.text for s in rows],
            "old": _floats(s.old.reward for s in rows),
            "new": _floats(s.new.total for s in rows),
            "change": [s.change for s in rows],
            "old_advantage": [s.old.advantage for s in rows],
            "new_advantage": [s.advantage for s in rows],
            "sign_changed": [_sign(s.old.advantage) != _sign(s.advantage) for s in rows],
        }
        sources = {"old": [s.old.reward_parts for s in rows], "new": [s.new.parts for s in rows]}
        for which, parts in sources.items():
            for name in sorted({name for p in parts for name in p}):
                plain[f"{which}:{name}"] = _floats(p.get(name) for p in parts)
        plain["error"] = [s.new.error for s in rows]
        return pd.DataFrame(plain, index)

    @cached_property
    def summary(self) -> dict[str, float]:
        """Numbers over all rollouts.

        ``rollouts``, ``failed_old``, ``failed_new``; of those that both functions scored the means
        ``old``, ``new`` and ``change``, and ``rank_correlation`` (Spearman's, NaN if one of the
        two is constant); ``groups``, ``reordered`` (groups in which a pair of rollouts is ordered
        otherwise than before, ties included), ``sign_changed`` (advantages of another sign).
        """
        old = np.array(_floats(s.old.reward for s in self.scored))
        new = np.array(_floats(s.new.total for s in self.scored))
        both = ~(np.isnan(old) | np.isnan(new))
        signs = [_sign(s.old.advantage) != _sign(s.advantage) for s in self.scored]
        groups = [list(g) for _, g in groupby(self.scored, key=lambda s: (s.step, s.group))]
        some = bool(both.any())
        return {
            "rollouts": len(self.scored),
            "failed_old": int(np.isnan(old).sum()),
            "failed_new": int(np.isnan(new).sum()),
            "old": float(old[both].mean()) if some else math.nan,
            "new": float(new[both].mean()) if some else math.nan,
            "change": float((new - old)[both].mean()) if some else math.nan,
            "rank_correlation": rank_correlation(old[both], new[both]),
            "groups": len(groups),
            "reordered": sum(map(_reordered, groups)),
            "sign_changed": sum(signs),
        }

    def largest(self, count: int = LARGEST) -> list[Scored]:
        """The rollouts whose reward changed most, the largest change first."""
        changed = [s for s in self.scored if not math.isnan(s.change) and s.change]
        return sorted(changed, key=lambda s: (-abs(s.change), s.id))[:count]

    def __repr__(self) -> str:
        return "\n".join([f"Rescored({self.run!r}, {len(self)} rollouts)", *self._sentences()])

    def _repr_html_(self) -> str:
        lines = "".join(f"<li>{html.escape(line)}</li>" for line in self._sentences())
        heads = ("rollout", "step", "old", "new", "prompt", "completion")
        titles = "".join(f"<th>{name}</th>" for name in heads)
        rows = "".join(f"<tr>{_cells(s)}</tr>" for s in self.largest())
        table = f"<p>The largest changes:</p><table><tr>{titles}</tr>{rows}</table>" if rows else ""
        title = f"{len(self)} rollouts of {self.run}, scored again"
        return f"<b>{html.escape(title)}</b><ul>{lines}</ul>{table}"

    def _sentences(self) -> list[str]:
        facts = self.summary
        found = [
            f"mean reward {facts['old']:.4g} → {facts['new']:.4g}",
            f"rank correlation {facts['rank_correlation']:.3f}",
            f"{facts['reordered']} of {facts['groups']} groups are ordered otherwise",
            f"{facts['sign_changed']} of {facts['rollouts']} advantages change their sign",
        ]
        if facts["failed_old"] or facts["failed_new"]:
            found.append(
                f"{facts['failed_new']} failed, of the recorded rewards {facts['failed_old']}"
            )
        first = next((s.new.error for s in self.scored if s.new.error is not None), None)
        return found if first is None else [*found, f"the first failure: {first}"]


def rank_correlation(one: "NDArray[np.float64]", other: "NDArray[np.float64]") -> float:
    """Spearman's correlation: that of the ranks, ties sharing theirs; NaN if one is constant.

    >>> round(rank_correlation(np.array([1.0, 2, 3]), np.array([1.0, 3, 2])), 6)
    0.5
    """
    a, b = _ranks(one), _ranks(other)
    if len(a) == 0 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return math.nan
    return float(np.corrcoef(a, b)[0, 1])


def _ranks(values: "NDArray[np.float64]") -> "NDArray[np.float64]":
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[place]


def _reordered(group: list[Scored]) -> bool:
    """True if a pair that both functions scored is ordered otherwise."""
    there = [s for s in group if not math.isnan(s.change)]
    old = np.array([s.old.reward for s in there], float)
    new = np.array([s.new.total for s in there], float)
    before, after = (np.sign(v[:, None] - v[None, :]) for v in (old, new))
    return not np.array_equal(before, after)


def _cells(scored: Scored) -> str:
    numbers = (scored.id, scored.step, f"{scored.old.reward:.4g}", f"{scored.new.total:.4g}")
    texts = (_cut(scored.prompt), _cut(scored.old.text))
    return "".join(f"<td>{n}</td>" for n in numbers) + "".join(
        f'<td style="{_STYLE}">{html.escape(t)}</td>' for t in texts
    )


def _cut(text: str) -> str:
    return text if len(text) <= EXCERPT else f"{text[:EXCERPT]} …"


def _floats(values: Any) -> list[float]:  # noqa: ANN401 (any iterable of numbers and None)
    return [math.nan if value is None else float(value) for value in values]


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)
