"""Making the file, or checking that one is ours and bringing it up to date."""

import sqlite3
import time
from contextlib import closing
from pathlib import Path

from xorl_lab.errors import StoreError
from xorl_lab.store.database import WAIT, connect, explained
from xorl_lab.store.schema import APPLICATION, TABLES, VERSION, upgrade, version

_AS_IT_IS = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM,
             sqlite3.SQLITE_FULL)  # fmt: skip
"""Why an older file that cannot be brought up to date is read as it is."""


def prepare(path: Path) -> None:
    """Make the file if it is missing; check that it is a store, and bring an older one up to date.

    One that cannot be written is read as it is.

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
    with closing(connect(path, "ro")) as connection:
        application, found = _header(connection)
    if application != APPLICATION:
        raise StoreError(
            f"{path} is a database, but not a store of runs; it was left as it is: choose another "
            "folder, or move it aside"
        )
    if found > VERSION:
        raise StoreError(
            f"{path} has schema {found} and this version of xorl_lab reads up to {VERSION}: "
            "update xorl_lab"
        )
    if found < VERSION:
        _bring_up_to_date(path)


def _bring_up_to_date(path: Path) -> None:
    try:
        with closing(connect(path, "rw")) as connection:
            upgrade(connection)
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF not in _AS_IT_IS:
            raise


def _header(connection: sqlite3.Connection) -> tuple[int, int]:
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    return application, version(connection)
