"""The course of runs as a plotly figure, for exploration after the fact."""

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from xorl_lab.errors import ConfigError
from xorl_lab.widgets.bands import band, finite
from xorl_lab.widgets.colours import COLOURS, GREY, PLOTLY_DASHES, translucent
from xorl_lab.widgets.feed import Feed
from xorl_lab.widgets.panels import MORE, Line, Panel, panels

if TYPE_CHECKING:
    from xorl_lab.store import Reader

_HEIGHT = 280
"""Pixels of one row of panels."""


def figure(readers: "Sequence[Reader]", names: Sequence[str] | None = None) -> go.Figure:
    """The course of runs as an explorable figure.

    Args:
        readers: of the runs; several are laid over each other, one panel per metric.
        names: metrics to draw; None or none draws those that the dashboard shows before "more".

    Raises:
        ConfigError: there is no run, or none of them has such a metric.
    """
    if not readers:
        raise ConfigError("there are no runs to draw: pass at least one reader")
    feeds = [Feed(reader) for reader in readers]
    there = list(dict.fromkeys(n for feed in feeds for n in feed.history.names))
    chosen = _chosen(there, names, several=len(feeds) > 1)
    columns = min(2, len(chosen)) or 1
    rows = max(1, -(-len(chosen) // columns))
    fig: Any = make_subplots(
        rows=rows,
        cols=columns,
        subplot_titles=[plain(f"{p.title} ({p.unit})" if p.unit else p.title) for p in chosen],
        vertical_spacing=0.4 / rows if rows > 1 else 0.2,
        horizontal_spacing=0.09,
    )
    for i, panel in enumerate(chosen):
        place = {"row": i // columns + 1, "col": i % columns + 1}
        legend = f"legend{i + 1}" if i else "legend"
        for trace in _traces(feeds, panel):
            fig.add_trace(trace.update(legend=legend), **place)
        cell = fig.get_subplot(**place)
        below = {"x": cell.xaxis.domain[0], "y": cell.yaxis.domain[0] - 24 / (_HEIGHT * rows)}
        fig.update_layout({legend: {**below, "yanchor": "top", "orientation": "h"}})
    fig.update_layout(
        height=_HEIGHT * rows + 110,
        hovermode="x unified",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        showlegend=True,
        font={"family": "system-ui, sans-serif", "color": GREY},
        # Whole names: a shortened one would end in half of an escaped character.
        hoverlabel={"bgcolor": "#f6f8fa", "font": {"color": "#1d2129"}, "namelength": -1},
        margin={"l": 50, "r": 20, "t": 40, "b": 70},
    )
    grid = "rgba(128,128,128,.25)"
    fig.update_xaxes(zeroline=False, gridcolor=grid)
    fig.update_yaxes(zeroline=False, gridcolor=grid)
    return fig


def plain(text: str) -> str:
    """A text that plotly shows as it is, and takes neither for HTML nor for TeX.

    >>> plain("<b> & $x$")
    '&lt;b&gt; &amp; &#36;x&#36;'
    """
    return html.escape(text, quote=False).replace("$", "&#36;")


def _chosen(there: Sequence[str], names: Sequence[str] | None, *, several: bool) -> list[Panel]:
    """The panels to draw."""
    if not names:
        return [p for p in panels(there, several=several) if p.section != MORE]
    unknown = [name for name in names if name not in there]
    if unknown:
        raise ConfigError(
            f"there is no metric {unknown[0]!r}: choose from {', '.join(sorted(there))}"
        )
    return [Panel(name, name, "", MORE, [Line(name, name)]) for name in names]


def _traces(feeds: Sequence[Feed], panel: Panel) -> list[Any]:
    traces: list[Any] = []
    for run, feed in enumerate(feeds):
        for number, line in enumerate(panel.lines):
            look = run if len(feeds) > 1 else number
            label = feed.name if len(feeds) > 1 else line.label
            traces += _line(feed, line, look, plain(label))
    return traces


def _line(feed: Feed, line: Line, look: int, label: str) -> list[Any]:
    """A line with its band.  Values that are missing or not finite leave a gap."""
    steps, values = feed.history.steps, finite(feed.history.column(line.name))
    if not np.isfinite(values).any():
        return []
    colour = COLOURS[look % len(COLOURS)]
    traces: list[Any] = []
    edges = band(feed.history.column, line)
    if edges is not None:
        # A band with gaps would be closed across them: it is drawn where it is known.
        known = np.isfinite(edges[0]) & np.isfinite(edges[1])
        around = np.concatenate([steps[known], steps[known][::-1]])
        height = np.concatenate([edges[1][known], edges[0][known][::-1]])
        look_of_band: dict[str, Any] = {"fill": "toself", "fillcolor": translucent(colour)}
        traces.append(
            go.Scatter(
                x=around,
                y=height,
                hoverinfo="skip",
                showlegend=False,
                line={"width": 0},
                mode="lines",
                **look_of_band,
            )
        )
    stacked = {"stackgroup": "parts"} if line.shape == "stack" else {}
    traces.append(
        go.Scatter(
            x=steps,
            y=values,
            name=label,
            mode="markers" if line.shape == "points" else "lines",
            line={"color": colour, "dash": PLOTLY_DASHES[look % len(PLOTLY_DASHES)], "width": 1.6},
            marker={"size": 8, "color": colour},
            **stacked,
        )
    )
    return traces
