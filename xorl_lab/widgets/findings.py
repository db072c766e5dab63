"""Answers to questions about the rollouts of several runs, handed out page by page."""

import itertools
import math
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from xorl_lab.errors import DataError

if TYPE_CHECKING:
    from xorl_lab.store import Reader

CHARS = 240
"""Characters of a text in a row of the table."""
MOST_ROWS = 500
"""Rows of one page."""
_KEPT = 16
"""Questions whose answers are held; older ones are asked again."""
GROUP_SCALARS = ("step", "group", "n", "matches", "failed", "reward:mean", "reward:std",
                 "reward:min", "reward:max", "spread", "length:mean")  # fmt: skip
"""By which groups are sorted."""

Condition = tuple[str, str, Any]


@dataclass(frozen=True, slots=True)
class Wish:
    """What a page asks for."""

    where: tuple[Condition, ...]
    """Conditions that all hold, as of :meth:`xorl_lab.store.Reader.rollouts`."""
    search: str
    """Must be in the text or in the prompt; empty = anything."""
    order_by: str
    """A scalar."""
    descending: bool
    """The greatest first."""
    grouped: bool
    """Rows are groups."""

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> "Wish":
        """Read what the page sent."""
        return cls(
            tuple((str(c), str(o), v) for c, o, v in content.get("where", [])),
            str(content.get("search") or ""),
            str(content.get("order_by") or "id"),
            bool(content.get("descending")),
            bool(content.get("grouped")),
        )


@dataclass(frozen=True, slots=True)
class _Found:
    """Which rows answer a wish, in order: n rollouts or groups."""

    runs: NDArray[np.int32]
    """(n,) index of the run."""
    ids: NDArray[np.int64]
    """(n,) of rollouts; of groups the row of the table of its run."""
    tables: list[dict[str, list[Any]]]
    """Groups of each run; empty if rows are rollouts."""


