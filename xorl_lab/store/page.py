"""A run as one HTML file: no script, no network, every text escaped."""

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from xorl_lab.errors import StoreError
from xorl_lab.store.notes import Note
from xorl_lab.store.records import Event, Scalars, StoredRollout

if TYPE_CHECKING:
    from xorl_lab.store.reader import Reader

ROWS = 500
"""The most steps and events that are listed."""
CHARTS = 24
"""The most metrics that are drawn."""
LONGEST = 20_000
"""The most characters of one text."""
_POINTS = 600
_WIDTH, _HEIGHT = 300, 90
_STYLE = """
:root { color-scheme: light dark; }
body { font: 14px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { border: 1px solid #8886; padding: .15rem .5rem; text-align: right; vertical-align: top; }
th { text-align: left; } td.text { text-align: left; }
.wide { overflow-x: auto; max-height: 40rem; overflow-y: auto; }
.charts { display: flex; flex-wrap: wrap; gap: 1rem; }
figure { margin: 0; } figcaption { font-size: 12px; }
svg { background: #8881; } svg path { fill: none; stroke: #0072B2; stroke-width: 1.5; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #8881; padding: .5rem; margin: .3rem 0; }
details { margin: .4rem 0; } summary { cursor: pointer; }
"""  # noqa: E501 (a stylesheet)
_HEAD = (
    '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    '<meta http-equiv="Content-Security-Policy" '
    "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
)


def write(reader: "Reader", path: Path, rollouts: int) -> Path:
    """Write a run as a page.

    Args:
        reader: of the run.
        path: of the file; missing folders are made.
        rollouts: the most rollouts that are shown.

    Raises:
        StoreError: the file cannot be written.
    """
    text = render(reader, rollouts)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StoreError(f"{path} cannot be written ({error}): check space and rights") from error
    return path


