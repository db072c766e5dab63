"""Tables of metrics from elsewhere."""

import sqlite3
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from xorl_lab.errors import StoreError
from xorl_lab.store.rows import layout_id, to_json

if TYPE_CHECKING:
    import pandas as pd


def checked(frame: "pd.DataFrame") -> tuple[NDArray[np.int64], dict[str, NDArray[np.float64]]]:
    """Steps and columns of a table of metrics.

    Raises:
        StoreError: a column is not numeric, two have one name, or steps do not grow.
    """
    steps: Any = range(1, len(frame) + 1)
    columns: dict[str, NDArray[np.float64]] = {}
    if frame.index.name == "step":
        steps = frame.index
    for i, name in enumerate(map(str, frame.columns)):
        if name in columns:
            raise StoreError(f"two columns are named {name!r}: rename one")
        if name == "step":
            steps = frame.iloc[:, i]
        else:
            columns[name] = _numeric(frame.iloc[:, i], name)
    return _growing(steps), columns


def insert(
    connection: sqlite3.Connection,
    attempt: int,
    steps: NDArray[np.int64],
    columns: Mapping[str, NDArray[np.float64]],
) -> None:
    """Write the rows of a table as steps; a NaN is a value that the step lacks."""
    now = time.time()
    names = list(columns)
    table = np.column_stack(list(columns.values())) if names else np.zeros((len(steps), 0))
    there = ~np.isnan(table)
    layouts: dict[bytes, int] = {}  # by the columns that a row has
    rows: list[tuple[int, int, float, int, bytes]] = []
    for step, values, own in zip(steps.tolist(), table, there, strict=True):
        if (layout := layouts.get(own.tobytes())) is None:
            has = [name for name, has in zip(names, own.tolist(), strict=True) if has]
            layout = layout_id(connection, to_json(has))
            layouts[own.tobytes()] = layout
        rows.append((attempt, step, now, layout, values[own].astype("<f8").tobytes()))
    connection.executemany("INSERT INTO steps VALUES (?, ?, ?, ?, ?)", rows)


def _numeric(column: "pd.Series", name: str) -> NDArray[np.float64]:
    if column.dtype.kind not in "biuf":
        raise StoreError(f"column {name!r} holds {column.dtype}: convert it to numbers, or drop it")
    return column.to_numpy(np.float64, na_value=np.nan)


def _growing(steps: Any) -> NDArray[np.int64]:  # noqa: ANN401 (a range, an index or a column)
    try:
        numbers = np.asarray(steps, np.float64)
    except (TypeError, ValueError) as error:
        raise StoreError(f"steps are not numbers ({error}): pass whole numbers from 1") from error
    if not (np.isfinite(numbers) & (numbers == np.floor(numbers)) & (numbers >= 1)).all():
        raise StoreError("steps are not all whole numbers from 1: renumber them, or drop `step`")
    if (np.diff(numbers) <= 0).any():
        first = int(np.flatnonzero(np.diff(numbers) <= 0)[0])
        raise StoreError(
            f"step {numbers[first]:.0f} is followed by {numbers[first + 1]:.0f}: sort the rows by "
            "step and keep one of each"
        )
    return numbers.astype(np.int64)
