"""How far a run is, and what its metrics were."""

import json
import sqlite3
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from xorl_lab.store.lease import holder
from xorl_lab.store.records import ACTIVE, RunStatus, Scalars


def status_of(connection: sqlite3.Connection, run: str) -> RunStatus:
    """How a run stands.

    Args:
        connection: in a transaction.
        run: its id.
    """
    state, message, total, updated = connection.execute(
        "SELECT state, message, total, updated FROM runs WHERE id = ?", (run,)
    ).fetchone()
    (step,) = connection.execute(
        "SELECT max((SELECT max(step) FROM steps WHERE attempt = a.id AND step <= a.upto)) "
        "FROM attempts a WHERE a.run = ?",
        (run,),
    ).fetchone()
    why = lost(connection, run, state)
    if why is not None:
        return RunStatus("crashed", step or 0, total, updated, why)
    return RunStatus(state, step or 0, total, updated, message)


def lost(connection: sqlite3.Connection, run: str, state: str) -> str | None:
    """Why a run that should have a live writer has none; None if all is well."""
    if state not in ACTIVE:
        return None
    held = holder(connection, run)
    return "its writer was dropped without being closed" if held is None else held.gone()


def scalars_of(connection: sqlite3.Connection, run: str, after: int) -> Scalars:
    """Metrics of the steps after a step, without those that were superseded."""
    (attempt,) = connection.execute(
        "SELECT max(number) FROM attempts WHERE run = ?", (run,)
    ).fetchone()
    rows = connection.execute(
        "SELECT s.step, s.layout, s.data FROM attempts a JOIN steps s ON s.attempt = a.id "
        "AND s.step <= a.upto AND s.step > ? WHERE a.run = ? ORDER BY a.number, s.step",
        (after, run),
    ).fetchall()
    layouts = {number: _layout(connection, number) for number in dict.fromkeys(r[1] for r in rows)}
    return Scalars(attempt, np.array([r[0] for r in rows], np.int64), _columns(rows, layouts))


def _layout(connection: sqlite3.Connection, number: int) -> list[str]:
    (names,) = connection.execute("SELECT names FROM layouts WHERE id = ?", (number,)).fetchone()
    return json.loads(names)


def _columns(
    rows: Sequence[tuple[int, int, bytes]], layouts: Mapping[int, list[str]]
) -> dict[str, NDArray[np.float64]]:
    names = list(dict.fromkeys(name for layout in layouts.values() for name in layout))
    table = np.full((len(names), len(rows)), np.nan)
    at = {name: i for i, name in enumerate(names)}
    of_row = np.array([row[1] for row in rows])
    for layout, own in layouts.items():
        where = np.flatnonzero(of_row == layout)
        data = b"".join([rows[i][2] for i in where.tolist()])
        values = np.frombuffer(data, "<f8").reshape(len(where), len(own))
        columns = np.array([at[name] for name in own], np.intp)
        table[columns[:, None], where] = values.T
    return dict(zip(names, table, strict=True))
