"""Questions about the rollouts of a run, answered by SQL on narrow rows.

The rows of one run are found by attempt and step; parts of rewards and means of streams are joined
by name only where a question mentions them; texts are read for the rows of the answer alone.
"""

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xorl_lab.errors import StoreError
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
TEXTS: Mapping[str, str] = {"text": "t.text", "error": "t.error", "prompt": "g.prompt"}
"""Columns of text, which can be filtered by but not sorted by."""
_COMPARISONS = ("=", "!=", "<", "<=", ">", ">=")
OPERATORS = (*_COMPARISONS, "in", "contains")
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
        self._wide = ""
        self.conditions = ["a.run = ?"]
        self.values: list[object] = []

    def scalar(self, name: str) -> str:
        """The expression of a scalar."""
        if name in SCALARS:
            return SCALARS[name]
        if name not in self._names:
            there = ", ".join([*SCALARS, *self._names])
            raise StoreError(f"there is no scalar {name!r}: choose from {there}")
        if name not in self._joins:
            alias = f"m{len(self._joins)}"
            self._joins[name] = (
                f" LEFT JOIN measures {alias} ON {alias}.key = r.id + {self._names[name] * SPAN}"
            )
        return f"m{list(self._joins).index(name)}.value"

    def add(self, condition: Condition) -> None:
        """Let one more condition hold."""
        try:
            name, operator, value = condition
        except (TypeError, ValueError):
            raise StoreError(
                f"a condition is {condition!r}: pass (column, operator, value)"
            ) from None
        if operator not in OPERATORS:
            raise StoreError(f"operator is {operator!r}: choose from {', '.join(OPERATORS)}")
        column = self._column(name)
        if operator == "in":
            chosen = [_plain(v) for v in value]
            self.conditions.append(f"{column} IN ({', '.join('?' * len(chosen))})")
            self.values += chosen
        elif operator == "contains":
            self.conditions.append(f"{column} LIKE ? ESCAPE '\\'")
            self.values.append(_pattern(clean(str(value))))
        elif value is None:
            self.conditions.append(f"{column} {'IS' if operator == '=' else 'IS NOT'} NULL")
        else:
            self.conditions.append(f"{column} {operator} ?")
            self.values.append(_plain(value))

    def _column(self, name: str) -> str:
        if name in TEXTS:
            source = TEXTS[name][0]
            if source not in self._wide:
                self._wide += source
            return TEXTS[name]
        return self.scalar(name)

    def select(self, what: str, tail: str, values: Sequence[object]) -> tuple[str, list[object]]:
        """The statement and its values."""
        source = "FROM attempts a CROSS JOIN rollouts r ON r.attempt = a.id AND r.step <= a.upto"
        if "g" in self._wide:
            source += " JOIN groups g ON g.id = r.group_id"
        if "t" in self._wide:
            source += " JOIN texts t ON t.rollout = r.id"
        source += "".join(self._joins.values())
        sql = f"SELECT {what} {source} WHERE {' AND '.join(self.conditions)}{tail}"
        return sql, [self._run, *self.values, *values]


def names_of(connection: sqlite3.Connection, run: str) -> dict[str, int]:
    """Numbers of the parts of rewards and means of streams of a run, by name."""
    rows = connection.execute("SELECT name, id FROM names WHERE run = ? ORDER BY id", (run,))
    return dict(rows.fetchall())


def matching(connection: sqlite3.Connection, question: Question) -> list[int]:
    """Ids of the rollouts asked for, in order.

    Raises:
        StoreError: a column or operator does not exist.
    """
    sql = _built(connection, question)
    key = sql.scalar(question.order_by)
    direction = "DESC" if question.descending else "ASC"
    tail = f" ORDER BY {key} {direction} NULLS LAST, r.id LIMIT ? OFFSET ?"
    limit = -1 if question.limit is None else question.limit
    statement, values = sql.select("r.id", tail, [limit, question.offset])
    return [row[0] for row in connection.execute(statement, values)]


def count(connection: sqlite3.Connection, question: Question) -> int:
    """How many rollouts match.

    Raises:
        StoreError: a column or operator does not exist.
    """
    statement, values = _built(connection, question).select("count(*)", "", [])
    return int(connection.execute(statement, values).fetchone()[0])


def table(connection: sqlite3.Connection, run: str, ids: Sequence[int]) -> dict[str, list[Any]]:
    """Scalars and texts of rollouts, column by column, in the order of the ids."""
    chosen = json.dumps(ids)
    columns = {**SCALARS, **TEXTS}
    rows = connection.execute(
        f"SELECT {', '.join(columns.values())} FROM json_each(?) j JOIN rollouts r ON r.id = "
        "j.value JOIN groups g ON g.id = r.group_id JOIN texts t ON t.rollout = r.id "
        "ORDER BY j.key",
        (chosen,),
    ).fetchall()
    if len(rows) != len(ids):
        raise LookupError(f"{len(ids) - len(rows)} rollouts lack a row of their own")
    found = {name: [row[i] for row in rows] for i, name in enumerate(columns)}
    for name, number in names_of(connection, run).items():
        values = connection.execute(
            "SELECT m.value FROM json_each(?) j LEFT JOIN measures m ON m.key = j.value + ? "
            "ORDER BY j.key",
            (chosen, number * SPAN),
        )
        found[name] = [value for (value,) in values]
    return found


def _built(connection: sqlite3.Connection, question: Question) -> _Sql:
    sql = _Sql(question.run, names_of(connection, question.run))
    for condition in question.where:
        sql.add(condition)
    return sql


def _plain(value: Any) -> object:  # noqa: ANN401 (numpy numbers too)
    plain = value.item() if hasattr(value, "item") else value
    if not isinstance(plain, str | int | float):
        raise StoreError(f"a condition compares with {value!r}: pass a number or text")
    return clean(plain) if isinstance(plain, str) else plain


def _pattern(text: str) -> str:
    for sign in ("\\", "%", "_"):
        text = text.replace(sign, "\\" + sign)
    return f"%{text}%"
