"""A loop of one's own, recorded, shown and steered like those of the recipes."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from xorl_lab.errors import ConfigError, LabError
from xorl_lab.lab import active, console
from xorl_lab.lab.autosave import Autosave
from xorl_lab.lab.bench import Bench
from xorl_lab.lab.budget import Budget
from xorl_lab.lab.conduct import check_run_name
from xorl_lab.lab.control import Control
from xorl_lab.lab.driver import await_turn, interrupts, note_change
from xorl_lab.lab.live import Live
from xorl_lab.lab.loop import described
from xorl_lab.lab.memory import in_use
from xorl_lab.lab.run import Run
from xorl_lab.recipes.settings import check_integer
from xorl_lab.types import Group, StepRecord

if TYPE_CHECKING:
    from xorl_lab.client import TrainingClient
    from xorl_lab.store import Writer


class Track(Run):
    """A run whose steps the caller takes.

    ::

        with lab.track("mine", client) as run:
            for step in run.steps(100):
                output = client.forward_backward(data, loss_fn="cross_entropy").result()
                client.optim_step({"learning_rate": run.knobs["learning_rate"]}).result()
                run.log(output.metrics)

    Its checkpoints are named after the run: ``mine-10``, ``mine-20``, ….  Made by
    :meth:`xorl_lab.lab.lab.Lab.track`.
    """

    def __init__(  # noqa: PLR0913 (made by the lab alone)
        self,
        bench: Bench,
        client: "TrainingClient",
        name: str,
        settings: dict[str, Any],
        knobs: dict[str, float],
        save_every: int,
        budget: Budget | None = None,
        quiet: bool = False,
    ) -> None:
        check_run_name(name)
        if not hasattr(client, "save_state"):
            raise ConfigError(
                f"client is {client!r}: pass the training client that the loop uses, such as "
                "lab.service.create_lora_training_client(lab.model)"
            )
        check_integer("save_every", save_every, 0)
        for knob, value in knobs.items():
            _require_number(f"knob {knob!r}", value)
        store = bench.weights.store
        self._writer: Writer = store.create(
            name=name, kind="custom", model=client.base_model, settings=settings
        )
        control = Control(
            knobs, _require_number, lambda: client.version, partial(note_change, self._writer)
        )
        self._mine = control
        self._live = Live(control, client)
        super().__init__(store.run(self._writer.info.id), self._live, bench)
        self._autosave = Autosave(
            client, None, self._writer, every=save_every, keep=0, prefix=self.name, budget=budget
        )
        self._step = self._logged = 0
        self._began = time.perf_counter()
        self._entered, self._quiet = False, quiet
        self._record: StepRecord | None = None

    @property
    def knobs(self) -> Mapping[str, float]:
        """The numbers that may be changed on the way, as they are now."""
        return self._mine.knobs()

    def steps(self, count: int) -> Iterator[int]:
        """Numbers of the next steps, with a stopping point before each.

        Ends early when the run is stopped, by its button or by Ctrl-C; a second Ctrl-C raises.

        Args:
            count: how many.

        Raises:
            ConfigError: outside of ``with``, or ``count`` is no integer > 0.
        """
        check_integer("count", count, 1)
        if not self._entered or not self.going:
            raise ConfigError(
                f"run {self.name!r} is not under way: take its steps in "
                f"`with lab.track({self.name!r}, client) as run:`"
            )
        return self._turns(self._step + count)

    def _turns(self, last: int) -> Iterator[int]:
        self._writer.status("running", total=last)
        tell = console.Teller(last, quiet=self._quiet or console.in_live_notebook())
        with interrupts(self._mine):
            while self._step < last:
                await_turn(self._mine, self._writer)
                if self._mine.stopping:
                    return
                self._step += 1
                self._mine.begin(self._step)
                self._began = time.perf_counter()
                yield self._step
                self._autosave.after(self._step)
                if self._record is not None and self._logged == self._step:
                    tell.step(self._record)

    def log(
        self,
        metrics: Mapping[str, float],
        rollouts: Sequence[Group] = (),
        warnings: Sequence[str] = (),
    ) -> None:
        """Record the present step, once.

        Args:
            metrics: numbers by name; ``seconds:step`` and memory in use are added, and what
                ``optim_step`` calls ``step`` is recorded as ``updates``.
            rollouts: groups of completions.
            warnings: sentences for the person at the screen.

        Raises:
            ConfigError: outside of a step, a second time in one, or what is passed is of another
                type.
        """
        if self._step == 0 or self._logged == self._step:
            what = "no step was begun" if self._step == 0 else f"step {self._step} is recorded"
            raise ConfigError(f"{what}: call log once in each turn of `for step in run.steps(…)`")
        seconds = {"seconds:step": time.perf_counter() - self._began}
        known = seconds | in_use() | _numbers(metrics)
        self._record = StepRecord(self._step, known, _groups(rollouts), _sentences(warnings))
        self._writer.step(self._record)
        self._logged = self._step

    def __enter__(self) -> Self:
        if self._entered:
            raise ConfigError(f"run {self.name!r} was begun before: make another with lab.track")
        self._entered = True
        self._mine.drive(True)
        active.RUNS.add(self)
        self._writer.event("start", "begun")
        if console.in_live_notebook() and not self._quiet:
            self.show()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._ended()
            else:
                self._broken(error)
        except BaseException as trouble:
            if error is None:
                with suppress(LabError):
                    self._writer.status("failed", described(trouble))
                raise
        finally:
            active.RUNS.discard(self)
            self._mine.drive(False)
            try:
                self._writer.close()
            finally:
                self._live.settle(error)

    def _ended(self) -> None:
        """The loop is through, or was stopped between two steps."""
        self._autosave.save(self._step)
        ending = "stopped" if self._mine.stopping else "finished"
        self._writer.event("end", ending, step=self._step or None)
        self._writer.status(ending)

    def _broken(self, error: BaseException) -> None:
        """Save what lies behind the last recorded step, if the weights are still those."""
        state = "failed" if isinstance(error, Exception) else "stopped"
        self._writer.event("error", described(error), step=self._step or None)
        self._writer.status(state, described(error))
        if self._logged == self._step or self._mine.untouched:
            self._autosave.save(self._logged)


def _require_number(name: str, value: object) -> None:
    """What the caller's numbers may be is the caller's business, as long as they are numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} is {value!r}: pass a number")


def _numbers(metrics: object) -> dict[str, float]:
    if not isinstance(metrics, Mapping):
        raise ConfigError(f"metrics is a {type(metrics).__name__}: pass a dict of numbers by name")
    found: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            found["updates" if name == "step" else str(name)] = float(value)
        except (TypeError, ValueError):
            raise ConfigError(f"metric {name!r} is {value!r:.80}: pass a number") from None
    return found


def _groups(rollouts: object) -> list[Group]:
    if not isinstance(rollouts, Sequence) or not all(isinstance(g, Group) for g in rollouts):
        raise ConfigError(
            f"rollouts is {rollouts!r:.80}: pass a list of xorl_lab.types.Group, one per prompt"
        )
    return list(rollouts)


def _sentences(warnings: object) -> list[str]:
    if isinstance(warnings, str) or not isinstance(warnings, Sequence):
        raise ConfigError(f"warnings is {warnings!r:.80}: pass a list of sentences")
    return [str(w) for w in warnings]
