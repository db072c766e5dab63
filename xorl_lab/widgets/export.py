"""A view as one HTML file that needs no network and no kernel."""

import base64
import html
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xorl_lab.errors import ConfigError
from xorl_lab.widgets.bundle import STATIC
from xorl_lab.widgets.feed import Feed
from xorl_lab.widgets.panels import panels

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from xorl_lab.store import Reader

_POINTS = 10_000
"""Rows of a run in the file; longer ones are thinned, no extreme lost."""
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' blob:; style-src 'unsafe-inline'; "
    "img-src data: blob:"
)
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title>
</head>
<body>
<noscript>A script that this page carries draws its charts: allow scripts.</noscript>
<main id="view"></main>
<script type="application/json" id="snapshot">{snapshot}</script>
<script type="text/plain" id="bundle">{bundle}</script>
<script>{host}</script>
</body>
</html>
"""


def export_html(readers: "Sequence[Reader]", path: str | Path) -> Path:
    """Write the dashboard of runs into one file.

    Args:
        readers: of the runs.
        path: of the file; what was there is replaced.

    Returns:
        The path.

    Raises:
        ConfigError: there is no run, or the front end is not built.
    """
    if not readers:
        raise ConfigError("there are no runs to export: pass at least one reader")
    feeds = [Feed(reader) for reader in readers]
    names = dict.fromkeys(name for feed in feeds for name in feed.history.names)
    everything = {
        "runs": [_texts(feed.snapshot(_POINTS)) for feed in feeds],
        "panels": [p.plain() for p in panels(names, several=len(feeds) > 1)],
        "knobs": {},
    }
    title = ", ".join(feed.name for feed in feeds)
    return write_page(Path(path), title, "dashboard", everything)


def write_page(path: Path, title: str, bundle: str, snapshot: "Mapping[str, Any]") -> Path:
    """Write a page in which a bundle runs on what a snapshot holds.

    Args:
        path: of the file; what was there is replaced.
        title: of the page.
        bundle: name of the widget's module.
        snapshot: JSON values, for ``widgets/src/host.js``.

    Raises:
        ConfigError: the front end is not built.
    """
    missing = [n for n in (f"{bundle}.js", "host.js") if not (STATIC / n).exists()]
    if missing:
        raise ConfigError(f"{missing[0]} is not built: run `make install` and try again")
    page = _PAGE.format(
        title=html.escape(title),
        policy=_POLICY,
        snapshot=_inert(json.dumps(snapshot, allow_nan=False)),
        bundle=base64.b64encode((STATIC / f"{bundle}.js").read_bytes()).decode(),
        host=(STATIC / "host.js").read_text(encoding="utf-8"),
    )
    path.write_text(page, encoding="utf-8")
    return path


def _texts(run: dict[str, Any]) -> dict[str, Any]:
    """A snapshot with its bytes as text."""
    return run | {"data": base64.b64encode(run["data"]).decode()}


def _inert(text: str) -> str:
    """JSON that cannot end the element that it stands in."""
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
