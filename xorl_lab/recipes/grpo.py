"""GRPO: reinforcement learning from a reward function, without a value network.

One step, in the order of this file: draw a group of completions for each prompt, score them,
compare each with its group, push up the probability of the better ones, and hand the new weights
to the sampler.

Source: Shao et al. 2024 (DeepSeekMath), sec. 4.1.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from xorl_lab import losses
from xorl_lab.errors import ConfigError
from xorl_lab.recipes import episodes, rollouts
from xorl_lab.recipes.clock import Clock
from xorl_lab.recipes.environments import MAX_TURNS, Environment, judge_of
from xorl_lab.recipes.evaluate import Evaluation, evaluate
from xorl_lab.recipes.limit import SECONDS
from xorl_lab.recipes.order import derive_seed, endless
from xorl_lab.recipes.prompts import Prompt, check_lengths, columns, encode_prompts
from xorl_lab.recipes.rewards import RewardFunction, Scorer, require_some_reward
from xorl_lab.recipes.settings import (
    Course,
    build,
    check_choice,
    check_integer,
    check_seconds,
)
from xorl_lab.recipes.syncing import sync_metrics
from xorl_lab.recipes.update import update
from xorl_lab.samplers.base import MAX_TOP
from xorl_lab.types import AdamParams, SamplingParams, StepRecord

if TYPE_CHECKING:
    from xorl_lab.client import TrainingClient

ADVANTAGES: Mapping[str, rollouts.Advantage] = {
    "group": losses.group_normalized,
    "mean": losses.mean_centered,
    "leave_one_out": losses.leave_one_out,
}
"""What the setting ``advantage`` chooses from."""
Examine = Callable[..., Evaluation]
""":func:`evaluate`, bound to the held-out prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpoSettings:
    """Settings of :func:`grpo`; all are checked before anything runs."""

    steps: int
    """Number of steps."""
    max_tokens: int
    """Longest completion, or turn of an episode, in tokens."""
    learning_rate: float
    """Of AdamW, constant."""
    group_size: int = 8
    """Completions per prompt, which are compared with each other."""
    prompts_per_step: int = 8
    """Prompts per step; they are gone through in a random order, again and again."""
    temperature: float = 1.0
    """Divides the logits when drawing, and in the loss too."""
    stop: str | list[str] | None = None
    """End a completion at any of these strings."""
    max_turns: int = MAX_TURNS
    """Turns of an episode, at most, where the reward is an environment."""
    reward_timeout: float | None = SECONDS
    """Seconds that each call of the reward may take, which is cut off then; None = any, in the
    thread of the run."""
    advantage: str = "group"
    """``group``: (r - mean) / std, ``mean``: r - mean, ``leave_one_out``: r - mean of others."""
    loss_fn: str = "policy_loss"
    """``policy_loss`` (clipped), or any other loss that reads advantages."""
    loss_fn_params: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of the loss, such as ``eps_clip`` or ``use_tis``."""
    kl_coef: float = 0.0
    """Weight of a penalty on the divergence from the base model, per token; 0 = none."""
    kl_type: str = "k3"
    """Estimator of that penalty: ``k1`` (no gradient in expectation), ``k2``, ``k3``."""
    report_base_kl: bool = False
    """Measure the divergence from the base model even without a penalty; costs one forward pass."""
    updates_per_batch: int = 1
    """Optimizer steps on each batch of completions; behind the first they are off-policy."""
    evaluate_every: int = 0
    """Held-out evaluation after every so many steps; 0 = only after the last one."""
    grad_clip_norm: float = 1.0
    """The gradient is scaled down to this norm; 0 = no clipping."""
    beta1: float = 0.9
    """Of AdamW."""
    beta2: float = 0.99
    """Of AdamW."""
    weight_decay: float = 0.0
    """Of AdamW."""
    record_top: int = 5
    """Alternatives recorded for each token, with the entropy of the choice; 0 = neither."""
    replay_experts: bool = False
    """Have the trainer go through the experts that the sampler chose (mixtures of experts only);
    they are not recorded."""
    seed: int = 0
    """Order of the prompts and every random draw; the same seed gives the same run."""

    def __post_init__(self) -> None:
        lows = {"steps": 1, "max_tokens": 1, "group_size": 1, "prompts_per_step": 1}
        lows |= {"updates_per_batch": 1, "evaluate_every": 0, "seed": 0, "record_top": 0}
        lows |= {"max_turns": 1}
        for name, low in lows.items():
            check_integer(name, getattr(self, name), low)
        check_seconds("reward_timeout", self.reward_timeout)
        if self.record_top > MAX_TOP:
            raise ConfigError(
                f"record_top is {self.record_top}: pass an integer from 0 to {MAX_TOP}"
            )
        if self.sampling(seed=0).temperature == 0:
            raise ConfigError(
                "temperature is 0, so all completions of a group are equal: pass one > 0"
            )
        check_choice("advantage", self.advantage, ADVANTAGES)
        check_choice("loss_fn", self.loss_fn, _with_advantages())
        own = sorted({"kl_coef", "kl_type", "logprob_temperature"} & set(self.loss_fn_params))
        if own:
            raise ConfigError(
                f"loss_fn_params has {own[0]!r}: set kl_coef, kl_type or temperature instead"
            )
        losses.check_params(self.loss_fn, self.loss())
        self.adam()

    def adam(self) -> AdamParams:
        """The optimizer's share of the settings."""
        return AdamParams(
            learning_rate=self.learning_rate,
            beta1=self.beta1,
            beta2=self.beta2,
            weight_decay=self.weight_decay,
            grad_clip_norm=self.grad_clip_norm,
        )

    def sampling(self, seed: int) -> SamplingParams:
        """The sampler's share of the settings."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            stop=self.stop,
            return_routed_experts=self.replay_experts,
            seed=seed,
        )

    def loss(self) -> dict[str, Any]:
        """The loss's share of the settings.  The temperature makes ratios start at 1."""
        params: dict[str, Any] = {"logprob_temperature": self.temperature}
        if "compute_kl_stats" in losses.get(self.loss_fn).params:
            params["compute_kl_stats"] = True
        if self.kl_coef != 0:
            params |= {"kl_coef": self.kl_coef, "kl_type": self.kl_type}
        return params | dict(self.loss_fn_params)

    def needs(self, name: str) -> bool:
        """True if the loss, as it is set, reads this per-token input."""
        return name in losses.required_inputs(self.loss_fn, self.loss())


