"""What each number is to reach: a floor, below which a release fails, and a goal."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Goal:
    """The two bounds of a number.

    >>> Goal(1.5, 2.5).verdict(2.0)
    'floor 1.5 met, goal 2.5 not met'
    >>> Goal(30, 15, at_least=False).verdict(40)
    'floor 30 not met, goal 15 not met'
    """

    floor: float
    """Must be reached."""
    goal: float
    """Is to be reached."""
    at_least: bool = True
    """False: the number is to stay at or under the bounds."""

    def verdict(self, value: float) -> str:
        """Both bounds, and whether the number is within them."""
        parts: list[str] = []
        for name in ("floor", "goal"):
            bound = getattr(self, name)
            met = value >= bound if self.at_least else value <= bound
            parts.append(f"{name} {bound:g} {'met' if met else 'not met'}")
        return ", ".join(parts)


SPEED: Mapping[tuple[str, str], Goal] = {
    ("grpo", "float32"): Goal(2, 3),
    ("grpo", "fastest"): Goal(3, 6),
    ("sampling", "float32"): Goal(1.8, 4),
    ("train_lengths", "float32"): Goal(1.5, 2.5),
    ("train_shared", "float32"): Goal(3, 5),
    ("bf16", "bfloat16"): Goal(1.5, 1.5),
}
"""Times faster than the peer, by case and dtype; of grpo the first shape alone."""
MEMORY = Goal(0.6, 0.4, at_least=False)
"""Peak of a GRPO step in the peer's."""
IMPORT = Goal(0.3, 0.2, at_least=False)
"""Seconds of importing the package."""
FIRST_REWARD = Goal(30, 15, at_least=False)
"""Seconds from starting Python to the first reward."""
