"""Beginning the steps of a run, and who drives them."""

import threading
import weakref
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from xorl_lab.errors import CancelledError
from xorl_lab.lab import active
from xorl_lab.lab.autosave import Autosave
from xorl_lab.lab.bench import Bench
from xorl_lab.lab.control import Change, Control
from xorl_lab.lab.driver import drive, interrupts, note_change
from xorl_lab.lab.jobs import Job, Settings
from xorl_lab.lab.live import Links, Live
from xorl_lab.lab.loop import Loop
from xorl_lab.lab.origin import Origin
from xorl_lab.lab.preflight import check_rate
from xorl_lab.lab.run import Run
from xorl_lab.store import Writer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from xorl_lab.client import TrainingClient
    from xorl_lab.lab.console import Teller
    from xorl_lab.types import StepRecord


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run begins, and how it is conducted."""

    client: "TrainingClient"
    """The model, with the weights to begin with."""
    origin: Origin
    """What lies behind them."""
    autosave: Autosave
    """Of the weights."""
    preflight: bool
    """Try the task before the first step."""
    paused: bool
    """Wait before the first step."""
    background: bool
    """On a thread of its own, and return at once; else return at the end."""
    show: bool
    """In the foreground, display the dashboard first."""
    tell: "Teller"
    """Writes lines to the terminal."""


def launch(job: Job, writer: Writer, start: Start, links: Links, bench: Bench) -> Run:
    """Begin to take the steps of a job.

    Args:
        job: what to do.
        writer: of the record; closed at the end.
        start: where to begin, and how.
        links: what may follow.
        bench: what the lab lends the run.

    Raises:
        LabError: in the foreground, what made the run fail.
    """
    done = start.origin.done
    control = Control(
        job.knobs(),
        lambda name, value: void(job.with_knobs({name: value})),
        partial(_version, weakref.ref(start.client)),
        partial(_turned, writer, start.client.lora is not None),
        done=done,
        planned=start.origin.planned,
    )
    if start.paused:
        control.pause()
    loop = Loop(start.client, control, writer, start.autosave, done)
    reader = bench.weights.store.run(writer.info.id)
    run = Run(reader, Live(control, start.client, links), bench)
    active.RUNS.add(run)

    def work() -> str:
        if start.show and not start.background:
            run.show()
        text = f"going on behind step {done}" if done else "begun"
        text += "".join(f", {name}: {was:g} → {now:g}" for name, was, now in _changes(job, start))
        planned = [asdict(change) for change in start.origin.planned]
        data = {"settings": job.described()["recipe"], "planned": planned}
        writer.event("start", text, step=done or None, data=data)
        for sentence in start.origin.warnings:
            writer.event("warning", sentence, step=done or None)
            start.tell.warn(sentence)
        steps = job.steps(start.client, done, lambda given: with_knobs(given, control))
        if start.preflight and not _examined(loop, job, start.tell):
            return "stopped"
        return _taken(loop, steps, start.tell, job.total)

    if start.background:
        name = f"xorl-{run.name}"
        threading.Thread(target=_whole, args=(run, loop, work), name=name, daemon=True).start()
        return run
    with interrupts(control):
        _whole(run, loop, work)
    return run.wait()


def with_knobs(given: Settings, control: Control) -> Settings:
    """The settings of the step under way."""
    return replace(given, **control.in_use)  # pyright: ignore[reportArgumentType]


def _changes(job: Job, start: Start) -> "list[tuple[str, float, float]]":
    """Knobs that are not what they were behind the last step: name, before, now."""
    before = start.origin.settings
    return [
        (name, float(before[name]), value)
        for name, value in job.knobs().items()
        if name in before and float(before[name]) != value
    ]


def _turned(writer: Writer, lora: bool, change: Change) -> None:
    """Record that a knob was turned, and what speaks against its new value."""
    note_change(writer, change)
    if change.name == "learning_rate":
        for sentence in check_rate(change.new, lora=lora):
            writer.event("warning", sentence, step=change.after or None)


def _version(client: "weakref.ref[TrainingClient]") -> int:
    """Of the weights now.  Who steers a run does not keep its model when it has ended."""
    found = client()
    return 0 if found is None else found.version


def void(_: object) -> None:
    """Drop a value."""


def _whole(run: Run, loop: Loop, work: "Callable[[], str]") -> None:
    """A run up to its end, which is told to whoever waits, whatever happens."""
    error: BaseException | None = None
    try:
        error = loop.run(work)
    except BaseException as interrupt:
        error = interrupt
        raise
    finally:
        active.RUNS.discard(run)
        if run.live is not None:
            run.live.settle(error)


def _taken(loop: Loop, steps: "Iterator[StepRecord]", tell: "Teller", total: int) -> str:
    def taken(record: "StepRecord") -> None:
        loop.taken(record)
        tell.step(record)

    return drive(steps, loop.control, loop.writer, taken, done=loop.last, total=total)


def _examined(loop: Loop, job: Job, tell: "Teller") -> bool:
    """Try the task; False if the run was stopped meanwhile."""
    if not loop.control.enter(loop.last):
        return False
    try:
        for sentence in job.task.examine(loop.client, job.settings):
            loop.writer.event("warning", sentence)
            tell.warn(sentence)
    except CancelledError:
        if loop.control.stopping:
            return False
        raise
    finally:
        loop.control.leave()
    return True
