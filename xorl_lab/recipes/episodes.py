"""Episodes of several turns, all of a step side by side: one call of the sampler for each turn.

The tokens of an episode are those that the sampler drew, and between them those that the
environment said; each turn is drawn behind exactly the tokens that precede it, and nothing is
encoded twice.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from xorl_lab.errors import DataError
from xorl_lab.recipes import rollouts
from xorl_lab.recipes.clock import Clock
from xorl_lab.recipes.conversation import Conversation
from xorl_lab.recipes.environments import Environment, Reply, Turn
from xorl_lab.recipes.order import derive_seed
from xorl_lab.recipes.prompts import Prompt
from xorl_lab.recipes.rewards import Score, Scorer
from xorl_lab.types import ModelInput, Rollout, SampledSequence, SampleResponse, SamplingParams
from xorl_lab.types.results import StopReason

if TYPE_CHECKING:
    import numpy.typing as npt
    from transformers import PreTrainedTokenizerBase

NAN = float("nan")


@dataclass(frozen=True, slots=True)
class Limits:
    """How long an episode may be."""

    turns: int
    """Turns of the model."""
    context: int
    """Tokens, of prompt and all turns."""


class Episode:
    """One episode: what was said so far."""

    def __init__(
        self,
        prompt: Prompt,
        params: SamplingParams,
        sample: int,
        environment: Environment,
        tokenizer: "PreTrainedTokenizerBase",
    ) -> None:
        self.prompt = prompt
        self.score: Score | None = None
        self._params = params
        self._sample = sample
        self._play = environment.begin(prompt.given, prompt.row)
        self._conversation = Conversation(prompt, tokenizer)
        self._tokenizer = tokenizer
        self._parts: list[SampledSequence | list[int]] = []
        self._text: list[str] = []
        self._stop_reason: StopReason | None = None

    @property
    def tokens(self) -> list[int]:
        """Ids behind the prompt."""
        parts = [p.tokens if isinstance(p, SampledSequence) else p for p in self._parts]
        return [token for part in parts for token in part]

    def request(self, turn: int) -> tuple[ModelInput, SamplingParams]:
        """What the sampler is asked for: the tokens so far, and a seed of this episode's turn."""
        seed = self._params.seed
        own = None if seed is None else derive_seed(seed, self._sample, turn)
        return (
            ModelInput.from_ints([*self.prompt.tokens, *self.tokens]),
            replace(self._params, seed=own),
        )

    def hear(self, sequence: SampledSequence, number: int, limits: "Limits") -> None:
        """Take a turn of the model, and let the environment answer."""
        self._parts.append(sequence)
        if sequence.stop_reason == "abort":
            self._end("the completion was aborted before it ended", "abort")
            return
        last = number == limits.turns
        text = sequence.text or ""
        turn = Turn(text, list(sequence.tokens), sequence.stop_reason, number, last)
        reply = self._play(turn)
        if reply.score is not None:
            self._close(reply)
            return
        if last:
            self._end(
                f"it was still going on after max_turns={limits.turns} turns: raise max_turns, or "
                "let the environment return a reward where turn.last is true"
            )
            return
        try:
            said, ids = self._conversation.reply(text, sequence.tokens, reply.observation)
        except DataError as error:
            self._end(str(error), sequence.stop_reason)
            return
        before = len(self.prompt.tokens) + len(self.tokens) + len(ids)
        if before + self._params.max_tokens > limits.context:
            self._end(
                f"there was no room for turn {number + 1}: {before} tokens with "
                f"max_tokens={self._params.max_tokens} are over the context of {limits.context}"
            )
            return
        whole = self._tokenizer.decode(sequence.tokens, skip_special_tokens=True)
        self._text += [str(whole), said]
        self._parts.append(ids)

    def rollout(self, version: int) -> Rollout:
        """The episode as it is recorded, without an advantage."""
        assert self.score is not None
        last = self._parts[-1]
        assert isinstance(last, SampledSequence)
        whole = rollouts.rollout(_joined(self._parts), self.score, version)
        weights = [
            weight
            for part in self._parts
            for weight in (
                [1.0] * len(part.tokens) if isinstance(part, SampledSequence) else [0.0] * len(part)
            )
        ]
        return replace(
            whole,
            text="".join([*self._text, last.text or ""]),
            stop_reason=self._stop_reason or last.stop_reason,
            weights=weights if 0.0 in weights else None,
        )

    def give_up(self) -> None:
        """Let the environment tidy up, if it is still going on."""
        if self.score is None:
            self._end("the step was given up", "abort")

    def _end(self, error: str, reason: StopReason = "length") -> None:
        self._stop_reason = reason
        self._close(self._play.end(error))

    def _close(self, reply: Reply) -> None:
        self.score = reply.score


