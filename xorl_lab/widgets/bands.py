"""The bands around lines of a figure; what the page draws is in ``widgets/src/data.js``."""

from collections.abc import Callable

import numpy as np

from xorl_lab.widgets.history import Floats, Table
from xorl_lab.widgets.panels import Line

Edges = tuple[Floats, Floats]
"""Lower and upper edge, (n,) each."""


def band(column: Callable[[str], Floats], line: Line) -> Edges | None:
    """The edges of a line's band; None if it has none.

    A band of one standard deviation does not leave the range of the values themselves.

    Args:
        column: (n,) values of a metric by its name.
        line: that the band belongs to.
    """
    low = finite(column(line.low)) if line.low else None
    high = finite(column(line.high)) if line.high else None
    if line.spread is None:
        return None if low is None or high is None else (low, high)
    mean, spread = finite(column(line.name)), finite(column(line.spread))
    bottom, top = mean - spread, mean + spread
    return (
        bottom if low is None else np.fmax(bottom, low),
        top if high is None else np.fmin(top, high),
    )


def widened(edges: Edges, table: Table) -> Edges:
    """The outer edges of each pair of rows that stands for many steps.

    Args:
        edges: of the table's rows.
        table: of a history, thinned.
    """
    pairs = int((table.steps < table.exact).sum()) // 2 * 2
    low, high = (edge.copy() for edge in edges)
    low[:pairs] = np.fmin.reduce(low[:pairs].reshape(-1, 2), axis=1).repeat(2)
    high[:pairs] = np.fmax.reduce(high[:pairs].reshape(-1, 2), axis=1).repeat(2)
    return low, high


def finite(values: Floats) -> Floats:
    """The values, NaN for those that are not finite."""
    return np.where(np.isfinite(values), values, np.nan)
