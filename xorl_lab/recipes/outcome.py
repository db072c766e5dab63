"""What a run achieved, in a few numbers and sentences."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from xorl_lab.recipes.evaluate import Evaluation
from xorl_lab.types import StepRecord

WINDOW = 5
"""Steps that are averaged at either end of a run, if it has twice as many."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The start and the end of a run beside each other; NaN where something was not measured."""

    steps: int
    """Number of steps that were done."""
    reward_first: float
    """Mean reward of the first steps, ``window`` of them."""
    reward_last: float
    """Mean reward of the last steps, ``window`` of them."""
    accuracy_before: float
    """Share of held-out prompts answered right, greedily, before training."""
    accuracy_after: float
    """The same after training."""
    seconds: float
    """Duration of all steps."""

    @property
    def window(self) -> int:
        """Steps averaged at either end: the two never overlap but in a run of one step."""
        return window(self.steps)

    @property
    def rise(self) -> float:
        """Gain of held-out accuracy."""
        return self.accuracy_after - self.accuracy_before

    def judge(self, *, reward: float, rise: float) -> list[str]:
        """Compare with what was asked for.

        Args:
            reward: least mean reward of the last steps.
            rise: least gain of held-out accuracy.

        Returns:
            One sentence each, which begins with yes or no and names no measured number, so that it
            is the same on every machine.
        """
        return [
            f"{_yes(self.reward_last >= reward)}: mean reward of the last {self.window} steps "
            f">= {reward:g}",
            f"{_yes(self.rise >= rise)}: held-out accuracy rose by >= {rise:g}",
        ]


def outcome(
    records: Sequence[StepRecord], before: Evaluation | None = None, after: Evaluation | None = None
) -> Outcome:
    """Sum up a run.

    Args:
        records: its steps.
        before: held-out evaluation before the first step.
        after: held-out evaluation after the last step.
    """
    rewards = [r.metrics["reward"] for r in records if "reward" in r.metrics]
    return Outcome(
        steps=len(records),
        reward_first=_mean(rewards[: window(len(records))]),
        reward_last=_mean(rewards[-window(len(records)) :]),
        accuracy_before=before.accuracy if before else float("nan"),
        accuracy_after=after.accuracy if after else float("nan"),
        seconds=sum(r.metrics.get("seconds:total", 0.0) for r in records),
    )


def window(steps: int) -> int:
    """How many steps to average at either end of a run.

    >>> window(30), window(4), window(1)
    (5, 2, 1)
    """
    return max(1, min(WINDOW, steps // 2))


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else float("nan")


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"
