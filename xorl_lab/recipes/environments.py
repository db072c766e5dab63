"""Tasks of several turns: a reward function that yields.

An environment asks by name for what it wants of the prompt's row, as a reward function does.  Each
``yield`` gives the model something to read and waits for what it writes then; the first one gives
nothing, as the model reads the prompt.  It returns the reward::

    def guess(number):
        turn = yield                            # what the model wrote behind the prompt
        while int(turn.text) != number:
            turn = yield "higher" if int(turn.text) < number else "lower"
        return 1 / turn.number

What it raises is shown, and marks that one episode as failed.
"""

import functools
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from xorl_lab.errors import DataError
from xorl_lab.recipes.limit import Limit
from xorl_lab.recipes.rewards import RewardFunction, Score, Scorer, score_of, wanted, yields
from xorl_lab.types.results import StopReason

MAX_TURNS = 8
"""Turns of an episode, unless something else is asked for."""
ALWAYS = ("prompt",)
"""What an environment may ask for beside the columns: the prompt as it was passed."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What the model wrote in one turn."""

    text: str
    """Without the stop token or string."""
    tokens: list[int] = field(default_factory=list)
    """Its ids, with the stop token."""
    stop_reason: StopReason = "stop"
    """``length``: it was cut off at max_tokens."""
    number: int = 1
    """Of the turn, from 1."""
    last: bool = False
    """True if there is no further turn, so that an environment that yields again is overlong."""


Playing = Generator[object, Turn, object]
"""An environment under way."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What an environment did after a turn."""

    observation: object = None
    """What the model is to read next."""
    score: Score | None = None
    """Set if the episode is over."""


class Environment:
    """An environment, bound by name to what it asks for.

    >>> def twice(answer):
    ...     turn = yield
    ...     if turn.text != answer:
    ...         turn = yield "try again"
    ...     return turn.text == answer
    >>> play = Environment(twice, ["answer"]).begin("2+2=", {"answer": "4"})
    >>> play(Turn("5")).observation, play(Turn("4")).score.total
    ('try again', 1.0)
    """

    def __init__(
        self, function: RewardFunction, columns: Collection[str], limit: Limit | None = None
    ) -> None:
        """Bind the function.

        Args:
            function: one that yields; see the module's docstring.
            columns: names of the columns that every prompt's row has.
            limit: of the time of each call; None = any time, in the thread of the caller.

        Raises:
            ConfigError: it asks for a name that is not there, or cannot be called like this.
        """
        self._function = function
        self._limit = limit or Limit(None)
        self._names = wanted(function, columns, ALWAYS)

    def begin(self, prompt: object, row: Mapping[str, Any]) -> "Play":
        """An episode, which begins with the model's first turn.

        Args:
            prompt: the prompt as the person passed it.
            row: the other columns of its row.
        """
        there = {**row, "prompt": prompt}
        asked = {name: there[name] for name in self._names}
        return Play(functools.partial(self._function, **asked), self._limit)


class Play:
    """One episode of an environment.

    Args:
        make: makes the generator.
        limit: of the time of each call.
    """

    def __init__(self, make: Callable[[], object], limit: Limit) -> None:
        self._make = make
        self._limit = limit
        self._playing: Playing | None = None

    def __call__(self, turn: Turn) -> Reply:
        """Tell it what the model wrote."""
        outcome = self._limit(functools.partial(self._next, turn))
        if isinstance(outcome.value, _Said):
            return Reply(outcome.value.observation)
        if outcome.late is not None:
            self._playing = None  # it may still be at it
        return Reply(score=score_of(outcome))

    def end(self, error: str) -> Reply:
        """End it before it returned."""
        playing = self._playing
        if playing is not None:
            self._limit(playing.close)
        return Reply(score=Score(None, error=error))

    def _next(self, turn: Turn) -> object:
        """What the environment says, or the reward that it returns."""
        if self._playing is None:
            playing: Any = self._make()
            self._playing = playing
            try:
                opening = next(playing)
            except StopIteration:
                raise DataError(
                    "the environment ended before the model's first turn: begin with turn = yield"
                ) from None
            if opening is not None:
                raise DataError(
                    f"the environment's first yield gives {opening!r:.80}, but the model reads the "
                    "prompt first: begin with turn = yield, and put what it is to read into the "
                    "prompt"
                )
        assert self._playing is not None
        try:
            return _Said(self._playing.send(turn))
        except StopIteration as end:
            return end.value


@dataclass(frozen=True, slots=True)
class _Said:
    observation: object


def judge_of(
    reward: RewardFunction, columns: Collection[str], seconds: float | None = None
) -> Scorer | Environment:
    """What gives the rewards: a function of one completion, or an environment.

    Args:
        reward: what a person wrote.
        columns: names of the columns that every prompt's row has.
        seconds: that each call of it may take; None = any.

    Raises:
        ConfigError: it asks for a name that is not there, or cannot be called.
    """
    limit = Limit(seconds)
    if yields(reward):
        return Environment(reward, columns, limit)
    return Scorer(reward, columns, limit)


def replay(
    environment: Environment,
    prompt: object,
    row: Mapping[str, Any],
    turns: Sequence[Turn],
    said: Callable[[int, object], bool],
) -> Score:
    """What an environment says of turns that were recorded, as long as it says the same again.

    Args:
        environment: the same one, or another that differs in its rewards.
        prompt: the prompt as it was passed.
        row: the other columns.
        turns: what the model wrote.
        said: tells whether an observation behind the turn of an index is the recorded one.
    """
    play = environment.begin(prompt, row)
    for index, turn in enumerate(turns):
        reply = play(turn)
        if reply.score is not None:
            over = index < len(turns) - 1 and reply.score.error is None
            early = f"it ended after turn {index + 1}, and {len(turns)} were recorded"
            return Score(None, error=early) if over else reply.score
        if index == len(turns) - 1:
            ended = play.end(f"it went on after turn {len(turns)}, the last that was recorded")
            return ended.score or Score(None)
        try:
            same = said(index, reply.observation)
        except DataError as error:
            return play.end(str(error)).score or Score(None)
        if not same:
            changed = play.end(
                f"after turn {index + 1} it said {reply.observation!r:.200}, which is not what "
                "was recorded, so what the model would have written then is unknown"
            )
            return changed.score or Score(None)
    return Score(None, error="the model wrote nothing")
