"""Records to be stored."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from xorl_lab.types import Alternatives, Group, Rollout, StepRecord

STREAMS = ("trainer_logprobs", "entropy")


def rollout(
    rng: np.random.Generator, length: int, streams: Sequence[str] = STREAMS, top: int = 0
) -> Rollout:
    """A rollout whose values are all float32 numbers."""
    drawn = Rollout(
        tokens=ids(rng, length).tolist(),
        logprobs=floats(-rng.exponential(1, length)),
        text="a completion " * (length // 8),
        stop_reason="length" if rng.random() < 0.3 else "stop",
        version=3,
        reward=float(rng.random()),
        reward_parts={"format": float(rng.random()), "answer": float(rng.random())},
        advantage=float(rng.normal()),
        streams={name: stream(rng, name, length) for name in streams},
    )
    return replace(drawn, top_logprobs=alternatives(rng, length, top)) if top else drawn


def stream(rng: np.random.Generator, name: str, length: int) -> list[float]:
    """Values such as a stream of this name has."""
    if name == "ratio":
        return floats(np.exp(rng.normal(size=length) * 0.05))
    if name == "flags":
        return floats(rng.choice([0.0, 1.0, 4.0], length, p=[0.95, 0.04, 0.01]))
    return floats(rng.normal(size=length))


def alternatives(rng: np.random.Generator, length: int, top: int) -> Alternatives:
    logprobs = -np.sort(rng.exponential(2, (length, top)), axis=1)
    return Alternatives(ids(rng, (length, top)), logprobs.astype(np.float32))


def ids(rng: np.random.Generator, shape: int | tuple[int, int]) -> np.ndarray:
    """Ids whose bytes are as regular as those that SmolLM2 draws: low ones come more often."""
    return (49152 * rng.random(shape) ** 5).astype(np.int32)


def floats(values: np.ndarray) -> list[float]:
    return [float(x) for x in values.astype(np.float32)]


def record(
    step: int,
    *,
    groups: int = 2,
    size: int = 3,
    length: int = 5,
    streams: Sequence[str] = STREAMS,
    top: int = 0,
) -> StepRecord:
    """A step that depends on its number alone."""
    rng = np.random.default_rng(step)
    drawn = [
        Group(
            f"prompt {g} of step {step}",
            [1, 2, 3 + g],
            [rollout(rng, length, streams, top) for _ in range(size)],
            {"answer": g, "topic": "sums"},
        )
        for g in range(groups)
    ]
    metrics = {
        "reward": step / 10,
        "loss:mean": 1 / (step or 1),
        "odd": math.nan if step % 2 else 1.0,
    }
    return StepRecord(step, metrics, drawn, [f"warning of step {step}"])


def same(one: object, other: object) -> bool:
    """Equal, where NaN is equal to NaN."""
    return repr(one) == repr(other)
