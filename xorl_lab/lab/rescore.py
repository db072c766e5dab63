"""Another reward function over recorded rollouts: what it would have said, without sampling."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from xorl_lab.errors import ConfigError, StoreError
from xorl_lab.lab.console import Counting
from xorl_lab.lab.rescored import Rescored, Scored
from xorl_lab.recipes.conversation import Conversation
from xorl_lab.recipes.environments import Environment, Turn, judge_of, replay
from xorl_lab.recipes.grpo import ADVANTAGES
from xorl_lab.recipes.limit import SECONDS
from xorl_lab.recipes.prompts import Prompt, columns, encode_prompts
from xorl_lab.recipes.rewards import RewardFunction, Score, Scorer
from xorl_lab.store import Condition, Reader, StoredRollout
from xorl_lab.store.rows import to_json
from xorl_lab.types import Rollout, SampledSequence

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Kept:
    """What scoring needs of a recorded rollout, in little memory."""

    tokens: "NDArray[np.int32]"
    """Ids of the completion."""
    rollout: Rollout
    """The rest of it, without values per token."""
    turns: list[tuple[int, int]]
    """Where the model's turns begin and end among the tokens."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recorded group."""

    step: int
    """Number of the step."""
    position: int
    """In the step, from 0."""
    prompt: str
    """The text that the model was shown."""
    given: object
    """The prompt as the reward function got it."""
    row: Mapping[str, Any]
    """The other columns."""
    kept: list[Kept]
    """In order of sample index."""
    ids: dict[int, int]
    """Of the chosen rollouts, by sample index."""


ScoreOf = Callable[[Recorded, Kept], Score]
"""Scores a rollout of a group."""


def rescore(
    reader: Reader,
    reward: RewardFunction,
    where: Sequence[Condition] = (),
    *,
    given: object = None,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    quiet: bool = False,
) -> Rescored:
    """Score recorded rollouts with another function; see :meth:`xorl_lab.lab.run.Run.rescore`.

    Args:
        reader: of the run.
        reward: the other function.
        where: which rollouts are shown.
        given: the prompts as the run was given them, if they are at hand.
        tokenizer: with which they are recognised, and an environment is played again.
        quiet: show no progress.

    Raises:
        ConfigError: the function asks for something that is not there.
        StoreError: there are no such rollouts, or a condition is none.
    """
    prompts = [] if given is None or tokenizer is None else encode_prompts(given, tokenizer)
    groups = list(_recorded(reader, where, _Prompts(prompts)))
    if not groups:
        what = "none that fit" if where else "none"
        raise StoreError(f"run {reader.info.name!r} has {what} of its rollouts recorded")
    there = set.intersection(*(set(group.row) for group in groups))
    judge = judge_of(reward, columns(prompts) if prompts else there, SECONDS)
    score = _scorer(judge, tokenizer, reader.info.settings.get("recipe", {}))
    advantage = ADVANTAGES[reader.info.settings.get("recipe", {}).get("advantage", "group")]
    show = (lambda items, _: items) if quiet else _shown
    found: list[Scored] = []
    for group in show(groups, sum(len(g.kept) for g in groups)):
        found += _scored(group, score, advantage)
    return Rescored(reader.info.name, found)


