"""Live views of runs in a notebook.  They draw the store, and know nothing heavier.

What a view *does* it asks of a :class:`~xorl_lab.types.RunCommands` that its maker hands in.
"""

from xorl_lab.widgets.dashboard import Dashboard
from xorl_lab.widgets.explorer import LossExplorer
from xorl_lab.widgets.export import export_html
from xorl_lab.widgets.fallback import fallback_html
from xorl_lab.widgets.figure import figure
from xorl_lab.widgets.inspector import RolloutInspector
from xorl_lab.widgets.shelf import CheckpointBrowser
from xorl_lab.widgets.view import RunView

__all__ = [
    "CheckpointBrowser",
    "Dashboard",
    "LossExplorer",
    "RolloutInspector",
    "RunView",
    "export_html",
    "fallback_html",
    "figure",
]
