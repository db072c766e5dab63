"""The charts of a run as a picture that can be seen on a white page and on a dark one."""

import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from xorl_lab.widgets.bands import band, finite, widened
from xorl_lab.widgets.colours import COLOURS, DASHES, GREY
from xorl_lab.widgets.feed import Feed
from xorl_lab.widgets.history import Floats, Table
from xorl_lab.widgets.panels import Line, Panel

_COLUMNS = 3
_POINTS = 1000
"""Rows of a long run, thinned without losing an extreme; a chart is narrower than that."""
_LABEL = 28
"""Characters of a label; the table beneath has all of it."""
_SIZES = ((1e9, "G"), (1e6, "M"))
_WIDE, _HIGH = 3.6, 2.1
"""Inches of one chart."""


def png(feed: Feed, shown: Sequence[Panel]) -> bytes:
    """Draw panels, some in a row.

    Args:
        feed: of the run.
        shown: the panels, at least one.
    """
    # matplotlib takes half a second, once, when a run has ended.
    from matplotlib.figure import Figure  # noqa: PLC0415

    columns = min(_COLUMNS, len(shown))
    rows = -(-len(shown) // columns)
    high, wide = _HIGH * rows, _WIDE * columns
    fig: Any = Figure(figsize=(wide, high), dpi=80)
    # By hand, since a layout engine draws everything several times.
    fig.subplots_adjust(
        left=0.45 / wide,
        right=1 - 0.1 / wide,
        top=1 - 0.3 / high,
        bottom=0.25 / high,
        wspace=0.17,
        hspace=0.4,
    )
    table, write = feed.history.thin(_POINTS), writing()
    for i, panel in enumerate(shown):
        _draw(fig.add_subplot(rows, columns, i + 1), table, panel, write)
    return encoded(fig)


def encoded(fig: Any) -> bytes:  # noqa: ANN401 (matplotlib has no types)
    """A figure as a small PNG whose ground is transparent, for light pages and dark ones."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 (half a second)
    from PIL import Image  # noqa: PLC0415

    fig.patch.set_alpha(0)
    canvas = FigureCanvasAgg(fig)
    canvas.draw()
    target = io.BytesIO()
    # 64 colours are enough for lines, and a third of the bytes.
    picture = Image.fromarray(np.asarray(canvas.buffer_rgba()))
    picture.quantize(64, method=Image.Quantize.FASTOCTREE).save(target, "PNG", optimize=True)
    return target.getvalue()


def writing() -> Callable[[str], str]:
    """What shortens a text to a label that the font has all characters of."""
    from matplotlib.font_manager import FontProperties, findfont, get_font  # noqa: PLC0415

    known: Any = get_font(findfont(FontProperties())).get_charmap()

    def written(text: str) -> str:
        short = text if len(text) <= _LABEL else text[: _LABEL - 1] + "…"
        return "".join(c if ord(c) in known else "□" for c in short)

    return written


def tick(value: float) -> str:
    """A number at an axis, in few characters.

    >>> [tick(v) for v in (2.15e9, -4e6, 1250.0, 3e-5, 0.25)]
    ['2.15G', '-4M', '1250', '3e-05', '0.25']
    """
    size, unit = next(((s, u) for s, u in _SIZES if abs(value) >= s), (1.0, ""))
    return f"{value / size:.4g}{unit}"


def _draw(
    axes: Any,  # noqa: ANN401 (matplotlib has no types)
    table: Table,
    panel: Panel,
    write: Callable[[str], str],
) -> None:
    """One panel.  Texts are never read as TeX."""
    title = f"{panel.title} ({panel.unit})" if panel.unit else panel.title
    axes.set_title(write(title), fontsize=9, color=GREY, loc="left", parse_math=False)
    axes.patch.set_alpha(0)
    axes.grid(visible=True, color=GREY, alpha=0.25, linewidth=0.5)
    axes.tick_params(colors=GREY, labelsize=7, length=2)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.yaxis.set_major_formatter(lambda value, _: tick(value))
    for name, spine in axes.spines.items():
        spine.set_visible(name in ("left", "bottom"))
        spine.set_color(GREY)
    below = np.zeros(len(table.steps))
    drawn: list[Any] = []
    for number, line in enumerate(panel.lines):
        look = number % len(COLOURS)
        if line.shape == "stack":
            top = below + np.nan_to_num(finite(table.column(line.name)))
            style = {"color": COLOURS[look], "linewidth": 0}
            drawn.append(axes.fill_between(table.steps, below, top, alpha=0.6, **style))
            below = top
        else:
            drawn.append(_line(axes, table, line, look))
    style = {"fontsize": 6.5, "frameon": False, "labelcolor": GREY, "handlelength": 2.2}
    if below.any():  # the legend lies above what is filled
        axes.set_ylim(0, 1.5 * below.max())
        style["loc"] = "upper left"
    if len(panel.lines) > 1:
        # Labels are set afterwards: one that begins with an underscore would be left out.
        legend = axes.legend(drawn, [" "] * len(drawn), ncols=2, **style)
        for text, line in zip(legend.get_texts(), panel.lines, strict=True):
            text.set_parse_math(False)
            text.set_text(write(line.label))


def _line(axes: Any, table: Table, line: Line, look: int) -> Any:  # noqa: ANN401
    """A line or dots, with the band; returns what the legend shows."""
    colour, dash = COLOURS[look], DASHES[look]
    edges = band(table.column, line)
    if edges is not None:
        low, high = widened(edges, table)
        axes.fill_between(table.steps, low, high, color=colour, alpha=0.15, linewidth=0)
    style: dict[str, Any] = {"linestyle": (0, dash) if dash else "solid", "linewidth": 1.3}
    values: Floats = finite(table.column(line.name))
    if line.shape == "points":
        style = {"linestyle": "none", "marker": "o", "markersize": 4}
    (drawn,) = axes.plot(table.steps, values, color=colour, **style)
    return drawn
