"""Why do trainer and sampler disagree?  Recorded completions, evaluated again under control.

The completions of step s + 1 were drawn by the weights behind step s.  Evaluated again with these,
as the run says it was done, they give numbers with which the record of the sampler, that of the
trainer, or neither agrees.  Whatever does not is held against evaluations that differ in one thing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from xorl_lab.engine.engine import Engine
from xorl_lab.errors import ConfigError
from xorl_lab.lab.diagnosis import advice
from xorl_lab.lab.diagnosis.candidates import Reference, Shelf
from xorl_lab.lab.diagnosis.causes import CAUSES, NOTES
from xorl_lab.lab.diagnosis.evaluator import Evaluator
from xorl_lab.lab.diagnosis.examination import Examination
from xorl_lab.lab.diagnosis.recorded import SIDES, Gap, Step, choose, step_of, temperature_at
from xorl_lab.lab.diagnosis.result import Diagnosis, Evidence
from xorl_lab.lab.diagnosis.verdict import LEAST, Outcome, bar_of, by_cause
from xorl_lab.recipes.settings import check_integer
from xorl_lab.store import Reader

if TYPE_CHECKING:
    from xorl_lab.client import TrainingClient

PRECISIONS = ("float32", "bfloat16", "float16")
Progress = Callable[[int, int, str], object]
"""Told how many evaluations are done, of how many, and what comes next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What to diagnose."""

    rollouts: int = 16
    """The most completions."""
    step: int | None = None
    """The step; None = the newest one that follows a checkpoint and has a gap."""
    temperature: float | None = None
    """At which it was drawn; None = as the run's settings say."""
    sampler_dtype: str | None = None
    """In which the sampler is known to compute; None = as the trainer."""

    def __post_init__(self) -> None:
        check_integer("rollouts", self.rollouts, 1)
        if self.step is not None:
            check_integer("step", self.step, 1)
        if self.temperature is not None and not self.temperature > 0:
            raise ConfigError(f"temperature is {self.temperature!r}: pass one > 0")
        if self.sampler_dtype not in (None, *PRECISIONS):
            raise ConfigError(
                f"sampler_dtype is {self.sampler_dtype!r}: use one of {', '.join(PRECISIONS)}"
            )


def diagnose(
    reader: Reader,
    question: Question,
    shelf: Shelf | None,
    engine: Callable[[], Engine],
    *,
    client: "TrainingClient | None" = None,
    progress: Progress = lambda *_: None,
) -> Diagnosis:
    """Find what makes trainer and sampler disagree.

    Args:
        reader: of the run.
        question: what to look at.
        shelf: the weights at hand; None where a server keeps them.
        engine: gives that of the base model.
        client: trains the run in this process, if one does.
        progress: told how far it is.

    Raises:
        ConfigError: the model is not to be had.
        StoreError: the record cannot be read.
    """
    behind = {} if shelf is None else shelf.behind()
    bar = bar_of(_dtype(question, behind, None if shelf is None else engine))
    step = _chosen(reader, question, behind, bar)
    if step is None or not step.cases:
        return _without(step)
    gap = step.gap
    if gap.tokens and gap.mean <= bar:
        return _told("healthy", advice.healthy(step, gap, bar, again=False), step, gap, ())
    before = step.number - 1
    if shelf is None or before not in behind:
        text = advice.no_weights(step, gap, before, on_server=shelf is None)
        return _told("not measured", text, step, gap, ())
    temperature = question.temperature or temperature_at(reader, step.number)
    evaluator = Evaluator(engine(), shelf, behind[before], step, temperature)
    examined = Examination(evaluator, choose(step, question.rollouts), bar, progress)
    again = not gap.tokens
    if again:  # in place of the trainer's, which were not recorded
        gap = examined.apart("sampler")
    if not gap.tokens:
        text = f"None of the logprobs recorded at step {step.number} is a finite number."
        return _told("not measured", text, step, gap, ())
    if gap.mean <= bar:
        return _told("healthy", advice.healthy(step, gap, bar, again=again), step, gap, ())
    examined.run(shelf, behind, client)
    return _judged(examined, gap)


