"""Sample, score, and shape rollouts into the data of a training call."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from xorl_lab.recipes.prompts import Prompt
from xorl_lab.recipes.rewards import Scorer
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
Advantage = Callable[[Sequence[float | None]], list[float]]
"""The advantages of one group from its rewards, None where a reward failed."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One trained completion beside the prompt that it answers."""

    prompt_tokens: list[int]
    """Token ids of the prompt."""
    rollout: Rollout
    """The completion."""


def sample(
    sampler: "SamplingClient",
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams],
    num_samples: int,
    record_top: int = 0,
) -> list[SampleResponse]:
    """Draw completions for several prompts, each with settings of its own.

    Args:
        sampler: the weights to draw from.
        prompts: P prompts.
        params: P settings.  Give each a seed of its own: one seed draws the same random numbers
            for every prompt.
        num_samples: completions per prompt.
        record_top: alternatives to report per token, and its entropy; 0 = neither.

    Returns:
        P responses, in the order of the prompts.
    """
    inputs = [ModelInput.from_ints(prompt.tokens) for prompt in prompts]
    future = sampler.sample_batch(
        inputs,
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


def version_of(sampler: "SamplingClient", client: "TrainingClient") -> int:
    """Number of the weights that a sampler draws from; the client's where the sampler cannot say.

    Args:
        sampler: made by ``client`` from its present weights.
        client: the model.
    """
    return client.version if sampler.version is None else sampler.version


def score(
    prompt: Prompt, response: SampleResponse, version: int, scorer: Scorer, advantage: Advantage
) -> Group:
    """Make a group of the completions of one prompt.

    Args:
        prompt: the prompt.
        response: its completions.
        version: of the weights that drew them.
        scorer: the reward function.
        advantage: the advantages from the rewards.
    """
    scores = [scorer(prompt.given, prompt.row, s) for s in response.sequences]
    advantages = advantage([s.total for s in scores])
    rollouts = [
        Rollout(
            tokens=sequence.tokens,
            logprobs=sequence.logprobs or [],
            text=sequence.text or "",
            stop_reason=sequence.stop_reason,
            version=version,
            reward=scored.total,
            reward_parts=scored.parts,
            advantage=value,
            error=scored.error,
            streams={} if sequence.entropies is None else {"entropies": sequence.entropies},
            top_logprobs=alternatives(sequence),
        )
        for sequence, scored, value in zip(response.sequences, scores, advantages, strict=True)
    ]
    # A conversation is kept beside its text, for another reward function that asks for it.
    given = {} if isinstance(prompt.given, str) else {"prompt": prompt.given}
    return Group(prompt.text, prompt.tokens, rollouts, {**prompt.row, **given})


def alternatives(sequence: SampledSequence) -> Alternatives | None:
    """The most likely tokens at each position as arrays; None if they were not asked for."""
    if not sequence.top_logprobs:
        return None
    width = max(map(len, sequence.top_logprobs))
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
    """One rollout as it is sent to a loss: the sampled ids themselves, the prompt not trained.

    Args:
        sample: a prompt of P tokens and a completion of C tokens.
        per_token: further loss inputs by name, each with C values.

    Returns:
        A datum of P + C - 1 positions, of which the last C are trained.
    """
    rollout = sample.rollout
    tokens = [*sample.prompt_tokens, *rollout.tokens]
    count = len(rollout.tokens)
    values: dict[str, Sequence[float]] = {
        "weights": [1.0] * count,
        "logprobs": rollout.logprobs,
        "advantages": [rollout.advantage] * count,
        **per_token,
    }
    prompt = [0.0] * (len(sample.prompt_tokens) - 1)
    inputs = {name: [*prompt, *v] for name, v in values.items()}
    return Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:], **inputs})


def completion_logprobs(
    output: ForwardBackwardOutput, samples: Sequence[Sample]
) -> list[list[float]]:
    """The trainer's logprobs of the completions alone.

    Args:
        output: answer to a call with one datum per sample.
        samples: the samples, in the same order.

    Returns:
        Per sample one value per token of the completion, in nats.
    """
    return [
        [float(x) for x in out.logprobs.data[-len(sample.rollout.tokens) :]]
        for out, sample in zip(output.loss_fn_outputs, samples, strict=True)
    ]


def note_terms(output: ForwardBackwardOutput, samples: Sequence[Sample]) -> None:
    """Put ratio and flags of an update down in each rollout's ``streams``.

    Args:
        output: answer to a call with one datum per sample that asked for :data:`TERMS`; a server
            that does not know them gives none.
        samples: the samples, in the same order.
    """
    for out, sample in zip(output.loss_fn_outputs, samples, strict=True):
        mine = {n: np.asarray(t.data)[-len(sample.rollout.tokens) :] for n, t in out.terms.items()}
        if "ratio" in mine:
            sample.rollout.streams["ratio"] = mine["ratio"].astype(float).tolist()
            flags = sum(bit * mine[name] for name, bit in TERMS.items() if bit and name in mine)
            flags = flags + np.zeros_like(mine["ratio"])
            sample.rollout.streams["flags"] = flags.astype(float).tolist()


def gap(
    name: str, sampled: Sequence[Sequence[float]], other: Sequence[Sequence[float]]
) -> dict[str, float]:
    """How far another model's logprobs lie from those of the model that drew the tokens.

    With d = other - sampled, mean |d| is the gap in nats, and mean(exp(d) - d - 1) estimates
    KL(sampled || other) (k3 of Schulman 2020, "Approximating KL divergence"; never negative).

    Args:
        name: prefix of the two metrics.
        sampled: per completion the logprobs of the model that drew it.
        other: the same tokens, judged by the other model.

    Returns:
        ``{name}`` (k3) and ``{name}_abs``.
    """
    d = np.concatenate([np.asarray(o) - np.asarray(s) for s, o in zip(sampled, other, strict=True)])
    return {name: float(np.mean(np.expm1(d) - d)), f"{name}_abs": float(np.mean(np.abs(d)))}


def reward_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Rewards, lengths and what is wrong with them, over all groups of a step.

    Returns:
        ``reward`` (mean) and its ``:std``, ``:min``, ``:max``, ``reward:part:NAME`` of each named
        part, ``rewards_failed``, ``groups_without_signal``, ``completion_tokens`` (mean),
        ``truncated`` (share that was cut off at max_tokens), ``entropy`` (nats, mean over all
        tokens) where it was recorded.
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
    metrics["completion_tokens"] = float(np.mean([len(r.tokens) for r in rollouts]))
    metrics["truncated"] = float(np.mean([r.stop_reason == "length" for r in rollouts]))
    entropies = [r.streams["entropies"] for r in rollouts if r.streams.get("entropies")]
    if entropies:
        metrics["entropy"] = float(np.mean(np.concatenate(entropies)))
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
    if all(r.stop_reason == "length" for r in drawn):
        found.append(
            f"every completion was cut off at max_tokens={max_tokens}: raise it, or check stop"
        )
    if all(len(g.rollouts) == 1 for g in groups):
        found.append("group_size is 1, so every advantage is 0: use at least 2")
    return found
