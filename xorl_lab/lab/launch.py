"""Beginning a run, or taking one up again: record, model, loop, and who drives it."""

import atexit
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from xorl_lab.errors import CancelledError, LabError
from xorl_lab.lab.autosave import Autosave
from xorl_lab.lab.control import Control
from xorl_lab.lab.driver import drive, interrupts
from xorl_lab.lab.jobs import Job, Settings
from xorl_lab.lab.run import Links, Live, Run
from xorl_lab.store import Reader, Writer
from xorl_lab.types import StepRecord

if TYPE_CHECKING:
    from xorl_lab.client import TrainingClient
    from xorl_lab.client.rest import RestClient

PATIENCE = 20.0
"""Seconds that the end of the process waits for runs to end and save."""
_ACTIVE: "weakref.WeakSet[Run]" = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run begins."""

    client: "TrainingClient"
    """The model, with the weights to begin with."""
    rest: "RestClient | None"
    """Looks after its checkpoints."""
    done: int
    """Steps that lie behind those weights."""
    preflight: bool
    """Try the task before the first step."""
    save_every: int
    """Steps between two checkpoints; 0 = at the end only."""
    keep: int
    """How many checkpoints to keep; 0 = all."""


def launch(  # noqa: PLR0913
    job: Job,
    reader: Reader,
    writer: Writer,
    start: Start,
    links: Links,
    *,
    told: Callable[[StepRecord], None],
    background: bool,
    show: bool,
) -> Run:
    """Begin to take the steps of a job.

    Args:
        job: what to do.
        reader: of the record.
        writer: of the record; closed at the end.
        start: where to begin.
        links: what may follow.
        told: called with each step.
        background: on a thread of its own, and return at once; else return at the end.
        show: in the foreground, display the dashboard first.

    Raises:
        ConfigError, DataError: the data or settings do not fit the model; nothing was begun.
        LabError: in the foreground, what made the run fail.
    """
    control = Control(
        job.knobs(),
        lambda name, value: void(job.with_knobs({name: value})),
        lambda: start.client.version,
        lambda name, old, new: writer.event(
            "knob",
            f"{name}: {old:g} → {new:g}",
            step=loop.last or None,
            data={"name": name, "old": old, "new": new},
        ),
    )
    autosave = Autosave(
        start.client, start.rest, writer, every=start.save_every, keep=start.keep, saved=start.done
    )
    try:
        steps = job.steps(start.client, start.done, lambda given: with_knobs(given, control))
    except BaseException as error:
        writer.status("failed", str(error))
        writer.close()
        raise
    run = Run(reader, Live(control, start.client, links))
    loop = Loop(run, control, writer, autosave, start)
    _ACTIVE.add(run)

    def work() -> None:
        loop.run(lambda: _take(loop, job, steps, told))

    if background:
        threading.Thread(target=work, name=f"xorl-{run.name}", daemon=True).start()
        return run
    if show:
        run.show()
    with interrupts(control):
        work()
    return run.wait()


class Loop:
    """A loop under way, and how it ends."""

    def __init__(
        self, run: Run, control: Control, writer: Writer, autosave: Autosave, start: Start
    ) -> None:
        self.of = run
        self.control = control
        self.writer = writer
        self.autosave = autosave
        self.start = start
        self.last = start.done
        self._version = start.client.version

    def told(self, record: StepRecord) -> None:
        """A step was recorded, and the weights are those behind it."""
        self.last = record.step
        self._version = self.start.client.version

    def run(self, work: Callable[[], str]) -> None:
        """Do the work and settle its end: state, last checkpoint, whoever waits."""
        error: BaseException | None = None
        try:
            self.writer.event("start", "begun" if not self.last else f"going on at {self.last}")
            ending = work()
            self._save()
            self.writer.event("end", ending, step=self.last or None)
            self.writer.status(ending)
        except BaseException as caught:  # noqa: BLE001 (handed to whoever waits)
            error = caught
            self._failed(caught)
        finally:
            self.writer.close()
            _ACTIVE.discard(self.of)
            if self.of.live is not None:
                self.of.live.settle(error)

    def _failed(self, error: BaseException) -> None:
        text = str(error) if isinstance(error, LabError) else f"{type(error).__name__}: {error}"
        for tell in (
            self._save,
            lambda: self.writer.event("error", text, step=self.last or None),
            lambda: self.writer.status("failed", text),
        ):
            try:
                tell()
            except LabError:  # the first error is the one to see
                continue

    def _save(self) -> None:
        """Save, if the weights are those behind the last recorded step."""
        if self.last and self.start.client.version == self._version:
            self.autosave.save(self.last)


def others(root: object) -> list[Run]:
    """Runs under way in this process whose record lies in the same store."""
    return [run for run in list(_ACTIVE) if run.reader.path == root and run.going]


def with_knobs(given: Settings, control: Control) -> Settings:
    """The settings of the next step."""
    return replace(given, **control.knobs())  # pyright: ignore[reportArgumentType]


def void(_: object) -> None:
    """Drop a value."""


def _take(loop: Loop, job: Job, steps: Any, told: Callable[[StepRecord], None]) -> str:  # noqa: ANN401
    if loop.start.preflight and not _examined(loop, job):
        return "stopped"

    def each(record: StepRecord) -> None:
        loop.told(record)
        told(record)

    return drive(steps, loop.writer, loop.control, loop.autosave, each)


def _examined(loop: Loop, job: Job) -> bool:
    """Try the task; False if the run was stopped meanwhile."""
    if not loop.control.enter():
        return False
    try:
        for sentence in job.examine(loop.start.client, job.settings):
            loop.writer.event("warning", sentence)
    except CancelledError:
        if loop.control.stopping:
            return False
        raise
    finally:
        loop.control.leave()
    return True


@atexit.register
def _end_all() -> None:
    """Let runs that are under way end and save when the process does."""
    active = list(_ACTIVE)
    for run in active:
        run.stop(wait=False)
    for run in active:
        if run.live is not None:
            run.live.ended.wait(PATIENCE)
