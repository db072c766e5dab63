"""What one run has to say since it was last asked."""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from xorl_lab.errors import LabError
from xorl_lab.widgets.history import History, Table

if TYPE_CHECKING:
    from xorl_lab.store import Reader

LINES_KEPT = 500
"""Lines of the log that a view shows; the store keeps all."""
MARKS_KEPT = 1000
"""Marks that a view shows, from the newest back."""
TEXT_KEPT = 2000
"""Characters of one line."""
POINTS = 2400
"""Rows of a snapshot; charts are narrower than that."""
TAIL = 400
"""The newest rows of a snapshot, which are never thinned."""
_UNMARKED = frozenset({"log", "warning", "start", "end", "resume"})
_RECENT = 20
"""Steps from which the time that is left is estimated."""

Entry = list[Any]
"""[id, unix time, step or None, kind, text]."""


@dataclass(frozen=True, slots=True)
class News:
    """What is new of a run."""

    after: int
    """The step before the first new one; 0 if there is none."""
    table: Table | None
    """New steps, or None."""
    entries: Sequence[Entry]
    """New events."""
    status: dict[str, Any] | None
    """The status, if it changed."""
    restarted: bool
    """True if earlier steps were replaced, so that everything has to be shown anew."""

    def __bool__(self) -> bool:
        return self.restarted or bool(self.entries) or (self.table or self.status) is not None


class Feed:
    """Reads one run, again and again.

    Args:
        reader: of the run.
    """

    def __init__(self, reader: "Reader") -> None:
        self.reader = reader
        self.history = History()
        self.lines: deque[Entry] = deque(maxlen=LINES_KEPT)
        self.marks: deque[Entry] = deque(maxlen=MARKS_KEPT)
        self.status: dict[str, Any] = {}
        self._event = 0
        self._attempt: int | None = None
        self._token: object = None
        self._failed = False
        self.poll()

    @property
    def name(self) -> str:
        """Of the run."""
        return self.reader.info.name

    def poll(self) -> News | None:
        """Read what is new; None if nothing is.

        A store that cannot be read is said once in the log, and tried again.
        """
        try:
            news = self._read()
        except (LabError, OSError) as error:
            if self._failed:
                return None
            self._failed = True
            entry = [-1, 0.0, None, "error", f"the run cannot be read: {error}"[:TEXT_KEPT]]
            self.lines.append(entry)
            return News(self.history.last, None, [entry], None, restarted=False)
        self._failed = False
        return news or None

    def description(self) -> dict[str, Any]:
        """What does not change about the run."""
        info = self.reader.info
        parent = info.parent
        return {
            "id": info.id,
            "name": info.name,
            "kind": info.kind,
            "model": info.model,
            "created": info.created,
            "parent": None
            if parent is None
            else {"run": parent.run, "checkpoint": parent.checkpoint},
        }

    def snapshot(self, points: int = POINTS) -> dict[str, Any]:
        """All there is, long histories thinned to about ``points`` rows."""
        table = self.history.thin(points, tail=TAIL)
        return {
            **self.description(),
            "names": list(table.names),
            "rows": len(table.steps),
            "data": table.wire(),
            "exact": table.exact,
            "status": self.status,
            "lines": list(self.lines),
            "marks": list(self.marks),
        }

    def _read(self) -> News:
        changed, self._token = self.reader.changed(self._token)
        after = self.history.last
        if not changed:
            return News(after, None, [], None, restarted=False)
        scalars = self.reader.scalars(after)
        restarted = self._attempt is not None and scalars.attempt != self._attempt
        if restarted:
            self._forget()
            scalars, after = self.reader.scalars(0), 0
        self._attempt = scalars.attempt
        table: Table | None = None
        if len(scalars.steps):
            start = len(self.history)
            self.history.extend(scalars.steps, scalars.columns)
            table = self.history.table(start)
        return News(after, table, self._entries(), self._status(), restarted)

    def _entries(self) -> list[Entry]:
        entries: list[Entry] = []
        for event in self.reader.events(self._event):
            self._event = max(self._event, event.id)
            if event.superseded:
                continue
            entries.append([event.id, event.time, event.step, event.kind, event.text[:TEXT_KEPT]])
        self.lines.extend(entries)
        self.marks.extend(e for e in entries if e[3] not in _UNMARKED and e[2] is not None)
        return entries

    def _forget(self) -> None:
        """Begin anew: steps and events were superseded."""
        self.history.clear()
        self.lines.clear()
        self.marks.clear()
        self._event = 0

    def _status(self) -> dict[str, Any] | None:
        """The status with the time left, if it changed."""
        now = self.reader.status()
        status = {
            "state": now.state,
            "step": now.step,
            "total": now.total,
            "message": now.message[:TEXT_KEPT],
            "seconds": round(max(0.0, now.updated - self.reader.info.created), 1),
            "left": self._left(now.step, now.total) if now.state == "running" else None,
        }
        if status == self.status:
            return None
        self.status = status
        return status

    def _left(self, step: int, total: int | None) -> float | None:
        """Seconds that the remaining steps will take, by the median of the newest ones."""
        recent = self.history.column("seconds:total")[-_RECENT:]
        recent = recent[np.isfinite(recent)]
        if total is None or not len(recent):
            return None
        left = statistics.median(recent.tolist()) * (total - step)
        return round(left, 1) if math.isfinite(left) and left >= 0 else None
