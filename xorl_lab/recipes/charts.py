"""The course of a run as a plotly figure."""

import html
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from xorl_lab.recipes.settings import check_choice
from xorl_lab.recipes.tables import number
from xorl_lab.types import StepRecord

PANELS = ("reward", "kl", "loss", "time")
"""What :func:`figure` can draw, in this order."""

_TEXT = "#7d8590"
"""Can be read on a white page and on a dark one."""
# Okabe and Ito's colours, told apart by nearly everyone; every line has a dash of its own too.
_BLUE, _ORANGE, _GREEN, _PINK, _SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9"
_LINES: Mapping[str, Sequence[tuple[str, str, str, str]]] = {
    "reward": (
        ("reward", "mean reward", _BLUE, "solid"),
        ("held_out:accuracy", "held-out accuracy", _ORANGE, "dot"),
    ),
    "kl": (
        ("kl_base", "KL to the base model", _BLUE, "solid"),
        ("kl_sampler_abs", "trainer vs. sampler", _ORANGE, "dot"),
    ),
    "loss": (("loss:mean", "loss", _BLUE, "solid"), ("grad_norm", "gradient norm", _ORANGE, "dot")),
}
_TITLES = {
    "reward": "Reward by step",
    "kl": "Divergence by step (nats per token)",
    "loss": "Loss and gradient norm by step",
    "time": "Seconds by step",
}
_TIMES = (
    ("sample", _BLUE),
    ("score", _PINK),
    ("train", _ORANGE),
    ("sync", _GREEN),
    ("evaluate", _SKY),
)


def figure(records: Sequence[StepRecord], panels: Sequence[str] = PANELS) -> go.Figure:
    """The course of a run as an explorable figure.

    Args:
        records: the steps; values that are missing, NaN or infinite leave a gap.
        panels: of :data:`PANELS`, those to draw.

    Raises:
        ConfigError: there is no such panel.
    """
    for panel in panels:
        check_choice("panel", panel, PANELS)
    columns = min(2, len(panels)) or 1
    rows = max(1, -(-len(panels) // columns))
    fig: Any = make_subplots(
        rows=rows,
        cols=columns,
        subplot_titles=[_TITLES[p] for p in panels],
        vertical_spacing=0.22,
        horizontal_spacing=0.09,
    )
    for i, panel in enumerate(panels):
        place = {"row": i // columns + 1, "col": i % columns + 1}
        legend = f"legend{i + 1}" if i else "legend"
        for trace in _traces(records, panel):
            fig.add_trace(trace.update(legend=legend), **place)
        cell = fig.get_subplot(**place)
        below = {"x": cell.xaxis.domain[0], "y": cell.yaxis.domain[0] - 26 / (300 * rows)}
        fig.update_layout({legend: {**below, "yanchor": "top", "orientation": "h"}})
    fig.update_layout(
        height=300 * rows + 110,
        barmode="stack",
        hovermode="x unified",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        showlegend=True,
        font={"family": "system-ui, sans-serif", "color": _TEXT},
        hoverlabel={"bgcolor": "#f6f8fa", "font": {"color": "#1d2129"}},
        margin={"l": 50, "r": 20, "t": 40, "b": 70},
    )
    fig.update_xaxes(zeroline=False, gridcolor="rgba(128,128,128,.25)")
    fig.update_yaxes(
        rangemode="tozero", gridcolor="rgba(128,128,128,.25)", zerolinecolor="rgba(128,128,128,.4)"
    )
    return fig


class Chart:
    """The figure of a run for a notebook, with a table where nothing draws plotly figures.

    Its plain text is the same for every run.
    """

    def __init__(self, records: Sequence[StepRecord], panels: Sequence[str] = PANELS) -> None:
        self._figure = figure(records, panels)
        self._table = steps_table(records, panels)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        del include, exclude
        drawn: dict[str, Any] = json.loads(str(self._figure.to_json()))
        return {
            "application/vnd.plotly.v1+json": drawn | {"config": {"displaylogo": False}},
            "text/html": self._table,
            "text/plain": repr(self),
        }

    def __repr__(self) -> str:
        return "Chart of a run"


def steps_table(records: Sequence[StepRecord], panels: Sequence[str] = PANELS) -> str:
    """The numbers behind :func:`figure` as an HTML table, one row per step."""
    lines = [line for panel in panels for line in _LINES.get(panel, ())]
    shown = [(n, label) for n, label, *_ in lines if any(v is not None for v in series(records, n))]
    head = "".join(f"<th>{html.escape(label)}</th>" for _, label in shown)
    rows = "".join(
        f"<tr><td>{record.step}</td>"
        + "".join(f"<td>{number(record.metrics.get(n, math.nan), 3)}</td>" for n, _ in shown)
        + "</tr>"
        for record in records
    )
    return f"<table><tr><th>step</th>{head}</tr>{rows}</table>"


def series(records: Sequence[StepRecord], name: str) -> list[float | None]:
    """One metric over the steps, None where it is missing or not finite."""
    values = [record.metrics.get(name, math.nan) for record in records]
    return [float(v) if math.isfinite(v) else None for v in values]


def _traces(records: Sequence[StepRecord], panel: str) -> list[Any]:
    steps = [r.step for r in records]
    if panel == "time":
        return [
            go.Bar(x=steps, y=series(records, f"seconds:{n}"), name=n, marker={"color": c})
            for n, c in _TIMES
            if any(series(records, f"seconds:{n}"))
        ]
    traces: list[Any] = []
    for name, label, colour, dash in _LINES[panel]:
        values = series(records, name)
        if any(v is not None for v in values):
            mode = "markers" if name.startswith("held_out") else "lines+markers"
            line = {"color": colour, "dash": dash}
            marker = {"size": 9 if mode == "markers" else 4, "color": colour}
            traces.append(
                go.Scatter(x=steps, y=values, name=label, mode=mode, line=line, marker=marker)
            )
    return traces
