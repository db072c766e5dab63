"""What a cell shows: widgets, and what stays of them when the notebook is saved."""

import threading
from typing import TYPE_CHECKING, Any

import ipywidgets
from IPython.core.getipython import get_ipython
from IPython.display import DisplayHandle, display

from xorl_lab.widgets.controls import Controls
from xorl_lab.widgets.dashboard import Dashboard
from xorl_lab.widgets.fallback import fallback_html

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from xorl_lab.store import Reader
    from xorl_lab.types import RunCommands

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
HOW_TO_STOP = (
    "No live view here.  To stop a run that this cell drives, interrupt the kernel (the ■ button): "
    "the step under way is given up, everything before it is kept and saved."
)
_SAVED = "What the saved notebook keeps"
_AGAIN = (
    "<p><i>A picture, so that it stays in the saved notebook.  Charts that can be explored: "
    "<code>view()</code> and <code>figure()</code> of the run.</i></p>"
)


class View:
    """Widgets that a cell shows, and what stays of them in a saved notebook.

    It may be displayed any number of times.  Displayed again in the same cell, it frees the views
    that the cell showed before.

    Args:
        parts: the widgets, from top to bottom.
    """

    endless = False
    """True for a view that no run ends: what stays of it is displayed beneath it, folded."""

    def __init__(self, parts: "Sequence[ipywidgets.DOMWidget]") -> None:
        self._box = ipywidgets.VBox(parts)
        self._parts = list(parts)
        self._handles: list[DisplayHandle] = []
        self._beneath: list[DisplayHandle] = []
        self._closed = False
        self.on_close: Callable[[Any], None] | None = None
        """Told of this view once it is closed."""
        self._lock = threading.RLock()

    @property
    def closed(self) -> bool:
        """True once its widgets are freed."""
        return self._closed

    def still(self) -> str:
        """HTML that a saved notebook keeps, all text in it escaped."""
        raise NotImplementedError

    def show(self) -> DisplayHandle | None:
        """Display the view in the present cell; None in a script, where there is no cell.

        A view that was closed shows what a saved notebook keeps.
        """
        if get_ipython() is None:
            return None
        if not self._closed:
            _CELLS.entered(self)
        with self._lock:
            if self._closed:
                return display(self._kept(), raw=True, display_id=True)
            handle = display(self._live(), raw=True, display_id=True)
            if handle is not None:
                self._handles.append(handle)
            if self.endless:
                folded = f"<details><summary>{_SAVED}</summary>{self.still()}</details>"
                html = {"text/html": folded, "text/plain": ""}
                beneath = display(html, raw=True, display_id=True)
                if beneath is not None:
                    self._beneath.append(beneath)
            return handle

    def finish(self) -> None:
        """Replace the view, wherever it was displayed, by what a saved notebook can keep."""
        with self._lock:
            if not self._handles:
                return
            bundle = self._kept()
            for handle in self._handles:
                handle.update(bundle, raw=True)
            for handle in self._beneath:  # it would say the same once more
                handle.update({"text/plain": ""}, raw=True)
            self._handles.clear()
            self._beneath.clear()

    def close(self) -> None:
        """Free everything, here and in the page."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._handles.clear()
            self._beneath.clear()
        _CELLS.left(self)
        self._box.children = ()
        if self._box.layout is not None:
            self._box.layout.close()
        self._box.close()
        for part in self._parts:
            part.close()
        if self.on_close is not None:
            self.on_close(self)

    def _live(self) -> dict[str, Any]:
        model = {"version_major": 2, "version_minor": 0, "model_id": self._box.model_id}
        return {WIDGET_VIEW: model, "text/plain": repr(self)}

    def _kept(self) -> dict[str, Any]:
        return {"text/html": self.still(), "text/plain": repr(self)}

    def _ipython_display_(self) -> None:
        """Shown as the last value of a cell."""
        self.show()


class RunView(View):
    """A live view of runs: charts, buttons and knobs.

    Once all of them have ended a picture takes its place, wherever it was displayed by then.  What
    is displayed later is there to be explored and stays, with the picture beneath it, folded.

    Args:
        readers: of the runs; the first one is the one that ``commands`` steers.
        commands: what the buttons do; None disables them, with the reason.

    Raises:
        ConfigError: there is no run.
    """

    def __init__(self, readers: "Sequence[Reader]", commands: "RunCommands | None" = None) -> None:
        self._readers = list(readers)
        self.dashboard = Dashboard(readers, commands)
        """The charts."""
        self.controls = Controls(self.dashboard, commands)
        """Buttons and knobs."""
        super().__init__([self.controls, self.dashboard])
        self.dashboard.on_end = self._ended
        self.endless = self.dashboard.over

    @property
    def answered(self) -> bool:
        """True once a page has shown this view and was heard of."""
        return self.controls.answered.is_set()

    def still(self) -> str:
        """A picture and a table of each run."""
        return "".join(fallback_html(reader) for reader in self._readers) + _AGAIN

    def end(self) -> None:
        """Leave a picture wherever it was displayed, and free the widgets.

        Unless a page was loaded again meanwhile: it shows the widgets where the picture cannot be
        put, and keeps them until the cell is run again.
        """
        self.finish()
        if len(self.controls.pages) <= 1:
            self.close()

    def _ended(self) -> None:
        """All runs have ended: said on the sender's thread, which a picture would halt."""
        self.endless = True  # what is displayed from now on is there to be explored
        if self._handles:
            threading.Thread(target=self.end, name="xorl-picture", daemon=True).start()

    def _live(self) -> dict[str, Any]:
        if self.endless:
            return super()._live()
        return super()._live() | {"text/plain": f"{self!r}\n{HOW_TO_STOP}"}

    def __repr__(self) -> str:
        return f"RunView({', '.join(self.dashboard.names)})"


class _Cells:
    """Which views each cell shows, so that running it again frees them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shown: dict[str, tuple[str, list[View]]] = {}

    def entered(self, view: View) -> None:
        """A view is being displayed: close what the cell showed in an earlier run of it."""
        cell, execution = _where()
        if cell is None:
            return
        with self._lock:
            before, views = self._shown.get(cell, (execution, []))
            old = [v for v in views if v is not view]
            kept = old if before == execution else []
            self._shown[cell] = (execution, [*kept, view])
        for stale in old if before != execution else []:
            stale.close()

    def left(self, view: View) -> None:
        """A view was closed."""
        with self._lock:
            for cell, (execution, views) in list(self._shown.items()):
                left = [v for v in views if v is not view]
                if left:
                    self._shown[cell] = (execution, left)
                else:
                    del self._shown[cell]


def _where() -> tuple[str | None, str]:
    """The cell that is being run, and which run of it this is; None where nobody says."""
    shell: Any = get_ipython()
    parent: Any = getattr(shell, "get_parent", dict)() if shell is not None else {}
    cell = parent.get("metadata", {}).get("cellId")
    return cell, str(parent.get("header", {}).get("msg_id", ""))


_CELLS = _Cells()
