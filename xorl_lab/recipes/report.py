"""One HTML file about a finished run, which opens offline, and the figure that it shows."""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs
from plotly.subplots import make_subplots

from xorl_lab.recipes.evaluate import Evaluation
from xorl_lab.recipes.outcome import outcome
from xorl_lab.recipes.settings import check_choice
from xorl_lab.types import Rollout, StepRecord

LONGEST = 2000
"""Characters of one text that are shown."""
ROWS = 40
"""Held-out prompts that are shown."""
PANELS = ("reward", "kl", "loss", "time")
"""What :func:`figure` can draw, in this order."""

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


@dataclass(frozen=True, slots=True)
class RunReport:
    """What a report is about."""

    title: str
    """Heading."""
    records: Sequence[StepRecord]
    """The steps of the run."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Settings by name."""
    environment: Mapping[str, object] = field(default_factory=dict)
    """Model, device, dtype, versions."""
    before: Evaluation | None = None
    """Held-out completions before training."""
    after: Evaluation | None = None
    """Held-out completions of the same prompts after training."""
    note: str = ""
    """A sentence under the heading."""


def write_report(path: str | Path, run: RunReport) -> Path:
    """Write a report; missing folders are made.

    Args:
        path: of the file.
        run: what it is about.

    Returns:
        The path.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render_html(run), encoding="utf-8")
    return path


def render_html(run: RunReport) -> str:
    """The report as one HTML document, which asks nothing of the network.

    Args:
        run: what it is about.  All of its texts are escaped.
    """
    chart = figure(run.records).to_html(
        full_html=False,
        include_plotlyjs=False,
        div_id="chart",
        config={"displaylogo": False, "responsive": True},
    )
    parts = [
        f"<h1>{_text(run.title)}</h1>",
        f"<p>{_text(run.note)}</p>" if run.note else "",
        _cards(run),
        chart,
        _completions(run.before, run.after),
        _training(run.records),
        _warnings(run.records),
        _table("Settings", run.settings),
        _table("Environment", run.environment),
    ]
    return _PAGE.format(
        title=_text(run.title),
        style=_STYLE,
        plotly=get_plotlyjs(),
        body="\n".join(parts),
        script=_SCRIPT,
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
        font={"family": "system-ui, sans-serif"},
        margin={"l": 50, "r": 20, "t": 40, "b": 70},
    )
    fig.update_xaxes(gridcolor="rgba(128,128,128,.25)")
    fig.update_yaxes(gridcolor="rgba(128,128,128,.25)", zerolinecolor="rgba(128,128,128,.4)")
    return fig


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


def _text(value: object) -> str:
    """Any value as safe HTML, cut if it is very long."""
    text = str(value)
    hidden = len(text) - LONGEST
    shown = html.escape(text[:LONGEST])
    return f"{shown}<i> … {hidden:,} more characters</i>" if hidden > 0 else shown


def _number(value: float, digits: int = 2) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else "–"


def _cards(run: RunReport) -> str:
    result = outcome(run.records, run.before, run.after)
    accuracy = (_number(result.accuracy_before), _number(result.accuracy_after))
    reward = (_number(result.reward_first), _number(result.reward_last))
    cards = {
        "held-out accuracy": " → ".join(accuracy),
        "mean reward, first → last 5 steps": " → ".join(reward),
        "steps": str(result.steps),
        "seconds of training": _number(result.seconds, 0),
    }
    items = "".join(
        f"<div><b>{_text(v)}</b><span>{_text(k)}</span></div>" for k, v in cards.items()
    )
    return f'<section class="cards">{items}</section>'


def _cell(rollout: Rollout | None) -> str:
    if rollout is None:
        return "<td>–</td>"
    mark = "failed" if rollout.reward is None else f"{rollout.reward:.2f}"
    good = "good" if rollout.reward is not None and rollout.reward >= 1 else "bad"
    note = f"<i>{_text(rollout.error)}</i>" if rollout.error else ""
    return f'<td><pre>{_text(rollout.text)}</pre>{note}<span class="{good}">{mark}</span></td>'


def _completions(before: Evaluation | None, after: Evaluation | None) -> str:
    shown = before or after
    if shown is None:
        return ""
    first, last = (e.groups if e else [None] * len(shown.groups) for e in (before, after))
    rows = [
        f"<tr><td><pre>{_text(group.prompt)}</pre></td>"
        f"{_cell(old.rollouts[0] if old else None)}{_cell(new.rollouts[0] if new else None)}</tr>"
        for group, old, new in zip(shown.groups[:ROWS], first, last, strict=False)
    ]
    count = f" ({ROWS} of {len(shown.groups)})" if len(shown.groups) > ROWS else ""
    return (
        f"<h2>Held-out prompts, before and after{count}</h2><table><tr><th>prompt</th>"
        f"<th>before</th><th>after</th></tr>{''.join(rows)}</table>"
    )


def _training(records: Sequence[StepRecord]) -> str:
    """One group of the first step beside one of the last."""
    ends = [r for r in (*records[:1], *records[-1:]) if r.groups]
    blocks = [
        f"<h3>step {record.step}</h3><pre>{_text(record.groups[0].prompt)}</pre><table><tr>"
        f"{''.join(_cell(r) for r in record.groups[0].rollouts)}</tr></table>"
        for record in ends
    ]
    return f"<h2>Completions while training</h2>{''.join(blocks)}" if blocks else ""


def _warnings(records: Sequence[StepRecord]) -> str:
    found = [f"step {r.step}: {w}" for r in records for w in r.warnings]
    if not found:
        return ""
    items = "".join(f"<li>{_text(w)}</li>" for w in found[:ROWS])
    more = f"<p>and {len(found) - ROWS} more</p>" if len(found) > ROWS else ""
    return f"<h2>Warnings</h2><ul>{items}</ul>{more}"


def _table(title: str, values: Mapping[str, object]) -> str:
    if not values:
        return ""
    rows = "".join(f"<tr><th>{_text(k)}</th><td>{_text(v)}</td></tr>" for k, v in values.items())
    return f"<h2>{_text(title)}</h2><table>{rows}</table>"


_STYLE = """
:root { color-scheme: light dark; --fg: #1d2129; --bg: #fff; --dim: #667; --line: #d5d9e0;
  --good: #00704f; --bad: #b34700; }
@media (prefers-color-scheme: dark) { :root { --fg: #e4e7ec; --bg: #16181d; --dim: #9aa3b2;
  --line: #363c47; --good: #4fd1a5; --bad: #f29b62; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--fg); background: var(--bg);
  max-width: 1080px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
p, i, span { color: var(--dim) }
.cards { display: flex; flex-wrap: wrap; gap: 1rem }
.cards div { border: 1px solid var(--line); border-radius: 8px; padding: .6rem 1rem }
.cards b { display: block; font-size: 1.25rem }
table { border-collapse: collapse; display: block; overflow-x: auto }
td, th { border: 1px solid var(--line); padding: .25rem .6rem; text-align: left;
  vertical-align: top }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; max-width: 30rem }
.good { color: var(--good) } .good::before { content: "✓ " }
.bad { color: var(--bad) } .bad::before { content: "✗ " }
"""

_SCRIPT = """
const dark = matchMedia("(prefers-color-scheme: dark)");
const paint = () => Plotly.relayout("chart", {"font.color": dark.matches ? "#e4e7ec" : "#1d2129",
  "hoverlabel.bgcolor": dark.matches ? "#262a32" : "#fff"});
dark.addEventListener("change", paint);
paint();
"""

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline';
 style-src 'unsafe-inline'; img-src data: blob:">
<title>{title}</title><style>{style}</style><script>{plotly}</script></head>
<body>{body}
<script>{script}</script></body></html>
"""
