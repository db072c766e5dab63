"""Recorded completions to evaluate again: which ones, and how much of them."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from xorl_lab.lab.diagnosis.reevaluate import Passage, Values
from xorl_lab.store import Reader
from xorl_lab.types import Group, Rollout

PROMPTS = 4
"""Prompts of one step that are looked at."""
PROMPT_TOKENS = 512
"""Tokens up to which further prompts are taken in."""
TOKENS = 256
"""Tokens of completions that are evaluated, the beginnings of all that were chosen."""
FEW, FEW_TOKENS = 2, 12
"""Completions on which every hypothesis is tried first, and how much of each."""
SIDES = ("sampler", "trainer")


@dataclass(frozen=True, slots=True)
class Gap:
    """How far two sets of logprobs lie apart."""

    mean: float
    """Nats, of the absolute differences; NaN where there are none."""
    max: float
    """Nats."""
    tokens: int
    """Tokens that have both, as finite numbers."""

    @classmethod
    def between(cls, one: Values, other: Values) -> "Gap":
        """Of (N,) logprobs and (N,) others; a token that lacks one is left out."""
        with np.errstate(invalid="ignore"):
            apart = np.abs(one - other)
        apart = apart[np.isfinite(apart)]
        if not len(apart):
            return cls(float("nan"), float("nan"), 0)
        return cls(float(apart.mean()), float(apart.max()), len(apart))


@dataclass(frozen=True, slots=True)
class Case:
    """One recorded completion, or its beginning: C tokens."""

    text: str
    """The prompt as text."""
    passage: Passage
    """Prompt and completion."""
    sampler: Values
    """(C,) nats, recorded; NaN where an environment wrote the token."""
    trainer: Values
    """(C,) nats, recorded; NaN where none was."""
    whole: Passage
    """The same with the whole completion."""
    advantage: float | None
    """What it was trained with; None if it was not."""
    drawn: NDArray[np.bool_]
    """(C,) False where an environment wrote the token."""

    def cut(self, tokens: int) -> "Case":
        """The beginning alone: what follows a token has no influence on it."""
        passage = replace(self.passage, completion=self.passage.completion[:tokens])
        return replace(
            self,
            passage=passage,
            sampler=self.sampler[:tokens],
            trainer=self.trainer[:tokens],
            drawn=self.drawn[:tokens],
        )


@dataclass(frozen=True, slots=True)
class Step:
    """What one step recorded."""

    number: int
    """The step."""
    cases: list[Case]
    """Completions with at least one token, and a sampler's logprob for each."""
    silent: int
    """Completions whose sampler reported no logprobs."""

    @property
    def gap(self) -> Gap:
        """Between sampler and trainer, as recorded."""
        return Gap.between(joined(self.cases, "sampler"), joined(self.cases, "trainer"))

    @property
    def broken(self) -> int:
        """Logprobs that are no finite numbers; NaN of the trainer's means that there is none."""
        sampler, trainer = joined(self.cases, "sampler"), joined(self.cases, "trainer")
        drawn = np.concatenate([case.drawn for case in self.cases])
        return int(((~np.isfinite(sampler) | np.isinf(trainer)) & drawn).sum())

    @property
    def longest_prompt(self) -> int:
        """In tokens."""
        return max(len(case.passage.prompt) for case in self.cases)

    @property
    def longest(self) -> int:
        """Prompt and completion, in tokens."""
        return max(len(c.whole.prompt) + len(c.whole.completion) for c in self.cases)


def step_of(reader: Reader, number: int) -> Step:
    """What a step recorded."""
    groups = reader.groups(number)
    drawn = [(g, r) for g in groups for r in g.rollouts if r.tokens]
    told = [(g, r) for g, r in drawn if len(r.logprobs) == len(r.tokens)]
    cases = [_case(group, rollout) for group, rollout in told]
    return Step(number, cases, len(drawn) - len(told))


