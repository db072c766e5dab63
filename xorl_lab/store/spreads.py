"""Groups of rollouts at a glance: the prompt, and how far the rewards on it spread."""

import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from xorl_lab.errors import StoreError
from xorl_lab.store.rollouts import Condition, Question, matching, parsed, whole_numbers
from xorl_lab.store.tables import cut_text, text_of

if TYPE_CHECKING:
    import pandas as pd

_COMPARISONS: Mapping[str, Callable[[Any, Any], NDArray[np.bool_]]] = {
    "=": np.equal,
    "!=": np.not_equal,
    "<": np.less,
    "<=": np.less_equal,
    ">": np.greater,
    ">=": np.greater_equal,
}
OWN = ("n", "matches", "reward:mean", "reward:std", "reward:min", "reward:max", "spread",
       "length:mean")  # fmt: skip
"""Columns that only groups have: conditions on them choose groups, others choose rollouts."""
ORDERS = ("step", "group", *OWN, "failed")
"""Columns by which groups can be sorted."""


def group_table(
    connection: sqlite3.Connection, question: Question, chars: int | None
) -> "pd.DataFrame":
    """One row for each group that has a rollout which is asked for.

    Args:
        connection: in a transaction.
        question: of rollouts and groups; ``limit`` and ``offset`` are ignored.
        chars: the most characters of a prompt; None = all.

    Raises:
        StoreError: a column or operator does not exist.
    """
    import pandas as pd  # noqa: PLC0415 (takes a second)

    if question.order_by not in ORDERS:
        raise StoreError(f"order_by is {question.order_by!r}: choose from {', '.join(ORDERS)}")
    conditions = [parsed(c) for c in question.where]
    rest = [c for c in conditions if c[0] not in OWN]
    rows, rewards = _rows(connection, question.run)
    matched = np.ones(len(rows), np.bool_)
    if rest:
        asked = replace(question, where=rest, order_by="id", descending=False)
        matched = np.isin(rows[:, 1], matching(connection, asked), assume_unique=True)
    own, starts = _columns(rows, rewards, matched)
    places = _places(connection, question.run)
    places = places[np.searchsorted(places[:, 0], rows[starts, 0])]
    columns = {"step": places[:, 1], "group": places[:, 2], **own}
    kept = columns["matches"] > 0
    for condition in conditions:
        if condition[0] in OWN:
            kept &= _holds(columns, condition)
    chosen = np.flatnonzero(kept)
    key = columns[question.order_by][chosen].astype(np.float64)
    at = chosen[np.argsort(-key if question.descending else key, kind="stable")]
    groups: list[int] = rows[starts[at], 0].tolist()
    ids, ends = rows[:, 1].tolist(), (starts + columns["n"]).tolist()
    members = [ids[starts[i] : ends[i]] for i in at.tolist()]
    index = pd.Index(groups, name="id", dtype="int64")
    table: dict[str, Any] = {name: values[at] for name, values in columns.items()}
    table["prompt"] = pd.Series(_prompts(connection, groups, chars), index, "object")
    table["ids"] = pd.Series(members, index, "object")
    return pd.DataFrame(table, index)


def _rows(
    connection: sqlite3.Connection, run: str
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Per rollout: (n, 4) group, id, length, scored; and (n,) rewards or NaN."""
    source = "FROM attempts a CROSS JOIN rollouts r ON r.attempt = a.id AND r.step <= a.upto"
    rows = _whole(connection, ("r.group_id", "r.id", "r.length", "r.scored"), source, run)
    found = connection.execute(  # an order in which they lie in the file, and also that of ids
        f"SELECT r.reward {source} WHERE a.run = ? ORDER BY a.number, r.step, r.id", (run,)
    ).fetchall()
    rewards = np.array([reward for (reward,) in found], np.float64)
    return rows[np.argsort(rows[:, 1])], rewards


def _places(connection: sqlite3.Connection, run: str) -> NDArray[np.int64]:
    """Per group: (g, 3) id, step, position; in the order of ids."""
    source = "FROM attempts a CROSS JOIN groups g ON g.attempt = a.id AND g.step <= a.upto"
    places = _whole(connection, ("g.id", "g.step", "g.position"), source, run)
    return places[np.argsort(places[:, 0])]


def _whole(
    connection: sqlite3.Connection, names: Sequence[str], source: str, run: str
) -> NDArray[np.int64]:
    lists = ", ".join(f"group_concat({name})" for name in names)
    (row,) = connection.execute(f"SELECT {lists} {source} WHERE a.run = ?", (run,)).fetchall()
    return np.column_stack([whole_numbers(digits) for digits in row])


def _columns(
    rows: NDArray[np.int64], rewards: NDArray[np.float64], matched: NDArray[np.bool_]
) -> tuple[dict[str, NDArray[Any]], NDArray[np.int64]]:
    """Columns by name, and where each group begins.  Rollouts of a group lie side by side."""
    starts = np.flatnonzero(np.diff(rows[:, 0], prepend=-1))
    n = np.diff(starts, append=len(rows))
    if not len(starts):
        empty = dict.fromkeys(("n", "matches", "failed"), np.zeros(0, np.int64))
        return {**dict.fromkeys((*OWN, "failed"), np.zeros(0)), **empty}, starts
    there = ~np.isnan(rewards)
    known = np.add.reduceat(there, starts, dtype=np.int64)
    least = np.minimum.reduceat(np.where(there, rewards, np.inf), starts)
    most = np.maximum.reduceat(np.where(there, rewards, -np.inf), starts)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):  # none, or infinite ones
        mean = np.add.reduceat(np.where(there, rewards, 0), starts) / known
        away = np.where(there, rewards - np.repeat(mean, n), 0)
        std = np.sqrt(np.add.reduceat(away * away, starts) / known)
        spread = most - least
    for values in (least, most, spread):
        values[known == 0] = np.nan
    columns = {
        "n": n,
        "matches": np.add.reduceat(matched, starts, dtype=np.int64),
        "reward:mean": mean,
        "reward:std": std,
        "reward:min": least,
        "reward:max": most,
        "spread": spread,
        "failed": n - np.add.reduceat(rows[:, 3], starts),
        "length:mean": np.add.reduceat(rows[:, 2], starts) / n,
    }
    return columns, starts


def _holds(columns: Mapping[str, NDArray[Any]], condition: Condition) -> NDArray[np.bool_]:
    name, operator, value = condition
    if operator not in _COMPARISONS or not isinstance(value, int | float | np.number | None):
        signs = " ".join(_COMPARISONS)
        raise StoreError(f"a condition is {condition!r}: {name} is compared by {signs} to a number")
    if value is None:
        missing = np.isnan(columns[name])
        return missing if operator == "=" else ~missing
    return _COMPARISONS[operator](columns[name], value) & ~np.isnan(columns[name])


def _prompts(
    connection: sqlite3.Connection, groups: Sequence[int], chars: int | None
) -> list[str | None]:
    rows = connection.execute(
        f"SELECT {cut_text('g.prompt', chars)} FROM json_each(?) j JOIN groups g ON g.id = j.value "
        "ORDER BY j.key",
        (json.dumps(groups),),
    )
    return [text_of(text, chars) for (text,) in rows]
