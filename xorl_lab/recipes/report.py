"""One HTML file about a finished run, which opens offline."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from plotly.offline import get_plotlyjs

from xorl_lab.recipes.charts import figure
from xorl_lab.recipes.evaluate import Evaluation
from xorl_lab.recipes.outcome import outcome
from xorl_lab.recipes.tables import ROWS, cell, completions_table, escape, number, table
from xorl_lab.types import StepRecord

NAMED = 10
"""Steps that are named beside one warning."""


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
        f"<h1>{escape(run.title)}</h1>",
        f"<p>{escape(run.note)}</p>" if run.note else "",
        _cards(run),
        chart,
        "<h2>Held-out prompts, before and after</h2>" if run.before or run.after else "",
        completions_table(run.before, run.after),
        _training(run.records),
        _warnings(run.records),
        table("Settings", run.settings),
        table("Environment", run.environment),
    ]
    return _PAGE.format(
        title=escape(run.title),
        style=_STYLE,
        plotly=get_plotlyjs(),
        body="\n".join(parts),
        script=_SCRIPT,
    )


def _cards(run: RunReport) -> str:
    result = outcome(run.records, run.before, run.after)
    accuracy = (number(result.accuracy_before), number(result.accuracy_after))
    reward = (number(result.reward_first), number(result.reward_last))
    cards = {
        "held-out accuracy": " → ".join(accuracy),
        f"mean reward, first → last {result.window} steps": " → ".join(reward),
        "steps": str(result.steps),
        "seconds of training": number(result.seconds, 0),
    }
    items = "".join(
        f"<div><b>{escape(v)}</b><span>{escape(k)}</span></div>" for k, v in cards.items()
    )
    return f'<section class="cards">{items}</section>'


def _training(records: Sequence[StepRecord]) -> str:
    """One group of the first step beside one of the last."""
    ends = [r for r in (*records[:1], *records[-1:]) if r.groups]
    blocks = [
        f"<h3>step {record.step}</h3><pre>{escape(record.groups[0].prompt)}</pre><table><tr>"
        f"{''.join(cell(r) for r in record.groups[0].rollouts)}</tr></table>"
        for record in ends
    ]
    return f"<h2>Completions while training</h2>{''.join(blocks)}" if blocks else ""


def _warnings(records: Sequence[StepRecord]) -> str:
    found: dict[str, list[int]] = {}
    for record in records:
        for warning in record.warnings:
            found.setdefault(warning, []).append(record.step)
    if not found:
        return ""
    items = "".join(f"<li>{_steps(s)}: {escape(w)}</li>" for w, s in list(found.items())[:ROWS])
    more = f"<p>and {len(found) - ROWS} more</p>" if len(found) > ROWS else ""
    return f"<h2>Warnings</h2><ul>{items}</ul>{more}"


def _steps(steps: Sequence[int]) -> str:
    """Where a warning came up."""
    if len(steps) == 1:
        return f"step {steps[0]}"
    named = ", ".join(map(str, steps[:NAMED]))
    return f"steps {named}" + (f" and {len(steps) - NAMED} others" if len(steps) > NAMED else "")


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
.good { color: var(--good) }
.bad { color: var(--bad) }
"""

_SCRIPT = """
const dark = matchMedia("(prefers-color-scheme: dark)");
const paint = () => Plotly.relayout("chart", {"font.color": dark.matches ? "#e4e7ec" : "#1d2129",
  "hoverlabel.font.color": dark.matches ? "#e4e7ec" : "#1d2129",
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
