"""Rows of runs and their attempts: begin, find, resume, delete."""

import json
import sqlite3
import time
from dataclasses import asdict, replace
from pathlib import Path

from xorl_lab.errors import StoreError
from xorl_lab.store.records import Parent, RunInfo
from xorl_lab.store.rows import clean, to_json
from xorl_lab.store.schema import SPAN

_SELECT = "SELECT id, name, kind, model, created, settings, total, parent FROM runs"


def begin(connection: sqlite3.Connection, info: RunInfo, state: str) -> tuple[RunInfo, int]:
    """Enter a run with its first attempt.

    Returns:
        The run under a name that was free, and the number of the attempt's row.
    """
    info = replace(
        info,
        name=_free_name(connection, clean(info.name)),
        kind=clean(info.kind),
        model=clean(info.model),
    )
    parent = None if info.parent is None else to_json(asdict(info.parent))
    connection.execute(
        "INSERT INTO runs (id, name, kind, model, created, settings, total, parent, state, updated)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (info.id, info.name, info.kind, info.model, info.created, to_json(info.settings),
         info.total, parent, state, info.created),
    )  # fmt: skip
    return info, _insert_attempt(connection, info.id, 1, 0)


def again(connection: sqlite3.Connection, run: str, after: int, total: int | None) -> int:
    """Enter a further attempt, which supersedes the later steps of those before it.

    Returns:
        Number of the attempt's row.
    """
    connection.execute("UPDATE attempts SET upto = min(upto, ?) WHERE run = ?", (after, run))
    (number,) = connection.execute(
        "SELECT max(number) FROM attempts WHERE run = ?", (run,)
    ).fetchone()
    connection.execute(
        "UPDATE runs SET state = 'running', message = '', total = coalesce(?, total), updated = ?, "
        "revision = revision + 1 WHERE id = ?",
        (total, time.time(), run),
    )
    return _insert_attempt(connection, run, number + 1, after)


def find(connection: sqlite3.Connection, run: str, path: Path) -> RunInfo:
    """A run by its id or name.

    Raises:
        StoreError: there is none; lists those there are.
    """
    row = connection.execute(
        f"{_SELECT} WHERE id = ?1 OR name = ?1 ORDER BY id = ?1 DESC", (clean(run),)
    ).fetchone()
    if row is None:
        newest = [info.name for info in everything(connection)[:10]]
        there = "the newest are " + ", ".join(newest) if newest else "there are none yet"
        raise StoreError(f"there is no run {run!r} in {path}: {there}")
    return _info(row)


def everything(connection: sqlite3.Connection) -> list[RunInfo]:
    """All runs, the newest first."""
    return [
        _info(row) for row in connection.execute(f"{_SELECT} ORDER BY created DESC, rowid DESC")
    ]


def erase(connection: sqlite3.Connection, run: str) -> None:
    """Delete a run with everything that belongs to it."""
    names = connection.execute("SELECT id FROM names WHERE run = ?", (run,)).fetchall()
    connection.executemany(
        "DELETE FROM measures WHERE key BETWEEN ? AND ?",
        ((name * SPAN, (name + 1) * SPAN - 1) for (name,) in names),
    )
    mine = "(SELECT id FROM attempts WHERE run = ?)"
    rollouts = f"(SELECT id FROM rollouts WHERE attempt IN {mine})"
    for statement in (
        "DELETE FROM names WHERE run = ?",
        f"DELETE FROM texts WHERE rollout IN {rollouts}",
        f"DELETE FROM rollouts WHERE attempt IN {mine}",
        f"DELETE FROM groups WHERE attempt IN {mine}",
        f"DELETE FROM steps WHERE attempt IN {mine}",
        "DELETE FROM events WHERE run = ?",
        "DELETE FROM attempts WHERE run = ?",
        "DELETE FROM leases WHERE run = ?",
        "DELETE FROM runs WHERE id = ?",
    ):
        connection.execute(statement, (run,))


def _insert_attempt(connection: sqlite3.Connection, run: str, number: int, after: int) -> int:
    done = connection.execute(
        "INSERT INTO attempts (run, number, after, started) VALUES (?, ?, ?, ?)",
        (run, number, after, time.time()),
    )
    assert done.lastrowid is not None
    return done.lastrowid


def _free_name(connection: sqlite3.Connection, name: str) -> str:
    if not name.strip():
        raise StoreError(f"name is {name!r}: pass a name that can be seen")
    taken = {row[0] for row in connection.execute("SELECT name FROM runs")}
    free, number = name, 1
    while free in taken:
        number += 1
        free = f"{name}-{number}"
    return free


def _info(row: tuple[str, str, str, str, float, str, int | None, str | None]) -> RunInfo:
    settings, parent = json.loads(row[5]), row[7]
    return RunInfo(
        *row[:5], settings, row[6], None if parent is None else Parent(**json.loads(parent))
    )
