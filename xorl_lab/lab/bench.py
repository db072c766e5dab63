"""What a lab lends its runs: weights, the tokenizer, and what may follow a run."""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from xorl_lab.lab.inspecting import Inspector
from xorl_lab.lab.pieces import Pieces
from xorl_lab.lab.resample import Resampled, plan, resampled
from xorl_lab.lab.run import Run
from xorl_lab.lab.weights import BASE, Weights
from xorl_lab.store import Reader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from xorl_lab.lab.live import Links


class Bench:
    """The tools of one lab.

    Args:
        model: name of the base model.
        weights: what can be sampled from.
        context: gives the longest sequence of the model in tokens, None if a server knows it.
    """

    def __init__(self, model: str, weights: Weights, context: Callable[[], int | None]) -> None:
        self.model = model
        self.weights = weights
        self.links: dict[str, Links] = {}
        """By id of the run: what may follow those that this lab began."""
        self._context = context

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """Of the base model."""
        return self.weights.client(BASE).get_tokenizer()

    @cached_property
    def pieces(self) -> Pieces:
        """The bytes of each of its tokens."""
        return Pieces(self.tokenizer)

    def resample(
        self,
        reader: Reader,
        rollout: int,
        position: int,
        reference: str,
        params: Mapping[str, Any],
    ) -> Resampled:
        """Continue a recorded rollout; see :meth:`xorl_lab.lab.run.Run.resample`."""
        planned = plan(reader, rollout, position, params, self._context(), self.model)
        return resampled(planned, self.weights.client(reference), reference, self.pieces)

    def inspector(self, *runs: Run) -> Inspector:
        """What an inspector of these runs may ask."""
        return Inspector([run.reader for run in runs], self)
