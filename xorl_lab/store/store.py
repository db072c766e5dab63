"""The store of runs: one file in a folder."""

import json
import math
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xorl_lab.errors import StoreError
from xorl_lab.store import frames, runs
from xorl_lab.store.database import Database
from xorl_lab.store.lease import Lease
from xorl_lab.store.opening import prepare
from xorl_lab.store.progress import scalars_of, status_of
from xorl_lab.store.reader import Reader
from xorl_lab.store.records import Parent, RunInfo
from xorl_lab.store.rows import to_json
from xorl_lab.store.writer import Writer

if TYPE_CHECKING:
    import pandas as pd

FILE = "runs.sqlite"
"""Name of the file in the folder."""
LAST = ("reward", "loss:mean")
"""Metrics of which :meth:`Store.frame` shows the last value."""


class Store:
    """Runs with their metrics, rollouts and events, in one SQLite file.

    Any number of processes may read it, and each run has at most one writer at a time.

    Args:
        folder: that holds the file; both are made if they are missing.

    Raises:
        StoreError: the file is damaged, foreign or of a newer version (it is left as it is), or the
            folder cannot be written.
    """

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / FILE
        prepare(self.path)
        self._database = Database(self.path)

    def __repr__(self) -> str:
        return f"Store({str(self.path.parent)!r})"

    def __reduce__(self) -> tuple[type, tuple[Path]]:
        return type(self), (self.path.parent,)

    def create(
        self,
        *,
        name: str,
        kind: str,
        model: str,
        settings: Mapping[str, Any] | None = None,
        total: int | None = None,
        parent: Parent | None = None,
    ) -> Writer:
        """Begin a run.

        Args:
            name: for people; where it is taken, ``-2``, ``-3``, … is added.
            kind: ``grpo``, ``sft``, ``custom``.
            model: name of the base model.
            settings: settings by name; what JSON lacks becomes text.
            total: steps that are planned.
            parent: the checkpoint that it was branched from.

        Raises:
            StoreError: the store cannot be written.
        """
        database = Database(self.path, writable=True)
        info = replace(self._new(name, kind, model, settings, total), parent=parent)
        lease = Lease(self.path, info.id, info.name)
        try:
            with database.write() as connection:
                info, attempt = runs.begin(connection, info, "running")
                lease.take(connection)
        except BaseException:
            database.close()
            raise
        return Writer(database, info, attempt, lease)

    def resume(self, run: str, *, after: int, total: int | None = None) -> Writer:
        """Go on with a run; its steps later than ``after`` are superseded, and kept.

        Args:
            run: id or name.
            after: the step whose checkpoint was loaded.
            total: steps that are planned now; None = as before.

        Raises:
            StoreError: there is no such run, a live writer holds it (the message names it), or the
                store cannot be written.
        """
        if after < 0:
            raise StoreError(f"after is {after}: pass the step that was loaded, 0 for none")
        database = Database(self.path, writable=True)
        try:
            with database.write() as connection:
                info = runs.find(connection, run, self.path)
                lease = Lease(self.path, info.id, info.name)
                lease.take(connection)
                attempt = runs.again(connection, info.id, after, total)
                info = runs.find(connection, info.id, self.path)
        except BaseException:
            database.close()
            raise
        return Writer(database, info, attempt, lease)

    def import_frame(
        self,
        frame: "pd.DataFrame",
        *,
        name: str,
        model: str = "",
        settings: Mapping[str, Any] | None = None,
    ) -> Reader:
        """Make a finished run, of kind ``imported``, of a table of metrics from anywhere.

        Args:
            frame: one row per step, one numeric column per metric; NaN where a step lacks the
                value.  Steps are the column or index named ``step``, else they count from 1.
            name: as of :meth:`create`.
            model: name of the base model, if known.
            settings: settings by name.

        Raises:
            StoreError: a column is not numeric, steps do not grow, or the store cannot be written.
        """
        steps, columns = frames.checked(frame)
        info = self._new(name, "imported", model, settings, int(steps[-1]) if len(steps) else 0)
        database = Database(self.path, writable=True)
        try:
            with database.write() as connection:
                info, attempt = runs.begin(connection, info, "finished")
                frames.insert(connection, attempt, steps, columns)
        finally:
            database.close()
        return Reader(self.path, info)

    def run(self, run: str) -> Reader:
        """A reader of one run.

        Args:
            run: id or name.

        Raises:
            StoreError: there is no such run; lists those there are.
        """
        with self._database.read() as connection:
            return Reader(self.path, runs.find(connection, run, self.path))

    def runs(self) -> list[RunInfo]:
        """All runs, the newest first."""
        with self._database.read() as connection:
            return runs.everything(connection)

    def frame(self) -> "pd.DataFrame":
        """All runs as a table, with how they stand and their last reward and loss."""
        import pandas as pd  # noqa: PLC0415 (takes a second)

        rows: list[dict[str, object]] = []
        with self._database.read() as connection:
            for info in runs.everything(connection):
                status = status_of(connection, info.id)
                last = scalars_of(connection, info.id, status.step - 1).columns
                rows.append(
                    {
                        **{n: getattr(info, n) for n in ("id", "name", "kind", "model")},
                        "created": pd.Timestamp(info.created, unit="s", tz="UTC"),
                        **{n: getattr(status, n) for n in ("state", "step", "total")},
                        **{n: last[n][-1] if n in last else math.nan for n in LAST},
                        "message": status.message,
                    }
                )
        return pd.DataFrame(rows)

    def delete(self, run: str) -> None:
        """Delete a run and give its space back.

        Args:
            run: id or name.

        Raises:
            StoreError: there is no such run, or a live writer holds it.
        """
        database = Database(self.path, writable=True)
        try:
            with database.write() as connection:
                info = runs.find(connection, run, self.path)
                lease = Lease(self.path, info.id, info.name)
                lease.take(connection)
                runs.erase(connection, info.id)
            with suppress(StoreError):
                database.shrink()
        finally:
            database.close()

    def disk_bytes(self) -> int:
        """Bytes on the disk, what was not yet moved into the file included."""
        total = 0
        for suffix in ("", "-wal", "-shm"):
            with suppress(FileNotFoundError):
                total += self.path.with_name(self.path.name + suffix).stat().st_size
        return total

    def close(self) -> None:
        """Let the file go; the next call opens it again."""
        self._database.close()

    def _new(self, name: str, kind: str, model: str, settings: Mapping[str, Any] | None,
             total: int | None) -> RunInfo:  # fmt: skip
        plain = json.loads(to_json(settings or {}))
        return RunInfo(secrets.token_hex(6), name, kind, model, time.time(), plain, total, None)
