"""What a lab lends its runs: weights, the tokenizer, and what may follow a run."""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from xorl_lab.engine import engine
from xorl_lab.lab.console import Counting
from xorl_lab.lab.inspecting import Inspector
from xorl_lab.lab.pieces import Pieces
from xorl_lab.lab.resample import Resampled, plan, resampled
from xorl_lab.lab.run import Run
from xorl_lab.lab.weights import BASE, Weights
from xorl_lab.store import Reader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from xorl_lab.lab.diagnosis.diagnose import Question
    from xorl_lab.lab.diagnosis.result import Diagnosis
    from xorl_lab.lab.live import Links


class Bench:
    """The tools of one lab.

    Args:
        model: name of the base model.
        weights: what can be sampled from.
        context: gives the longest sequence of the model in tokens, None if a server knows it.
        where: device and dtype, as the lab was given them.
    """

    def __init__(
        self,
        model: str,
        weights: Weights,
        context: Callable[[], int | None],
        where: tuple[str, str],
    ) -> None:
        self.model = model
        self.weights = weights
        self.links: dict[str, Links] = {}
        """By id of the run: what may follow those that this lab began."""
        self._context = context
        self._where = where

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

    def diagnose(self, run: Run, question: "Question", quiet: bool) -> "Diagnosis":
        """Why trainer and sampler of a run disagree; see :meth:`xorl_lab.lab.run.Run.diagnose`."""
        # Imported when it is asked for, as seldom as that is.
        from xorl_lab.lab.diagnosis.candidates import Shelf  # noqa: PLC0415
        from xorl_lab.lab.diagnosis.diagnose import diagnose  # noqa: PLC0415

        root = self.weights.service.root
        shelf = None if root is None else Shelf(root, self.weights.store, self.weights, run.info)
        tell = Counting(quiet=quiet)
        found = diagnose(
            run.reader,
            question,
            shelf,
            lambda: engine.get(run.info.model, *self._where),
            client=run.client if run.going else None,
            progress=lambda done, total, what: tell(done, total, f"evaluations: {what}"),
        )
        tell.finish(len(found.evidence), "hypotheses evaluated")
        return found

    def inspector(self, *runs: Run) -> Inspector:
        """What an inspector of these runs may ask."""
        return Inspector([run.reader for run in runs], self)
