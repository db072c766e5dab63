"""Records to be stored."""

import math
from collections.abc import Sequence

import numpy as np

from xorl_lab.types import Group, Rollout, StepRecord

STREAMS = ("trainer_logprobs", "entropy")


def rollout(rng: np.random.Generator, length: int, streams: Sequence[str] = STREAMS) -> Rollout:
    """A rollout whose values are all float32 numbers."""
    return Rollout(
        tokens=[int(x) for x in rng.zipf(1.3, length) % 49152],
        logprobs=floats(-rng.exponential(1, length)),
        text="a completion " * (length // 8),
        stop_reason="length" if rng.random() < 0.3 else "stop",
        version=3,
        reward=float(rng.random()),
        reward_parts={"format": float(rng.random()), "answer": float(rng.random())},
        advantage=float(rng.normal()),
        streams={name: floats(rng.normal(size=length)) for name in streams},
    )


def floats(values: np.ndarray) -> list[float]:
    return [float(x) for x in values.astype(np.float32)]


def record(
    step: int, *, groups: int = 2, size: int = 3, length: int = 5, streams: Sequence[str] = STREAMS
) -> StepRecord:
    """A step that depends on its number alone."""
    rng = np.random.default_rng(step)
    drawn = [
        Group(
            f"prompt {g} of step {step}",
            [1, 2, 3 + g],
            [rollout(rng, length, streams) for _ in range(size)],
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
