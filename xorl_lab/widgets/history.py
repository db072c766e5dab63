"""All numbers of one run that were read so far, and fewer of them where that is enough to draw."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Steps = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Table:
    """Some steps of a run with all of its metrics."""

    names: tuple[str, ...]
    """K metrics."""
    steps: Steps
    """(n,) ascending."""
    values: Floats
    """(n, K); NaN where a step has no value."""
    exact: int
    """From this step on every step is there; before it, two rows stand for many steps."""

    def column(self, name: str) -> Floats:
        """(n,) values of one metric, all NaN if there is no such metric."""
        if name not in self.names:
            return np.full(len(self.steps), np.nan)
        return self.values[:, self.names.index(name)]

    def wire(self) -> bytes:
        """(n,) int32 steps, then K times (n,) float32 values, little-endian."""
        values = np.ascontiguousarray(self.values.T, dtype="<f4")
        return self.steps.astype("<i4").tobytes() + values.tobytes()


class History:
    """Columns that grow at the end.

    >>> history = History()
    >>> history.extend(np.array([1, 2]), {"loss": np.array([0.5, 0.25])})
    >>> history.table().values.tolist()
    [[0.5], [0.25]]
    """

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._length = 0
        self._steps: Steps = np.empty(256, dtype=np.int64)
        self._values: Floats = np.empty((256, 0))

    def __len__(self) -> int:
        return self._length

    @property
    def names(self) -> tuple[str, ...]:
        """Metrics in the order in which they first came; only ever longer."""
        return tuple(self._names)

    @property
    def last(self) -> int:
        """The newest step, 0 if there is none."""
        return int(self._steps[self._length - 1]) if self._length else 0

    @property
    def steps(self) -> Steps:
        """(n,) ascending."""
        return self._steps[: self._length]

    def column(self, name: str) -> Floats:
        """(n,) values of one metric, all NaN if there is no such metric."""
        if name not in self._names:
            return np.full(self._length, np.nan)
        return self._values[: self._length, self._names[name]]

    def latest(self) -> dict[str, float]:
        """The newest value of each metric that has one."""
        found: dict[str, float] = {}
        for name in self._names:
            known = self.column(name)[~np.isnan(self.column(name))]
            if len(known):
                found[name] = float(known[-1])
        return found

    def extend(self, steps: Steps, columns: Mapping[str, Floats]) -> None:
        """Append steps.

        Args:
            steps: (n,) ascending, behind those that are there.
            columns: (n,) values by metric; metrics that are new begin with NaN.
        """
        for name in columns:
            self._names.setdefault(name, len(self._names))
        end = self._length + len(steps)
        self._reserve(end, len(self._names))
        fresh = slice(self._length, end)
        self._steps[fresh] = steps
        self._values[fresh] = np.nan
        for name, values in columns.items():
            self._values[fresh, self._names[name]] = values
        self._length = end

    def table(self, start: int = 0, stop: int | None = None) -> Table:
        """Rows ``start`` to ``stop``, all of them."""
        rows = slice(start, self._length if stop is None else stop)
        steps = self.steps[rows]
        first = int(steps[0]) if len(steps) else 0
        return Table(self.names, steps, self._values[: self._length][rows], exact=first)

    def thin(self, points: int, start: int = 0, stop: int | None = None, tail: int = 0) -> Table:
        """Rows ``start`` to ``stop`` in at most about ``points`` rows, no extreme lost.

        Runs of rows of equal length are replaced by two: least and greatest value of each metric,
        in the order in which they came.

        Args:
            points: number of rows; where there are no more, all stay.
            start: first row.
            stop: row behind the last; None means the end.
            tail: so many of the last rows stay as they are.
        """
        table = self.table(start, stop)
        count = len(table.steps)
        if count <= points:
            return table
        tail = min(tail, points // 2)
        size = -(-(count - tail) // max(1, (points - tail) // 2))
        whole = (count - tail) // size * size  # the rest joins the tail
        blocks = table.values[:whole].reshape(-1, size, len(table.names))
        low, high = np.fmin.reduce(blocks, axis=1), np.fmax.reduce(blocks, axis=1)
        low_at = np.where(np.isnan(blocks), np.inf, blocks).argmin(axis=1)
        high_at = np.where(np.isnan(blocks), -np.inf, blocks).argmax(axis=1)
        rising = low_at <= high_at
        pairs = np.stack([np.where(rising, low, high), np.where(rising, high, low)], axis=1)
        steps = table.steps[:whole].reshape(-1, size)
        places = steps[:, [0, size // 2]]
        return Table(
            table.names,
            np.concatenate([places.reshape(-1), table.steps[whole:]]),
            np.concatenate([pairs.reshape(-1, len(table.names)), table.values[whole:]]),
            exact=int(table.steps[whole]) if whole < count else self.last + 1,
        )

    def between(self, low: float, high: float, points: int) -> Table:
        """The steps from ``low`` to ``high`` and one more on each side, thinned if need be."""
        start, stop = np.searchsorted(self.steps, [low, high], side="left")
        start, stop = max(0, int(start) - 1), min(self._length, int(stop) + 2)
        return self.thin(points, start, stop)

    def clear(self) -> None:
        """Forget everything."""
        self.__init__()

    def _reserve(self, rows: int, columns: int) -> None:
        """Make room; what is there stays."""
        have = self._values.shape
        if rows <= have[0] and columns <= have[1]:
            return
        shape = (max(have[0], 1 << (rows - 1).bit_length()), max(have[1], columns))
        values = np.full(shape, np.nan)
        values[: self._length, : have[1]] = self._values[: self._length]
        steps: Steps = np.empty(shape[0], dtype=np.int64)
        steps[: self._length] = self.steps
        self._values, self._steps = values, steps
