"""Held-out evaluation: greedy answers to prompts never trained on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from xorl_lab.recipes import episodes, rollouts
from xorl_lab.recipes.environments import MAX_TURNS, judge_of
from xorl_lab.recipes.limit import SECONDS
from xorl_lab.recipes.prompts import check_lengths, columns, encode_prompts
from xorl_lab.recipes.rewards import RewardFunction
from xorl_lab.types import Group, SamplingParams

if TYPE_CHECKING:
    from xorl_lab.client import SamplingClient, TrainingClient

SOLVED = 1.0
"""A completion with at least this reward counts as right."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Greedy completions of held-out prompts, scored."""

    groups: list[Group]
    """One group of one rollout per prompt, in the order of the prompts."""

    @property
    def accuracy(self) -> float:
        """Share of prompts whose reward is at least 1; a failed reward is not."""
        rewards = [g.rollouts[0].reward for g in self.groups]
        return float(np.mean([r is not None and r >= SOLVED for r in rewards]))

    @property
    def reward(self) -> float:
        """Mean reward, failed ones left out; NaN if all failed."""
        rewards = [r for g in self.groups if (r := g.rollouts[0].reward) is not None]
        return float(np.mean(rewards)) if rewards else float("nan")

    @property
    def metrics(self) -> dict[str, float]:
        """``held_out:reward`` and ``held_out:accuracy``."""
        return {"held_out:reward": self.reward, "held_out:accuracy": self.accuracy}

    @property
    def warnings(self) -> list[str]:
        """What the person at the screen should read: rewards that failed, and why the first did."""
        errors = [e for g in self.groups if (e := g.rollouts[0].error) is not None]
        if not errors:
            return []
        return [
            f"{len(errors)} of {len(self.groups)} held-out rewards failed and count as not solved; "
            f"the first: {errors[0]}"
        ]


def evaluate(  # noqa: PLR0913 (all settings by name, as the recipe has them)
    client: "TrainingClient",
    prompts: object,
    reward: RewardFunction,
    *,
    max_tokens: int,
    stop: str | list[str] | None = None,
    max_turns: int = MAX_TURNS,
    reward_timeout: float | None = SECONDS,
    sampler: "SamplingClient | None" = None,
) -> Evaluation:
    """Answer every prompt once, greedily, and score the answers.

    Args:
        client: the model.
        prompts: as for :func:`~xorl_lab.recipes.grpo.grpo`.
        reward: as for :func:`~xorl_lab.recipes.grpo.grpo`.
        max_tokens: longest completion, or turn of an episode, in tokens.
        stop: end it at any of these strings.
        max_turns: turns of an episode, at most.
        reward_timeout: seconds that each call of the reward may take; None = any.
        sampler: the weights to evaluate; None means the client's present ones.

    Raises:
        ConfigError: a prompt does not fit the context, or the reward asks for what is not there.
        DataError: a prompt is empty or malformed.
    """
    encoded = encode_prompts(prompts, client.get_tokenizer())
    check_lengths(encoded, max_tokens, client.context_length)
    judge = judge_of(reward, columns(encoded), reward_timeout)
    greedy = SamplingParams(max_tokens=max_tokens, temperature=0.0, stop=stop)
    weights = sampler or client.save_weights_and_get_sampling_client()
    draw = rollouts.Draw(client, weights, num_samples=1, max_turns=max_turns)
    drawn = episodes.collect(draw, encoded, [greedy] * len(encoded), judge)
    return Evaluation(
        [rollouts.group(p, own, _none) for p, own in zip(encoded, drawn, strict=True)]
    )


def _none(rewards: Sequence[float | None]) -> list[float]:
    """No advantages: nothing is trained here."""
    return [0.0] * len(rewards)
