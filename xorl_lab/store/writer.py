"""Recording a run."""

import os
import sqlite3
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Self

from xorl_lab.errors import StoreError
from xorl_lab.store import prompts, rows
from xorl_lab.store.database import Database
from xorl_lab.store.lease import Lease
from xorl_lab.store.records import ACTIVE, STATES, RunInfo
from xorl_lab.types import StepRecord

EVENTS = ("checkpoint", "knob", "sync", "pause", "resume",
          "warning", "error", "log", "start", "end")  # fmt: skip
"""Kinds of events."""


class Writer:
    """The one writer of a run; any thread may use it.

    Each call is one transaction: after an error or a kill it has happened or it has not.  Leaving a
    ``with`` block ends the run as ``finished``, or ``failed`` after an exception.

    Args:
        database: writable, of this writer's own.
        info: the run.
        attempt: number of the attempt's row.
        lease: taken already.
    """

    def __init__(self, database: Database, info: RunInfo, attempt: int, lease: Lease) -> None:
        self.info = info
        self._database = database
        self._attempt = attempt
        self._lease = lease
        self._closed = False
        self._pid = os.getpid()
        lease.keep(self)

    def step(self, record: StepRecord) -> None:
        """Record metrics, rollouts and warnings of one step, all or nothing.

        Args:
            record: of a step later than all before it.

        Raises:
            StoreError: the disk refused, another writer took over, or the record does not fit; in
                each case nothing of it was recorded.
        """
        step = int(record.step)
        if "step" in record.metrics:
            raise StoreError(
                f"step {step} has a metric called 'step', which is the name of its number: call it "
                "something else"
            )
        names, values = rows.metric_bytes(record.metrics, step)
        groups = rows.group_rows(record)
        with self._writing() as (connection, now):
            self._check_order(connection, step)
            layout = rows.layout_id(connection, names)
            connection.execute(
                "INSERT INTO steps VALUES (?, ?, ?, ?, ?)",
                (self._attempt, step, now, layout, values),
            )
            if groups:
                rows.insert_groups(connection, self.info.id, self._attempt, step, groups)
                tokens = [group.prompt_tokens for group in record.groups]
                prompts.insert(connection, self._attempt, step, tokens)
            for text in record.warnings:
                self._insert_event(connection, (now, step, "warning", rows.clean(text), "{}"))

    def event(
        self,
        kind: str,
        text: str,
        *,
        step: int | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> None:
        """Record that something happened.

        Args:
            kind: of :data:`EVENTS`.
            text: for the person at the screen.
            step: that it belongs to.
            data: facts, as JSON values.

        Raises:
            StoreError: there is no such kind, or it could not be recorded.
        """
        if kind not in EVENTS:
            raise StoreError(f"kind is {kind!r}: choose from {', '.join(EVENTS)}")
        facts = rows.to_json(data or {})
        step = None if step is None else int(step)
        with self._writing() as (connection, now):
            self._insert_event(connection, (now, step, kind, rows.clean(text), facts))

    def status(self, state: str, message: str = "", total: int | None = None) -> None:
        """Report how the run stands.

        Args:
            state: ``running``, ``paused``, ``stopped``, ``finished`` or ``failed``.
            message: why, in words.
            total: steps that are planned now; None = as before.

        Raises:
            StoreError: there is no such state, or it could not be recorded.
        """
        if state not in STATES:
            raise StoreError(f"state is {state!r}: choose from {', '.join(STATES)}")
        with self._writing() as (connection, _):
            connection.execute(
                "UPDATE runs SET state = ?, message = ?, total = coalesce(?, total) WHERE id = ?",
                (state, rows.clean(message), total, self.info.id),
            )

    def close(self) -> None:
        """Give up the run.  One that is still running or paused counts as stopped."""
        self._end("stopped", "")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self._end("finished", "")
            return
        name = type(error).__name__
        with suppress(StoreError):  # the first error is the one to see
            if isinstance(error, Exception):
                self._end("failed", f"{name}: {error}")
            else:
                self._end("stopped", f"interrupted by {name}")

    def _end(self, state: str, message: str) -> None:
        if self._closed:
            return
        try:
            with self._writing() as (connection, _):
                marks = ", ".join("?" * len(ACTIVE))
                connection.execute(
                    f"UPDATE runs SET state = ?, message = ? WHERE id = ? AND state IN ({marks})",
                    (state, rows.clean(message), self.info.id, *ACTIVE),
                )
        finally:
            self._closed = True
            try:
                self._lease.release()
            finally:
                self._database.close()

    @contextmanager
    def _writing(self) -> Generator[tuple[sqlite3.Connection, float], None, None]:
        """A transaction of the run's only writer, and the time."""
        if self._closed:
            raise StoreError(
                f"the writer of run {self.info.name!r} was closed: resume the run for a new one"
            )
        if os.getpid() != self._pid:
            raise StoreError(
                f"the writer of run {self.info.name!r} belongs to process {self._pid} and this is "
                f"{os.getpid()}: record in the process that began the run"
            )
        with self._database.write() as connection:
            self._lease.confirm(connection)
            now = time.time()
            connection.execute(
                "UPDATE runs SET updated = ?, revision = revision + 1 WHERE id = ?",
                (now, self.info.id),
            )
            yield connection, now

    def _check_order(self, connection: sqlite3.Connection, step: int) -> None:
        (last,) = connection.execute(
            "SELECT coalesce((SELECT max(step) FROM steps WHERE attempt = id), after) "
            "FROM attempts WHERE id = ?",
            (self._attempt,),
        ).fetchone()
        if step <= last:
            raise StoreError(
                f"step is {step} but step {last} was recorded before: steps only grow; resume the "
                "run after an earlier step to do it again"
            )

    def _insert_event(
        self, connection: sqlite3.Connection, event: tuple[float, int | None, str, str, str]
    ) -> None:
        connection.execute(
            "INSERT INTO events (run, attempt, time, step, kind, text, data) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            (self.info.id, self._attempt, *event),
        )
