"""Buttons and knobs of a run, and the channel through which its views ask for more."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import traitlets

from xorl_lab.widgets.bundle import script
from xorl_lab.widgets.channel import Answer, Channel
from xorl_lab.widgets.dashboard import Dashboard, finite
from xorl_lab.widgets.sender import SENDER

if TYPE_CHECKING:
    from xorl_lab.types import RunCommands

NO_COMMANDS = "This run is not driven from this kernel: it can be watched here, not steered."
ENDED = "This run has ended: run.resume() takes it up again."
ACTIONS = ("pause", "resume", "step", "stop")


class Controls(Channel):
    """Pause, Resume, Step, Stop and the knobs of one run.

    A widget apart from the charts, which speak without being asked: see :class:`Channel`.

    Args:
        dashboard: the charts that belong to it.
        commands: what the buttons do; None disables them.
    """

    _esm = script("controls")
    reason = traitlets.Unicode().tag(sync=True)
    """Why the buttons are disabled; empty if they are not."""
    knobs: Any = traitlets.Dict().tag(sync=True)
    """Values at display; later ones come with the charts."""

    def __init__(self, dashboard: Dashboard, commands: "RunCommands | None") -> None:
        self._dashboard = dashboard
        self._commands = commands
        super().__init__(
            group=dashboard.group,
            reason="" if commands is not None else NO_COMMANDS if dashboard.going else ENDED,
            knobs={} if commands is None else finite(commands.knobs()),
        )

    def answer(self, content: Mapping[str, Any], buffers: list[bytes]) -> Answer:
        """Do what the page asks; the charts follow at once."""
        try:
            return self._obey(content, buffers)
        finally:
            SENDER.wake()

    def _obey(self, content: Mapping[str, Any], buffers: list[bytes]) -> Answer:
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

    def __repr__(self) -> str:
        return f"Controls({self._dashboard.names[0]})"
