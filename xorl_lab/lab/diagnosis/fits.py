"""The temperature, or the truncation, that turns evaluated logprobs into recorded ones."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from xorl_lab.lab.diagnosis.reevaluate import Values

LOWEST, HIGHEST = 0.01, 10.0
"""Temperatures that are looked at."""
POINTS, STEPS = 16, 26
"""So many are tried at first; the best one's neighbours are then narrowed down in so many steps."""
GOLDEN = (5**0.5 - 1) / 2
_PLAIN = (*(i / 10 for i in range(1, 10)), *(i / 20 for i in range(1, 20)), 0.99, 0.995, 0.999,
          *(i / 100 for i in range(1, 100)))  # fmt: skip
"""Shares that people choose for top-p, the rounder the earlier: preferred where they fit alike."""
_NEAR = 0.05
"""How far from what is possible they are looked for."""
_ROUNDING = 1e-6


def logprobs_at(
    logits: torch.Tensor, targets: Sequence[int], temperature: float
) -> NDArray[np.float64]:
    """(N, V) logits -> (N,) nats of the targets."""
    scaled = logits / temperature
    wanted = torch.tensor(targets, device=logits.device)[:, None]
    picked = scaled.gather(-1, wanted)[:, 0] - torch.logsumexp(scaled, -1)
    return picked.double().cpu().numpy()


def temperature(logits: torch.Tensor, targets: Sequence[int], recorded: Values) -> float:
    """The temperature at which the logprobs of the targets come nearest to those recorded.

    Args:
        logits: (N, V) float32.
        targets: N ids.
        recorded: (N,) nats; what is not finite is left out.

    Returns:
        It, to two decimals where that fits as well.
    """
    known = [int(i) for i in np.flatnonzero(np.isfinite(recorded))]
    chosen, wanted = logits[known], [targets[i] for i in known]

    def apart(value: float) -> float:
        return float(np.abs(logprobs_at(chosen, wanted, value) - recorded[known]).mean())

    grid = np.geomspace(LOWEST, HIGHEST, POINTS).tolist()
    index = int(np.argmin([apart(t) for t in grid]))
    best = _least(apart, grid[max(index - 1, 0)], grid[min(index + 1, POINTS - 1)])
    plain = round(best, 2)
    return plain if plain > 0 and apart(plain) <= 1.05 * apart(best) + 1e-5 else best


class Truncation:
    """The masses of the most likely tokens, by which truncated probabilities were divided.

    Args:
        logits: (N, V) float32, at temperature 1.
        targets: N ids.
        temperature: of the run.
    """

    def __init__(self, logits: torch.Tensor, targets: Sequence[int], temperature: float) -> None:
        chances = torch.softmax(logits / temperature, -1)
        sums = chances.sort(-1, descending=True).values.double().cumsum(-1)
        self._sums = sums.cpu().numpy()
        self.plain = logprobs_at(logits, targets, temperature)
        """(N,) nats, nothing cut off."""

    def of_p(self, p: float) -> Values:
        """(N,) nats where the fewest tokens that hold ``p`` were kept."""
        found = np.asarray([row.searchsorted(p - _ROUNDING) for row in self._sums])
        index = np.minimum(found, self._sums.shape[1] - 1)
        return self.plain - np.log(self._kept(index))

    def range_p(self, p: float) -> tuple[float, float]:
        """The shares that keep the very same tokens as ``p`` does."""
        index = np.asarray([row.searchsorted(p - _ROUNDING) for row in self._sums])
        index = np.minimum(index, self._sums.shape[1] - 1)
        below = np.where(index > 0, self._sums[np.arange(len(index)), index - 1], 0.0)
        return float(below.max()), min(float(self._kept(index).min()), 1.0)

    def of_k(self, k: int) -> Values:
        """(N,) nats where the ``k`` most likely tokens were kept."""
        index = np.full(len(self._sums), min(k, self._sums.shape[1]) - 1)
        return self.plain - np.log(self._kept(index))

    def best_p(self, recorded: Values) -> float | None:
        """The share that explains recorded logprobs best; None if all are below the plain ones."""
        ranks = self._ranks(recorded)
        if not len(ranks):
            return None
        # The token that completes a nucleus carries it over p: p lies between the two sums.
        rows, last = ranks[:, 0], ranks[:, 1]
        above = self._sums[rows, last]
        below = np.where(last > 0, self._sums[rows, np.maximum(last - 1, 0)], 0.0)
        low, high = sorted((float(np.quantile(below, 0.98)), float(np.quantile(above, 0.02))))
        plain = [p for p in _PLAIN if low - _NEAR <= p <= high + _NEAR]
        between = (low + high) / 2
        tries = [*plain, *(p for p in (between, *above, *((above + below) / 2)) if p < 1)]
        if not tries:
            return None
        return _best(tries, [_apart(self.of_p(float(p)), recorded) for p in tries])

    def best_k(self, recorded: Values) -> int | None:
        """The number of tokens that explains recorded logprobs best, as :meth:`best_p`."""
        ranks = self._ranks(recorded)
        if not len(ranks):
            return None
        tries = sorted({int(k) for k in ranks[:, 1] + 1 if k < self._sums.shape[1]})
        return int(_best(tries, [_apart(self.of_k(k), recorded) for k in tries])) if tries else None

    def _ranks(self, recorded: Values) -> NDArray[np.int64]:
        """(M, 2) of the tokens that were raised: which they are, and the last rank kept."""
        with np.errstate(invalid="ignore", over="ignore"):
            kept = np.exp(self.plain - recorded)
        raised = np.flatnonzero(np.isfinite(kept) & (kept < 1 - _ROUNDING))
        ranks = [int(np.abs(self._sums[i] - kept[i]).argmin()) for i in raised]
        return np.stack([raised, np.asarray(ranks, dtype=np.int64)], axis=1)

    def _kept(self, index: NDArray[np.int64]) -> Values:
        return np.minimum(np.take_along_axis(self._sums, index[:, None], 1)[:, 0], 1.0)


def _least(of: Callable[[float], float], low: float, high: float) -> float:
    """Where a function with one valley is least, by golden section of the logarithm."""
    span = high / low
    left, right = low * span ** (1 - GOLDEN), low * span**GOLDEN
    at_left, at_right = of(left), of(right)
    for _ in range(STEPS):
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = low * (high / low) ** (1 - GOLDEN)
            at_left = of(left)
        else:
            low, left, at_left = left, right, at_right
            right = low * (high / low) ** GOLDEN
            at_right = of(right)
    return left if at_left < at_right else right


def _apart(values: Values, recorded: Values) -> float:
    gaps = np.abs(values - recorded)
    return float(gaps[np.isfinite(gaps)].mean())


def _best(tries: Sequence[float], gaps: Sequence[float]) -> float:
    """The first of those that fit about as well as the best."""
    limit = 1.05 * min(gaps) + 1e-5
    return next(t for t, gap in zip(tries, gaps, strict=True) if gap <= limit)
