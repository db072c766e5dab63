"""What may make trainer and sampler disagree, as evaluations that differ in one thing each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from xorl_lab.lab.diagnosis.candidates import Reference
from xorl_lab.lab.diagnosis.evaluator import Cases, Evaluator
from xorl_lab.lab.diagnosis.fits import Truncation
from xorl_lab.lab.diagnosis.recorded import SIDES, joined
from xorl_lab.lab.diagnosis.reevaluate import Values
from xorl_lab.lab.diagnosis.rewording import Rewording
from xorl_lab.lab.weights import BASE
from xorl_lab.types import Datum, ModelInput

if TYPE_CHECKING:
    from xorl_lab.client import TrainingClient

TEMPERATURE, TOP_P, TOP_K = "temperature", "top-p", "top-k"
STALE, ADAPTER = "stale version", "wrong adapter"
TEMPLATE, POSITION, SHAPE = "template mismatch", "position mismatch", "batch shape"
DTYPE, DROPOUT = "dtype", "dropout"
CAUSES = (TEMPERATURE, TOP_P, TOP_K, STALE, ADAPTER, TEMPLATE, POSITION, SHAPE, DTYPE, DROPOUT)
"""In the order in which they are tried."""
SHIFTS = (1, 2, 3, 4, 8, -1, -2)
"""By how much position ids are moved."""
Run = Callable[[Cases], Values]


@dataclass(frozen=True, slots=True)
class Trial:
    """One hypothesis with a value."""

    cause: str
    """One of :data:`CAUSES`."""
    value: str
    """Such as ``0.7``, or ``step-3, 2 steps older``."""
    run: Run
    """The logprobs that the completions would have; NaN where that cannot be told."""
    sides: Sequence[str] = SIDES
    """Whose numbers it may explain."""


def fitted(evaluator: Evaluator, cases: Cases, sides: Sequence[str]) -> list[Trial]:
    """Temperature and truncation, with the values that come nearest.

    Args:
        evaluator: evaluates.
        cases: to find the values on.
        sides: whose numbers are to be explained.
    """
    found: list[Trial] = []
    for side in sides:
        value = evaluator.best_temperature(cases, side)
        found.append(Trial(TEMPERATURE, f"{value:.4g}", _at(evaluator, value), (side,)))
        truncation, chosen = evaluator.truncation(cases)
        recorded = joined(chosen, side)
        p, k = truncation.best_p(recorded), truncation.best_k(recorded)
        if p is not None:
            run = _truncated(evaluator, lambda t, p=p: t.of_p(p))
            found.append(Trial(TOP_P, _share(p, *truncation.range_p(p)), run, (side,)))
        if k is not None:
            run = _truncated(evaluator, lambda t, k=k: t.of_k(k))
            found.append(Trial(TOP_K, str(k), run, (side,)))
    return found


def versions(evaluator: Evaluator, near: Sequence[Reference], *, first: bool) -> list[Trial]:
    """Earlier and later weights of the run.

    Args:
        evaluator: evaluates.
        near: those that are saved.
        first: the version before is the untrained model.
    """
    behind = evaluator.reference.step or 0
    found = [
        Trial(STALE, f"{r.name}, {_apart((r.step or 0) - behind)}", _plain(evaluator, r))
        for r in near
    ]
    if first:
        value = f"the untrained weights, {_apart(-1)}"
        found.append(Trial(STALE, value, _plain(evaluator, Reference(BASE, mark=BASE))))
    return found


def present(evaluator: Evaluator, client: "TrainingClient") -> Trial:
    """The weights that a client has by now."""

    def run(cases: Cases) -> Values:
        data = [
            Datum(
                ModelInput.from_ints(p.read),
                {
                    "target_tokens": [*p.prompt[1:], *p.completion],
                    "weights": [0.0] * (len(p.prompt) - 1) + [1.0] * len(p.completion),
                },
            )
            for p in (case.passage for case in cases)
        ]
        params = {"logprob_temperature": evaluator.temperature}
        outputs = client.forward(data, "cross_entropy", params).result().loss_fn_outputs
        parts = [
            output.logprobs.to_numpy()[-len(case.passage.completion) :]
            for output, case in zip(outputs, cases, strict=True)
        ]
        return np.concatenate(parts).astype(np.float64)

    return Trial(STALE, f"version {client.version}, the present one", run)


def adapters(evaluator: Evaluator, foreign: Sequence[Reference]) -> list[Trial]:
    """The weights of other runs, and none."""
    found = [Trial(ADAPTER, r.name, _plain(evaluator, r)) for r in foreign]
    if evaluator.reference.mark != BASE:
        run = _plain(evaluator, Reference(BASE, mark=BASE))
        found.append(Trial(ADAPTER, "none: the base model", run))
    return found


def reworded(evaluator: Evaluator, cases: Cases) -> list[Trial]:
    """Prompts with another beginning or template."""
    loaded = evaluator.engine.loaded
    words = Rewording(loaded.tokenizer, loaded.context_length)

    def run_of(way: str) -> Run:
        return lambda some: evaluator.reworded(words.passages(way, some))

    return [Trial(TEMPLATE, way, run_of(way)) for way in words.ways(cases)]


def moved(evaluator: Evaluator) -> list[Trial]:
    """Position ids moved, in the completion or throughout."""

    def run_of(before: int, behind: int) -> Run:
        return lambda cases: evaluator.shifted(cases, [(before, behind)] * len(cases))

    def counted(cases: Cases) -> Values:
        pads = _pads(evaluator, cases)
        return evaluator.shifted(cases, [(0, pad) for pad in pads])

    return [
        *(Trial(POSITION, f"completion moved by {k:+d}", run_of(0, k)) for k in SHIFTS),
        *(Trial(POSITION, f"all moved by {k:+d}", run_of(k, k)) for k in SHIFTS[:1]),
        Trial(POSITION, "completion moved by the padding of its prompt", counted),
    ]


def shaped(evaluator: Evaluator) -> list[Trial]:
    """The same tokens in batches of other shapes."""

    def padding(*, masked: bool, whole: bool = False) -> Run:
        return lambda cases: evaluator.padded(
            cases, _pads(evaluator, cases, whole=whole), masked=masked
        )

    return [
        Trial(SHAPE, "each alone", evaluator.alone),
        Trial(SHAPE, "token by token", evaluator.decoded),
        Trial(SHAPE, "packed with the whole step", evaluator.with_its_step),
        Trial(SHAPE, "padded to the left", padding(masked=True)),
        Trial(SHAPE, "padding before prompts read as text", padding(masked=False)),
        Trial(SHAPE, "padding before sequences read as text", padding(masked=False, whole=True)),
    ]


def rounded(evaluator: Evaluator, dtype: torch.dtype) -> list[Trial]:
    """Computed in another precision: by the sampler's way and by the trainer's."""
    name = str(dtype).removeprefix("torch.")
    return [
        Trial(DTYPE, name, lambda cases: evaluator.decoded(cases, dtype), ("sampler",)),
        Trial(DTYPE, name, lambda cases: evaluator.cast(cases, dtype), ("trainer",)),
    ]


def _at(evaluator: Evaluator, value: float) -> Run:
    return lambda cases: evaluator.at_temperature(cases, value)


def _plain(evaluator: Evaluator, reference: Reference) -> Run:
    return lambda cases: evaluator.plain(cases, reference)


def _truncated(evaluator: Evaluator, of: Callable[[Truncation], Values]) -> Run:
    """Distributions are held of the first tokens only: NaN behind them."""

    def run(cases: Cases) -> Values:
        values = of(evaluator.truncation(cases)[0])
        result = np.full(sum(len(c.passage.completion) for c in cases), np.nan)
        result[: len(values)] = values
        return result

    return run


def _pads(evaluator: Evaluator, cases: Cases, *, whole: bool = False) -> list[int]:
    """Per case, the padding that makes its prompt, or all of it, as long as the step's longest."""
    step = evaluator.step
    if whole:
        return [step.longest - len(c.whole.prompt) - len(c.whole.completion) for c in cases]
    return [step.longest_prompt - len(c.passage.prompt) for c in cases]


def _share(p: float, low: float, high: float) -> str:
    """A share, or the shares that cannot be told apart."""
    return f"{p:.4g}" if high - low < 0.01 else f"{low:.2f} to {high:.2f}"


def _apart(steps: int) -> str:
    count = f"{abs(steps)} step{'s' if abs(steps) != 1 else ''}"
    return f"{count} {'older' if steps < 0 else 'newer'}"


NOTES: Mapping[str, str] = {
    TEMPERATURE: "there was nothing to fit",
    TOP_P: "no token is more likely than under the whole distribution",
    TOP_K: "no token is more likely than under the whole distribution",
    STALE: "no other version is saved",
    ADAPTER: "there are no other weights",
    TEMPLATE: "no change applies to these prompts",
    DTYPE: "not needed: the gap is explained",
    DROPOUT: "not needed: the trainer's numbers are explained",
}
"""Why a cause was not evaluated, where it was not."""
