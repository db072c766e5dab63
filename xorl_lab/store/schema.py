"""The tables, their version, and whether a file is one of ours."""

import sqlite3
import time
from pathlib import Path

from xorl_lab.errors import StoreError
from xorl_lab.store.database import WAIT, connect, explained

VERSION = 1
"""Grows when the tables change; a newer file is refused."""
APPLICATION = 0x786F726C
"""``xorl``, in the header of the file."""
ENDLESS = 2**53
"""The last step of an attempt that nothing has superseded."""
SPAN = 2**40
"""Rollouts of a store, at most; see ``measures``."""

TABLES = (
    # Updated in place: state, message, total, updated, revision, and attempts.upto, leases.
    # Everything else is only ever added.
    """CREATE TABLE runs (
        id TEXT PRIMARY KEY, name TEXT NOT NULL UNIQUE, kind TEXT NOT NULL, model TEXT NOT NULL,
        created REAL NOT NULL, settings TEXT NOT NULL, total INTEGER, parent TEXT,
        state TEXT NOT NULL, message TEXT NOT NULL DEFAULT '', updated REAL NOT NULL,
        revision INTEGER NOT NULL DEFAULT 0)""",
    # A run begins with attempt 1.  Resuming it after step s begins another one, and sets upto of
    # the earlier ones to s at most: their later steps stay, and are no longer a part of the run.
    f"""CREATE TABLE attempts (
        id INTEGER PRIMARY KEY, run TEXT NOT NULL, number INTEGER NOT NULL,
        after INTEGER NOT NULL, upto INTEGER NOT NULL DEFAULT {ENDLESS}, started REAL NOT NULL,
        UNIQUE (run, number))""",
    """CREATE TABLE leases (
        run TEXT PRIMARY KEY, token TEXT NOT NULL, pid INTEGER NOT NULL, host TEXT NOT NULL,
        place TEXT NOT NULL, started TEXT NOT NULL, renewed REAL NOT NULL)""",
    # Names of metrics in the order of the float64 values of a step.
    "CREATE TABLE layouts (id INTEGER PRIMARY KEY, names TEXT NOT NULL UNIQUE)",
    """CREATE TABLE steps (
        attempt INTEGER NOT NULL, step INTEGER NOT NULL, time REAL NOT NULL,
        layout INTEGER NOT NULL, data BLOB NOT NULL, PRIMARY KEY (attempt, step)) WITHOUT ROWID""",
    """CREATE TABLE groups (
        id INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, step INTEGER NOT NULL,
        position INTEGER NOT NULL, prompt TEXT NOT NULL, row TEXT NOT NULL,
        arrays BLOB NOT NULL)""",
    "CREATE INDEX groups_of_step ON groups (attempt, step, position)",
    # Narrow rows: filters and sorts read these alone.  NULL in a number is NaN; where scored = 0
    # the reward function failed.
    """CREATE TABLE rollouts (
        id INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, step INTEGER NOT NULL,
        group_id INTEGER NOT NULL, position INTEGER NOT NULL, sample INTEGER NOT NULL,
        scored INTEGER NOT NULL, reward REAL, advantage REAL, length INTEGER NOT NULL,
        prompt_length INTEGER NOT NULL, logprob REAL, version INTEGER NOT NULL,
        stop_reason TEXT NOT NULL)""",
    "CREATE INDEX rollouts_of_step ON rollouts (attempt, step)",
    "CREATE TABLE texts (rollout INTEGER PRIMARY KEY, text TEXT NOT NULL, error TEXT)",
    # Parts of rewards and means of streams.  The key is name * 2^40 + rollout: one number is found
    # several times as fast as a pair.
    """CREATE TABLE names (
        id INTEGER PRIMARY KEY, run TEXT NOT NULL, name TEXT NOT NULL, UNIQUE (run, name))""",
    "CREATE TABLE measures (key INTEGER PRIMARY KEY, value REAL)",
    """CREATE TABLE events (
        id INTEGER PRIMARY KEY, run TEXT NOT NULL, attempt INTEGER NOT NULL, time REAL NOT NULL,
        step INTEGER, kind TEXT NOT NULL, text TEXT NOT NULL, data TEXT NOT NULL)""",
    "CREATE INDEX events_of_run ON events (run, id)",
)


def prepare(path: Path) -> None:
    """Make the file if it is missing; check that it is a store that this version can read.

    Args:
        path: of the file; missing folders are made.

    Raises:
        StoreError: it is damaged, foreign or of a newer version, and was left as it is; or it
            cannot be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"the folder {path.parent} cannot be made ({error}): choose another one"
        ) from error
    try:
        if _is_new(path):
            _create(path)
        else:
            _check(path)
    except sqlite3.Error as error:
        raise explained(error, path) from error


def _is_new(path: Path) -> bool:
    """True if nothing is there, or what a process left that was killed while it made the file."""
    if not path.exists():
        return True
    beside = path.with_name(path.name + "-wal")
    if path.stat().st_size == 0 and beside.exists() and beside.stat().st_size > 0:
        raise StoreError(
            f"{path} is empty but {beside.name} is not: the file was cut off; put a backup in its "
            "place, or move both aside to begin a new store"
        )
    # Beside a file that is half made lies what undoes it, which only a writer may apply.
    half_made = path.with_name(path.name + "-journal").exists()
    connection = connect(path, "rw" if half_made else "ro")
    try:
        return _blank(connection)
    finally:
        connection.close()


def _blank(connection: sqlite3.Connection) -> bool:
    (count,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    return count == 0 and _header(connection) == (0, 0)


def _create(path: Path) -> None:
    connection = connect(path, "rwc")
    try:
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        _use_wal(connection)
        connection.execute("BEGIN IMMEDIATE")
        if _blank(connection):  # else another process was quicker
            for table in TABLES:
                connection.execute(table)
            connection.execute(f"PRAGMA application_id = {APPLICATION}")
            connection.execute(f"PRAGMA user_version = {VERSION}")
        connection.execute("COMMIT")
    finally:
        connection.close()
    _check(path)


def _use_wal(connection: sqlite3.Connection) -> None:
    """Switch to WAL mode; SQLite itself does not wait here for another process that does so."""
    deadline = time.monotonic() + WAIT
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return


def _check(path: Path) -> None:
    connection = connect(path, "ro")
    try:
        application, version = _header(connection)
    finally:
        connection.close()
    if application != APPLICATION:
        raise StoreError(
            f"{path} is a database, but not a store of runs; it was left as it is: choose another "
            "folder, or move it aside"
        )
    if version > VERSION:
        raise StoreError(
            f"{path} has schema {version} and this version of xorl_lab reads up to {VERSION}: "
            "update xorl_lab"
        )


def _header(connection: sqlite3.Connection) -> tuple[int, int]:
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return application, version