def _dtype(
    question: Question, behind: Mapping[int, Reference], engine: Callable[[], Engine] | None
) -> str:
    """In which trainer and sampler are said to compute, the coarser of the two."""
    known = [reference.dtype for reference in behind.values() if reference.dtype]
    trainer = known[-1] if known else engine().loaded.dtype if engine else "float32"
    pair = (trainer, question.sampler_dtype or trainer)
    return next((each for each in pair if each != "float32"), "float32")


def _chosen(
    reader: Reader, question: Question, behind: Mapping[int, Reference], bar: float
) -> Step | None:
    """The step to look at, None where no rollouts are recorded."""
    if question.step is not None:
        return step_of(reader, question.step)
    usable: Step | None = None
    for number in sorted((s + 1 for s in behind), reverse=True):
        step = step_of(reader, number)
        if step.cases and not step.gap.mean <= bar:
            return step
        usable = usable or (step if step.cases else None)
    if usable is not None:
        return usable
    newest = reader.newest(1)
    return step_of(reader, newest[0].step) if newest else None


def _without(step: Step | None) -> Diagnosis:
    """There is nothing to compare."""
    if step is not None and step.silent:
        text = (
            f"at step {step.number} the sampler reported no logprobs: ask it for them "
            "(return_logprobs=True)."
        )
    else:
        where = "the run" if step is None else f"step {step.number}"
        text = f"{where} has no rollouts with tokens, so there is nothing to compare."
    number = None if step is None else step.number
    return Diagnosis("not measured", text, number, float("nan"), float("nan"), 0)


def _judged(examined: Examination, gap: Gap) -> Diagnosis:
    """The cause, from all that was tried."""
    evaluator = examined.evaluator
    step, sides = evaluator.step, examined.sides
    found = [each for side in sides for each in examined.explained(side)]
    evidence = _evidence(examined)
    nearest = list(by_cause(examined.outcomes).values())
    if min(examined.apart(side).tokens for side in sides) < LEAST:
        return _told("unexplained", advice.few(step, gap, nearest), step, gap, evidence)
    if {o.side for o in found} != set(sides) or _same_everywhere(found, sides):
        text = advice.unexplained(nearest, sides, step, gap, evaluator.reference.name)
        return _told("unexplained", text, step, gap, evidence)
    cause = " and ".join(
        dict.fromkeys(" or ".join(o.cause for o in found if o.side == side) for side in sides)
    )
    text = advice.explained(found, step, gap, evaluator.temperature)
    return _told(cause, text, step, gap, evidence)


def _same_everywhere(found: list[Outcome], sides: list[str]) -> bool:
    """True if both sides are explained by the very same thing, which cannot set them apart."""
    return len(sides) > 1 and len({(o.cause, o.value) for o in found}) == 1


def _evidence(examined: Examination) -> tuple[Evidence, ...]:
    """One row per hypothesis, and how far each side is from the weights."""
    step = examined.evaluator.step
    rows = [_row("as recorded", "", "", step.gap)]
    for side in SIDES:
        apart = examined.apart(side)
        if apart.tokens:
            name = examined.evaluator.reference.name
            rows.append(_row("evaluated again", f"by {name}", side, apart))
    best = by_cause(examined.outcomes)
    tried = sorted(best.values(), key=lambda o: -o.share if o.share == o.share else 9.0)
    rows += [_row(o.cause, o.value, o.side, o.left, o.share, o.note) for o in tried]
    for cause in CAUSES:
        if cause not in best:
            rows.append(Evidence(cause, note=examined.notes.get(cause, NOTES.get(cause, ""))))
    return tuple(rows)


def _row(
    hypothesis: str, value: str, side: str, gap: Gap, share: float = float("nan"), note: str = ""
) -> Evidence:
    return Evidence(hypothesis, value, side, gap.mean, gap.max, share, gap.tokens, note)


def _told(cause: str, text: str, step: Step, gap: Gap, evidence: tuple[Evidence, ...]) -> Diagnosis:
    if step.broken:
        text += f" {step.broken} recorded logprobs are not finite numbers, and were left out."
    return Diagnosis(cause, text, step.number, gap.mean, gap.max, gap.tokens, evidence)
