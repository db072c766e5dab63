"""How a run is conducted, whatever it does."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from xorl_lab.checkpoints.names import MODEL_ID
from xorl_lab.errors import ConfigError
from xorl_lab.recipes.settings import check_integer, suggest

SAVE_EVERY, KEEP = 10, 10
"""Steps between two checkpoints, and how many of a run are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conduct:
    """What a run is told beside the settings of its recipe."""

    name: str | None = None
    """Of the run and of its model; None = the recipe's, numbered."""
    resume: str | None = None
    """A run to go on with, from its last checkpoint."""
    branch: tuple[str, str] | None = None
    """A run and one of its checkpoints to begin from."""
    background: bool | None = None
    """None = in a live notebook."""
    paused: bool = False
    """Wait before the first step, until it is resumed; in the background only."""
    preflight: bool = True
    """Try the task on a few prompts first, and warn of what stands in the way."""
    save_every: int = SAVE_EVERY
    """Steps between checkpoints; 0 = at the end only."""
    keep: int = KEEP
    """Checkpoints to keep; 0 = all."""
    concurrent: bool = False
    """Leave another run of this lab that is under way alone, rather than stop it."""
    quiet: bool = False
    """Print nothing where there is no dashboard."""

    def __post_init__(self) -> None:
        for name in ("save_every", "keep"):
            check_integer(name, getattr(self, name), 0)
        for name in ("paused", "preflight", "concurrent", "quiet", "background"):
            value = getattr(self, name)
            if not isinstance(value, bool) and (name, value) != ("background", None):
                raise ConfigError(f"{name} is {value!r}: pass True or False")
        if self.name is not None:
            check_run_name(self.name)
        if self.resume is not None and not isinstance(self.resume, str):
            raise ConfigError(f"resume is {self.resume!r}: pass the name of a run")
        pair = self.branch
        if pair is not None and not (
            isinstance(pair, tuple | list) and [isinstance(x, str) for x in pair] == [True, True]
        ):
            raise ConfigError(
                f"branch is {pair!r}: pass the names of a run and of one of its checkpoints, such "
                "as ('grpo-1', 'step-40')"
            )
        if self.resume is not None and (pair is not None or self.name is not None):
            other = "name" if pair is None else "branch"
            raise ConfigError(
                f"resume={self.resume!r} and {other}={getattr(self, other)!r}: pass one of the "
                "two, as a resumed run keeps its name and its past"
            )


def check_run_name(name: object) -> None:
    """Raise a ConfigError unless a run, and so a folder of checkpoints, can be called that."""
    if not isinstance(name, str) or not MODEL_ID.fullmatch(name):
        raise ConfigError(
            f"name is {name!r}: use 1 to 128 letters, digits, '_' and '-', and start with a "
            "letter or digit"
        )


def parted(given: Mapping[str, Any], recipe: type) -> tuple[Conduct, dict[str, Any]]:
    """What is for the conduct of a run, and what is for its recipe.

    Args:
        given: both, by name.
        recipe: dataclass of the recipe's settings.

    Raises:
        ConfigError: a name belongs to neither (names the nearest), or a value is out of range.
    """
    mine = [f.name for f in fields(Conduct)]
    known = [*mine, *(f.name for f in fields(recipe))]
    for name in given:
        if name not in known:
            raise ConfigError(f"unknown setting {name!r}{suggest(name, known)}")
    conduct = Conduct(**{k: v for k, v in given.items() if k in mine})
    return conduct, {k: v for k, v in given.items() if k not in mine}
