"""Explorer of losses: value and gradient of one token as curves, with sliders for everything."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import traitlets

from xorl_lab.widgets import explorer_still
from xorl_lab.widgets.bundle import script
from xorl_lab.widgets.channel import Answer, Channel
from xorl_lab.widgets.shelf_wire import plain
from xorl_lab.widgets.view import View

if TYPE_CHECKING:
    from xorl_lab.types import LossCommands


class Curves(Channel):
    """The widget: asks its commands for the curve that the page asks for.

    Args:
        commands: what computes.
        asked: loss, parameters and token at first, as of
            :meth:`~xorl_lab.types.LossCommands.curve`.
    """

    _esm = script("explorer")
    first: Any = traitlets.Dict().tag(sync=True)
    """The losses, and the curve when the widget was made."""

    def __init__(
        self, commands: "LossCommands", asked: tuple[str, Mapping[str, Any], Mapping[str, Any]]
    ) -> None:
        self._commands = commands
        self.curve = commands.curve(*asked)
        """What the page was shown last."""
        super().__init__(first={"forms": plain(commands.forms()), "curve": plain(self.curve)})

    def answer(self, content: Mapping[str, Any], buffers: list[bytes]) -> Answer:
        """A curve takes milliseconds."""
        del buffers
        kind = content.get("kind")
        if kind == "curve":
            asked = (str(content.get("loss")), content.get("params"), content.get("token"))
            self.curve = self._commands.curve(*asked)  # pyright: ignore[reportArgumentType]
        elif kind != "hello":
            return {"error": f"{kind!r} is no request: pass hello or curve"}
        return {"curve": plain(self.curve)}


class LossExplorer(View):
    """A loss with sliders for one token and every parameter; curves, and numbers at a mark.

    Args:
        commands: what computes.
        loss: the first one.
        params: of it.
        token: ``ratio``, ``advantage``, …, as of :meth:`~xorl_lab.types.LossCommands.curve`.

    Raises:
        LabError: something is out of its range.
    """

    endless = True

    def __init__(
        self,
        commands: "LossCommands",
        loss: str,
        params: Mapping[str, Any],
        token: Mapping[str, Any],
    ) -> None:
        self.curves = Curves(commands, (loss, params, token))
        """The widget."""
        super().__init__([self.curves])

    @property
    def curve(self) -> Mapping[str, Any]:
        """What the page shows, as of :meth:`~xorl_lab.types.LossCommands.curve`."""
        return self.curves.curve

    def still(self) -> str:
        """A picture of the curves, and the numbers at the mark."""
        return explorer_still.still_html(self.curve)

    def __repr__(self) -> str:
        return f"LossExplorer({explorer_still.said(self.curve)})"