def grpo(
    client: "TrainingClient",
    prompts: object,
    reward: RewardFunction,
    *,
    held_out: object = None,
    done: int = 0,
    live: Callable[[GrpoSettings], GrpoSettings] | None = None,
    **settings: Any,  # noqa: ANN401 (GrpoSettings checks every one of them)
) -> Iterator[StepRecord]:
    """Train a model by reinforcement learning, one step each time the result is advanced.

    Args:
        client: the model to train.
        prompts: strings, conversations, or a DataFrame or dicts with a column ``prompt``; other
            columns, such as ``answer``, go to the reward function.
        reward: called by name with what it asks for of ``prompt``, ``completion``, ``tokens``,
            ``stop_reason`` and the columns; returns a number, or a dict of numbers to be summed.
            One that yields is an environment: see :mod:`~xorl_lab.recipes.environments`.
        held_out: prompts never trained on, for evaluation.
        done: steps that lie behind the client's weights; the next one is the one that would come.
        live: asked for the settings before each step, to change some on the way.
        settings: the fields of :class:`GrpoSettings`.

    Returns:
        An iterator of step records.  All arguments are checked before this function returns.

    Raises:
        ConfigError: a setting is unknown or out of range, or a prompt does not fit the context.
        DataError: a prompt is empty or malformed; while running: all rewards of a step failed.

    Source: Shao et al. 2024, section 4.1.
    """
    chosen = build(GrpoSettings, settings)
    encoded = encode_prompts(prompts, client.get_tokenizer())
    check_lengths(encoded, chosen.max_tokens, client.context_length)
    judge = judge_of(reward, columns(encoded), chosen.reward_timeout)
    examine: Examine | None = None
    if held_out is not None:
        unseen = encode_prompts(held_out, client.get_tokenizer())
        check_lengths(unseen, chosen.max_tokens, client.context_length)
        judge_of(reward, columns(unseen))
        names = ("max_tokens", "stop", "max_turns", "reward_timeout")
        limits = {name: getattr(chosen, name) for name in names}
        examine = functools.partial(evaluate, client, held_out, reward, **limits)
    return _steps(client, encoded, judge, Course(chosen, live, done), examine)


def _steps(
    client: "TrainingClient",
    prompts: Sequence[Prompt],
    judge: Scorer | Environment,
    course: Course[GrpoSettings],
    examine: Examine | None,
) -> Iterator[StepRecord]:
    """The loop."""
    given = course.given
    order = endless(len(prompts), given.seed)
    for _ in range(course.done * given.prompts_per_step):
        next(order)
    sampler = client.save_weights_and_get_sampling_client()
    for step in range(course.done + 1, given.steps + 1):
        settings = course.settings()
        clock = Clock()
        batch = [prompts[next(order)] for _ in range(settings.prompts_per_step)]
        params = [settings.sampling(derive_seed(settings.seed, step, i)) for i in range(len(batch))]
        draw = rollouts.Draw(
            client, sampler, settings.group_size, settings.record_top, settings.max_turns
        )
        drawn = episodes.collect(draw, batch, params, judge, clock)

        advantage = ADVANTAGES[settings.advantage]
        groups = [rollouts.group(p, own, advantage) for p, own in zip(batch, drawn, strict=True)]
        require_some_reward(groups)
        metrics = rollouts.reward_metrics(groups)
        warnings = rollouts.warnings(groups, settings.max_tokens)
        clock.lap("score")

        if metrics["groups_without_signal"] < len(groups) or settings.needs("ref_logprobs"):
            metrics |= update(client, rollouts.trainable(groups), settings, warnings)
            clock.lap("train")
            sampler = client.save_weights_and_get_sampling_client()
            metrics |= sync_metrics(sampler)
            clock.lap("sync")
        else:
            warnings.append(
                "the rewards of each group are all equal: there was nothing to learn from, and the "
                "weights stay as they are"
            )

        if examine and (step == settings.steps or _due(step, settings.evaluate_every)):
            seen = examine(sampler=sampler)
            metrics |= seen.metrics
            warnings += seen.warnings
            clock.lap("evaluate")
        tokens = sum(r.drawn for g in groups for r in g.rollouts)
        metrics |= clock.metrics(tokens) | {"version": float(client.version)}
        if settings.replay_experts:
            groups = rollouts.without_experts(groups)
        yield StepRecord(step, metrics, groups, warnings)


def _with_advantages() -> list[str]:
    """Names of the losses that use advantages."""
    return [name for name in losses.names() if "advantages" in losses.get(name).required]


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