class _Prompts:
    """Prompts as they were given, found by what the model was shown."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._by_row = {(p.text, _plain(p.row)): p for p in prompts}
        texts = Counter(p.text for p in prompts)
        self._by_text = {p.text: p for p in prompts if texts[p.text] == 1}

    def find(self, text: str, row: Mapping[str, Any]) -> tuple[object, Mapping[str, Any]]:
        """Prompt and columns; those of the record where no prompt was given that fits.

        A record holds a prompt that was no string, under the name that no column can have.
        """
        found = self._by_row.get((text, _plain(row))) or self._by_text.get(text)
        if found is not None:
            return found.given, found.row
        others = {name: value for name, value in row.items() if name != "prompt"}
        return row.get("prompt", text), others


def _recorded(reader: Reader, where: Sequence[Condition], prompts: _Prompts) -> Iterator[Recorded]:
    """The groups that have a chosen rollout, in order."""
    chosen = set(reader.ids(where=where).tolist())
    table = reader.group_table(where=where, chars=0)
    places = sorted(zip(*(table[name].tolist() for name in ("step", "group", "ids")), strict=True))
    stored = reader.stored([number for _, _, ids in places for number in ids])
    for (step, position), found in groupby(stored, key=lambda r: (r.step, r.group)):
        group = list(found)
        given, row = prompts.find(group[0].prompt, group[0].row)
        ids = {r.sample: r.id for r in group if r.id in chosen}
        kept = [_slim(rollout) for rollout in group]
        yield Recorded(step, position, group[0].prompt, given, row, kept, ids)


def _slim(stored: StoredRollout) -> Kept:
    bare = Rollout(
        [],
        [],
        stored.text,
        stored.stop_reason,
        stored.version,
        stored.reward,
        stored.reward_parts,
        stored.advantage,
        stored.error,
    )
    # The array is a part of its whole group's.
    return Kept(stored.tokens.copy(), bare, stored.turns)


def _scorer(
    judge: Scorer | Environment,
    tokenizer: "PreTrainedTokenizerBase | None",
    recipe: Mapping[str, Any],
) -> ScoreOf:
    """What scores a recorded rollout of a group.

    Raises:
        ConfigError: an environment is to be played again without a tokenizer.
    """
    if isinstance(judge, Environment):
        if tokenizer is None:
            raise ConfigError(
                "the reward function is an environment, which is played again from the text of "
                "the recorded turns, and nothing here knows the tokenizer: open the run from a Lab "
                "with its model"
            )
        return Replay(judge, tokenizer, recipe)
    return lambda group, kept: judge(
        group.given,
        group.row,
        SampledSequence(kept.tokens.tolist(), kept.rollout.stop_reason, text=kept.rollout.text),
    )


class Replay:
    """An environment, told what the model wrote, as long as it answers what was recorded.

    Args:
        environment: the one that was played, or another that differs in its rewards.
        tokenizer: of the run's model.
        recipe: settings of the run.
    """

    def __init__(
        self,
        environment: Environment,
        tokenizer: "PreTrainedTokenizerBase",
        recipe: Mapping[str, Any],
    ) -> None:
        self._environment = environment
        self._tokenizer = tokenizer
        stop = recipe.get("stop") or []
        self._stops = [stop] if isinstance(stop, str) else list(stop)
        self._most = recipe.get("max_turns")

    def __call__(self, group: Recorded, kept: Kept) -> Score:
        """Score one rollout."""
        tokens = kept.tokens.tolist()
        turns = [
            self._turn(tokens[start:end], number, kept, last=number == len(kept.turns))
            for number, (start, end) in enumerate(kept.turns, start=1)
        ]
        prompt = Prompt(group.given, group.prompt, [], group.row)
        conversation = Conversation(prompt, self._tokenizer)
        gaps = [
            tokens[end:start]
            for (_, end), (start, _) in zip(kept.turns, kept.turns[1:], strict=False)
        ]

        def said(index: int, observation: object) -> bool:
            turn = turns[index]
            return conversation.reply(turn.text, turn.tokens, observation)[1] == gaps[index]

        return replay(self._environment, group.given, group.row, turns, said)

    def _turn(self, tokens: list[int], number: int, kept: Kept, *, last: bool) -> Turn:
        text = str(self._tokenizer.decode(tokens, skip_special_tokens=True))
        cuts = [cut for stop in self._stops if (cut := text.find(stop)) >= 0]
        special = bool(tokens) and tokens[-1] in self._tokenizer.all_special_ids
        ended = bool(cuts) or special
        reason = kept.rollout.stop_reason if last else "stop" if ended else "length"
        return Turn(text[: min(cuts, default=None)], tokens, reason, number, number == self._most)


def _scored(
    group: Recorded, score_of: ScoreOf, advantage: Callable[[Sequence[float | None]], list[float]]
) -> list[Scored]:
    """The chosen rollouts of a group; all of it is scored, as advantages compare."""
    scores = [score_of(group, kept) for kept in group.kept]
    advantages = advantage([score.total for score in scores])
    return [
        Scored(
            group.ids[sample],
            group.step,
            group.position,
            sample,
            group.prompt,
            kept.rollout,
            score,
            value,
        )
        for sample, (kept, score, value) in enumerate(
            zip(group.kept, scores, advantages, strict=True)
        )
        if sample in group.ids
    ]


def _shown(groups: Iterable[Recorded], total: int) -> Iterator[Recorded]:
    """Hand groups on, and say on standard error how far it is if it takes a while."""
    tell, done = Counting(quiet=False), 0
    for group in groups:
        tell(done, total, "rollouts scored")
        yield group
        done += len(group.kept)
    tell.finish(total, "rollouts scored")


def _plain(row: Mapping[str, Any]) -> str:
    """Columns as a record holds them, to be compared."""
    others = {str(name): value for name, value in row.items() if name != "prompt"}
    return json.dumps(json.loads(to_json(others)), sort_keys=True)
