"""What a saved notebook keeps of a dashboard: a picture and a table, no script."""

import base64
import html
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from xorl_lab.widgets.feed import Feed
from xorl_lab.widgets.panels import MORE, Panel, panels
from xorl_lab.widgets.picture import png

if TYPE_CHECKING:
    from xorl_lab.store import Reader

_MOST_PANELS = 15
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
    table = f"<details><summary>Newest values</summary>{table}</details>"
    return f"<div><p>{head}</p>{_picture(feed, shown) if shown else ''}{table}</div>"


def number(value: float) -> str:
    """Four digits, or the name of what is no number.

    >>> number(0.123456), number(1234567.0), number(float("inf"))
    ('0.1235', '1.235e+06', 'inf')
    """
    return f"{value:.4g}" if math.isfinite(value) else str(value)


def _picture(feed: Feed, shown: Sequence[Panel]) -> str:
    """The charts; in words, why there are none."""
    try:
        data = base64.b64encode(png(feed, shown)).decode()
    except Exception as error:  # noqa: BLE001 (whatever it is, the table says how the run ended)
        why = html.escape(f"{type(error).__name__}: {error}"[:500])
        return f"<p><i>The picture of the charts could not be drawn: {why}</i></p>"
    alt = f"Charts of {feed.name}, {len(feed.history)} steps; the table has the newest values"
    return f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{data}">'
