"""Sample, score, and shape rollouts into the data of a training call."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from xorl_lab.recipes.prompts import Prompt
from xorl_lab.recipes.rewards import Score
from xorl_lab.types import (
    Alternatives,
    Datum,
    ForwardBackwardOutput,
    Group,
    ModelInput,
    Rollout,
    SampledSequence,
    SampleResponse,
    SamplingParams,
)

if TYPE_CHECKING:
    from xorl_lab.client import SamplingClient, TrainingClient

_ALIASES = frozenset({"loss_sum", "loss_mean", "token_count", "step"})
"""What a run records under other names: a step has its number already."""
TERMS = {"ratio": 0, "clipped": 1, "masked": 2, "tis_clipped": 4}
"""Per-token terms of a loss that are recorded; what each adds to the stream ``flags``."""
NAN = float("nan")
Advantage = Callable[[Sequence[float | None]], list[float]]
"""The advantages of one group from its rewards, None where a reward failed."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One trained completion beside the prompt that it answers."""

    prompt_tokens: list[int]
    """Token ids of the prompt."""
    rollout: Rollout
    """The completion."""

    @property
    def weights(self) -> Sequence[float]:
        """One per token: 1, or 0 where the model did not draw it."""
        return self.rollout.weights or [1.0] * len(self.rollout.tokens)


@dataclass(frozen=True, slots=True)
class Draw:
    """How to draw completions."""

    client: "TrainingClient"
    """The model."""
    sampler: "SamplingClient"
    """The weights to draw from, made by ``client``."""
    num_samples: int
    """Completions per prompt."""
    record_top: int = 0
    """Alternatives to report per token, and its entropy; 0 = neither."""
    max_turns: int = 1
    """Turns of an episode, at most."""

    @property
    def version(self) -> int:
        """Number of the weights; the client's present one where the sampler cannot say."""
        return self.client.version if self.sampler.version is None else self.sampler.version


def sample(
    sampler: "SamplingClient",
    prompts: Sequence[ModelInput],
    params: Sequence[SamplingParams],
    num_samples: int,
    record_top: int = 0,
) -> list[SampleResponse]:
    """Draw completions for several prompts, each with settings of its own.

    Args:
        sampler: the weights to draw from.
        prompts: P prompts.
        params: P settings.
        num_samples: completions per prompt.
        record_top: alternatives to report per token, and its entropy; 0 = neither.

    Returns:
        P responses, in the order of the prompts.
    """
    future = sampler.sample_batch(
        prompts,
        list(params),
        num_samples=num_samples,
        top_logprobs=record_top,
        entropies=record_top > 0,
    )
    try:
        batch = future.result()
    except BaseException:  # an interrupt too: leave no work behind
        future.cancel()
        raise
    for _, error in batch.failed:
        raise error
    return [response for _, response in batch.completed]


def rollout(sequence: SampledSequence, scored: Score, version: int) -> Rollout:
    """A completion as it is recorded, without an advantage.

    Args:
        sequence: the completion.
        scored: its reward.
        version: of the weights that drew it.
    """
    return Rollout(
        tokens=sequence.tokens,
        logprobs=sequence.logprobs or [],
        text=sequence.text or "",
        stop_reason=sequence.stop_reason,
        version=version,
        reward=scored.total,
        reward_parts=scored.parts,
        error=scored.error,
        streams={} if sequence.entropies is None else {"entropies": sequence.entropies},
        top_logprobs=alternatives(sequence),
        routed_experts=sequence.routed_experts,
    )


def group(prompt: Prompt, drawn: Sequence[Rollout], advantage: Advantage) -> Group:
    """The completions of one prompt, compared with each other.

    Args:
        prompt: the prompt.
        drawn: its completions, in order of sample index.
        advantage: the advantages from the rewards.
    """
    advantages = advantage([r.reward for r in drawn])
    found = [replace(r, advantage=a) for r, a in zip(drawn, advantages, strict=True)]
    # A conversation is kept beside its text, for another reward function that asks for it.
    given = {} if isinstance(prompt.given, str) else {"prompt": prompt.given}
    return Group(prompt.text, prompt.tokens, found, {**prompt.row, **given})


