"""Call a person's reward function so that a bad completion is data, never a crash.

A reward function asks by name for what it wants to see::

    def reward(completion, answer):
        return float(completion.strip() == answer)

Names that are always there are those of :data:`ALWAYS`; the others are columns of the prompt's row.
It returns a number, or a dict of named numbers whose sum is the reward.  A function that yields is
an environment of several turns: :mod:`xorl_lab.recipes.environments`.
"""

import functools
import inspect
import math
import numbers
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from xorl_lab.errors import ConfigError, DataError
from xorl_lab.recipes.limit import Limit, Outcome, described
from xorl_lab.types import Group, SampledSequence

RewardFunction = Callable[..., object]
"""What a person writes; see the module's docstring."""

ALWAYS = ("prompt", "completion", "tokens", "stop_reason")
"""The prompt as it was passed, the decoded completion, its token ids, and why it ended."""


@dataclass(frozen=True, slots=True)
class Score:
    """What a reward function said of one completion."""

    total: float | None
    """The reward, or None if there is none."""
    parts: dict[str, float] = field(default_factory=dict)
    """The named parts, if the function returned parts."""
    error: str | None = None
    """Why there is no reward."""


class Scorer:
    """A reward function, bound by name to what it asks for.

    It is called for one completion after the other.

    >>> scorer = Scorer(lambda completion, answer: completion == answer, ["answer"])
    >>> scorer("2+2=", {"answer": "4"}, SampledSequence([52], text="4")).total
    1.0
    """

    def __init__(
        self, reward: RewardFunction, columns: Collection[str], limit: Limit | None = None
    ) -> None:
        """Bind the function.

        Args:
            reward: the reward function.
            columns: names of the columns that every prompt's row has.
            limit: of the time of a call; None = any time, in the thread of the caller.

        Raises:
            ConfigError: it asks for a name that is not there, or cannot be called like this.
        """
        if yields(reward):
            raise ConfigError(
                "the reward function yields, so it is an environment, which plays along while the "
                "model writes: pass it to grpo or evaluate, or write a function that returns the "
                "reward of what is there already"
            )
        self._reward = reward
        self._limit = limit or Limit(None)
        self._names = wanted(reward, columns, ALWAYS)

    def __call__(self, prompt: object, row: Mapping[str, Any], sequence: SampledSequence) -> Score:
        """Score one completion.

        Args:
            prompt: the prompt as the person passed it.
            row: the other columns of its row.
            sequence: the completion.
        """
        if sequence.stop_reason == "abort":
            return Score(None, error="the completion was aborted before it ended")
        there: dict[str, Any] = {
            **row,
            "prompt": prompt,
            "completion": sequence.text or "",
            "tokens": list(sequence.tokens),
            "stop_reason": sequence.stop_reason,
        }
        asked = {name: there[name] for name in self._names}
        return score_of(self._limit(functools.partial(self._reward, **asked)))


def require_some_reward(groups: Sequence[Group]) -> None:
    """Raise a DataError if every completion of a step failed: then the function is at fault.

    Args:
        groups: the scored groups of one step.
    """
    rollouts = [r for g in groups for r in g.rollouts]
    if rollouts and all(r.reward is None for r in rollouts):
        first = rollouts[0]
        raise DataError(
            f"the reward function failed for all {len(rollouts)} completions of this step; the "
            f"first was {first.text!r:.500}, and the reason: {first.error}. Call the function by "
            "hand with that completion, and mend it; where it works by hand: it is called in a "
            "thread of its own, or in the run's with reward_timeout=None"
        )


def yields(reward: object) -> bool:
    """True if a function is an environment: one that yields."""
    call = getattr(type(reward), "__call__", None)  # noqa: B004 (of an object that is called)
    return inspect.isgeneratorfunction(reward) or (
        not inspect.isroutine(reward) and inspect.isgeneratorfunction(call)
    )


def wanted(function: RewardFunction, columns: Collection[str], always: Sequence[str]) -> list[str]:
    """Names of the arguments to pass to a function, in order.

    Args:
        function: a reward function or an environment.
        columns: names of the columns that every prompt's row has.
        always: names of what there is beside them; the first is the prompt.

    Raises:
        ConfigError: it asks for a name that is not there, or cannot be called like this.
    """
    taken = sorted(set(columns) & set(ALWAYS[1:]))
    if taken:
        raise ConfigError(
            f"the prompts have a column named {taken[0]!r}, which every reward function gets from "
            "the completion: rename the column"
        )
    parameters = _parameters(function)
    there = [*always, *sorted(set(columns) - {"prompt"})]
    names: list[str] = []
    for name, parameter in parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            return there
        if parameter.kind is parameter.VAR_POSITIONAL:
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ConfigError(
                f"the reward function takes {name!r} by position only: remove the '/'"
            )
        if name in there:
            names.append(name)
        elif parameter.default is parameter.empty:
            hint = (
                "; an environment gets what the model wrote from its yield: turn = yield"
                if name in ALWAYS
                else ""
            )
            raise ConfigError(
                f"the reward function asks for {name!r}, which is not there: it can ask for "
                f"{', '.join(there)}{hint}"
            )
    return names


def _parameters(reward: RewardFunction) -> Mapping[str, inspect.Parameter]:
    if not callable(reward):
        raise ConfigError(f"reward is a {type(reward).__name__}: pass a function")
    if inspect.iscoroutinefunction(reward) or inspect.isasyncgenfunction(reward):
        raise ConfigError("the reward function is async: pass one that returns the reward itself")
    try:
        return inspect.signature(reward).parameters
    except (TypeError, ValueError):
        raise ConfigError(
            f"the argument names of {reward!r} cannot be read: wrap it, "
            "def reward(completion): return ..."
        ) from None


def score_of(outcome: Outcome) -> Score:
    """What a call of a person's function says of a completion."""
    if outcome.late is not None:
        return Score(None, error=outcome.late)
    if outcome.error is not None:
        return Score(None, error=described(outcome.error))
    return to_score(outcome.value)


def to_score(value: object) -> Score:
    """Check what came back."""
    if not isinstance(value, Mapping):
        number = _number(value)
        return (
            Score(number)
            if isinstance(number, float)
            else Score(None, error=f"it returned {number}")
        )
    parts: dict[str, float] = {}
    for name, part in value.items():  # pyright: ignore[reportUnknownVariableType]
        number = _number(part)
        if not isinstance(number, float):
            return Score(None, parts, error=f"part {name!r} is {number}")
        parts[str(name)] = number  # pyright: ignore[reportUnknownArgumentType]
    if not parts:
        return Score(None, error="it returned an empty dict: return a number or a dict of numbers")
    return Score(sum(parts.values()), parts)


def _number(value: object) -> float | str:
    """The finite number, or a phrase that says what it is instead."""
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "ndim", None) == 0:
        value = item()  # a scalar of numpy or torch
    if isinstance(value, numbers.Real):
        number = float(value)
        return number if math.isfinite(number) else f"{number}, which is not a finite number"
    if value is None:
        return "None instead of a number (is a return missing?)"
    return f"{value!r:.80}, a {type(value).__name__} instead of a number"
