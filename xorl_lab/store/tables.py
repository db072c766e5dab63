"""Answers as tables: rollouts with their texts, tags and notes, column by column."""

import json
import sqlite3
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from xorl_lab.errors import StoreError
from xorl_lab.store.notes import split
from xorl_lab.store.rollouts import SCALARS, TAGS, TEXTS, names_of
from xorl_lab.store.schema import SPAN

if TYPE_CHECKING:
    import pandas as pd

_WORDS = {"stop_reason", *TEXTS, "tags"}
_WHOLE = {"step", "group", "sample", "length", "prompt_length", "version"}
_WIDEST = 4
"""The most bytes of a character."""


def table(
    connection: sqlite3.Connection, run: str, ids: Sequence[int], chars: int | None = None
) -> dict[str, list[Any]]:
    """Scalars, texts, tags and notes of rollouts, column by column, in the order of the ids.

    Args:
        connection: in a transaction.
        run: id of the run.
        ids: of its rollouts, superseded ones too.
        chars: the most characters of each text; None = all.

    Raises:
        StoreError: the run has no such rollout.
    """
    chosen = json.dumps(ids)
    columns = {**SCALARS, **{n: cut_text(sql, chars) for n, sql in TEXTS.items()}, "tags": TAGS}
    rows = connection.execute(
        f"SELECT {', '.join(columns.values())} FROM json_each(?) j CROSS JOIN rollouts r ON r.id = "
        "j.value JOIN attempts a ON a.id = r.attempt AND a.run = ? JOIN groups g ON g.id = "
        "r.group_id JOIN texts t ON t.rollout = r.id LEFT JOIN notes n ON n.rollout = r.id "
        "ORDER BY j.key",
        (chosen, run),
    ).fetchall()
    if len(rows) != len(ids):
        groups_of(connection, run, ids)
        raise LookupError("rollouts lack a row of their own")
    found = {name: [row[i] for row in rows] for i, name in enumerate(columns)}
    found["failed"] = [bool(failed) for failed in found["failed"]]
    for name in TEXTS:
        found[name] = [text_of(text, chars) for text in found[name]]
    found["note"] = [note or "" for note in found["note"]]
    found["tags"] = [split(tags) for tags in found["tags"]]
    for name, number in names_of(connection, run).items():
        values = connection.execute(
            "SELECT m.value FROM json_each(?) j LEFT JOIN measures m ON m.key = j.value + ? "
            "ORDER BY j.key",
            (chosen, number * SPAN),
        )
        found[name] = [value for (value,) in values]
    return found


def frame(connection: sqlite3.Connection, run: str, ids: Sequence[int]) -> "pd.DataFrame":
    """The same with the ids as its index, and types that do not depend on what the rows hold."""
    import pandas as pd  # noqa: PLC0415 (takes a second)

    found = table(connection, run, ids)
    index = pd.Index(found.pop("id"), name="id", dtype="int64")
    return pd.DataFrame({n: pd.Series(v, index, _type(n)) for n, v in found.items()}, index)


def cut_text(column: str, chars: int | None) -> str:
    """An expression of SQL for :func:`text_of`.  Bytes, as SQLite's characters end at a NUL."""
    if chars is None:
        return column
    start = f"substr(CAST({column} AS BLOB), 1, {_WIDEST * int(chars)})"  # NULL, if it is empty
    return f"iif({column} IS NULL, NULL, coalesce({start}, x''))"


def text_of(value: str | bytes | None, chars: int | None) -> str | None:
    """The first characters of a text that was selected by :func:`cut_text`."""
    if not isinstance(value, bytes):
        return value
    return value.decode("utf-8", "ignore")[:chars]


def _type(name: str) -> str:
    if name == "failed":
        return "bool"
    return "object" if name in _WORDS else "int64" if name in _WHOLE else "float64"


def groups_of(connection: sqlite3.Connection, run: str, ids: Sequence[int]) -> dict[int, int]:
    """The group of each rollout.

    Raises:
        StoreError: the run has no such rollout.
    """
    rows = connection.execute(
        "SELECT r.id, r.group_id FROM json_each(?) j CROSS JOIN rollouts r ON r.id = j.value "
        "JOIN attempts a ON a.id = r.attempt WHERE a.run = ?",
        (json.dumps(ids), run),
    )
    found: dict[int, int] = dict(rows.fetchall())
    for number in ids:
        if number not in found:
            raise StoreError(f"the run has no rollout {number}: take ids from ids()")
    return found
