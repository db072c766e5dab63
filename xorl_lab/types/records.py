"""What a recipe yields: the rollouts and numbers of one training step."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from xorl_lab.types.results import StopReason


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
    """Further values per token, by name, as ``trainer_logprobs``; NaN where a token has none."""


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
