"""An environment with a tool: the model may have a product worked out before it answers."""

import re
from collections.abc import Generator

from xorl_lab.recipes.environments import Turn

CALL = "calc:"
"""Begins a line that is for the calculator."""
ANSWER = "A:"
"""Begins the answer."""
_SUM = re.compile(r"\s*(\d{1,6})\s*([-+*])\s*(\d{1,6})\s*")


def calculate(expression: str) -> str:
    """What the calculator shows.

    Args:
        expression: two whole numbers with ``+``, ``-`` or ``*`` between them.

    Returns:
        The result, or ``error`` for anything else.

    >>> calculate(" 12*7"), calculate("12*"), calculate("2**9")
    ('84', 'error', 'error')
    """
    found = _SUM.fullmatch(expression)
    if found is None:
        return "error"
    left, sign, right = int(found[1]), found[2], int(found[3])
    return str({"+": left + right, "-": left - right, "*": left * right}[sign])


def calculator(answer: str) -> Generator[str | None, Turn, float]:
    """Lines that begin with ``calc:`` are worked out; the first other one is the answer.

    Args:
        answer: the right one.

    Returns:
        1 for the right answer, otherwise 0.
    """
    turn = yield
    while turn.text.startswith(CALL):
        if turn.last or turn.stop_reason == "length":
            return 0.0
        turn = yield f"= {calculate(turn.text.removeprefix(CALL))}\n"
    return float(turn.text.removeprefix(ANSWER).strip() == answer)
