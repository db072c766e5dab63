"""The built front end, which lies beside this module."""

import os
from pathlib import Path

STATIC = Path(__file__).parent / "static"
"""Where the build puts it."""
_MISSING = """export default { render({ el }) {
  el.textContent = "The front end of xorl_lab is not built: run `make install`, or "
    + "`npm ci && npm run build` in the folder widgets of its sources, and restart the kernel.";
} };
"""


def script(name: str) -> str | Path:
    """The module of a widget, ready for anywidget's ``_esm``.

    The text, since a path would keep every widget alive that was made of it; only under
    ``ANYWIDGET_HMR=1`` (a developer who edits the front end) the path.

    Args:
        name: of the bundle, without ``.js``.
    """
    path = STATIC / f"{name}.js"
    if not path.exists():
        return _MISSING
    if os.environ.get("ANYWIDGET_HMR") == "1":
        return path
    return path.read_text(encoding="utf-8")


def recorded_hash() -> str | None:
    """Hash of the sources of which the bundle was built, None if there is no bundle."""
    path = STATIC / "sources.sha256"
    return path.read_text(encoding="utf-8").strip() if path.exists() else None
