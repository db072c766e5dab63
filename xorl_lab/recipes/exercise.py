"""Exercises of the course: what a reader answers is compared with what xorl_lab computes."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from xorl_lab.errors import ConfigError

State = Literal["open", "right", "not yet"]

_SIGNS: dict[State, str] = {"open": "○", "right": "✓", "not yet": "✗"}
_LINES: dict[State, str] = {"open": "#888888", "right": "#0072B2", "not yet": "#D55E00"}
"""Of Okabe and Ito; the sign says the same."""


@dataclass(frozen=True, slots=True)
class Exercise:
    """What became of an answer; a notebook shows it."""

    state: State
    """``open`` = nothing was answered yet."""
    text: str
    """One or two sentences."""

    def __repr__(self) -> str:
        return f"exercise: {self.state}. {self.text}"

    def _repr_html_(self) -> str:
        line = f"border-left:4px solid {_LINES[self.state]};padding:.3em .8em"
        text = f"{_SIGNS[self.state]} <b>{self.state}</b>. {html.escape(self.text)}"
        return f'<div style="{line}">{text}</div>'


def exercise(answer: object, expected: object, *, within: float = 1e-3, hint: str = "") -> Exercise:
    """Compare an answer with what is right.

    Args:
        answer: of the reader; None = not answered yet.
        expected: what is right, computed by the notebook: a number, text, truth value, or a list of
            these; or a function that is given the answer and says whether it is right.
        within: how far a number may be from the right one, absolute and relative to it.
        hint: shown with an answer that is not right.

    Raises:
        ConfigError: ``within`` is negative or not a number, or nothing was expected.

    >>> exercise(None, 0.25)
    exercise: open. Put your answer in the place of None, and run the cell again.
    >>> exercise(0.2501, 0.25)
    exercise: right. 0.2501
    >>> exercise("k1", "k3", hint="Which of them is never negative?")
    exercise: not yet. You said k1. Which of them is never negative?
    """
    if not within >= 0:
        raise ConfigError(f"within={within!r}: a number >= 0 is expected")
    if expected is None:
        raise ConfigError("expected=None: pass what is right, or a function that judges")
    if answer is None:
        return Exercise("open", "Put your answer in the place of None, and run the cell again.")
    shown = _shown(answer)
    try:
        right = (
            expected(answer)
            if callable(expected)
            else _equal(_plain(answer), _plain(expected), within)
        )
    except Exception as error:  # noqa: BLE001 (the answer is the reader's: anything may be wrong)
        return Exercise("not yet", f"{shown} cannot be tried: {type(error).__name__}: {error}")
    if right:
        return Exercise("right", shown)
    return Exercise("not yet", f"You said {shown}. {hint}".rstrip())


def _plain(value: object) -> object:
    """A number or truth value of numpy's or torch's as one of Python's."""
    scalar = getattr(value, "shape", None) == ()
    return cast("Any", value).item() if scalar else value


def _equal(answer: object, expected: object, within: float) -> bool:
    if isinstance(expected, str):
        return isinstance(answer, str) and answer.strip().lower() == expected.strip().lower()
    if isinstance(expected, bool):
        return answer is expected
    if isinstance(expected, Sequence):
        several = cast("Sequence[object]", answer)
        pairs = zip(several, expected, strict=True)
        return all(_equal(_plain(one), _plain(other), within) for one, other in pairs)
    if isinstance(answer, bool | str):
        return False
    one, other = float(cast("float", answer)), float(cast("float", expected))
    return math.isclose(one, other, rel_tol=within, abs_tol=within)


def _shown(answer: object) -> str:
    return str(getattr(answer, "__name__", "your function")) if callable(answer) else str(answer)
