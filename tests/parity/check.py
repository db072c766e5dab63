"""The one check of parity: what the sampler reports is what the trainer computes."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import xorl_lab as xl

FLOAT32_LIMIT = 1e-4
"""Nats, for every token."""


@dataclass(frozen=True)
class Samples:
    """Completions with their prompts, of unequal lengths, and the sampler's logprobs."""

    prompts: list[list[int]]
    completions: list[list[int]]
    logprobs: np.ndarray
    temperature: float


def sample(
    client: xl.SamplingClient,
    prompts: Sequence[Sequence[int]],
    *,
    temperature: float,
    max_tokens: int,
    num_samples: int = 2,
    seed: int = 4,
) -> Samples:
    """Draw completions; neither prompts nor completions may all be equally long."""
    result = client.sample_batch(
        [xl.ModelInput.from_ints(p) for p in prompts],
        xl.SamplingParams(max_tokens, temperature, seed=seed, stop_token_ids=[32, 101, 28]),
        num_samples,
    ).result()
    assert len(result.completed) == len(prompts)
    pairs = [(list(prompts[i]), s) for i, r in result.completed for s in r.sequences]
    assert len({len(p) for p in prompts}) > 1
    logprobs = [x for _, s in pairs for x in s.logprobs]
    return Samples(
        [p for p, _ in pairs], [s.tokens for _, s in pairs], np.asarray(logprobs), temperature
    )


def trained_logprobs(client: xl.TrainingClient, samples: Samples) -> np.ndarray:
    """What the trainer says to the same completions, at the same temperature."""
    data = [
        xl.Datum(
            xl.ModelInput.from_ints([*prompt, *completion]),
            {
                "labels": [*prompt, *completion],
                "weights": [0.0] * len(prompt) + [1.0] * len(completion),
            },
        )
        for prompt, completion in zip(samples.prompts, samples.completions, strict=True)
    ]
    params = {"logprob_temperature": samples.temperature}
    outputs = client.forward(data, "cross_entropy", params).result().loss_fn_outputs
    parts = [
        output.logprobs.to_numpy()[len(prompt) - 1 :]
        for prompt, output in zip(samples.prompts, outputs, strict=True)
    ]
    assert [len(p) for p in parts] == [len(c) for c in samples.completions]
    return np.concatenate(parts).astype(np.float64)


@dataclass(frozen=True)
class Gap:
    """How far trainer and sampler are apart, in nats per token."""

    mean: float
    max: float
    tokens: int

    @classmethod
    def between(cls, ours: np.ndarray, theirs: np.ndarray) -> "Gap":
        difference = np.abs(ours - theirs)
        return cls(float(difference.mean()), float(difference.max()), len(difference))

    def __str__(self) -> str:
        return f"mean {self.mean:.2e}, max {self.max:.2e} nats over {self.tokens} tokens"


def check_parity(
    trainer: xl.TrainingClient,
    sampler: xl.SamplingClient,
    prompts: Sequence[Sequence[int]],
    *,
    temperature: float = 1.0,
    max_tokens: int = 24,
    num_samples: int = 2,
    limit: float = FLOAT32_LIMIT,
) -> Gap:
    """Assert that trainer and sampler agree on what the sampler has drawn.

    Returns:
        The gap that was found.

    Raises:
        AssertionError: a token's logprobs differ by more than ``limit``.
    """
    samples = sample(
        sampler, prompts, temperature=temperature, max_tokens=max_tokens, num_samples=num_samples
    )
    gap = Gap.between(trained_logprobs(trainer, samples), samples.logprobs)
    assert gap.tokens >= 10, "too few tokens to compare"
    # Not tied to how sure the model is: a model that is certain of everything agrees with itself.
    assert samples.logprobs.std() > 0.1, "the logprobs are all alike: the check would see nothing"
    assert gap.max <= limit, f"trainer and sampler disagree: {gap}"
    return gap


def learn(
    client: xl.TrainingClient, data: Sequence[Sequence[int]], steps: int, rate: float
) -> None:
    """Real updates: cross entropy on these sequences."""
    batch = [xl.Datum(xl.ModelInput.from_ints(d), {"labels": list(d)}) for d in data]
    for _ in range(steps):
        client.forward_backward(batch).result()
        client.optim_step(xl.AdamParams(learning_rate=rate)).result()


def show(what: str, measured: object) -> None:
    """Print a measurement; pytest shows it with -s, or beside a failure."""
    sys.stdout.write(f"{what}: {measured}\n")
