"""Buttons and knobs of a run, and the channel through which its views ask for more."""

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import anywidget
import traitlets

from xorl_lab.errors import LabError
from xorl_lab.widgets.bundle import script
from xorl_lab.widgets.dashboard import Dashboard, finite
from xorl_lab.widgets.sender import SENDER

if TYPE_CHECKING:
    from xorl_lab.types import RunCommands

NO_COMMANDS = "This run is not driven from this kernel: it can be watched here, not steered."
ENDED = "This run has ended: run.resume() takes it up again."
ACTIONS = ("pause", "resume", "step", "stop")


class Controls(anywidget.AnyWidget):
    """Pause, Resume, Step, Stop and the knobs of one run.

    A widget apart from the charts so that a click reaches Python while a cell blocks: ipykernel 7.4
    sends what a page says on a channel to the thread that last spoke on it, and everything that
    was made or updated in a cell spoke from the main thread, which is busy.  So nothing is ever
    said here but in answer to the page, and the route is left to the page (:meth:`_unbind`).

    Args:
        dashboard: the charts that belong to it.
        commands: what the buttons do; None disables them.
    """

    _esm = script("controls")
    group = traitlets.Unicode().tag(sync=True)
    """As of the dashboard."""
    reason = traitlets.Unicode().tag(sync=True)
    """Why the buttons are disabled; empty if they are not."""
    knobs: Any = traitlets.Dict().tag(sync=True)
    """Values at display; later ones come with the charts."""

    def __init__(self, dashboard: Dashboard, commands: "RunCommands | None") -> None:
        self._dashboard = dashboard
        self._commands = commands
        self.answered = threading.Event()
        """Set once a page has been heard of."""
        super().__init__(
            group=dashboard.group,
            reason="" if commands is not None else NO_COMMANDS if dashboard.going else ENDED,
            knobs={} if commands is None else finite(commands.knobs()),
        )
        self.on_msg(self._hear)
        self._unbind()

    def close(self) -> None:
        """Free the widget here and in the page."""
        if self.layout is not None:
            self.layout.close()
        super().close()

    def _hear(self, _widget: object, content: Mapping[str, Any], _buffers: object) -> None:
        """Do what the page asks, and answer."""
        self.answered.set()
        number = content.get("id")
        buffers: list[bytes] = []
        try:
            answer = self._obey(content, buffers)
        except Exception as error:  # noqa: BLE001 (an answer is due, whatever a command raises)
            text = str(error) if isinstance(error, LabError) else f"{type(error).__name__}: {error}"
            answer = {"error": text}
        self.send({"kind": "answer", "id": number, **answer}, buffers)
        self._unbind()
        SENDER.wake()

    def _obey(self, content: Mapping[str, Any], buffers: list[bytes]) -> dict[str, Any]:
        kind = content.get("kind")
        if kind == "again":
            self._dashboard.again()
        elif kind == "part":
            head, data = self._dashboard.part(
                int(content["run"]), float(content["low"]), float(content["high"])
            )
            buffers.append(data)
            return head
        elif kind == "set" and self._commands is not None:
            self._commands.set(str(content["name"]), float(content["value"]))
        elif kind in ACTIONS and self._commands is not None:
            getattr(self._commands, kind)()
        elif kind == "hello":
            return {"heads": self._dashboard.heads()}
        else:
            return {"error": NO_COMMANDS}
        return {}

    def _unbind(self) -> None:
        """Let ipykernel 7.4 forget which thread spoke here last; other versions know no such thing.

        Without this a click is put before the main thread, and waits until the cell is done.
        """
        if self.comm is not None:
            vars(self.comm).pop("_reply_subshell_id", None)

    def __repr__(self) -> str:
        return f"Controls({self._dashboard.names[0]})"