def without_experts(groups: Sequence[Group]) -> list[Group]:
    """The groups as they are recorded: chosen experts have served their turn, and take more room
    than all else.
    """
    return [
        replace(group, rollouts=[replace(r, routed_experts=None) for r in group.rollouts])
        for group in groups
    ]


def alternatives(sequence: SampledSequence) -> Alternatives | None:
    """The most likely tokens at each position as arrays; None if they were not asked for."""
    if not sequence.top_logprobs:
        return None
    width = max(map(len, sequence.top_logprobs))  # 0 of a token that was not drawn
    missing = (-1, float("nan"))
    rows = [[*row, *[missing] * (width - len(row))] for row in sequence.top_logprobs]
    pairs = np.array(rows, dtype=np.float64).reshape(len(rows), width, 2)
    return Alternatives(pairs[..., 0].astype(np.int32), pairs[..., 1].astype(np.float32))


def trainable(groups: Sequence[Group]) -> list[Sample]:
    """The rollouts to train on: those with a reward and at least one token."""
    return [
        Sample(group.prompt_tokens, rollout)
        for group in groups
        for rollout in group.rollouts
        if rollout.reward is not None and rollout.tokens
    ]


def note(name: str, samples: Sequence[Sample], values: Sequence[Sequence[float]]) -> None:
    """Put values per token down in each rollout's ``streams``.

    Args:
        name: what they are.
        samples: N completions.
        values: N lists, as long as the completions.
    """
    for sample, stream in zip(samples, values, strict=True):
        sample.rollout.streams[name] = list(stream)


def datum(sample: Sample, per_token: Mapping[str, Sequence[float]]) -> Datum:
    """One rollout as it is sent to a loss: the sampled ids themselves, what was read not trained.

    Args:
        sample: a prompt of P tokens and a completion of C tokens.
        per_token: further loss inputs by name, each with C values.

    Returns:
        A datum of P + C - 1 positions, of which the last C are trained, but for what an environment
        wrote.  Experts that the rollout knows are replayed, by every model that judges it.
    """
    rollout = sample.rollout
    tokens = [*sample.prompt_tokens, *rollout.tokens]
    weights = sample.weights
    values: dict[str, Sequence[float]] = {
        "weights": weights,
        "logprobs": rollout.logprobs,
        "advantages": [rollout.advantage] * len(weights),
        **per_token,
    }
    if rollout.weights is not None:  # what is not trained has no value
        values = {
            name: [x if w else 0.0 for x, w in zip(v, weights, strict=True)]
            for name, v in values.items()
        }
    prompt = [0.0] * (len(sample.prompt_tokens) - 1)
    inputs = {name: [*prompt, *v] for name, v in values.items()}
    return Datum(
        ModelInput.from_ints(tokens[:-1]),
        {"target_tokens": tokens[1:], **inputs},
        rollout.routed_experts,
    )


def completion_logprobs(
    output: ForwardBackwardOutput, samples: Sequence[Sample]
) -> list[list[float]]:
    """The trainer's logprobs of the completions alone.

    Args:
        output: answer to a call with one datum per sample.
        samples: the samples, in the same order.

    Returns:
        Per sample one value per token of the completion, in nats; NaN where it is not trained.
    """
    return [
        _of_completion(out.logprobs.data, sample)
        for out, sample in zip(output.loss_fn_outputs, samples, strict=True)
    ]


def _of_completion(values: Any, sample: Sample) -> list[float]:  # noqa: ANN401 (a list or array)
    """(C,) the last of some values; NaN where the model did not draw the token."""
    pairs = zip(values[-len(sample.rollout.tokens) :], sample.weights, strict=True)
    return [float(x) if weight else NAN for x, weight in pairs]


def note_terms(output: ForwardBackwardOutput, samples: Sequence[Sample]) -> None:
    """Put ratio and flags of an update down in each rollout's ``streams``.

    Args:
        output: answer to a call with one datum per sample that asked for :data:`TERMS`; a server
            that does not know them gives none.
        samples: the samples, in the same order.
    """
    for out, sample in zip(output.loss_fn_outputs, samples, strict=True):
        mine = {n: np.array(_of_completion(t.data, sample)) for n, t in out.terms.items()}
        if "ratio" in mine:
            sample.rollout.streams["ratio"] = mine["ratio"].tolist()
            flags = sum(bit * mine[name] for name, bit in TERMS.items() if bit and name in mine)
            flags = flags + 0.0 * mine["ratio"]
            sample.rollout.streams["flags"] = flags.tolist()


