"""Reading a run, while it is written or at any later time."""

import json
import sqlite3
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from xorl_lab.errors import StoreError
from xorl_lab.store import groups, page, parquet, rollouts
from xorl_lab.store.database import Database
from xorl_lab.store.progress import lost, scalars_of, status_of
from xorl_lab.store.records import Event, RunInfo, RunStatus, Scalars, StoredRollout
from xorl_lab.store.rollouts import Condition, Question
from xorl_lab.types import Group

if TYPE_CHECKING:
    import pandas as pd


class Reader:
    """One run, for any thread and process; it never keeps the writer waiting.

    Args:
        path: of the file.
        info: the run.
    """

    def __init__(self, path: Path, info: RunInfo) -> None:
        self.path = path
        self.info = info
        self._database = Database(path)

    def __repr__(self) -> str:
        return f"Reader({self.info.name!r}, {str(self.path)!r})"

    def __reduce__(self) -> tuple[type, tuple[Path, RunInfo]]:
        return type(self), (self.path, self.info)

    def close(self) -> None:
        """Let the file go; the next call opens it again."""
        self._database.close()

    def status(self) -> RunStatus:
        """How the run stands; ``crashed`` where it should be running and its writer is gone."""
        with self._reading() as connection:
            return status_of(connection, self.info.id)

    def changed(self, seen: object) -> tuple[bool, object]:
        """Whether anything is new; cheap enough to be asked many times a second.

        Args:
            seen: what the last call returned second; None at first.

        Returns:
            Whether anything was recorded since, or the writer was lost; and what to pass next time.
        """
        with self._reading() as connection:
            state, revision = connection.execute(
                "SELECT state, revision FROM runs WHERE id = ?", (self.info.id,)
            ).fetchone()
            token = (revision, lost(connection, self.info.id, state) is None)
        return token != seen, token

    def scalars(self, after: int = 0) -> Scalars:
        """Metrics of the steps after a step, without those that were superseded.

        Args:
            after: number of the last step that is known.
        """
        with self._reading() as connection:
            return scalars_of(connection, self.info.id, after)

    def events(self, after: int = 0, kinds: Sequence[str] | None = None) -> list[Event]:
        """What happened, the oldest first.

        Args:
            after: id of the last event that is known.
            kinds: those to return; None = all.
        """
        with self._reading() as connection:
            found = connection.execute(
                "SELECT e.id, e.time, e.step, e.kind, e.text, e.data, "
                "coalesce(e.step > a.upto, 0) FROM events e JOIN attempts a ON a.id = e.attempt "
                "WHERE e.run = ? AND e.id > ? ORDER BY e.id",
                (self.info.id, after),
            ).fetchall()
            return [
                Event(number, time, step, kind, text, json.loads(data), bool(superseded))
                for number, time, step, kind, text, data, superseded in found
                if kinds is None or kind in kinds
            ]

    def checkpoints(self) -> list[Event]:
        """The checkpoints that the run reported; the folders themselves are the truth."""
        return self.events(kinds=("checkpoint",))

    def metrics(self) -> "pd.DataFrame":
        """All metrics: one row per step, one column per scalar; NaN where a step lacks it."""
        import pandas as pd  # noqa: PLC0415 (takes a second)

        scalars = self.scalars()
        index = pd.Index(scalars.steps, name="step")
        return pd.DataFrame(scalars.columns, index=index)

    def rollout_columns(self) -> list[str]:
        """The scalars by which :meth:`rollouts` filters and sorts."""
        with self._reading() as connection:
            return [*rollouts.SCALARS, *rollouts.names_of(connection, self.info.id)]

    def count(self, where: Sequence[Condition] = ()) -> int:
        """How many rollouts there are.

        Args:
            where: as of :meth:`rollouts`.

        Raises:
            StoreError: a column or operator does not exist.
        """
        with self._reading() as connection:
            return rollouts.count(connection, Question(self.info.id, where))

    def rollouts(
        self,
        *,
        where: Sequence[Condition] = (),
        order_by: str = "id",
        descending: bool = False,
        limit: int | None = None,
        offset: int = 0,
    ) -> "pd.DataFrame":
        """Rollouts, one row each: scalars, text and prompt.

        Args:
            where: conditions that all hold: ``[("reward", ">", 0.5), ("text", "contains", "a")]``;
                ``= != < <= > >= in contains``.  A comparison with what is missing does not hold;
                ``("reward", "=", None)`` finds it.
            order_by: a scalar; see :meth:`rollout_columns`.  What lacks it comes last.
            descending: the greatest first.
            limit: the most rows; None = all.
            offset: rows to leave out at the beginning.

        Returns:
            A table with the rollouts' ids as its index; NaN where a value is missing.

        Raises:
            StoreError: a column or operator does not exist.
        """
        import pandas as pd  # noqa: PLC0415 (takes a second)

        question = Question(self.info.id, where, order_by, descending, limit, offset)
        with self._reading() as connection:
            ids = rollouts.matching(connection, question)
            found = rollouts.table(connection, self.info.id, ids)
            index = pd.Index(found.pop("id"), name="id", dtype="int64")
            types = _types(found)
            columns = {n: pd.Series(v, index, types[n]) for n, v in found.items()}
            return pd.DataFrame(columns, index)

    def rollout(self, id: int) -> StoredRollout:  # noqa: A002 (what the table calls it)
        """One rollout with its tokens and streams.

        Args:
            id: from the index of :meth:`rollouts`.

        Raises:
            StoreError: the run has no such rollout.
        """
        with self._reading() as connection:
            return groups.stored(connection, self.info.id, int(id))

    def groups(self, step: int) -> list[Group]:
        """The groups of a step as they were recorded, values per token in float32."""
        with self._reading() as connection:
            return groups.groups_of(connection, self.info.id, step)

    def to_html(self, path: str | Path, *, rollouts: int = 200) -> Path:
        """Write the run as one HTML file that asks nothing of the network.

        Args:
            path: of the file; missing folders are made.
            rollouts: the most rollouts that are shown, the newest first.

        Raises:
            StoreError: the file cannot be written.
        """
        return page.write(self, Path(path), rollouts)

    def to_parquet(self, folder: str | Path) -> list[Path]:
        """Write ``metrics.parquet``, ``rollouts.parquet`` and ``events.parquet``.

        Args:
            folder: for the three files; made if it is missing.

        Raises:
            StoreError: pyarrow is not installed, or a file cannot be written.
        """
        return parquet.write(self, Path(folder))

    def newest(self, limit: int) -> list[StoredRollout]:
        """The last rollouts with their tokens and streams, the newest first."""
        question = Question(self.info.id, order_by="id", descending=True, limit=limit)
        with self._reading() as connection:
            ids = rollouts.matching(connection, question)
            return groups.stored_many(connection, ids)

    def walk(self) -> Iterator[StoredRollout]:
        """All rollouts with their tokens and streams, in order, one group in memory at a time."""
        with self._reading() as connection:
            found = groups.live(connection, self.info.id)
        for group in found:
            with self._reading() as connection:
                some = groups.rollouts_of(connection, group)
            yield from some

    @contextmanager
    def _reading(self) -> Generator[sqlite3.Connection, None, None]:
        with self._database.read() as connection:
            if not connection.execute(
                "SELECT 1 FROM runs WHERE id = ?", (self.info.id,)
            ).fetchone():
                raise StoreError(f"run {self.info.name!r} was deleted from {self.path}")
            yield connection


def _types(columns: dict[str, list[object]]) -> dict[str, str]:
    """Types that do not depend on what the rows happen to hold."""
    words = {"stop_reason", *rollouts.TEXTS}
    whole = {"step", "group", "sample", "length", "prompt_length", "version"}
    return {
        name: "object" if name in words else "int64" if name in whole else "float64"
        for name in columns
    } | {"failed": "bool"}
