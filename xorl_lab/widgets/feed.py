"""What one run has to say since it was last asked."""

import math
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from xorl_lab.errors import LabError
from xorl_lab.widgets.history import Floats, History, Table

if TYPE_CHECKING:
    from xorl_lab.store import Event, Reader, RunStatus

LINES_KEPT = 500
"""Lines of the log that a view shows; the store keeps all."""
MARKS_KEPT = 300
"""Marks of one kind that a view shows, from the newest back."""
TEXT_KEPT = 2000
"""Characters of one line."""
POINTS = 2400
"""Rows of a snapshot; charts are narrower than that."""
TAIL = 400
"""The newest rows of a snapshot, which are never thinned."""
_UNMARKED = frozenset({"log", "warning", "start", "end", "resume"})
_ROUTINE = frozenset({"sync"})
"""What happens at nearly every step, and would leave no room in the log for what does not."""
_DURATIONS = ("seconds:total", "seconds:step")
"""How long a step of a recipe took, and one of a loop of the caller's own."""
_RECENT = 20
"""Steps from which the time that is left is estimated."""

UNKNOWN = "unknown"
"""State of a run that could not be read so far."""

Entry = list[Any]
"""[id, unix time, step or None, kind, text]; ids below 0 are not of the store."""


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
        self.status: dict[str, Any] = _unread(reader)
        self.event = 0
        """Id of the newest event that was read."""
        self._marks: dict[str, deque[Entry]] = {}
        self._placed = 0
        self._began = (reader.info.created, 0.0)
        self._attempt: int | None = None
        self._token: object = None
        self._failed = False
        self._said = 0
        self.poll()

    @property
    def name(self) -> str:
        """Of the run."""
        return self.reader.info.name

    @property
    def marks(self) -> list[Entry]:
        """What is marked in the charts, the oldest first."""
        return sorted((e for kept in self._marks.values() for e in kept), key=lambda e: e[0])

    def poll(self) -> News | None:
        """Read what is new; None if nothing is.

        A store that cannot be read is said once in the log, and tried again.
        """
        try:
            news = self._read()
        except (LabError, OSError) as error:
            return self._unreadable(f"the run cannot be read: {error}")
        if self._failed:
            self._failed = False
            said = self._say("log", "the run can be read again")
            news = replace(news, entries=[*news.entries, said])
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
            "marks": self.marks,
            "event": self.event,
        }

    def _read(self) -> News:
        changed, token = self.reader.changed(self._token)
        after = self.history.last
        if not changed:
            return News(after, None, [], None, restarted=False)
        scalars = self.reader.scalars(after)
        restarted = self._attempt is not None and scalars.attempt != self._attempt
        if restarted:
            scalars, after = self.reader.scalars(0), 0
        events = self.reader.events(0 if restarted else self.event)
        status = self.reader.status()
        # All was read: from here on nothing fails, so that what is new is told once.
        if restarted:
            self._forget()
        live = self._attempt is not None and not restarted
        self._token, self._attempt = token, scalars.attempt
        table: Table | None = None
        if len(scalars.steps):
            start = len(self.history)
            self.history.extend(scalars.steps, scalars.columns)
            table = self.history.table(start)
        entries = self._entries(events, live=live)
        return News(after, table, entries, self._status(status), restarted)

    def _entries(self, events: "Sequence[Event]", *, live: bool) -> list[Entry]:
        """What a view shows of events; those without a step are placed behind the last one.

        Args:
            events: the oldest first.
            live: they happened just now, and not at any time of the steps that were read.
        """
        entries: list[Entry] = []
        for event in events:
            self.event = max(self.event, event.id)
            if event.superseded:
                continue
            if event.kind == "start":
                self._began = (event.time, self._worked(event.step or 0))
            if event.step is not None:
                self._placed = event.step
            marked = event.kind not in _UNMARKED
            step = event.step
            if step is None and marked:
                step = self.history.last if live else self._placed
            entry = [event.id, event.time, step, event.kind, event.text[:TEXT_KEPT]]
            entries.append(entry)
            if event.kind not in _ROUTINE:
                self.lines.append(entry)
            if marked:
                kept = self._marks.setdefault(event.kind, deque(maxlen=MARKS_KEPT))
                kept.append(entry)
        return entries

    def _say(self, kind: str, text: str) -> Entry:
        """A line that is not of the store."""
        self._said -= 1
        entry: Entry = [self._said, time.time(), None, kind, text[:TEXT_KEPT]]
        self.lines.append(entry)
        return entry

    def _unreadable(self, text: str) -> News | None:
        if self._failed:
            return None
        self._failed = True
        if self.status["state"] == UNKNOWN:
            self.status = self.status | {"message": text[:TEXT_KEPT]}
        entry = self._say("error", text)
        return News(self.history.last, None, [entry], None, restarted=False)

    def _forget(self) -> None:
        """Begin anew: steps and events were superseded."""
        self.history.clear()
        self.lines.clear()
        self._marks.clear()
        self.event = self._placed = 0
        self._began = (self.reader.info.created, 0.0)

    def _status(self, now: "RunStatus") -> dict[str, Any] | None:
        """The status with the time left, if it changed."""
        began, worked = self._began
        status = {
            "state": now.state,
            "step": now.step,
            "total": now.total,
            "message": now.message[:TEXT_KEPT],
            "seconds": round(worked + max(0.0, now.updated - began), 1),
            "left": self._left(now.step, now.total) if now.state == "running" else None,
        }
        if status == self.status:
            return None
        self.status = status
        return status

    def _left(self, step: int, total: int | None) -> float | None:
        """Seconds that the remaining steps will take, by the median of the newest ones."""
        recent = self._seconds()[-_RECENT:]
        recent = recent[np.isfinite(recent)]
        if total is None or not len(recent):
            return None
        left = statistics.median(recent.tolist()) * (total - step)
        return round(left, 1) if math.isfinite(left) and left >= 0 else None

    def _worked(self, step: int) -> float:
        """Seconds that the steps up to one took: what a resumed run had behind it."""
        seconds = self._seconds()[: np.searchsorted(self.history.steps, step, side="right")]
        return float(seconds[np.isfinite(seconds)].sum())

    def _seconds(self) -> Floats:
        """(n,) how long each step took."""
        known = (n for n in _DURATIONS if n in self.history.names)
        return self.history.column(next(known, _DURATIONS[0]))


def _unread(reader: "Reader") -> dict[str, Any]:
    """The status of a run of which nothing is known yet."""
    blank = {"state": UNKNOWN, "step": 0, "total": reader.info.total, "message": ""}
    return blank | {"seconds": 0.0, "left": None}