def temperature_at(reader: Reader, step: int) -> float:
    """The sampling temperature of a step, as the run's settings and knobs have it; 1 by default."""
    settings = reader.info.settings
    recipe = settings.get("recipe", settings)
    found: object = recipe.get("temperature")
    for event in reader.events(kinds=("start", "knob")):
        if event.superseded or (event.step or 0) >= step:
            continue
        if event.kind == "start":
            found = event.data.get("settings", {}).get("temperature", found)
        elif event.data.get("name") == "temperature":
            found = event.data.get("new")
    return float(found) if isinstance(found, int | float) and found > 0 else 1.0


def choose(step: Step, count: int) -> list[Case]:
    """Some completions of a step: of few prompts, the short ones, those with the widest gap first.

    Args:
        step: what was recorded.
        count: the most completions.

    Returns:
        The beginnings of the completions, or the whole ones where the gap comes later.
    """
    chosen = _spread(step.cases, count)
    wide = Gap.between(joined(chosen, "sampler"), joined(chosen, "trainer")).mean
    tokens = max(TOKENS // len(chosen), 8)
    while True:
        cut = [case.cut(tokens) for case in chosen]
        narrow = Gap.between(joined(cut, "sampler"), joined(cut, "trainer")).mean
        whole = all(len(case.passage.completion) <= tokens for case in chosen)
        if whole or not narrow < wide / 2:
            return cut
        tokens *= 2


def few(cases: Sequence[Case]) -> list[Case]:
    """Fewer and shorter ones, for trying many things; all where these do not show the gap."""
    short = [case.cut(FEW_TOKENS) for case in cases[:FEW]]
    wide, narrow = (
        Gap.between(joined(some, "sampler"), joined(some, "trainer")).mean
        for some in (cases, short)
    )
    return list(cases) if narrow < wide / 3 else short


def first(cases: Sequence[Case], tokens: int) -> list[Case]:
    """The first cases that together have no more than so many tokens; the first in any case."""
    found: list[Case] = []
    for case in cases:
        room = tokens - sum(len(c.passage.completion) for c in found)
        if room <= 0:
            break
        found.append(case.cut(room))
    return found


def joined(cases: Iterable[Case], side: str) -> Values:
    """(N,) recorded logprobs of ``sampler`` or ``trainer``, one completion behind the other."""
    parts = [case.sampler if side == "sampler" else case.trainer for case in cases]
    return np.concatenate(parts) if parts else np.zeros(0)


def _case(group: Group, rollout: Rollout) -> Case:
    trainer = rollout.streams.get("trainer_logprobs", [])
    if len(trainer) != len(rollout.tokens):
        trainer = [float("nan")] * len(rollout.tokens)
    passage = Passage(tuple(group.prompt_tokens), tuple(rollout.tokens))
    return Case(
        group.prompt,
        passage,
        np.asarray(rollout.logprobs, dtype=np.float64),
        np.asarray(trainer, dtype=np.float64),
        passage,
        None if rollout.reward is None else rollout.advantage,
        np.asarray(rollout.weights or [1.0] * len(rollout.tokens)) != 0,
    )


def _spread(cases: Sequence[Case], count: int) -> list[Case]:
    """In turn from each of the prompts that are looked at."""
    by_prompt: dict[tuple[int, ...], list[Case]] = {}
    for case in cases:
        by_prompt.setdefault(case.passage.prompt, []).append(case)
    prompts = sorted(by_prompt, key=lambda prompt: (len(prompt), prompt))
    room = itertools.accumulate(len(prompt) for prompt in prompts)
    kept = [p for i, (p, used) in enumerate(zip(prompts, room, strict=True))
            if i == 0 or (i < PROMPTS and used <= PROMPT_TOKENS)]  # fmt: skip
    stacks = [sorted(by_prompt[prompt], key=_width, reverse=True) for prompt in kept]
    turns = itertools.zip_longest(*stacks)
    return [case for turn in turns for case in turn if case is not None][:count]


def _width(case: Case) -> float:
    gap = Gap.between(case.sampler, case.trainer)
    return gap.mean if gap.tokens else 0.0
