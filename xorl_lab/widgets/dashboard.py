"""The live dashboard of one or more runs."""

import contextlib
import math
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import anywidget
import traitlets

from xorl_lab.errors import ConfigError
from xorl_lab.widgets.bundle import script
from xorl_lab.widgets.feed import UNKNOWN, Feed, News
from xorl_lab.widgets.panels import panels
from xorl_lab.widgets.sender import SENDER

if TYPE_CHECKING:
    from xorl_lab.store import Reader
    from xorl_lab.types import RunCommands

_UNDER_WAY = ("running", "paused", UNKNOWN)
_DETAIL_POINTS = 4000
"""Rows that answer a look into a part of the history."""


class Dashboard(anywidget.AnyWidget):
    """Charts, events and state of runs, kept up to date while they go on.

    What was recorded before it was made is there at once; what is new is sent at most four times a
    second, by one thread for all dashboards of the process.

    Args:
        readers: of the runs, R of them; the first one is the one that ``commands`` steers.
        commands: to show the present values of its knobs.

    Raises:
        ConfigError: there is no run.
    """

    _esm = script("dashboard")
    group = traitlets.Unicode().tag(sync=True)
    """What this widget and its controls are called in the page."""
    snapshot: Any = traitlets.Dict().tag(sync=True)
    """Everything so far; made anew whenever a front end asks for the state."""

    def __init__(self, readers: "Sequence[Reader]", commands: "RunCommands | None" = None) -> None:
        if not readers:
            raise ConfigError("there are no runs to show: pass at least one reader")
        self._lock = threading.RLock()
        self._feeds = [Feed(reader) for reader in readers]
        self.going = readers[0].status().state in ("running", "paused")
        """Whether the first run was under way when this was made."""
        self.on_end: Callable[[], None] | None = None
        """Called by the sender once all runs have ended; not if they had when this was made.

        An open widget is alive, and what is to be called with it.
        """
        self._over = self.over
        self._commands = commands
        self._knobs: dict[str, float | None] = self._read_knobs()
        self._sent = [feed.history.names for feed in self._feeds]
        self._closing = False
        super().__init__(group=uuid.uuid4().hex)
        SENDER.add(self)

    @property
    def names(self) -> list[str]:
        """Of the runs."""
        return [feed.name for feed in self._feeds]

    @property
    def over(self) -> bool:
        """Whether all runs have ended, as far as was read."""
        return all(feed.status["state"] not in _UNDER_WAY for feed in self._feeds)

    def get_state(self, key: Any = None, drop_defaults: bool = False) -> dict[str, Any]:  # noqa: ANN401
        """The state that a front end begins with: the whole history."""
        state: dict[str, Any] = super().get_state(key, drop_defaults=drop_defaults)
        if "snapshot" in state:
            state["snapshot"] = self.everything()
        return state

    def everything(self, points: int | None = None) -> dict[str, Any]:
        """All there is to draw.

        Args:
            points: rows to which a long history is thinned; None means as many as a screen needs.
        """
        with self._lock:
            more = {} if points is None else {"points": points}
            return {
                "runs": [feed.snapshot(**more) for feed in self._feeds],
                "panels": self._panels(),
                "knobs": self._knobs,
            }

    def update(self) -> bool:
        """Send what is new; True if anything was.  The sender calls this."""
        sent = self._tell()
        with self._lock:
            before, self._over = self._over, self.over
            on_end = self.on_end if self._over and not before else None
        if on_end is not None:
            on_end()
        return sent

    def _tell(self) -> bool:
        with self._lock:
            if self._closing:
                return False
            news = [feed.poll() for feed in self._feeds]
            knobs = self._read_knobs()
            if not any(news) and knobs == self._knobs:
                return False
            content: dict[str, Any] = {"kind": "delta", "runs": []}
            if knobs != self._knobs:
                self._knobs = content["knobs"] = knobs
            if any(n is not None and n.restarted for n in news):
                self._sent = [feed.history.names for feed in self._feeds]
                self.send_state("snapshot")
                return True
            buffers: list[bytes] = []
            for i, one in enumerate(news):
                if one is not None:
                    content["runs"].append(self._delta(i, one, buffers))
            if any("names" in run for run in content["runs"]):
                content["panels"] = self._panels()
            self.send(content, buffers)
            return True

    def again(self) -> None:
        """Send everything to all views of this widget."""
        with self._lock:
            self.send_state("snapshot")

    def heads(self) -> list[tuple[int, int]]:
        """Newest step and event of each run that was sent: a page that has less asks for all."""
        with self._lock:
            return [(feed.history.last, feed.event) for feed in self._feeds]

    def part(self, run: int, low: float, high: float) -> tuple[dict[str, Any], bytes]:
        """Steps ``low`` to ``high`` of one run in full, as far as a screen can show them."""
        with self._lock:
            table = self._feeds[run].history.between(low, high, _DETAIL_POINTS)
            head = {"rows": len(table.steps), "names": list(table.names), "exact": table.exact}
            return head, table.wire()

    def close(self) -> None:
        """Free the widget here and in the page."""
        self._closing = True
        self.on_end = None
        SENDER.discard(self)
        if self.layout is not None:
            self.layout.close()
        super().close()

    def _delta(self, index: int, news: News, buffers: list[bytes]) -> dict[str, Any]:
        """One run's share of a message; appends to the buffers."""
        run: dict[str, Any] = {"run": index}
        if news.table is not None:
            run |= {"after": news.after, "rows": len(news.table.steps)}
            buffers.append(news.table.wire())
            if self._sent[index] != news.table.names:
                self._sent[index] = news.table.names
                run["names"] = list(news.table.names)
        if news.status is not None:
            run["status"] = news.status
        if news.entries:
            run["events"] = list(news.entries)
        return run

    def _panels(self) -> list[dict[str, Any]]:
        names = dict.fromkeys(name for feed in self._feeds for name in feed.history.names)
        return [p.plain() for p in panels(names, several=len(self._feeds) > 1)]

    def _read_knobs(self) -> dict[str, float | None]:
        """The knobs as JSON takes them; the last ones known where they cannot be read."""
        if self._commands is None:
            return {}
        with contextlib.suppress(Exception):
            return finite(self._commands.knobs())
        return getattr(self, "_knobs", {})

    def __repr__(self) -> str:
        return f"Dashboard({', '.join(self.names)})"


def finite(values: Mapping[str, float]) -> dict[str, float | None]:
    """Numbers as JSON takes them: None instead of NaN and infinity."""
    return {n: float(v) if math.isfinite(v) else None for n, v in values.items()}