def render(reader: "Reader", rollouts: int) -> str:
    """A run as an HTML document.

    Args:
        reader: of the run.
        rollouts: the most rollouts that are shown.
    """
    info, status, scalars = reader.info, reader.status(), reader.scalars()
    began = datetime.fromtimestamp(info.created, UTC).isoformat(sep=" ", timespec="seconds")
    facts = {
        "model": info.model,
        "kind": info.kind,
        "state": f"{status.state}: {status.message}" if status.message else status.state,
        "steps": status.step if status.total is None else f"{status.step} of {status.total}",
        "began": began,
        "id": info.id,
    }
    if info.parent is not None:
        facts["branched from"] = f"{info.parent.checkpoint} (step {info.parent.step})"
    body = [
        f"<h1>{_escape(info.name)}</h1>",
        _facts("Run", facts),
        _facts("Settings", info.settings),
        _charts(scalars),
        _metrics(scalars),
        _events(reader.events()),
        _rollouts(reader, rollouts),
    ]
    return (
        f'<!doctype html><html lang="en"><head>{_HEAD}<title>{_escape(info.name)}</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _facts(title: str, facts: Mapping[str, object]) -> str:
    if not facts:
        return ""
    rows = "".join(
        f'<tr><th scope="row">{_escape(name)}</th><td class="text">{_escape(value)}</td></tr>'
        for name, value in facts.items()
    )
    return f"<h2>{title}</h2><table>{rows}</table>"


def _charts(scalars: Scalars) -> str:
    able = {n: v for n, v in scalars.columns.items() if np.isfinite(v).sum() > 1}
    drawn = "".join(
        _chart(name, scalars.steps, values) for name, values in list(able.items())[:CHARTS]
    )
    more = f"<p>{CHARTS} of {len(able)} metrics are drawn.</p>" if len(able) > CHARTS else ""
    return f'<h2>Metrics by step</h2><div class="charts">{drawn}</div>{more}' if drawn else ""


def _chart(name: str, steps: NDArray[np.int64], values: NDArray[np.float64]) -> str:
    """A line that breaks where a value is missing, NaN or infinite."""
    every = slice(None, None, len(values) // _POINTS + 1)
    x, y = steps[every].astype(np.float64), values[every]
    there = np.isfinite(y)
    if not there.any():
        return ""
    low, high = float(y[there].min()), float(y[there].max())
    with np.errstate(over="ignore", invalid="ignore"):
        across = (x - x[0]) / max(x[-1] - x[0], 1) * _WIDTH
        up = _HEIGHT - (y - low) / ((high - low) or 1) * (_HEIGHT - 8) - 4
    there &= np.isfinite(up)
    points = zip(there.tolist(), across.tolist(), up.tolist(), strict=True)
    pieces = [list(piece) for ok, piece in groupby(points, key=lambda p: p[0]) if ok]
    path = "".join(
        "M" + "L".join(f"{a:.1f},{b:.1f}" for _, a, b in piece) + ("h1" if len(piece) == 1 else "")
        for piece in pieces
    )
    title = f"{_escape(name)}: {_number(low)} to {_number(high)}"
    return (
        f'<figure><svg role="img" aria-label="{title}" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}"><path d="{path}"/></svg>'
        f"<figcaption>{title}</figcaption></figure>"
    )


def _metrics(scalars: Scalars) -> str:
    count = len(scalars.steps)
    if not count:
        return ""
    heads = "".join(f'<th scope="col">{_escape(n)}</th>' for n in ("step", *scalars.columns))
    chosen = {name: values[-ROWS:].tolist() for name, values in scalars.columns.items()}
    rows = "".join(
        f'<tr><th scope="row">{step}</th>'
        + "".join(f"<td>{_number(values[i])}</td>" for values in chosen.values())
        + "</tr>"
        for i, step in enumerate(scalars.steps[-ROWS:].tolist())
    )
    return f"<h2>Metrics</h2>{_limit('step', count, ROWS)}{_wide(heads, rows)}"


def _events(events: Sequence[Event]) -> str:
    if not events:
        return ""
    rows = "".join(
        f"<tr><td>{'' if e.step is None else e.step}</td><td class='text'>{_escape(e.kind)}</td>"
        f"<td class='text'>{_escape(e.text)}{' (superseded)' if e.superseded else ''}</td></tr>"
        for e in events[-ROWS:]
    )
    head = "".join(f'<th scope="col">{name}</th>' for name in ("step", "kind", "what"))
    return f"<h2>Events</h2>{_limit('event', len(events), ROWS)}{_wide(head, rows)}"


def _wide(head: str, rows: str) -> str:
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<div class="wide" tabindex="0">{table}</div>'


def _rollouts(reader: "Reader", most: int) -> str:
    count = reader.count()
    if not count:
        return ""
    notes = reader.notes()
    shown = "".join(_rollout(r, notes.get(r.id, Note())) for r in reader.newest(most))
    return f"<h2>Rollouts</h2>{_limit('rollout', count, most)}{shown}"


def _rollout(rollout: StoredRollout, note: Note) -> str:
    reward = "failed" if rollout.reward is None else f"reward {_number(rollout.reward)}"
    facts = {
        **rollout.reward_parts,
        "advantage": rollout.advantage,
        "tokens": len(rollout.tokens),
        "stop reason": rollout.stop_reason,
        "version": rollout.version,
    }
    line = " · ".join(
        f"{_escape(name)} {_number(v) if isinstance(v, float) else _escape(v)}"
        for name, v in facts.items()
    )
    error = f"<p>{_escape(rollout.error)}</p>" if rollout.error else ""
    tags = f"<p>tags: {_escape(', '.join(note.tags))}</p>" if note.tags else ""
    words = f"<pre>{_escape(note.note)}</pre>" if note.note else ""
    place = f"step {rollout.step}, group {rollout.group}, sample {rollout.sample}"
    return (
        f"<details><summary>{place}: {reward}</summary><p>{line}</p>{error}{tags}{words}"
        f"<pre>{_escape(rollout.prompt)}</pre><pre>{_escape(rollout.text)}</pre></details>"
    )


def _limit(what: str, count: int, most: int) -> str:
    if count <= most:
        return f"<p>{count:,} {what}{'' if count == 1 else 's'}.</p>"
    return f"<p>The last {most:,} of {count:,} {what}s.</p>"


def _number(value: float) -> str:
    if math.isfinite(value):
        return f"{value:.6g}"
    return "–" if math.isnan(value) else ("∞" if value > 0 else "−∞")


def _escape(value: object) -> str:
    text = str(value)
    hidden = len(text) - LONGEST
    # Halves of surrogate pairs, which UTF-8 cannot carry, and what HTML forbids become U+FFFD.
    safe = html.escape(_printable(text[:LONGEST]))
    return f"{safe}<i> … {hidden:,} more characters</i>" if hidden > 0 else safe


def _printable(text: Iterable[str]) -> str:
    return "".join(
        c if c in "\n\t" or not (ord(c) < 32 or 0xD800 <= ord(c) <= 0xDFFF) else "\ufffd"
        for c in text
    )
