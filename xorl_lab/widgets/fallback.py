"""What a saved notebook keeps of a dashboard: a picture and a table, no script."""

import base64
import html
import io
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from xorl_lab.widgets.colours import COLOURS, DASHES, GREY
from xorl_lab.widgets.feed import Feed
from xorl_lab.widgets.figure import band
from xorl_lab.widgets.panels import MORE, Panel, panels

if TYPE_CHECKING:
    from xorl_lab.store import Reader

_COLUMNS = 3
_MOST_PANELS = 12
_POINTS = 1000
"""Steps in the picture of a long run."""
_WORDS = {
    "running": "running",
    "paused": "paused",
    "stopped": "stopped by hand",
    "finished": "finished",
    "failed": "ended by an error",
    "crashed": "its process is gone",
}


def fallback_html(reader: "Reader") -> str:
    """A run as HTML that any page shows: state, newest values, a picture of its charts.

    Args:
        reader: of the run.
    """
    feed = Feed(reader)
    status, values = feed.status, feed.history.latest()
    shown = [p for p in panels(values) if p.section != MORE][:_MOST_PANELS]
    total = f" of {status['total']}" if status["total"] else ""
    state = _WORDS.get(str(status["state"]), str(status["state"]))
    head = f"<b>{html.escape(feed.name)}</b>: {state}, step {status['step']}{total}"
    if status["message"]:
        head += f" ({html.escape(status['message'])})"
    rows = "".join(
        f"<tr><td>{html.escape(panel.title)}</td><td>{html.escape(line.label)}</td>"
        f"<td>{number(values[line.name])}</td><td>{html.escape(panel.unit)}</td></tr>"
        for panel in shown
        for line in panel.lines
        if line.name in values
    )
    table = f"<table><tr><th></th><th></th><th>newest</th><th>unit</th></tr>{rows}</table>"
    picture = ""
    if shown:
        data = base64.b64encode(_png(feed, shown)).decode()
        alt = f"Charts of {feed.name}, {len(feed.history)} steps; the table has the newest values"
        picture = f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{data}">'
    table = f"<details><summary>Newest values</summary>{table}</details>"
    return f"<div><p>{head}</p>{picture}{table}</div>"


def number(value: float) -> str:
    """Four digits, or the name of what is no number.

    >>> number(0.123456), number(1234567.0), number(float("inf"))
    ('0.1235', '1.235e+06', 'inf')
    """
    return f"{value:.4g}" if math.isfinite(value) else str(value)


def _png(feed: Feed, shown: list[Panel]) -> bytes:
    """The charts as a picture that can be seen on a white page and on a dark one."""
    # matplotlib takes half a second, once, when a run has ended.
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415
    from PIL import Image  # noqa: PLC0415

    columns = min(_COLUMNS, len(shown))
    rows = -(-len(shown) // columns)
    fig: Any = Figure(figsize=(3.6 * columns, 2.1 * rows), dpi=80)
    # By hand, since a layout engine draws everything several times.
    high, wide = 2.1 * rows, 3.6 * columns
    fig.subplots_adjust(
        left=0.45 / wide,
        right=1 - 0.1 / wide,
        top=1 - 0.3 / high,
        bottom=0.25 / high,
        wspace=0.17,
        hspace=0.4,
    )
    for i, panel in enumerate(shown):
        axes = fig.add_subplot(rows, columns, i + 1)
        _draw(axes, feed, panel)
    fig.patch.set_alpha(0)
    canvas = FigureCanvasAgg(fig)
    canvas.draw()
    target = io.BytesIO()
    # 64 colours are enough for lines, and a third of the bytes.
    picture = Image.fromarray(np.asarray(canvas.buffer_rgba()))
    picture.quantize(64, method=Image.Quantize.FASTOCTREE).save(target, "PNG", optimize=True)
    return target.getvalue()


def _draw(axes: Any, feed: Feed, panel: Panel) -> None:  # noqa: ANN401 (matplotlib has no types)
    title = f"{panel.title} ({panel.unit})" if panel.unit else panel.title
    axes.set_title(title, fontsize=9, color=GREY, loc="left")
    axes.patch.set_alpha(0)
    axes.grid(visible=True, color=GREY, alpha=0.25, linewidth=0.5)
    axes.tick_params(colors=GREY, labelsize=7, length=2)
    for name, spine in axes.spines.items():
        spine.set_visible(name in ("left", "bottom"))
        spine.set_color(GREY)
    every = max(1, len(feed.history) // _POINTS)
    steps = feed.history.steps[::every]
    for number_, line in enumerate(panel.lines):
        values = feed.history.column(line.name)[::every]
        colour, dash = COLOURS[number_ % len(COLOURS)], DASHES[number_ % len(DASHES)]
        edges = band(feed, line)
        if edges is not None:
            axes.fill_between(
                steps, edges[0][::every], edges[1][::every], color=colour, alpha=0.15, linewidth=0
            )
        style = {"linestyle": (0, dash) if dash else "solid", "linewidth": 1.3}
        if line.shape == "points":
            style = {"linestyle": "none", "marker": "o", "markersize": 4}
        axes.plot(steps, values, color=colour, label=line.label, **style)
    if len(panel.lines) > 1:
        axes.legend(fontsize=6.5, frameon=False, labelcolor=GREY, ncols=2, handlelength=2.2)
