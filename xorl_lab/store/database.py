"""One connection to the file: transactions, threads, forks, and errors in words."""

import os
import sqlite3
import threading
import weakref
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from xorl_lab.errors import StoreError
from xorl_lab.store import search
from xorl_lab.store.schema import VERSION, supplement, upgrade, version

WAIT = 30.0
"""Seconds for which a write waits for that of another process."""
_CACHE_KIB = 32 * 1024
_PORTION = 4096
_PAGES = 16 * 1024
"""SQLite tidies up by itself, in the middle of a step, only where a lease does not keep up."""
_inherited: list[sqlite3.Connection] = []
"""Connections of a parent process: they must neither be used nor closed in this one."""


class Database:
    """A connection that is opened on first use, and again after a fork.

    Threads take turns.  Readers never wait for a writer, nor a writer for them: the file is in WAL
    mode.

    Args:
        path: of the file, which must be there.
        writable: False = this connection cannot change anything.
    """

    def __init__(self, path: Path, *, writable: bool = False) -> None:
        self.path = path
        self.writable = writable
        self._pid = 0
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._older = False
        self._closer: weakref.finalize[..., Database] | None = None

    @contextmanager
    def read(self) -> Generator[sqlite3.Connection, None, None]:
        """A transaction in which all reads see the same state.

        Raises:
            StoreError: the file cannot be read.
        """
        with self._transaction("BEGIN") as connection:
            try:
                yield connection
            except (ValueError, TypeError, LookupError) as error:  # rows that no writer made
                raise StoreError(
                    f"{self.path} holds what cannot be understood ({type(error).__name__}: "
                    f"{error}); it was left as it is: put a backup in its place"
                ) from error

    @contextmanager
    def write(self) -> Generator[sqlite3.Connection, None, None]:
        """A transaction that is there as a whole or, after any error or kill, not at all.

        Raises:
            StoreError: the file cannot be written; nothing was changed.
        """
        with self._transaction("BEGIN IMMEDIATE") as connection:
            yield connection

    def tidy(self) -> None:
        """Move what was committed into the main file, as far as readers and writers allow.

        Raises:
            StoreError: the file cannot be written.
        """
        with self._own_lock(), self._explained():
            self._open().execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def shrink(self) -> None:
        """Give free space back to the disk, as far as nobody is in the way.

        Raises:
            StoreError: the file cannot be written.
        """
        with self._own_lock(), self._explained():
            connection = self._open()
            free = -1
            while free != (free := connection.execute("PRAGMA freelist_count").fetchone()[0]):
                # In portions, between which other writers have their turn.  (``execute`` would
                # free a single page.)
                connection.executescript(f"PRAGMA incremental_vacuum({_PORTION})")
            connection.execute("PRAGMA busy_timeout = 500")  # meanwhile others cannot write
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            connection.execute(f"PRAGMA busy_timeout = {WAIT * 1000:.0f}")

    def close(self) -> None:
        """Close the connection; the next use opens it again."""
        with self._own_lock():
            if self._closer is not None:
                self._closer()
            self._connection = self._closer = None

    @contextmanager
    def _transaction(self, begin: str) -> Generator[sqlite3.Connection, None, None]:
        with self._own_lock(), self._explained():
            connection = self._open()
            if connection.in_transaction:  # an interrupt fell between two lines of this function
                connection.rollback()
            try:
                connection.execute(begin)
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    connection.rollback()
                raise

    @contextmanager
    def _explained(self) -> Generator[None, None, None]:
        try:
            yield
        except sqlite3.Error as error:
            raise explained(error, self.path) from error

    def _own_lock(self) -> threading.RLock:
        """The lock of this process: that of the parent may be held by a thread that is not here."""
        if self._pid != os.getpid():
            self._lock = threading.RLock()
            if self._connection is not None:
                _inherited.append(self._connection)
            self._connection = self._closer = None
            self._pid = os.getpid()
        return self._lock

    def _open(self) -> sqlite3.Connection:
        if self._connection is not None and self._older and version(self._connection) == VERSION:
            self.close()  # another process has brought the file up to date
        if self._connection is None:
            connection = connect(self.path, "rw" if self.writable else "ro")
            self._connection = connection
            self._closer = weakref.finalize(self, _close, connection, os.getpid())
            if self.writable:
                upgrade(connection)
            else:
                self._older = supplement(connection)
        return self._connection


def connect(path: Path, mode: str) -> sqlite3.Connection:
    """Open a connection.

    Args:
        path: of the file.
        mode: ``ro``, ``rw``, or ``rwc``, which makes the file if it is missing.

    Raises:
        sqlite3.Error: it cannot be opened.
    """
    address = path.absolute().as_uri()
    try:
        return _configured(f"{address}?mode={mode}")
    except sqlite3.OperationalError:
        # SQLite keeps readers and writers apart by files beside this one.  Where they cannot be
        # made, nobody can be writing either.
        if mode != "ro" or not path.is_file() or os.access(path.parent, os.W_OK) or _pending(path):
            raise
    return _configured(f"{address}?mode=ro&immutable=1")


def _configured(address: str) -> sqlite3.Connection:
    connection = sqlite3.connect(
        address, uri=True, timeout=WAIT, isolation_level=None, check_same_thread=False
    )
    try:
        # A commit survives the end of this process, not always that of the machine's power; the
        # file stays whole in either case.
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        connection.execute(f"PRAGMA wal_autocheckpoint = {_PAGES}")
        connection.execute("SELECT 1 FROM sqlite_master").fetchone()
        search.register(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def explained(error: sqlite3.Error, path: Path) -> StoreError:
    """What went wrong with the file, and what to do."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    folder = path.parent
    if code == sqlite3.SQLITE_FULL:
        return StoreError(f"the disk that holds {path} is full: free some space; nothing was lost")
    if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
        return StoreError(
            f"{path} is damaged ({error}); it was left as it is: move it aside to begin a new "
            "store, or put a backup in its place"
        )
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        return StoreError(
            f"{path} cannot be opened or written ({error}): check that {folder} is there and that "
            "you may write to it"
        )
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StoreError(
            f"another process has been writing to {path} for {WAIT:.0f} seconds: try again"
        )
    return StoreError(f"{path}: {error}: check the disk and the permissions of {folder}")


def _pending(path: Path) -> bool:
    """True if what was written last lies beside the file."""
    beside = path.with_name(path.name + "-wal")
    return beside.exists() and beside.stat().st_size > 0


def _close(connection: sqlite3.Connection, pid: int) -> None:
    if pid == os.getpid():
        connection.close()
    else:
        _inherited.append(connection)