def gap(name: str, samples: Sequence[Sample], other: Sequence[Sequence[float]]) -> dict[str, float]:
    """How far another model's logprobs lie from those of the model that drew the tokens.

    With d = other - sampled, mean |d| is the gap in nats, and mean(exp(d) - d - 1) estimates
    KL(sampled || other) (k3 of Schulman 2020, "Approximating KL divergence"; never negative).

    Args:
        name: prefix of the two metrics.
        samples: the completions; what an environment wrote is left out.
        other: the same tokens, judged by the other model.

    Returns:
        ``{name}`` (k3) and ``{name}_abs``.
    """
    apart = [
        (np.asarray(o) - np.asarray(s.rollout.logprobs))[np.asarray(s.weights) != 0]
        for s, o in zip(samples, other, strict=True)
    ]
    d = np.concatenate(apart)
    return {name: float(np.mean(np.expm1(d) - d)), f"{name}_abs": float(np.mean(np.abs(d)))}


def reward_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Rewards, lengths and what is wrong with them, over all groups of a step.

    Returns:
        ``reward`` (mean) and its ``:std``, ``:min``, ``:max``, ``reward:part:NAME`` of each named
        part, ``rewards_failed``, ``groups_without_signal``, ``completion_tokens`` (mean of those
        drawn), ``truncated`` (share that was cut off at max_tokens), ``turns`` (mean) where there
        are several, ``entropy`` (nats, mean over all drawn tokens) where it was recorded.
    """
    rollouts = [r for g in groups for r in g.rollouts]
    rewards = [r.reward for r in rollouts if r.reward is not None]
    metrics: dict[str, float] = {
        "reward": float(np.mean(rewards)),
        "reward:std": float(np.std(rewards)),
        "reward:min": min(rewards),
        "reward:max": max(rewards),
    }
    for part in sorted({name for r in rollouts for name in r.reward_parts}):
        scored = [r.reward_parts for r in rollouts if r.error is None]
        values = [parts[part] for parts in scored if part in parts]
        metrics[f"reward:part:{part}"] = float(np.mean(values)) if values else float("nan")
    metrics["rewards_failed"] = len(rollouts) - len(rewards)
    metrics["groups_without_signal"] = sum(
        all(r.advantage == 0 for r in g.rollouts) for g in groups
    )
    metrics["completion_tokens"] = float(np.mean([r.drawn for r in rollouts]))
    if any(r.weights is not None for r in rollouts):
        metrics["turns"] = float(np.mean([len(r.turns) for r in rollouts]))
    metrics["truncated"] = float(np.mean([r.stop_reason == "length" for r in rollouts]))
    entropies = [r.streams["entropies"] for r in rollouts if r.streams.get("entropies")]
    if entropies:
        metrics["entropy"] = float(np.nanmean(np.concatenate(entropies)))
    return metrics


def over_updates(seen: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One number per metric: the least of minima, the greatest of maxima, else the mean."""
    rules = {"_min": np.min, "_max": np.max}
    return {
        name: float(rules.get(name[-4:], np.mean)([m[name] for m in seen if name in m]))
        for name in seen[-1]
        if name not in _ALIASES
    }


def warnings(groups: Sequence[Group], max_tokens: int) -> list[str]:
    """Sentences about the completions of a step that the person at the screen should read.

    Args:
        groups: the scored groups.
        max_tokens: longest completion, in tokens.
    """
    drawn = [r for g in groups for r in g.rollouts]
    failed = [r for r in drawn if r.error is not None]
    found: list[str] = []
    if failed:
        found.append(
            f"{len(failed)} of {len(drawn)} rewards failed and were left out of the training; "
            f"the first: {failed[0].error}"
        )
    if all(r.stop_reason == "length" for r in drawn) and len(failed) < len(drawn):
        found.append(
            f"every completion was cut off at max_tokens={max_tokens}: raise it, or check stop"
        )
    if all(len(g.rollouts) == 1 for g in groups):
        found.append("group_size is 1, so every advantage is 0: use at least 2")
    return found