class Findings:
    """Questions about runs and their answers.

    Args:
        readers: of R runs.
    """

    def __init__(self, readers: "Sequence[Reader]") -> None:
        self._readers = list(readers)
        self._lock = threading.Lock()
        self._found: OrderedDict[int, _Found] = OrderedDict()
        self._number = itertools.count(1)
        self._seen: list[object] = [None] * len(self._readers)
        self._version = 0

    def ask(self, wish: Wish) -> dict[str, Any]:
        """Find what is wished for.

        Returns:
            ``key`` for :meth:`page`, ``count`` of rows, ``rollouts`` as of :meth:`count`,
            ``version`` for :meth:`changed`.

        Raises:
            StoreError: a column or operator does not exist.
        """
        version = self.changed()
        found = self._groups(wish) if wish.grouped else self._rollouts(wish)
        with self._lock:
            key = next(self._number)
            self._found[key] = found
            while len(self._found) > _KEPT:
                self._found.popitem(last=False)
        rollouts = self.count(wish) if wish.grouped else len(found.ids)
        return {"key": key, "count": len(found.ids), "rollouts": rollouts, "version": version}

    def changed(self) -> int:
        """A number that grows whenever anything was recorded."""
        with self._lock:
            for i, reader in enumerate(self._readers):
                news, self._seen[i] = reader.changed(self._seen[i])
                self._version += news
            return self._version

    def count(self, wish: Wish) -> int:
        """How many rollouts there are by now."""
        if wish.search:
            return len(self._rollouts(wish).ids)
        return sum(reader.count(wish.where) for reader in self._readers)

    def page(self, key: int, start: int, count: int) -> dict[str, Any]:
        """Some rows of an answer, column by column.

        Raises:
            DataError: the answer is no longer held; ask again.
        """
        with self._lock:
            found = self._found.get(key)
            if found is None:
                raise DataError("this list is no longer held: ask again")
            self._found.move_to_end(key)
        rows = slice(start, start + min(count, MOST_ROWS))
        runs, ids = found.runs[rows], found.ids[rows]
        if found.tables:
            return self._group_rows(found, runs, ids)
        return {"start": start, "columns": self.rows(runs, ids)}

    def rows(self, runs: NDArray[np.int32], ids: NDArray[np.int64]) -> dict[str, list[Any]]:
        """Columns of rollouts of any of the runs; None where a value is missing.

        Args:
            runs: (n,) index of the run of each.
            ids: (n,) its id.
        """
        columns: dict[str, list[Any]] = {"run": runs.tolist(), "id": ids.tolist()}
        for r in sorted(set(runs.tolist())):
            own = np.flatnonzero(runs == r)
            for name, values in self._readers[r].table(ids[own].tolist(), chars=CHARS).items():
                if name in ("run", "id"):
                    continue
                column = columns.setdefault(name, [None] * len(ids))
                for i, value in zip(own.tolist(), values, strict=True):
                    column[i] = plain(value)
        return columns

    def _rollouts(self, wish: Wish) -> _Found:
        order = {"order_by": wish.order_by, "descending": wish.descending}
        parts = [self._matching(reader, wish, order) for reader in self._readers]
        runs = np.repeat(np.arange(len(parts), dtype=np.int32), [len(p) for p in parts])
        ids = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        if sum(len(part) > 0 for part in parts) > 1:
            values = _numbers(self._keys(parts, wish.order_by))
            merged = _order(values, wish.descending)
            runs, ids = runs[merged], ids[merged]
        return _Found(runs, ids, [])

    def _matching(
        self, reader: "Reader", wish: Wish, order: Mapping[str, Any]
    ) -> NDArray[np.int64]:
        if not wish.search:
            return reader.ids(where=wish.where, **order)
        either = [
            reader.ids(where=[*wish.where, (column, "contains", wish.search)], **order)
            for column in ("text", "prompt")
        ]
        if len(either[0]) == 0 or len(either[1]) == 0:
            return either[0] if len(either[0]) else either[1]
        every = reader.ids(where=wish.where, **order)
        return every[np.isin(every, np.concatenate(either))]

    def _keys(self, parts: Sequence[NDArray[np.int64]], name: str) -> list[Any]:
        """Values by which rollouts of several runs are merged."""
        if name == "id":  # as recorded: by step, since several runs have no common clock
            name = "step"
        return [
            value
            for reader, ids in zip(self._readers, parts, strict=True)
            for start in range(0, len(ids), 20_000)
            for value in reader.table(ids[start : start + 20_000].tolist(), chars=0)[name]
        ]

    def _groups(self, wish: Wish) -> _Found:
        where = list(wish.where)
        tables = [self._group_table(reader, wish, where) for reader in self._readers]
        sizes = [len(table["ids"]) for table in tables]
        runs = np.repeat(np.arange(len(tables), dtype=np.int32), sizes)
        rows = np.concatenate([np.arange(size, dtype=np.int64) for size in sizes])
        name = wish.order_by if wish.order_by in GROUP_SCALARS else "step"
        values = _numbers([v for table in tables for v in table[name]])
        order = _order(values, wish.descending)
        return _Found(runs[order], rows[order], tables)

    def _group_table(
        self, reader: "Reader", wish: Wish, where: list[Condition]
    ) -> dict[str, list[Any]]:
        frame = reader.group_table(where=where, chars=CHARS)
        if wish.search:
            wanted = set(self._matching(reader, wish, {"order_by": "id"}).tolist())
            frame = frame[[not wanted.isdisjoint(ids) for ids in frame["ids"]]]
        columns: dict[str, list[Any]] = {str(n): frame[n].tolist() for n in frame.columns}
        return columns

    def _group_rows(
        self, found: _Found, runs: NDArray[np.int32], rows: NDArray[np.int64]
    ) -> dict[str, Any]:
        columns: dict[str, list[Any]] = {"run": runs.tolist()}
        own = list(zip(runs.tolist(), rows.tolist(), strict=True))
        for name in ("prompt", "ids", *GROUP_SCALARS):
            columns[name] = [plain(found.tables[r][name][i]) for r, i in own]
        columns["ids"] = [[int(i) for i in ids] for ids in columns["ids"]]
        every = [(r, i) for r, ids in zip(columns["run"], columns["ids"], strict=True) for i in ids]
        flat = self.rows(
            np.array([r for r, _ in every], np.int32), np.array([i for _, i in every], np.int64)
        )
        return {"columns": columns, "rollouts": flat}


def plain(value: Any) -> Any:  # noqa: ANN401 (a value of a table)
    """A value as JSON takes it: None where a number is missing, text where it is infinite."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def _numbers(values: list[Any]) -> NDArray[np.float64]:
    """Numbers to sort by; words by their alphabetical rank, NaN where there is none."""
    words = sorted({v for v in values if isinstance(v, str)})
    if words:
        ranks = {word: float(i) for i, word in enumerate(words)}
        return np.array([ranks.get(v, math.nan) for v in values], np.float64)
    return np.array([math.nan if v is None else v for v in values], np.float64)


def _order(values: NDArray[np.float64], descending: bool) -> NDArray[np.int64]:
    """A stable order; what lacks a value comes last either way."""
    keys = np.where(np.isnan(values), np.inf, -values if descending else values)
    return np.lexsort((np.arange(len(values)), np.isnan(values), keys))
