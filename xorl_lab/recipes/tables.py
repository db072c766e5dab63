"""Pieces of HTML in which everything that a model or a person wrote is escaped."""

import html
import math
from collections.abc import Mapping, Sequence

from xorl_lab.recipes.evaluate import Evaluation
from xorl_lab.types import Rollout

LONGEST = 2000
"""Characters of one text that are shown."""
ROWS = 40
"""Held-out prompts that are shown."""


def escape(value: object) -> str:
    """Any value as safe HTML, cut if it is very long."""
    text = str(value)
    hidden = len(text) - LONGEST
    shown = html.escape(text[:LONGEST])
    return f"{shown}<i> … {hidden:,} more characters</i>" if hidden > 0 else shown


def number(value: float, digits: int = 2) -> str:
    """A number, or a dash if it is not finite."""
    return f"{value:.{digits}f}" if math.isfinite(value) else "–"


def cell(rollout: Rollout | None) -> str:
    """One completion with its reward, as a cell of a table."""
    if rollout is None:
        return "<td>–</td>"
    # The sign is text, not style: JupyterLab shows the table without our stylesheet.
    good = "good" if rollout.reward is not None and rollout.reward >= 1 else "bad"
    sign = "✓" if good == "good" else "✗"
    mark = f"{sign} failed" if rollout.reward is None else f"{sign} {rollout.reward:.2f}"
    note = f"<i>{escape(rollout.error)}</i>" if rollout.error else ""
    return f'<td><pre>{escape(rollout.text)}</pre>{note}<span class="{good}">{mark}</span></td>'


def completions_table(before: Evaluation | None, after: Evaluation | None) -> str:
    """Held-out prompts with the completions before and after training, as an HTML table.

    Args:
        before: evaluation before training.
        after: evaluation of the same prompts after training.
    """
    shown = before or after
    if shown is None:
        return ""
    first, last = (e.groups if e else [None] * len(shown.groups) for e in (before, after))
    start = common_start([group.prompt for group in shown.groups])
    rows = "".join(
        f"<tr><td><pre>{escape(group.prompt[len(start) :])}</pre></td>"
        f"{cell(old.rollouts[0] if old else None)}{cell(new.rollouts[0] if new else None)}</tr>"
        for group, old, new in zip(shown.groups[:ROWS], first, last, strict=False)
    )
    count = len(shown.groups)
    above = f"<p>All prompts begin with:</p><pre>{escape(start)}</pre>" if start else ""
    below = f"<p>{ROWS} of {count} prompts</p>" if count > ROWS else ""
    head = "<tr><th>prompt</th><th>before</th><th>after</th></tr>"
    return f"{above}<table>{head}{rows}</table>{below}"


def common_start(texts: Sequence[str]) -> str:
    r"""The whole lines with which all texts begin, if there are at least two texts.

    >>> common_start(["a\nb\nc", "a\nb\nd"])
    'a\nb\n'
    """
    shared: list[str] = []
    if len(set(texts)) > 1:
        for lines in zip(*(text.splitlines(keepends=True) for text in texts), strict=False):
            if len(set(lines)) > 1 or not lines[0].endswith("\n"):
                break
            shared.append(lines[0])
    return "".join(shared)


def table(title: str, values: Mapping[str, object]) -> str:
    """Names and values under a heading; nothing if there are none.  Blank values show quoted."""
    if not values:
        return ""
    shown = {k: v if str(v).strip() else repr(v) for k, v in values.items()}
    rows = "".join(f"<tr><th>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in shown.items())
    return f"<h2>{escape(title)}</h2><table>{rows}</table>"
