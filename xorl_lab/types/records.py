"""What a recipe yields: the rollouts and numbers of one training step."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from xorl_lab.types.results import StopReason

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True, slots=True, eq=False)
class Alternatives:
    """The K most likely tokens at each of the C positions of a completion."""

    ids: "npt.NDArray[np.int32]"
    """(C, K) best first; -1 where fewer than K are known."""
    logprobs: "npt.NDArray[np.float32]"
    """(C, K) nats, of the distribution that the completion's logprobs belong to; NaN where fewer
    than K are known."""

    def __eq__(self, other: object) -> bool:
        """Whether all ids and logprobs are the same, NaN where NaN is."""
        if not isinstance(other, Alternatives):
            return NotImplemented
        mine, theirs = self.logprobs, other.logprobs
        if self.ids.shape != other.ids.shape or mine.shape != theirs.shape:
            return False
        same = (mine == theirs) | ((mine != mine) & (theirs != theirs))
        return bool((self.ids == other.ids).all() and same.all())


@dataclass(frozen=True, slots=True)
class Rollout:
    """One completion with everything that is known of it."""

    tokens: list[int]
    """Ids of the completion, the stop token included."""
    logprobs: list[float]
    """Nats, the sampler's, one per token."""
    text: str
    """The completion, decoded."""
    stop_reason: StopReason
    """``length`` means that it was cut off at max_tokens."""
    version: int
    """Version of the weights that drew it."""
    reward: float | None
    """Total reward, or None if the reward function failed."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """The named parts that add up to the reward, if the function returns parts."""
    advantage: float = 0.0
    """The group-relative advantage; 0 if the rollout failed."""
    error: str | None = None
    """Why the reward failed.  Such a rollout is kept here but left out of group and loss."""
    streams: dict[str, list[float]] = field(default_factory=dict)
    """Further values per token, by name; NaN where a token has none.  ``trainer_logprobs`` and
    ``ref_logprobs`` (nats), ``entropies`` (nats, the sampler's), and as of the last update on the
    rollout ``ratio`` (before any clip) and ``flags`` (the sum of 1 = clipped, 2 = masked, 4 = the
    weight of truncated importance sampling was cut)."""
    top_logprobs: Alternatives | None = None
    """The most likely tokens at each position, the sampler's, if it was asked for them."""


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one prompt."""

    prompt: str
    """The text shown to the model."""
    prompt_tokens: list[int]
    """Its token ids, exactly as sampled from."""
    rollouts: list[Rollout]
    """In order of sample index."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """The other columns of the prompt's row, e.g. ``answer``."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of a recipe."""

    step: int
    """Number of the step, from 1."""
    metrics: dict[str, float]
    """Scalars by name: ``reward``, ``loss:mean``, ``kl_…``, ``seconds:sample``, …"""
    groups: list[Group] = field(default_factory=list)
    """The rollouts of this step; empty for supervised steps."""
    warnings: list[str] = field(default_factory=list)
    """Sentences for the person at the screen."""
