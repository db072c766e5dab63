"""Make the settings of a recipe from keyword arguments, with an error for every wrong name."""

import difflib
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Generic, TypeVar

from xorl_lab.errors import ConfigError

S = TypeVar("S")
_USUAL = {"steps": "20", "epochs": "1", "max_tokens": "64", "learning_rate": "1e-4"}
"""What to begin with, for settings that have no default because the task decides."""


@dataclass(frozen=True, slots=True)
class Course(Generic[S]):
    """Which steps of a recipe to take, and how."""

    given: S
    """The settings, as they were given."""
    live: Callable[[S], S] | None
    """Makes of them those of the next step, if some are to change on the way."""
    done: int
    """Steps taken already."""

    def __post_init__(self) -> None:
        check_integer("done", self.done, 0)

    def settings(self) -> S:
        """The settings of the next step."""
        return self.live(self.given) if self.live else self.given


def build(cls: type[S], values: Mapping[str, Any]) -> S:
    """Make a settings dataclass from keyword arguments.

    Args:
        cls: a dataclass that checks its values when it is made.
        values: field name to value.

    Raises:
        ConfigError: a name is unknown (names the nearest), or one without default is missing.
    """
    known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            raise ConfigError(f"unknown setting {name!r}{suggest(name, known)}")
    missing = [
        f.name
        for f in known.values()
        if f.default is MISSING and f.default_factory is MISSING and f.name not in values
    ]
    if missing:
        usual = ", ".join(f"{name}={_USUAL.get(name, '...')}" for name in missing)
        raise ConfigError(
            f"missing setting{'s' * (len(missing) > 1)} {', '.join(missing)}: pass {usual}, or "
            "whatever suits"
        )
    return cls(**values)


def suggest(name: str, known: Collection[str]) -> str:
    """The end of an error message that lists the names nearest to ``name``, or else all of them."""
    near = difflib.get_close_matches(name, known, n=3)
    if near:
        return f": did you mean {' or '.join(near)}?"
    return f": choose from {', '.join(sorted(known))}"


def check_integer(name: str, value: object, low: int) -> None:
    """Raise a ConfigError unless ``value`` is an integer >= ``low``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{name} is {value!r}: pass an integer >= {low}")


def check_seconds(name: str, value: object) -> None:
    """Raise a ConfigError unless ``value`` is a number > 0, or None."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"{name} is {value!r}: pass seconds > 0, or None for any time")


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    """Raise a ConfigError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}: choose from {', '.join(sorted(choices))}")
