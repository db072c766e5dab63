"""Questions about the rollouts of a run, answered by SQL on narrow rows.

The rows of one run are found by attempt and step; parts of rewards and means of streams are joined
by name only where a question mentions them, and so are texts, tags and notes.
"""

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xorl_lab.errors import StoreError
from xorl_lab.store import search
from xorl_lab.store.notes import one_tag
from xorl_lab.store.rows import clean
from xorl_lab.store.schema import SPAN

Condition = tuple[str, str, Any]
"""Column, operator, value: ``("reward", ">", 0.5)``, ``("text", "contains", "because")``."""

SCALARS: Mapping[str, str] = {
    "id": "r.id",
    "step": "r.step",
    "group": "r.position",
    "sample": "r.sample",
    "reward": "r.reward",
    "advantage": "r.advantage",
    "length": "r.length",
    "prompt_length": "r.prompt_length",
    "mean:logprobs": "r.logprob",
    "version": "r.version",
    "stop_reason": "r.stop_reason",
    "failed": "(r.scored = 0)",
}
"""Columns that every rollout has."""
TEXTS: Mapping[str, str] = {
    "text": "t.text",
    "error": "t.error",
    "prompt": "g.prompt",
    "note": "nullif(n.note, '')",
}
"""Columns of text, which can be filtered by but not sorted by."""
TAGS = "nullif(n.tags, '')"
"""The tags, with a space between them."""
_COMPARISONS = ("=", "!=", "<", "<=", ">", ">=")
OPERATORS = (*_COMPARISONS, "in", "contains", "has")
"""What may stand in the middle of a condition."""


@dataclass(frozen=True, slots=True)
class Question:
    """Which rollouts of a run, in which order."""

    run: str
    """Id of the run."""
    where: Sequence[Condition] = ()
    """All of them must hold."""
    order_by: str = "id"
    """A scalar; ``id`` is the order in which they were recorded."""
    descending: bool = False
    """The greatest first.  What lacks the scalar comes last either way."""
    limit: int | None = None
    """The most rows; None = all."""
    offset: int = 0
    """Rows to leave out at the beginning."""


class _Sql:
    """Pieces of one SELECT, joined as columns are mentioned."""

    def __init__(self, run: str, names: Mapping[str, int]) -> None:
        self._names = names
        self._run = run
        self._joins: dict[str, str] = {}
        self.conditions = ["a.run = ?"]
        self.values: list[object] = []

    def scalar(self, name: str) -> str:
        """The expression of a scalar."""
        if name in SCALARS:
            return SCALARS[name]
        if name not in self._names:
            there = ", ".join([*SCALARS, *self._names])
            raise StoreError(f"there is no scalar {name!r}: choose from {there}")
        number = self._names[name]
        alias = f"m{number}"
        self._joins[alias] = f" LEFT JOIN measures {alias} ON {alias}.key = r.id + {number * SPAN}"
        return f"{alias}.value"

    def add(self, condition: Condition) -> None:
        """Let one more condition hold."""
        name, operator, value = parsed(condition)
        if (name == "tags") != (operator == "has") and not (
            name == "tags" and (operator == "contains" or value is None)
        ):
            raise StoreError(
                f'a condition is {condition!r}: ask ("tags", "has", "a-tag"), '
                '("tags", "contains", "part") or ("tags", "=", None)'
            )
        if name == "prompt":  # which all rollouts of a group share
            test, values = _test("q.prompt", operator, value)
            self.conditions.append(
                "r.group_id IN (SELECT q.id FROM attempts b JOIN groups q ON q.attempt = b.id "
                f"WHERE b.run = ? AND {test})"
            )
            self.values.append(self._run)
        else:
            test, values = _test(self._column(name), operator, value)
            self.conditions.append(test)
        self.values += values

    def _column(self, name: str) -> str:
        column = TAGS if name == "tags" else TEXTS.get(name)
        if column is None:
            return self.scalar(name)
        if "n." in column:
            self._joins["notes"] = " LEFT JOIN notes n ON n.rollout = r.id"
        else:
            self._joins["texts"] = " JOIN texts t ON t.rollout = r.id"
        return column

    def select(self, what: str, tail: str, values: Sequence[object]) -> tuple[str, list[object]]:
        """The statement and its values."""
        source = "FROM attempts a CROSS JOIN rollouts r ON r.attempt = a.id AND r.step <= a.upto"
        source += "".join(self._joins.values())
        sql = f"SELECT {what} {source} WHERE {' AND '.join(self.conditions)}{tail}"
        return sql, [self._run, *self.values, *values]


