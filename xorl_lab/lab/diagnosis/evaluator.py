"""Evaluating recorded completions under one hypothesis at a time, on the engine's own thread."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch

from xorl_lab.engine import adapters
from xorl_lab.engine.engine import Engine
from xorl_lab.engine.packing import pack
from xorl_lab.errors import ConfigError
from xorl_lab.lab.diagnosis import precision, reevaluate
from xorl_lab.lab.diagnosis.candidates import Reference, Shelf, Subject, adapted
from xorl_lab.lab.diagnosis.fits import Truncation
from xorl_lab.lab.diagnosis.fits import temperature as fitted_temperature
from xorl_lab.lab.diagnosis.recorded import Case, Step, first, joined
from xorl_lab.lab.diagnosis.reevaluate import Passage, Tick, Values

WHOLE = 640
"""Tokens up to which a step is evaluated as a whole."""
LOGITS = 96
"""Tokens whose whole distributions are held at a time."""
Cases = Sequence[Case]
How = Callable[[Subject, Tick], Values]


class Evaluator:
    """What one step's completions would have been given, were one thing different.

    Args:
        engine: the base model and its thread.
        shelf: the weights.
        reference: those that drew the step.
        step: what was recorded.
        temperature: at which it was drawn.
    """

    def __init__(
        self, engine: Engine, shelf: Shelf, reference: Reference, step: Step, temperature: float
    ) -> None:
        self.engine = engine
        self.step = step
        self.temperature = temperature
        self.reference = reference
        self._shelf = shelf
        self._held: dict[str, Subject] = {}
        self._logits: dict[tuple[Passage, ...], torch.Tensor] = {}

    @property
    def subject(self) -> Subject:
        """The weights that drew the step."""
        return self._held[self.reference.mark]

    def plain(self, cases: Cases, reference: Reference | None = None) -> Values:
        """As recorded, under these weights; None = those that drew the step."""
        texts = _passages(cases)
        return self._do(lambda s, tick: reevaluate.packed(s.model, texts, self.temperature, tick),
                        reference)  # fmt: skip

    def reworded(self, passages: Sequence[Passage]) -> Values:
        """With other prompts."""
        return self._do(lambda s, t: reevaluate.packed(s.model, passages, self.temperature, t))

    def shifted(self, cases: Cases, shifts: Sequence[tuple[int, int]]) -> Values:
        """With other position ids; see :func:`~xorl_lab.lab.diagnosis.reevaluate.shifted`.

        Raises:
            ConfigError: the positions do not fit the context.
        """
        texts = _passages(cases)
        self._require_room(len(p.read) + max(shift) for p, shift in zip(texts, shifts, strict=True))
        return self._do(
            lambda s, tick: reevaluate.shifted(s.model, texts, self.temperature, tick, shifts)
        )

    def padded(self, cases: Cases, pads: Sequence[int], *, masked: bool) -> Values:
        """In one padded batch; see :func:`~xorl_lab.lab.diagnosis.reevaluate.padded`.

        Raises:
            ConfigError: the batch does not fit the context.
        """
        texts = _passages(cases)
        self._require_room(len(p.read) + pad for p, pad in zip(texts, pads, strict=True))

        def how(s: Subject, tick: Tick) -> Values:
            t = self.temperature
            return reevaluate.padded(s.model, texts, t, tick, pads, masked=masked)

        return self._do(how)

    def alone(self, cases: Cases) -> Values:
        """Each in a row of its own."""
        texts = _passages(cases)
        return self._do(lambda s, tick: reevaluate.alone(s.model, texts, self.temperature, tick))

    def decoded(self, cases: Cases, dtype: torch.dtype | None = None) -> Values:
        """Token by token as the sampler does it, in another precision if one is given."""
        texts = _passages(cases)

        def how(s: Subject, tick: Tick) -> Values:
            base = self.engine.base if dtype is None else precision.cast(self.engine.base, dtype)
            version = s.version
            if version.full is not None and dtype is not None:
                version = replace(version, full=precision.cast(version.full, dtype))
            return reevaluate.decoded(base, version, texts, self.temperature, tick)

        return self._do(how)

    def cast(self, cases: Cases, dtype: torch.dtype) -> Values:
        """As the trainer does it, in another precision."""
        texts = _passages(cases)

        def how(s: Subject, tick: Tick) -> Values:
            return reevaluate.packed(precision.cast(s.model, dtype), texts, self.temperature, tick)

        return self._do(how)

    def with_its_step(self, cases: Cases) -> Values:
        """Packed with all that the step trained on, as the trainer packs it.

        Raises:
            ConfigError: the step has too many tokens for that.
        """
        trained = [c for c in self.step.cases if c.advantage is not None]
        parts = [[c.whole for c in trained if bool(c.advantage) is loud] for loud in (True, False)]
        rows = [pack([p.read for p in part]) for part in parts if part]
        if sum(len(row.tokens) for some in rows for row in some) > WHOLE:
            raise ConfigError(f"the step has more than {WHOLE} tokens")

        def how(s: Subject, tick: Tick) -> Values:
            known: dict[Passage, Values] = {}
            for part in parts:
                if part:
                    values = reevaluate.packed(s.model, part, self.temperature, tick)
                    ends = np.cumsum([len(p.completion) for p in part])[:-1]
                    known |= dict(zip(part, np.split(values, ends), strict=True))
            missing = np.full(1, np.nan)
            return np.concatenate(
                [np.resize(known.get(c.whole, missing), len(c.passage.completion)) for c in cases]
            )

        return self._do(how)

    def drawn(self, cases: Cases, dropout: float, count: int) -> Values:
        """(count, N) evaluations with dropout on the adapter.

        Raises:
            ConfigError: these weights have no adapter.
        """
        texts = _passages(cases)

        def how(s: Subject, tick: Tick) -> Values:
            if s.spec is None:
                raise ConfigError("there is no adapter")
            generator = torch.Generator().manual_seed(0)
            model = adapted(self.engine.base, s.version, s.spec, generator, dropout)
            with adapters.dropout(model, generator):
                runs = [
                    reevaluate.packed(model, texts, self.temperature, tick, share=False)
                    for _ in range(count)
                ]
            return np.stack(runs)

        return self._do(how)

    def noisy(self, cases: Cases, dtype: torch.dtype, count: int) -> Values:
        """(count, N) evaluations with the rounding of a precision, drawn at random."""
        texts = _passages(cases)

        def how(s: Subject, tick: Tick) -> Values:
            model = precision.noisy(s.model, dtype, torch.Generator().manual_seed(0))
            return np.stack(
                [reevaluate.packed(model, texts, self.temperature, tick) for _ in range(count)]
            )

        return self._do(how)

    def best_temperature(self, cases: Cases, side: str) -> float:
        """That explains the recorded numbers of a side best."""
        chosen = first(cases, LOGITS)
        logits, targets = self._distributions(chosen)
        return fitted_temperature(logits, targets, joined(chosen, side))

    def at_temperature(self, cases: Cases, value: float) -> Values:
        """At another temperature."""
        texts = _passages(cases)
        return self._do(lambda s, tick: reevaluate.packed(s.model, texts, value, tick))

    def truncation(self, cases: Cases) -> tuple[Truncation, list[Case]]:
        """The masses of truncated distributions, of as many tokens as are held at a time."""
        chosen = first(cases, LOGITS)
        logits, targets = self._distributions(chosen)
        return Truncation(logits, targets, self.temperature), chosen

    def _distributions(self, cases: Cases) -> tuple[torch.Tensor, list[int]]:
        """(N, V) logits and N targets; those of the last two sets of cases are kept."""
        texts = _passages(cases)
        targets = [t for p in texts for t in p.completion]
        key = tuple(texts)
        if key not in self._logits:

            def how(s: Subject, tick: Tick) -> Values:
                hidden = reevaluate.packed_states(s.model, texts, tick)
                recent = dict(list(self._logits.items())[-1:])
                self._logits = recent | {key: reevaluate.logits(s.model, hidden).cpu()}
                return np.zeros(0)

            self._do(how)
        return self._logits[key], targets

    def _do(self, how: How, reference: Reference | None = None) -> Values:
        """One job of the worker; training goes on between two of them."""
        wanted = reference or self.reference
        return self.engine.scheduler.submit(
            lambda ticket: how(self._hold(wanted), ticket.tick), name="diagnose"
        ).result()

    def _hold(self, reference: Reference) -> Subject:
        """The weights in memory: those that drew the step stay, of others the last."""
        if reference.mark not in self._held:
            kept = {k: s for k, s in self._held.items() if k == self.reference.mark}
            self._held = kept | {reference.mark: self._shelf.load(self.engine, reference)}
        return self._held[reference.mark].place()

    def _require_room(self, lengths: Iterable[int]) -> None:
        longest = max(lengths)
        context = self.engine.loaded.context_length
        if longest > context:
            raise ConfigError(f"{longest} positions do not fit the context of {context}")


def _passages(cases: Cases) -> list[Passage]:
    return [case.passage for case in cases]