def collect(
    draw: rollouts.Draw,
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams],
    judge: Scorer | Environment,
    clock: Clock | None = None,
) -> list[list[Rollout]]:
    """Draw completions or episodes of several prompts, with their rewards.

    Args:
        draw: how to sample.
        prompts: P prompts.
        params: P settings.  Give each a seed of its own: one seed draws the same random numbers
            for every prompt.
        judge: gives the rewards.
        clock: to book ``sample`` and ``score``.

    Returns:
        P lists of rollouts, without advantages.
    """
    clock = clock or Clock()
    first = [prompt.input for prompt in prompts]
    responses = rollouts.sample(draw.sampler, first, params, draw.num_samples, draw.record_top)
    clock.lap("sample")
    if isinstance(judge, Environment):
        found = _play(draw, list(zip(prompts, params, responses, strict=True)), judge, clock)
    else:
        found = [
            [
                rollouts.rollout(sequence, judge(prompt.given, prompt.row, sequence), draw.version)
                for sequence in response.sequences
            ]
            for prompt, response in zip(prompts, responses, strict=True)
        ]
    clock.lap("score")
    return found


def _play(
    draw: rollouts.Draw,
    begun: Sequence[tuple[Prompt, SamplingParams, SampleResponse]],
    environment: Environment,
    clock: Clock,
) -> list[list[Rollout]]:
    """Go on from the first turns, those of a group drawn together, to the end of all episodes."""
    limits = Limits(draw.max_turns, draw.client.context_length)
    tokenizer = draw.client.get_tokenizer()
    groups: list[list[Episode]] = []
    try:
        for prompt, params, response in begun:
            count = range(len(response.sequences))
            groups.append([Episode(prompt, params, i, environment, tokenizer) for i in count])
            for episode, sequence in zip(groups[-1], response.sequences, strict=True):
                episode.hear(sequence, 1, limits)
        clock.lap("score")
        for number in range(2, draw.max_turns + 1):
            live = [e for group in groups for e in group if e.score is None]
            if not live:
                break
            asked = [episode.request(number) for episode in live]
            tokens, own = [t for t, _ in asked], [p for _, p in asked]
            answers = rollouts.sample(draw.sampler, tokens, own, 1, draw.record_top)
            clock.lap("sample")
            for episode, response in zip(live, answers, strict=True):
                episode.hear(response.sequences[0], number, limits)
            clock.lap("score")
    except BaseException:
        for episode in (e for group in groups for e in group):
            with contextlib.suppress(Exception):
                episode.give_up()
        raise
    return [[episode.rollout(draw.version) for episode in group] for group in groups]


def _joined(parts: Sequence[SampledSequence | list[int]]) -> SampledSequence:
    """Turns of the model, and ids that it did not draw, as one sequence; NaN where it did not."""
    tokens: list[int] = []
    logprobs: list[float] = []
    entropies: list[float] = []
    top: list[list[tuple[int, float]]] = []
    drawn = [p for p in parts if isinstance(p, SampledSequence)]
    for part in parts:
        count = len(part.tokens if isinstance(part, SampledSequence) else part)
        tokens += part.tokens if isinstance(part, SampledSequence) else part
        holes = [NAN] * count
        logprobs += (part.logprobs or holes) if isinstance(part, SampledSequence) else holes
        entropies += (part.entropies or holes) if isinstance(part, SampledSequence) else holes
        rows = part.top_logprobs if isinstance(part, SampledSequence) else None
        top += rows or [[] for _ in range(count)]
    return SampledSequence(
        tokens,
        drawn[-1].stop_reason,
        logprobs if all(d.logprobs is not None for d in drawn) else None,
        drawn[-1].text,
        top if any(d.top_logprobs for d in drawn) else None,
        entropies if all(d.entropies is not None for d in drawn) else None,
        _experts([d.routed_experts for d in drawn]),
    )


def _experts(turns: "Sequence[npt.NDArray[np.int16] | None]") -> "npt.NDArray[np.int16] | None":
    """Chosen experts of an episode; each turn's reach from its start to its last token but one.

    A token that was drawn keeps the experts of the step that drew from it: read again as a part of
    the next turn's prompt, it may have met a near-tie otherwise.
    """
    whole = turns[0]
    for turn in turns[1:]:
        if whole is None or turn is None:
            return None
        whole = np.concatenate([whole, turn[len(whole) :]])
    return whole