def parsed(condition: Condition) -> Condition:
    """The three parts of a condition, of which the operator exists.

    Raises:
        StoreError: it has other parts.
    """
    try:
        name, operator, value = condition
    except (TypeError, ValueError):
        raise StoreError(f"a condition is {condition!r}: pass (column, operator, value)") from None
    if operator not in OPERATORS:
        raise StoreError(f"operator is {operator!r}: choose from {', '.join(OPERATORS)}")
    return name, operator, value


def names_of(connection: sqlite3.Connection, run: str) -> dict[str, int]:
    """Numbers of the parts of rewards and means of streams of a run, by name."""
    rows = connection.execute("SELECT name, id FROM names WHERE run = ? ORDER BY id", (run,))
    return dict(rows.fetchall())


def matching(connection: sqlite3.Connection, question: Question) -> NDArray[np.int64]:
    """(n,) ids of the rollouts asked for, in order.

    Raises:
        StoreError: a column or operator does not exist.
    """
    sql = _built(connection, question)
    key = sql.scalar(question.order_by)
    direction = "DESC" if question.descending else "ASC"
    tail = f" ORDER BY {key} {direction} NULLS LAST, r.id LIMIT ? OFFSET ?"
    limit = -1 if question.limit is None else question.limit
    statement, values = sql.select("r.id AS id", tail, [limit, question.offset])
    (digits,) = connection.execute(f"SELECT group_concat(id) FROM ({statement})", values).fetchone()
    return whole_numbers(digits)


def whole_numbers(digits: str | None) -> NDArray[np.int64]:
    """(n,) whole numbers of a list that ``group_concat`` made; None where there were no rows.

    A list comes in half the time of as many rows.
    """
    return np.fromstring(digits, np.int64, sep=",") if digits else np.zeros(0, np.int64)


def count(connection: sqlite3.Connection, question: Question) -> int:
    """How many rollouts match.

    Raises:
        StoreError: a column or operator does not exist.
    """
    statement, values = _built(connection, question).select("count(*)", "", [])
    return int(connection.execute(statement, values).fetchone()[0])


def _built(connection: sqlite3.Connection, question: Question) -> _Sql:
    sql = _Sql(question.run, names_of(connection, question.run))
    for condition in question.where:
        sql.add(condition)
    return sql


def _test(column: str, operator: str, value: Any) -> tuple[str, list[object]]:  # noqa: ANN401
    """A condition in SQL, and its values."""
    if operator == "in":
        chosen = [_plain(v) for v in value]
        return f"{column} IN ({', '.join('?' * len(chosen))})", chosen
    if operator == "contains":
        test, words = search.condition(column, clean(str(value)))
        return test, [words]
    if operator == "has":
        return f"instr(' ' || {column} || ' ', ?) > 0", [f" {one_tag(value)} "]
    if value is None:
        return f"{column} {'IS' if operator == '=' else 'IS NOT'} NULL", []
    return f"{column} {operator} ?", [_plain(value)]


def _plain(value: Any) -> object:  # noqa: ANN401 (numpy numbers too)
    plain = value.item() if hasattr(value, "item") else value
    if not isinstance(plain, str | int | float):
        raise StoreError(f"a condition compares with {value!r}: pass a number or text")
    return clean(plain) if isinstance(plain, str) else plain
