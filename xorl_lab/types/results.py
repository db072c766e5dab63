"""What comes back from a call."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from xorl_lab.types.data import TensorData

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

StopReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """One completion, without its prompt."""

    tokens: list[int]
    """Ids in the order drawn; the stop token, if one was drawn, is the last."""
    stop_reason: StopReason = "stop"
    """``stop``: a stop token or string; ``length``: max_tokens reached; ``abort``: given up."""
    logprobs: list[float] | None = None
    """Nats, one per token, at the sampling temperature (1 if greedy), over the whole vocabulary."""
    text: str | None = None
    """The tokens decoded, without the stop token or string."""
    top_logprobs: list[list[tuple[int, float]]] | None = None
    """Per token the most likely (id, logprob) at that position, best first, if asked for."""
    entropies: list[float] | None = None
    """Nats, one per token: the entropy of the whole distribution that the logprobs belong to, if
    asked for and known."""
    routed_experts: "npt.NDArray[np.int16] | None" = field(default=None, compare=False, repr=False)
    """(P + C - 1, L, K) ids: the K experts that each of the P prompt tokens and of the C tokens
    but the last went through in each of L layers, from the very steps that read them, if asked for
    (``SamplingParams.return_routed_experts``)."""


@dataclass(frozen=True, slots=True)
class SampleResponse:
    """The completions of one prompt."""

    sequences: list[SampledSequence]
    """In order of sample index."""
    meta_info: dict[str, Any] | None = None
    """``weight_version``, ``model``, ``seed``, ``prompt_tokens``, ``completion_tokens``."""
    prompt_logprobs: list[float | None] | None = None
    """Nats at temperature 1, one per prompt token, None for the first, if asked for."""

    @property
    def text(self) -> str:
        """Text of the first completion."""
        return (self.sequences[0].text or "") if self.sequences else ""

    @property
    def tokens(self) -> list[int]:
        """Token ids of the first completion."""
        return self.sequences[0].tokens if self.sequences else []

    @property
    def logprobs(self) -> list[float] | None:
        """Logprobs of the first completion."""
        return self.sequences[0].logprobs if self.sequences else None


@dataclass(frozen=True, slots=True)
class BatchSampleResult:
    """What became of each prompt of a batch; every index is in exactly one of the lists."""

    completed: list[tuple[int, SampleResponse]]
    """(index of the prompt, response), ordered by index."""
    failed: list[tuple[int, BaseException]]
    """(index of the prompt, error), ordered by index."""
    cancelled: list[int]
    """Indices of the prompts that were pending when the time was up."""


@dataclass(frozen=True, slots=True)
class LossFnOutput(Mapping[str, Any]):
    """Outputs of the loss for one datum, by key and by attribute.

    Positions that are not trained hold 0.0.  Length: N - 1 for ``labels``, N for ``target_tokens``.
    """

    loss: float
    """Sum over the trained tokens of this datum."""
    logprobs: TensorData
    """Nats; the trainer's log-probability of each target."""
    elementwise_loss: TensorData
    """The loss of each token; these sum to ``loss``."""
    terms: dict[str, TensorData] = field(default_factory=dict)
    """Further per-token values if ``return_terms`` was asked for: ratio, clipped, masked, …"""

    def __getitem__(self, key: str) -> Any:  # noqa: ANN401 (a float or a TensorData)
        if key in self.terms:
            return self.terms[key]
        if key in ("loss", "logprobs", "elementwise_loss"):
            return getattr(self, key)
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        yield from ("loss", "logprobs", "elementwise_loss")
        yield from self.terms

    def __len__(self) -> int:
        return 3 + len(self.terms)


@dataclass(frozen=True, slots=True)
class ForwardBackwardOutput:
    """Answer to ``forward`` and ``forward_backward``."""

    loss_fn_outputs: list[LossFnOutput] = field(default_factory=list)
    """One per datum, in the order passed."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Over all trained tokens of the call; ``loss:sum``, ``loss:mean``, ``valid_tokens``, …"""
    loss_fn_output_type: str = ""
    """Name of the loss."""
    info: dict[str, Any] = field(default_factory=dict)
    """Facts that are not numbers, e.g. ``warnings``: a list of sentences."""


@dataclass(frozen=True, slots=True)
class OptimStepResponse:
    """Answer to ``optim_step``."""

    metrics: dict[str, float] = field(default_factory=dict)
    """``grad_norm`` (before clipping), ``learning_rate``, ``step``, ``valid_tokens``, …"""
    info: dict[str, Any] = field(default_factory=dict)
    """Facts that are not numbers."""


@dataclass(frozen=True, slots=True)
class SaveWeightsResponse:
    """Answer to ``save_state``."""

    path: str
    """URI, ``xorl://MODEL/weights/NAME``."""
    model: str
    """The model id."""
