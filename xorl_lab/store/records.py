"""What a reader of the store is given."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xorl_lab.types import Alternatives, Rollout
from xorl_lab.types.records import turns_of
from xorl_lab.types.results import StopReason

WEIGHTS = "weights"
"""The stream of :attr:`xorl_lab.types.Rollout.weights`."""

STATES = ("running", "paused", "stopped", "finished", "failed")
"""What a writer may report.  ``crashed`` is what a reader sees where the writer is gone."""
ACTIVE = ("running", "paused")
"""The states that need a live writer."""


@dataclass(frozen=True, slots=True)
class Parent:
    """Where a branched run began."""

    run: str | None
    """Id of the run that wrote the checkpoint, if the store knows it."""
    checkpoint: str
    """Name or address of the checkpoint."""
    step: int
    """Step at which it was written."""


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What is fixed when a run begins."""

    id: str
    """Never used twice."""
    name: str
    """Unique within the store."""
    kind: str
    """``grpo``, ``sft``, ``custom`` or ``imported``."""
    model: str
    """Name of the base model."""
    created: float
    """Seconds since the epoch."""
    settings: dict[str, Any]
    """Settings by name, as JSON values."""
    total: int | None
    """Steps that were planned, as of when this was read."""
    parent: Parent | None
    """Where it was branched off."""


@dataclass(frozen=True, slots=True)
class RunStatus:
    """How a run stands."""

    state: str
    """``running``, ``paused``, ``stopped``, ``finished``, ``failed`` or ``crashed``."""
    step: int
    """The last committed step; 0 before the first."""
    total: int | None
    """Steps that are planned."""
    updated: float
    """Seconds since the epoch: the last thing that was recorded."""
    message: str
    """Why it is in this state, in words."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened at a moment of a run."""

    id: int
    """Grows with time."""
    time: float
    """Seconds since the epoch."""
    step: int | None
    """The step that it belongs to, if any."""
    kind: str
    """``checkpoint``, ``knob``, ``sync``, ``pause``, ``resume``, ``warning``, ``error``, …"""
    text: str
    """For the person at the screen."""
    data: dict[str, Any]
    """The facts, as JSON values."""
    superseded: bool
    """True if it belongs to a step that a later attempt did again."""


@dataclass(frozen=True, slots=True)
class Scalars:
    """Metrics of consecutive steps."""

    attempt: int
    """Number of the attempt, from 1: when it grows, steps were superseded, and a viewer that has
    some reads again from 0."""
    steps: NDArray[np.int64]
    """(n,) numbers of the steps, ascending."""
    columns: dict[str, NDArray[np.float64]]
    """(n,) values by name; NaN where a step lacks the value."""


@dataclass(frozen=True, slots=True)
class StoredRollout:
    """One completion with all that was recorded of it, C tokens long."""

    id: int
    """Its number in the store."""
    step: int
    """The step that drew it."""
    group: int
    """Position of its group in the step, from 0."""
    sample: int
    """Position in the group, from 0."""
    prompt: str
    """The text shown to the model."""
    prompt_tokens: NDArray[np.int32]
    """(P,) ids of the prompt."""
    row: dict[str, Any]
    """The other columns of the prompt's row, as JSON values."""
    tokens: NDArray[np.int32]
    """(C,) ids of the completion."""
    logprobs: NDArray[np.float32]
    """(C,) nats, the sampler's; empty if it reported none."""
    streams: dict[str, NDArray[np.float32]]
    """Further values per token, (C,) each, by name; NaN where a token has none.  See
    :attr:`xorl_lab.types.Rollout.streams`."""
    top_ids: NDArray[np.int32]
    """(C, K) ids of the most likely tokens at each position, best first; (C, 0) if none were
    recorded."""
    top_logprobs: NDArray[np.float32]
    """(C, K) nats, theirs."""
    text: str
    """The completion, decoded."""
    stop_reason: StopReason
    """``length`` means that it was cut off."""
    version: int
    """Version of the weights that drew it."""
    reward: float | None
    """Total reward; None if the reward function failed."""
    reward_parts: dict[str, float]
    """Named parts of the reward."""
    advantage: float
    """The group-relative advantage."""
    error: str | None
    """Why the reward failed."""

    @property
    def weights(self) -> NDArray[np.float32] | None:
        """(C,) 1, or 0 where an environment wrote the token; None = the model drew all."""
        return self.streams.get(WEIGHTS)

    @property
    def turns(self) -> list[tuple[int, int]]:
        """Where the model's turns begin and end among the tokens."""
        weights = self.weights
        return turns_of(None if weights is None else weights.tolist(), len(self.tokens))

    @property
    def facts(self) -> Mapping[str, Any]:
        """What is one number or word per rollout, by name."""
        names = ("step", "group", "sample", "stop_reason", "version", "reward", "advantage")
        return {name: getattr(self, name) for name in names} | self.reward_parts

    def rollout(self) -> Rollout:
        """The same as the recipe made it, in lists."""
        return Rollout(
            tokens=self.tokens.tolist(),
            logprobs=self.logprobs.tolist(),
            text=self.text,
            stop_reason=self.stop_reason,
            version=self.version,
            reward=self.reward,
            reward_parts=dict(self.reward_parts),
            advantage=self.advantage,
            error=self.error,
            streams={n: v.tolist() for n, v in self.streams.items() if n != WEIGHTS},
            top_logprobs=(
                Alternatives(self.top_ids, self.top_logprobs) if self.top_ids.shape[1] else None
            ),
            weights=None if self.weights is None else self.weights.tolist(),
        )
