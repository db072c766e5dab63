"""``xorl-lab notebooks``: the course out of the installed package, or as pages to read."""

import html
import importlib.util
import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rich.console import Console

from xorl_lab.cli import formulas
from xorl_lab.errors import ConfigError

if TYPE_CHECKING:
    from nbformat import NotebookNode

PLOTLY = "application/vnd.plotly.v1+json"
WIDGET = "application/vnd.jupyter.widget-view+json"
DARK = "github-dark"
"""Colours of code on a dark page."""
FOLDED = "<details>"
"""How the still picture of a widget begins beneath it: here it is all there is of it."""
SCRIPT = "plotly.min.js"
"""Written once beside the pages."""
STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --paper: #fff; --soft: #f6f8fa; --line: #d0d7de; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --paper: #0d1117; --soft: #161b22; --line: #30363d; }
  .output_html, .js-plotly-plot { background: #fff; }
  .output_html { color: #1f2328; }
}
body { max-width: 58rem; margin: 2rem auto; padding: 0 1rem; background: var(--paper);
  color: var(--ink); font: 16px/1.6 system-ui, sans-serif; }
a { color: inherit; }
pre { overflow-x: auto; font-size: 14px; line-height: 1.45; margin: 0; white-space: pre-wrap; }
.highlight, .output_area { padding: .6rem .8rem; border-radius: 6px; }
.highlight { background: var(--soft) !important; border: 1px solid var(--line); }
.output_area { overflow-x: auto; }
.prompt, .anchor-link { display: none; }
table { border-collapse: collapse; font-size: 14px; }
td, th { padding: .2rem .6rem; border-bottom: 1px solid var(--line); text-align: left; }
img { max-width: 100%; }
li { margin-bottom: .7rem; }
math { font-size: 1.1em; }
math[display="block"] { margin: .8rem 0; padding: .2rem 0; overflow-x: auto; overflow-y: hidden; }
summary { cursor: pointer; }
details { padding: .4rem .8rem; border-left: 4px solid var(--line); }
"""


def folder() -> Path:
    """Where the notebooks of this installation lie.

    Raises:
        ConfigError: it has none.
    """
    package = Path(__file__).resolve().parent.parent
    for place in (package / "notebooks", package.parent / "notebooks"):
        if any(place.glob("*.ipynb")):
            return place
    raise ConfigError(
        f"there are no notebooks beside {package}: install xorl-lab from a wheel or a checkout"
    )


def copy(target: Path, console: Console, *, overwrite: bool) -> None:
    """Copy the course; what a person has changed since stays as it is.

    Args:
        target: a folder, which is made if it is not there.
        console: told what became of each notebook.
        overwrite: replace notebooks that differ.

    Raises:
        ConfigError: the folder cannot be written.
    """
    _made(target)
    for source in sorted(folder().glob("*.ipynb")):
        place = target / source.name
        if place.exists() and place.read_bytes() == source.read_bytes():
            said = "is there already"
        elif place.exists() and not overwrite:
            said = "differs from the one in the package and stays (--overwrite replaces it)"
        else:
            said = "replaced" if place.exists() else "copied"
            shutil.copyfile(source, place)
        console.print(f"{place}: {said}", markup=False, soft_wrap=True, highlight=False)
    line = f"Open them with: jupyter lab --notebook-dir={target}"
    console.print(line, markup=False, soft_wrap=True, highlight=False)


def gallery(target: Path, console: Console) -> None:
    """Render the course with its stored outputs as pages that need neither kernel nor network.

    Args:
        target: a folder, which is made if it is not there; pages in it are replaced.
        console: told where the first page lies.

    Raises:
        ConfigError: the folder cannot be written, or what renders pages is not installed.
    """
    for needed in ("nbconvert", "latex2mathml"):
        if importlib.util.find_spec(needed) is None:
            raise ConfigError(f"{needed} is not installed: pip install 'xorl-lab[notebook]'")
    import nbformat  # noqa: PLC0415 (not everybody has it)
    from plotly.offline import get_plotlyjs  # noqa: PLC0415 (4 MB of text)

    _made(target)
    (target / SCRIPT).write_text(get_plotlyjs(), encoding="utf-8")
    entries: list[str] = []
    for source in sorted(folder().glob("*.ipynb")):
        notebook = cast("NotebookNode", nbformat.read(source, as_version=4))
        title, opening = _opening(notebook)
        body = _body(notebook)
        links = f'<p><a href="index.html">All notebooks</a> · {html.escape(source.name)}</p>'
        (target / f"{source.stem}.html").write_text(_page(title, links + body), encoding="utf-8")
        entries.append(
            f'<li><a href="{html.escape(source.stem)}.html"><b>{html.escape(title)}</b></a><br>'
            f"{_linked(formulas.markdown(opening))}</li>"
        )
    index = f"<h1>The course of xorl_lab</h1><ol>{''.join(entries)}</ol>"
    (target / "index.html").write_text(_page("The course of xorl_lab", index), encoding="utf-8")
    console.print(
        f"{target / 'index.html'}: {len(entries)} notebooks", markup=False, soft_wrap=True
    )


def _made(target: Path) -> None:
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{target} cannot be made a folder ({error}): pass another") from error


def _opening(notebook: "NotebookNode") -> tuple[str, str]:
    """The heading as text, and the first paragraph as it was written."""
    text = next((str(c.source) for c in notebook.cells if c.cell_type == "markdown"), "")
    heading, _, rest = text.partition("\n")
    paragraphs = [p.strip() for p in rest.split("\n\n") if p.strip()]
    title = re.sub(r"[*`$]|\[([^\]]*)\]\([^)]*\)", r"\1", heading.lstrip("# "))
    return title.strip() or "Untitled", paragraphs[0] if paragraphs else ""


def _body(notebook: "NotebookNode") -> str:
    """The cells as HTML."""
    count = 0
    for cell in notebook.cells:
        kept: list[Any] = []
        outputs = cell.get("outputs", [])
        alive = any(WIDGET in output.get("data", {}) for output in outputs)
        for output in outputs:
            data = output.get("data", {})
            if WIDGET in data:
                continue  # its still picture is the output beside it
            if alive and data.get("text/html", "").startswith(FOLDED):
                data["text/html"] = data["text/html"].replace(FOLDED, "<details open>", 1)
            if PLOTLY in data:
                count += 1
                output["data"] = {"text/html": _chart(f"chart-{count}", data[PLOTLY])}
            kept.append(output)
        if "outputs" in cell:
            cell["outputs"] = kept
    body, _ = formulas.exporter().from_notebook_node(notebook)
    return _linked(str(body))


def _linked(page: str) -> str:
    """Links between notebooks as links between pages."""
    return re.sub(r'href="([\w-]+)\.ipynb(#[^"]*)?"', r'href="\1.html\2"', page)


def _chart(name: str, figure: dict[str, Any]) -> str:
    """A figure that is drawn when the page is opened."""
    parts = [figure.get("data", []), figure.get("layout", {})]
    # "</" would end the script element in the middle of a text.
    data, layout = (json.dumps(part).replace("</", "<\\/") for part in parts)
    return (
        f'<div id="{name}"></div><script>Plotly.newPlot("{name}", {data}, {layout}, '
        '{"responsive": true, "displaylogo": false})</script>'
    )


def _page(title: str, body: str) -> str:
    from pygments.formatters import HtmlFormatter  # noqa: PLC0415 (comes with nbconvert)

    colours = HtmlFormatter().get_style_defs(".highlight") + (
        "@media (prefers-color-scheme: dark) {"
        f"{HtmlFormatter(style=DARK).get_style_defs('.highlight')}}}"
    )
    script = f'<script src="{SCRIPT}"></script>' if "Plotly.newPlot" in body else ""
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{colours}{STYLE}</style>{script}</head>"
        f"<body>{body}</body></html>"
    )
