"""Formulas of the course as MathML, which browsers draw by themselves: no scripts, no network.

What LaTeX has and the converter has not is written otherwise before it, or put right behind it;
a formula that it cannot read stays as it was typed.
"""

import html
from functools import cache
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

if TYPE_CHECKING:
    from nbconvert import HTMLExporter

REWRITTEN = {"{aligned}": "{split}", "{gathered}": "{split}"}
"""Names of the same thing."""
RELATIONS = {"~": "∼"}
"""Read as letters by the converter, though a space belongs on both sides."""


@cache
def mathml(formula: str, *, block: bool = False) -> str:
    r"""A formula as a MathML element, or as text if it cannot be read.

    Args:
        formula: LaTeX without its dollars.
        block: on a line of its own.

    >>> mathml("x<y").count("&lt;"), mathml("x^2").startswith('<math xmlns="http://www.w3.org/1998')
    (1, True)
    >>> mathml(r"\frac{")
    '<code>\\frac{</code>'
    """
    from latex2mathml.converter import convert_to_element  # noqa: PLC0415 (not everybody has it)

    text = formula.strip()
    for old, new in REWRITTEN.items():
        text = text.replace(old, new)
    try:
        root = convert_to_element(text, display="block" if block else "inline")
    except Exception:  # noqa: BLE001 (whatever it is, the reader is to see the formula)
        return f"<code>{html.escape(formula.strip())}</code>"
    _align(root)
    for element in root.iter():
        # It writes signs as references, which would be escaped once more.
        element.text = html.unescape(element.text) if element.text else element.text
        if element.tag == "mi" and element.text in RELATIONS:
            element.tag, element.text = "mo", RELATIONS[element.text]
        elif element.tag == "mi" and len(element.text or "") > 1:
            element.set("style", "padding-right: .17em")  # log x
    return ElementTree.tostring(root, encoding="unicode")


def _align(root: ElementTree.Element) -> None:
    """Say by style how columns are aligned: browsers do not know the attribute any more."""
    for cells in root.iter("mtr"):
        before = None
        for cell in cells:
            side = cell.attrib.pop("columnalign", None)
            if side is not None:
                style = f"text-align: {side}"
                # The two sides of a sign of equality belong together.
                style += "; padding-right: 0" if side == "right" else ""
                style += "; padding-left: 0" if before == "right" else ""
                cell.set("style", style)
            before = side


@cache
def renderer() -> type[Any]:
    """What turns markdown into HTML, formulas included."""
    from nbconvert.filters.markdown_mistune import IPythonRenderer  # noqa: PLC0415 (as above)

    class Renderer(IPythonRenderer):
        def block_math(self, body: str) -> str:
            return mathml(body, block=True)

        def inline_math(self, body: str) -> str:
            return mathml(body)

        def latex_environment(self, name: str, body: str) -> str:
            return mathml(rf"\begin{{{name}}}{body}\end{{{name}}}", block=True)

    return Renderer


def markdown(source: str) -> str:
    """Markdown as HTML."""
    from nbconvert.filters.markdown_mistune import MarkdownWithMath  # noqa: PLC0415 (as above)

    return MarkdownWithMath(renderer=renderer()(escape=False)).render(source)


def exporter() -> "HTMLExporter":
    """What turns a notebook into HTML, without head, style and scripts of somebody else."""
    from nbconvert import HTMLExporter  # noqa: PLC0415 (as above)

    made = HTMLExporter(template_name="basic")
    made.register_filter("markdown2html", markdown)
    return made
