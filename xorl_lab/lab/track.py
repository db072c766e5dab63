"""A loop of one's own, recorded, shown and steered like those of the recipes."""

import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from xorl_lab.errors import ConfigError, LabError
from xorl_lab.lab import console
from xorl_lab.lab.autosave import Autosave
from xorl_lab.lab.control import Control
from xorl_lab.lab.driver import await_turn, interrupts
from xorl_lab.lab.run import Live, Run
from xorl_lab.store import Store, Writer
from xorl_lab.types import Group, StepRecord

if TYPE_CHECKING:
    from xorl_lab.client import TrainingClient


class Track(Run):
    """A run whose steps the caller takes.

    ::

        with lab.track("mine", client) as run:
            for step in run.steps(100):
                output = client.forward_backward(data, loss_fn="cross_entropy").result()
                client.optim_step({"learning_rate": run.knobs["learning_rate"]}).result()
                run.log(output.metrics)

    Made by :meth:`xorl_lab.lab.lab.Lab.track`.
    """

    def __init__(
        self,
        store: Store,
        client: "TrainingClient",
        name: str,
        settings: dict[str, Any],
        knobs: dict[str, float],
        save_every: int,
    ) -> None:
        self._writer: Writer = store.create(
            name=name, kind="custom", model=client.base_model, settings=settings
        )
        control = Control(knobs, _any, lambda: client.version, self._note)
        self._mine = control
        self._live = Live(control, client)
        super().__init__(store.run(self._writer.info.id), self._live)
        self._autosave = Autosave(
            client, None, self._writer, every=save_every, keep=0, prefix="auto"
        )
        self._step = self._logged = 0
        self._began = time.perf_counter()

    @property
    def knobs(self) -> Mapping[str, float]:
        """The numbers that may be changed on the way, as they are now."""
        return self._mine.knobs()

    def steps(self, count: int) -> Iterator[int]:
        """Numbers of the next steps, with a stopping point before each.

        Ends early when the run is stopped, by its button or by Ctrl-C; a second Ctrl-C raises.

        Args:
            count: how many.
        """
        last = self._step + count
        self._writer.status("running", total=last)
        tell = console.teller(last, quiet=console.in_live_notebook())
        with interrupts(self._mine):
            while self._step < last:
                await_turn(self._mine, self._writer)
                if self._mine.stopping:
                    return
                self._step += 1
                self._began = time.perf_counter()
                yield self._step
                if self._logged == self._step:
                    self._autosave.after(self._step)
                    tell(self._record)

    def log(
        self,
        metrics: Mapping[str, float],
        rollouts: Sequence[Group] = (),
        warnings: Sequence[str] = (),
    ) -> None:
        """Record the present step, once.

        Args:
            metrics: numbers by name; ``seconds:step`` is added.
            rollouts: groups of completions.
            warnings: sentences for the person at the screen.

        Raises:
            ConfigError: outside of a step, or a second time in one.
        """
        if self._step == 0 or self._logged == self._step:
            what = "no step was begun" if self._step == 0 else f"step {self._step} is recorded"
            raise ConfigError(f"{what}: call log once in each turn of `for step in run.steps(…)`")
        seconds = {"seconds:step": time.perf_counter() - self._began}
        numbers = {str(k): float(v) for k, v in metrics.items()}
        self._record = StepRecord(
            self._step, seconds | numbers, list(rollouts), [str(w) for w in warnings]
        )
        self._writer.step(self._record)
        self._logged = self._step

    def __enter__(self) -> Self:
        self._writer.event("start", "begun")
        if console.in_live_notebook():
            self.show()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        stopped = self._mine.stopping or isinstance(error, KeyboardInterrupt)
        try:
            # A step that was begun and not recorded may have moved the weights.
            if self._logged == self._step and (error is None or stopped):
                self._autosave.save(self._logged)
            if error is None or stopped:
                self._writer.status("stopped" if stopped else "finished")
            else:
                named = isinstance(error, LabError)
                text = str(error) if named else f"{type(error).__name__}: {error}"
                self._writer.event("error", text, step=self._step or None)
                self._writer.status("failed", text)
        finally:
            self._writer.close()
            self._live.settle()

    def _note(self, name: str, old: float, new: float) -> None:
        data = {"name": name, "old": old, "new": new}
        self._writer.event("knob", f"{name}: {old:g} → {new:g}", data=data)


def _any(name: str, value: float) -> None:
    """What the caller's numbers may be is the caller's business."""
    del name, value
