"""Colours and dashes of lines, told apart by nearly everyone.

Okabe and Ito's palette ("Color Universal Design", 2008), ordered so that neighbours differ in
lightness too; the dash is a second cue.  The front end has the same table
(``widgets/src/looks.js``): a test compares the two.
"""

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
"""Of the first, second, … line of a chart, or run."""
DASHES: tuple[tuple[int, ...], ...] = ((), (6, 3), (2, 2), (8, 3, 2, 3), (12, 3), (2, 4))
"""Lengths of strokes and gaps in pixels."""
PLOTLY_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "6px,2px")
"""The same for plotly."""
GREY = "#7d8590"
"""Can be read on a white page and on a dark one."""


def translucent(colour: str, share: float = 0.15) -> str:
    """``#RRGGBB`` as an rgba colour.

    >>> translucent("#0072B2")
    'rgba(0,114,178,0.15)'
    """
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{share})"
