"""Taking the steps of a run: on a thread of its own, or in the caller's with a graceful Ctrl-C."""

import signal
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from types import FrameType

from xorl_lab.errors import CancelledError
from xorl_lab.lab.control import Change, Control
from xorl_lab.lab.memory import in_use
from xorl_lab.store import Writer
from xorl_lab.types import StepRecord

LOOK = 0.5
"""Seconds between looks, while paused."""


def drive(
    steps: Iterator[StepRecord],
    control: Control,
    writer: Writer,
    taken: Callable[[StepRecord], None],
    *,
    done: int,
    total: int,
) -> str:
    """Take steps until they end or the run is stopped.

    Args:
        steps: the loop.
        control: asked before each step.
        writer: where they are recorded.
        taken: called with each step once it is recorded.
        done: steps that lie behind.
        total: number of the last step.

    Returns:
        ``finished`` or ``stopped``.

    Raises:
        LabError: and whatever else a step raises.
    """
    while done < total:
        await_turn(control, writer)
        if not control.enter(done + 1):
            return "stopped"
        try:
            record = next(steps, None)
        except CancelledError:
            if control.stopping:
                return "stopped"
            raise
        finally:
            control.leave()
        if record is None:
            break
        record.metrics.update(in_use())
        writer.step(record)
        done = record.step
        taken(record)
    return "finished"


def await_turn(control: Control, writer: Writer) -> None:
    """Wait while the run is paused, and record that it is."""
    if not control.paused:
        return
    writer.status("paused")
    writer.event("pause", "paused", step=control.begun or None)
    while not control.wait(LOOK):
        pass
    if not control.stopping:
        writer.status("running")
        writer.event("resume", "going on", step=control.begun or None)


def note_change(writer: Writer, change: Change) -> None:
    """Record that a knob was turned."""
    text = f"{change.name}: {change.old:g} → {change.new:g}"
    data = {"name": change.name, "old": change.old, "new": change.new}
    writer.event("knob", text, step=change.after or None, data=data)


@contextmanager
def interrupts(control: Control) -> Generator[None]:
    """The first Ctrl-C, or interrupt of the kernel, stops the run; a second one raises.

    Only on the main thread, where signals arrive; elsewhere this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if control.stopping:
            signal.default_int_handler(number, frame)
        control.stop()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
