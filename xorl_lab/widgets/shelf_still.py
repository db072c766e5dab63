"""What a saved notebook keeps of a browser of checkpoints: a table, no script."""

import html
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from xorl_lab.widgets.fallback import number
from xorl_lab.widgets.shelf_wire import main, metrics, plain


def still_html(tree: Mapping[str, Any]) -> str:
    """The checkpoints as HTML that any page shows, all text in it escaped.

    Args:
        tree: as of :meth:`~xorl_lab.types.CheckpointCommands.tree`.
    """
    checkpoints: list[dict[str, Any]] = plain(tree["checkpoints"])
    shown = main(metrics(checkpoints))
    heads = ["checkpoint", "step", "comes from", *shown, "size", "saved", "expires"]
    rows = [
        [
            checkpoint["name"],
            "" if checkpoint["step"] is None else str(checkpoint["step"]),
            checkpoint["parent"] or "",
            *(_number(checkpoint["metrics"].get(name)) for name in shown),
            size((checkpoint["megabytes"] or 0.0) * 1e6),
            _moment(checkpoint["created"]),
            _moment(checkpoint["expires"], "never"),
        ]
        for checkpoint in checkpoints
    ]
    table = _row("th", heads) + "".join(_row("td", row) for row in rows)
    body = f"<table>{table}</table>" if rows else "<p>There is no checkpoint yet.</p>"
    return f"<div><p>{html.escape(counted(tree))}; {html.escape(disk(tree))}</p>{body}</div>"


def counted(tree: Mapping[str, Any]) -> str:
    """How many there are.

    >>> counted({"checkpoints": [{"name": "base"}, {"name": "a/step-1"}], "runs": [{}, {}]})
    '1 checkpoint of 2 runs'
    """
    # The base model may be listed, and is no checkpoint.
    found = sum(checkpoint["name"] != "base" for checkpoint in tree["checkpoints"])
    runs = len(tree["runs"])
    return f"{found} checkpoint{'s' * (found != 1)} of {runs} run{'s' * (runs != 1)}"


def disk(tree: Mapping[str, Any]) -> str:
    """What they take.

    >>> disk({"disk": {"used": 4_200_000, "budget": None}})
    '4.2 MB on the disk'
    """
    used, budget = tree["disk"]["used"], tree["disk"]["budget"]
    return f"{size(used)} {'on the disk' if budget is None else f'of {size(budget)} on the disk'}"


def size(count: float) -> str:
    """Bytes as a person reads them.

    >>> size(999), size(4_200_000), size(12_300_000_000)
    ('999 B', '4.2 MB', '12 GB')
    """
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    whole = unit == "B" or value >= 9.95
    return f"{value:.0f} {unit}" if whole else f"{value:.1f} {unit}"


def _number(value: object) -> str:
    return "–" if value is None else number(float(str(value)))


def _moment(seconds: float | None, otherwise: str = "") -> str:
    if seconds is None:
        return otherwise
    try:
        return datetime.fromtimestamp(seconds, tz=UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError, OSError):
        return otherwise


def _row(tag: str, cells: list[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"
