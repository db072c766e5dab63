"""One step under examination: hypotheses tried until its gap is explained, or none is left."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from xorl_lab.errors import LabError
from xorl_lab.lab.diagnosis import causes
from xorl_lab.lab.diagnosis.candidates import Reference, Shelf
from xorl_lab.lab.diagnosis.causes import ADAPTER, DROPOUT, DTYPE, STALE, Trial
from xorl_lab.lab.diagnosis.chance import Likeness, likeness
from xorl_lab.lab.diagnosis.evaluator import Evaluator
from xorl_lab.lab.diagnosis.recorded import SIDES, Case, Gap, few, first, joined
from xorl_lab.lab.diagnosis.reevaluate import Values
from xorl_lab.lab.diagnosis.verdict import Outcome, best, by_cause, outcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from xorl_lab.client import TrainingClient

    Progress = Callable[[int, int, str], object]

PROMISING = 0.3
"""Share of the gap from which a hypothesis is tried on all completions."""
DRAWS = 4
"""Evaluations by which a noise is judged."""
ALIKE = {DTYPE: 3.0, DROPOUT: 1.5}
"""Factor by which a gap may be wider or narrower than the noise that makes it."""
NOISY = 128
"""Tokens on which rounding is drawn at random; half of them for dropout, which shares nothing."""
TOWARD = 0.6
"""Correlation with what another hypothesis changes from which a gap is not taken for noise."""


class Examination:
    """One step under examination.

    Args:
        evaluator: evaluates.
        cases: the completions.
        bar: nats, up to which trainer and sampler agree.
        progress: told how many evaluations are done, of how many, and what comes next.
    """

    def __init__(
        self, evaluator: Evaluator, cases: list[Case], bar: float, progress: "Progress"
    ) -> None:
        self.evaluator = evaluator
        self.cases = cases
        self.bar = bar
        self.notes: dict[str, str] = {}
        """Why a cause could not be evaluated."""
        self._progress = progress
        self._done, self._total = 0, 2
        self._found: dict[tuple[str, str, str], Outcome] = {}
        self._trials: dict[tuple[str, str, str], Trial] = {}
        self._tell("as recorded")
        self.plain = evaluator.plain(cases)
        """(N,) evaluated as the run says it was done."""
        self._few = few(cases)
        self._few_plain = self.plain

    @property
    def sides(self) -> list[str]:
        """Those whose recorded numbers are not those of the weights."""
        apart = {side: self.apart(side) for side in SIDES}
        there = {side: gap for side, gap in apart.items() if gap.tokens}
        wrong = [side for side, gap in there.items() if gap.mean > self.bar]
        return wrong or [max(there, key=lambda side: there[side].mean)]

    @property
    def outcomes(self) -> list[Outcome]:
        """What was found."""
        return list(self._found.values())

    def apart(self, side: str) -> Gap:
        """How far the record of a side is from the evaluation."""
        return Gap.between(joined(self.cases, side), self.plain)

    def explained(self, side: str) -> list[Outcome]:
        """What explains the record of a side, the best first."""
        return best([o for o in self.outcomes if o.side == side], self.bar)

    def run(
        self, shelf: Shelf, behind: Mapping[int, Reference], client: "TrainingClient | None"
    ) -> None:
        """Try all hypotheses; those of chance only where the others leave something."""
        if _count(self._few) < len(self.plain):
            self._few_plain = self.evaluator.plain(self._few)
        trials = list(self._planned(shelf, behind, client))
        self._total = len(trials) + 4
        for trial in trials:
            self._try(trial)
        for side in self.sides:
            self._confirm(side)
        for side in self.sides:
            if not self.explained(side):
                self._try_dropout(side)
                self._try_rounding(side)

    def _planned(
        self, shelf: Shelf, behind: Mapping[int, Reference], client: "TrainingClient | None"
    ) -> Iterator[Trial]:
        evaluator = self.evaluator
        before = evaluator.step.number - 1
        near = shelf.versions(behind, before)
        yield from causes.fitted(evaluator, self.cases, self.sides)
        yield from causes.versions(evaluator, near, first=before == 1 and 0 in behind)
        if client is not None:
            yield causes.present(evaluator, client)
        yield from causes.adapters(evaluator, shelf.foreign([*behind.values()], before))
        yield from causes.reworded(evaluator, self._few)
        yield from causes.moved(evaluator)
        yield from causes.shaped(evaluator)

    def _try(self, trial: Trial, *, on_all: bool = False) -> None:
        """Evaluate a hypothesis and note how much it explains."""
        self._tell(trial.cause)
        cases, plain = (self.cases, self.plain) if on_all else (self._few, self._few_plain)
        try:
            tried = trial.run(cases)
        except LabError as error:
            self.notes[trial.cause] = str(error)
            return
        for side in trial.sides:
            if side in self.sides:
                recorded = joined(cases, side)
                key = (trial.cause, trial.value, side)
                self._found[key] = outcome(*key, recorded, plain, tried)
                self._trials[key] = trial

    def _confirm(self, side: str) -> None:
        """Evaluate what looks best on all completions, until what looks best was so evaluated."""
        confirmed: set[tuple[str, str]] = set()
        while _count(self._few) < len(self.plain):
            leading = by_cause([o for o in self.outcomes if o.side == side]).values()
            open_ = [
                (o.cause, o.value)
                for o in leading
                if o.share >= PROMISING and (o.cause, o.value) not in confirmed
            ]
            if not open_:
                return
            for cause, value in open_:
                self._try(self._trials[cause, value, side], on_all=True)
            confirmed |= set(open_)

    def _try_dropout(self, side: str) -> None:
        """The rate is known, so that the size of the gap alone tells: no other of them fits."""
        spec = self.evaluator.subject.spec
        if side != "trainer" or spec is None or not spec.dropout:
            where = "the sampler has none" if side != "trainer" else "the adapter has none"
            self.notes.setdefault(DROPOUT, where)
            return
        rate = spec.dropout
        self._tell(DROPOUT)
        cases = first(self.cases, NOISY // 2)
        plain = self.plain[: _count(cases)]
        noise = self.evaluator.drawn(cases, rate, DRAWS) - plain
        alike, gap = self._compared(side, noise, cases, plain)
        self._note(DROPOUT, f"dropout={rate:g}", side, alike, gap, alike.sized(ALIKE[DROPOUT]))

    def _try_rounding(self, side: str) -> None:
        if self.evaluator.engine.loaded.dtype != "float32":
            self._try_precision(side, torch.float32)
            return
        self._try_precision(side, torch.bfloat16)
        if self.explained(side):
            return
        self._tell(DTYPE)
        cases = first(self.cases, NOISY)
        plain = self.plain[: _count(cases)]

        def compared(dtype: torch.dtype) -> tuple[Likeness, float]:
            noise = self.evaluator.noisy(cases, dtype, DRAWS) - plain
            return self._compared(side, noise, cases, plain)

        name, (alike, gap) = "bfloat16", compared(torch.bfloat16)
        if alike.ratio * ALIKE[DTYPE] < 1:  # float16 keeps three bits more
            self._try_precision(side, torch.float16)
            if self.explained(side):
                return
            name, (alike, gap) = "float16", compared(torch.float16)
        mine = [o for o in self.outcomes if o.side == side and o.cause in (STALE, ADAPTER)]
        elsewhere = any(o.toward >= TOWARD for o in mine)
        certain = alike.sized(ALIKE[DTYPE]) and alike.patterned and not elsewhere
        self._note(DTYPE, name, side, alike, gap, certain)

    def _try_precision(self, side: str, dtype: torch.dtype) -> None:
        for trial in causes.rounded(self.evaluator, dtype):
            if side in trial.sides:
                self._try(trial)

    def _compared(
        self, side: str, noise: Values, cases: Sequence[Case], plain: Values
    ) -> tuple[Likeness, float]:
        """How a side's gap compares with a noise, and its mean."""
        apart = joined(cases, side) - plain
        return likeness(apart, noise), float(np.nanmean(np.abs(apart)))

    def _note(
        self, cause: str, value: str, side: str, alike: Likeness, gap: float, certain: bool
    ) -> None:
        self._found[cause, value, side] = Outcome(
            cause,
            value,
            side,
            Gap(alike.left, alike.largest, alike.tokens),
            1 - alike.left / gap,
            f"at random, so compared by size: {alike.ratio:.2g} times that of the noise",
            certain=certain,
        )

    def _tell(self, what: str) -> None:
        self._total = max(self._total, self._done + 1)
        self._progress(self._done, self._total, what)
        self._done += 1


def _count(cases: Sequence[Case]) -> int:
    return sum(len(case.passage.completion) for case in cases)
