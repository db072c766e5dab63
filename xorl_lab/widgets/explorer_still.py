"""What a saved notebook keeps of an explorer of losses: a picture and the numbers, no script."""

import base64
import html
from collections.abc import Mapping
from typing import Any

from xorl_lab.widgets.colours import COLOURS, DASHES, GREY
from xorl_lab.widgets.fallback import number
from xorl_lab.widgets.picture import encoded, tick

HATCHES = {"clipped": ("//", COLOURS[5]), "masked": ("xx", COLOURS[3])}
"""Hatch and colour of what is clipped and of what is masked."""
_LINES = (("values", "value of the loss"), ("gradients", "gradient by the logprob"))


def still_html(curve: Mapping[str, Any]) -> str:
    """The curves as HTML that any page shows, all text in it escaped.

    Args:
        curve: as of :meth:`~xorl_lab.types.LossCommands.curve`.
    """
    settings = ", ".join(f"{name}={value}" for name, value in curve["params"].items())
    token = ", ".join(f"{name}={number(float(value))}" for name, value in curve["token"].items())
    rows = "".join(
        f"<tr><td>{html.escape(str(name))}</td><td>{_shown(value)}</td></tr>"
        for name, value in curve["mark"].items()
    )
    text = [f"<b>{html.escape(curve['loss'])}</b>: {html.escape(settings)}", html.escape(token)]
    text += [
        f"{r['kind']} (hatched {HATCHES[r['kind']][0][0]}): ratio {number(r['low'])} to "
        f"{number(r['high'])}"
        for r in curve["regions"]
    ]
    return f"<div><p>{'<br>'.join(text)}</p>{_picture(curve)}<table>{rows}</table></div>"


def said(curve: Mapping[str, Any]) -> str:
    """The numbers at the mark in a line.

    >>> mark = {"ratio": 1.5, "value": -1.2, "gradient": 0.0, "clipped": True, "masked": False}
    >>> said({"loss": "ppo", "token": {"advantage": 1}, "mark": mark})
    'ppo: ratio 1.5, advantage 1, value -1.2, gradient 0, clipped'
    """
    mark = curve["mark"]
    words = [
        f"ratio {number(mark['ratio'])}",
        f"advantage {number(curve['token']['advantage'])}",
        f"value {number(mark['value'])}",
        f"gradient {number(mark['gradient'] + 0.0)}",
        *(flag for flag in HATCHES if mark[flag]),
    ]
    return f"{curve['loss']}: {', '.join(words)}"


def _shown(value: float | bool) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else number(value + 0.0)


def _picture(curve: Mapping[str, Any]) -> str:
    try:
        data = base64.b64encode(png(curve)).decode()
    except Exception as error:  # noqa: BLE001 (numbers without bounds; the table has them)
        why = html.escape(f"{type(error).__name__}: {error}"[:500])
        return f"<p><i>The picture of the curves could not be drawn: {why}</i></p>"
    return f'<img alt="{html.escape(said(curve))}" src="data:image/png;base64,{data}">'


def png(curve: Mapping[str, Any]) -> bytes:
    """Draw value and gradient over the ratio, for a white page and for a dark one."""
    # matplotlib takes half a second, once.
    from matplotlib.figure import Figure  # noqa: PLC0415

    fig: Any = Figure(figsize=(7.6, 2.6), dpi=80)
    fig.subplots_adjust(left=0.07, right=0.98, top=0.89, bottom=0.16, wspace=0.17)
    for index, (line, title) in enumerate(_LINES):
        _draw(fig.add_subplot(1, 2, index + 1), curve, (line, title, index))
    return encoded(fig)


def _draw(axes: Any, curve: Mapping[str, Any], what: tuple[str, str, int]) -> None:  # noqa: ANN401
    line, title, look = what
    axes.set_title(title, fontsize=9, color=GREY, loc="left")
    axes.patch.set_alpha(0)
    axes.grid(visible=True, color=GREY, alpha=0.25, linewidth=0.5)
    for kind, (hatch, colour) in HATCHES.items():
        for region in curve["regions"]:
            if region["kind"] == kind:
                style = {"facecolor": "none", "edgecolor": colour, "linewidth": 0, "alpha": 0.5}
                axes.axvspan(region["low"], region["high"], hatch=hatch, **style)
    dash = DASHES[look]
    style = {"color": COLOURS[look], "linestyle": (0, dash) if dash else "solid"}
    axes.plot(curve["ratios"], curve[line], linewidth=1.5, **style)
    mark = curve["mark"]
    axes.axvline(mark["ratio"], color=GREY, linewidth=0.8, linestyle=":")
    axes.plot([mark["ratio"]], [mark[line.removesuffix("s")]], marker="o", color=GREY, markersize=5)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: tick(value))
    axes.yaxis.set_major_formatter(lambda value, _: tick(value))
    axes.tick_params(colors=GREY, labelsize=7, length=2)
    axes.set_xlabel("ratio r", fontsize=7, color=GREY, labelpad=1)
    for name, spine in axes.spines.items():
        spine.set_visible(name in ("left", "bottom"))
        spine.set_color(GREY)
