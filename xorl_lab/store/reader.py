"""Reading a run, while it is written or at any later time."""

import json
import sqlite3
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from xorl_lab.errors import StoreError
from xorl_lab.store import groups, notes, page, parquet, rollouts, spreads, tables, walks
from xorl_lab.store.database import Database
from xorl_lab.store.notes import Note
from xorl_lab.store.progress import lost, scalars_of, status_of
from xorl_lab.store.prompts import Prompts
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
        self._prompts = Prompts(info.id)

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
        """Rollouts, one row each: scalars, text, prompt, tags and note.

        Args:
            where: conditions that all hold: ``[("reward", ">", 0.5), ("text", "contains", "a")]``;
                ``= != < <= > >= in contains``.  A comparison with what is missing does not hold;
                ``("reward", "=", None)`` finds it.  ``contains`` searches ``text``, ``prompt``,
                ``error``, ``note`` and ``tags``, upper or lower case.  ``("tags", "has", "hack")``
                asks for a tag.
            order_by: a scalar; see :meth:`rollout_columns`.  What lacks it comes last.
            descending: the greatest first.
            limit: the most rows; None = all.
            offset: rows to leave out at the beginning.

        Returns:
            A table with the rollouts' ids as its index; NaN where a value is missing.

        Raises:
            StoreError: a column or operator does not exist.
        """
        question = Question(self.info.id, where, order_by, descending, limit, offset)
        with self._reading() as connection:
            ids = rollouts.matching(connection, question)
            return tables.frame(connection, self.info.id, ids.tolist())

    def ids(
        self,
        *,
        where: Sequence[Condition] = (),
        order_by: str = "id",
        descending: bool = False,
    ) -> NDArray[np.int64]:
        """(n,) ids of rollouts in order: what a table that is shown in pages asks first.

        Args:
            where: as of :meth:`rollouts`.
            order_by: as of :meth:`rollouts`.
            descending: the greatest first.

        Raises:
            StoreError: a column or operator does not exist.
        """
        with self._reading() as connection:
            question = Question(self.info.id, where, order_by, descending)
            return rollouts.matching(connection, question)

    def table(
        self, ids: Sequence[int] | NDArray[np.int64], chars: int | None = None
    ) -> dict[str, list[Any]]:
        """Some rollouts, column by column in the order of the ids: one page.

        The columns are ``id`` and those of :meth:`rollouts`; a missing number is None.

        Args:
            ids: from :meth:`ids`.
            chars: the most characters of each text; None = all.

        Raises:
            StoreError: the run has no such rollout.
        """
        with self._reading() as connection:
            return tables.table(connection, self.info.id, _whole(ids), chars)

    def group_table(
        self,
        *,
        where: Sequence[Condition] = (),
        order_by: str = "step",
        descending: bool = False,
        chars: int | None = None,
    ) -> "pd.DataFrame":
        """Groups, one row each, of which a rollout is asked for: prompt and rewards.

        Args:
            where: conditions on rollouts, as of :meth:`rollouts`: one rollout of the group at least
                must meet all of them.  Conditions on ``n``, ``matches``, ``reward:mean``,
                ``reward:std``, ``reward:min``, ``reward:max``, ``spread`` and ``length:mean`` are
                on the group: ``("spread", "=", 0)``.
            order_by: a column that is a number.  Groups without one come last.
            descending: the greatest first.
            chars: the most characters of a prompt; None = all.

        Returns:
            A table with ``step``; ``group``, its position in the step; ``n`` rollouts, of which
            ``matches`` meet the conditions and in ``failed`` the reward failed; mean, standard
            deviation (of the group, not of a sample), least, greatest and ``spread`` (greatest -
            least) of all rewards that are numbers; ``length:mean`` in tokens; ``prompt``; and
            ``ids`` of all its rollouts.

        Raises:
            StoreError: a column or operator does not exist.
        """
        question = Question(self.info.id, where, order_by, descending)
        with self._reading() as connection:
            return spreads.group_table(connection, question, chars)

    def same_prompt(self, id: int) -> list[int]:  # noqa: A002 (what the table calls it)
        """Ids of all rollouts on the prompt of a rollout, token for token, by step.

        Args:
            id: from :meth:`ids`.

        Raises:
            StoreError: the run has no such rollout.
        """
        with self._reading() as connection:
            return self._prompts.same(connection, int(id))

    def annotate(
        self,
        id: int,  # noqa: A002 (what the table calls it)
        *,
        tags: Sequence[str] | None = None,
        note: str | None = None,
    ) -> Note:
        """Leave tags and a note on a rollout, in place of those it has.

        The run may be under way, and superseded steps count too.  Of two that do it at once the
        last one wins.

        Args:
            id: from :meth:`ids`.
            tags: words without white space and commas, at most 50 of at most 50 characters; each
                is kept once.  None = as before.
            note: at most 100,000 characters.  None = as before.

        Returns:
            What the rollout has now.

        Raises:
            StoreError: the run has no such rollout, a tag or the note does not fit, or the file
                cannot be written.
        """
        words, text = notes.checked(tags, note)
        database = Database(self.path, writable=True)
        try:
            with database.write() as connection:
                return notes.put(connection, self.info.id, int(id), words, text)
        finally:
            database.close()

    def notes(self) -> dict[int, Note]:
        """All tags and notes of the run, by the id of the rollout."""
        with self._reading() as connection:
            return notes.of_run(connection, self.info.id)

    def stored(self, ids: Iterable[int]) -> Iterator[StoredRollout]:
        """Rollouts with their tokens and streams, in the order of the ids.

        Each group is unpacked once.  In the order of :meth:`ids` there is one in memory at a time;
        in another, of each group that was begun what is still to come.

        Args:
            ids: from :meth:`ids`.

        Raises:
            StoreError: the run has no such rollout.
        """
        chosen = _whole(ids)
        with self._reading() as connection:
            group_of = tables.groups_of(connection, self.info.id, chosen)

        def unpack(group: int) -> list[StoredRollout]:
            with self._reading() as connection:
                return groups.rollouts_of(connection, group)

        yield from walks.in_order(chosen, group_of, unpack)

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
            return groups.stored_many(connection, ids.tolist())

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


def _whole(ids: Iterable[int]) -> list[int]:
    return [int(number) for number in ids]
