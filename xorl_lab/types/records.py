"""What a recipe yields: the rollouts and numbers of one training step."""

from collections.abc import Mapping, Sequence
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


def turns_of(weights: "Sequence[float] | None", count: int) -> list[tuple[int, int]]:
    """Where the model's turns begin and end among the tokens behind the first prompt.

    Args:
        weights: one per token, 0 where the model did not draw it; None = it drew all.
        count: number of tokens.

    >>> turns_of([1, 1, 0, 0, 1], 5), turns_of(None, 3)
    ([(0, 2), (4, 5)], [(0, 3)])
    """
    if weights is None:
        return [(0, count)]
    drawn = [False, *(weight != 0 for weight in weights), False]
    edges = [i for i in range(count + 1) if drawn[i] != drawn[i + 1]]
    return list(zip(edges[::2], edges[1::2], strict=True))


@dataclass(frozen=True, slots=True)
class Rollout:
    """One completion with everything that is known of it, or an episode of several turns."""

    tokens: list[int]
    """Ids behind the prompt, stop tokens included, and what an environment said in between."""
    logprobs: list[float]
    """Nats, the sampler's, one per token; NaN where the model did not draw it."""
    text: str
    """The tokens, decoded."""
    stop_reason: StopReason
    """Why the last turn ended; ``length``: cut off at max_tokens, or out of turns or context."""
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
    weights: list[float] | None = None
    """One per token: 1, or 0 where an environment wrote it, which is not trained.  None = all 1."""
    routed_experts: "npt.NDArray[np.int16] | None" = field(default=None, repr=False, compare=False)
    """(P + C - 1, L, K) experts that its tokens went through, prompt included, where they are to be
    replayed; until the weights have been updated, and never in the record."""

    @property
    def turns(self) -> list[tuple[int, int]]:
        """Where the model's turns begin and end among the tokens."""
        return turns_of(self.weights, len(self.tokens))

    @property
    def drawn(self) -> int:
        """Number of tokens that the model drew."""
        return sum(end - start for start, end in self.turns)


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
