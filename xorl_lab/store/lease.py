"""Who writes a run: a row that a live process renews.

A writer counts as alive while its row is fresh and, where it runs on this machine, its process is
there.  A process is known by its id and the moment it began, since ids are used again.
"""

import os
import secrets
import socket
import sqlite3
import subprocess
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from xorl_lab.errors import StoreError
from xorl_lab.store.database import Database

RENEW = 3.0
"""Seconds between two renewals."""
STALE = 30.0
"""Seconds without a renewal after which a writer counts as gone, whatever its process does."""

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a run, as its row says."""

    token: str
    """Differs for every writer."""
    pid: int
    """Process id."""
    host: str
    """Name of the machine, for people."""
    place: str
    """Tells this boot of this machine, and this container, from any other."""
    started: str
    """When the process began, as its system counts."""
    renewed: float
    """Seconds since the epoch: the last renewal."""

    def gone(self) -> str | None:
        """Why it is not alive, in words; None if it is."""
        silent = time.time() - self.renewed
        if self.place == place() and process_start(self.pid) != self.started:
            return f"its process {self.pid} ended without closing it"
        if silent > STALE:
            return f"its process {self.pid} on {self.host} has been silent for {silent:.0f} seconds"
        return None


class Lease:
    """The right to write a run.  A thread renews it until it is released or lost.

    The thread has a connection of its own.  It also moves what was committed into the main file,
    which no step then has to wait for.

    Args:
        path: of the file.
        run: id of the run.
        name: of the run, for messages.
    """

    def __init__(self, path: Path, run: str, name: str) -> None:
        self._database = Database(path, writable=True)
        self.run = run
        self.name = name
        self.token = secrets.token_hex(8)
        self._released = threading.Event()

    def take(self, connection: sqlite3.Connection) -> None:
        """Enter this process as the writer.

        Args:
            connection: in a transaction that writes.

        Raises:
            StoreError: a live writer holds the run; names it.
        """
        held = holder(connection, self.run)
        if held is not None and held.gone() is None:
            whose = "this process" if held.pid == os.getpid() else f"process {held.pid}"
            raise StoreError(
                f"run {self.name!r} is being written by {whose} on {held.host} (last heard of "
                f"{max(0.0, time.time() - held.renewed):.0f} s ago): stop it there first"
            )
        connection.execute(
            "INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?, ?, ?, ?)",
            (self.run, self.token, os.getpid(), host(), place(), process_start(os.getpid()),
             time.time()),
        )  # fmt: skip

    def confirm(self, connection: sqlite3.Connection) -> None:
        """Renew, inside a transaction that writes.

        Raises:
            StoreError: another writer has taken over.
        """
        done = connection.execute(
            "UPDATE leases SET renewed = ? WHERE run = ? AND token = ?",
            (time.time(), self.run, self.token),
        )
        if done.rowcount != 1:
            held = holder(connection, self.run)
            whose = f"process {held.pid} on {held.host}" if held else "a process that is done"
            raise StoreError(
                f"run {self.name!r} was taken over by {whose}, as this writer had been silent for "
                f"more than {STALE:.0f} s, or it was deleted: nothing was recorded; resume the run "
                "for a new writer"
            )

    def release(self) -> None:
        """Give the run up; does nothing if another writer has it."""
        self._released.set()
        with self._database.write() as connection:
            connection.execute(
                "DELETE FROM leases WHERE run = ? AND token = ?", (self.run, self.token)
            )
        self._database.close()

    def keep(self, owner: object) -> None:
        """Renew in the background for as long as ``owner`` is in use."""
        thread = threading.Thread(
            target=_renew_for,
            args=(weakref.ref(owner), self),
            name=f"lease of {self.name}",
            daemon=True,
        )
        thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait; True as soon as the lease is released."""
        return self._released.wait(seconds)

    def renew(self) -> bool:
        """Renew; False if another writer has taken over."""
        try:
            with self._database.write() as connection:
                done = connection.execute(
                    "UPDATE leases SET renewed = ? WHERE run = ? AND token = ?",
                    (time.time(), self.run, self.token),
                )
            self._database.tidy()
            return done.rowcount == 1
        except StoreError:
            return True  # the disk is full, say: the next step will tell


def _renew_for(owner: "weakref.ref[object]", lease: Lease) -> None:
    while not lease.wait(RENEW):
        if owner() is None:  # dropped without being closed
            with suppress(StoreError):
                lease.release()
            return
        if not lease.renew():
            return


def holder(connection: sqlite3.Connection, run: str) -> Holder | None:
    """Who holds a run, dead or alive.

    Args:
        connection: in a transaction.
        run: its id.
    """
    row = connection.execute(
        "SELECT token, pid, host, place, started, renewed FROM leases WHERE run = ?", (run,)
    ).fetchone()
    return None if row is None else Holder(*row)


@cache
def host() -> str:
    """Name of this machine."""
    return socket.gethostname()


def place() -> str:
    """What this machine's process ids are good for: name, boot and, in a container, its ids."""
    boot = namespace = ""
    with suppress(OSError):
        boot = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = os.readlink(_PROC / "self/ns/pid")
    return f"{host()} {boot} {namespace}"


def process_start(pid: int) -> str:
    """When a process began; empty if there is none, or if it has ended and awaits its parent."""
    if (_PROC / "self/stat").exists():
        try:
            stat = (_PROC / f"{pid}/stat").read_text(encoding="ascii", errors="replace")
        except OSError:
            return ""
        fields = stat.rpartition(")")[2].split()  # what is in parentheses may hold anything
        return "" if fields[0] in "ZX" else fields[19]
    done = subprocess.run(
        ["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    state, _, began = done.stdout.strip().partition(" ")
    return "" if not state or state.startswith("Z") else began.strip()
