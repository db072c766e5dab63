"""What will keep a run from learning, found out before its first step from a small real sample."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from xorl_lab.recipes import episodes, rollouts
from xorl_lab.recipes.environments import judge_of
from xorl_lab.recipes.grpo import ADVANTAGES, GrpoSettings
from xorl_lab.recipes.order import derive_seed
from xorl_lab.recipes.prompts import columns, encode_prompts
from xorl_lab.recipes.rewards import RewardFunction
from xorl_lab.types import Group, Rollout

if TYPE_CHECKING:
    from xorl_lab.client import TrainingClient

PROMPTS, SAMPLES = 4, 4
"""How many prompts are tried, and completions of each."""
LORA_RATES = (1e-6, 2e-2)
"""Learning rates of adapters that are usual."""
FULL_RATES = (1e-8, 1e-3)
"""Learning rates of full weights that are usual."""


def check_rate(learning_rate: float, *, lora: bool) -> list[str]:
    """A sentence if a learning rate is out of the usual range."""
    low, high = LORA_RATES if lora else FULL_RATES
    what = "an adapter" if lora else "full weights"
    usual = f"usual for {what} is {low:g} to {high:g}"
    if learning_rate == 0:
        return [f"learning_rate is 0, so the weights will not change: {usual}"]
    if learning_rate < low:
        return [f"learning_rate is {learning_rate:g}, so little will change: {usual}"]
    if learning_rate > high:
        return [f"learning_rate is {learning_rate:g}, and the model may break: {usual}"]
    return []


def check_grpo(
    client: "TrainingClient", prompts: object, reward: RewardFunction, settings: GrpoSettings
) -> list[str]:
    """Draw a few completions as the run would, score them, and say what stands in the way.

    Args:
        client: the model.
        prompts: as for the recipe, which has checked that they fit the context.
        reward: as for the recipe.
        settings: of the run.

    Returns:
        Sentences; none if nothing was found.
    """
    encoded = encode_prompts(prompts, client.get_tokenizer())
    # Spread over all of them, rather than the first few.
    count = min(PROMPTS, len(encoded))
    chosen = [encoded[i * len(encoded) // count] for i in range(count)]
    params = [settings.sampling(derive_seed(settings.seed, 0, i)) for i in range(count)]
    sampler = client.save_weights_and_get_sampling_client()
    judge = judge_of(reward, columns(encoded), settings.reward_timeout)
    samples = min(SAMPLES, settings.group_size)
    draw = rollouts.Draw(client, sampler, samples, max_turns=settings.max_turns)
    drawn = episodes.collect(draw, chosen, params, judge)
    advantage = ADVANTAGES["mean"]
    groups = [rollouts.group(p, own, advantage) for p, own in zip(chosen, drawn, strict=True)]
    rate = check_rate(settings.learning_rate, lora=client.lora is not None)
    single = ["group_size is 1: with nothing to compare with, no completion teaches anything"]
    alone = settings.group_size == 1 and settings.kl_coef == 0
    return [*rate, *(single if alone else []), *_ends(groups, settings), *_rewards(groups)]


def _ends(groups: Sequence[Group], settings: GrpoSettings) -> list[str]:
    drawn = _all(groups)
    # An episode that ran out of turns or context says so itself.
    over = [r for r in drawn if r.weights is not None and r.reward is None]
    cut = sum(r.stop_reason == "length" for r in drawn) - len(over)
    if cut < len(drawn):
        return []
    if settings.stop is not None:
        return [
            f"all {cut} completions of a trial ran into max_tokens={settings.max_tokens}, and none "
            f"came to the stop string {settings.stop!r}: check it, or raise max_tokens"
        ]
    return [
        f"all {cut} completions of a trial were cut off at max_tokens={settings.max_tokens}, as "
        "none produced the stop token: raise max_tokens, pass a stop string, or use the chat "
        "format (a list of messages), after which the model knows to stop"
    ]


def _rewards(groups: Sequence[Group]) -> list[str]:
    drawn = _all(groups)
    failed = [r for r in drawn if r.reward is None]
    if len(failed) == len(drawn):
        return [f"the reward failed for all {len(drawn)} completions of a trial: {failed[0].error}"]
    found = [r.reward for r in drawn if r.reward is not None]
    note = []
    if failed:
        note = [f"the reward failed for {len(failed)} of {len(drawn)}: {failed[0].error}"]
    if len(found) > 1 and len(set(found)) == 1:
        hint = "make the task easier, or give partial credit" if found[0] <= 0 else "make it harder"
        return [
            *note,
            f"all {len(found)} completions of a trial got the same reward, {found[0]:g}: without "
            f"differences there is nothing to learn from; {hint}",
        ]
    pairs = [g for g in groups if len(g.rollouts) > 1]
    if pairs and all(len({r.reward for r in g.rollouts}) == 1 for g in pairs):
        return [
            *note,
            f"the {len(pairs[0].rollouts)} completions of each prompt of a trial got the same "
            "reward, and only those of one prompt are compared: there is nothing to learn from; "
            "raise temperature or group_size, or give partial credit",
        ]
    return note


def _all(groups: Sequence[Group]) -> list[Rollout]:
    return [r for g in groups for r in g.rollouts]
