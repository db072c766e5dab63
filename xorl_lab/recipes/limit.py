"""A time limit for what a person writes, in any thread of any program.

Signals would end a call only in the main thread of a program, which a notebook's runs are not in.
So a call is made in a thread of its own and no longer waited for when its time is up.  A loop in
Python is ended then; what sleeps, or waits for a network, cannot be, and its thread is abandoned.
What holds the interpreter's lock all the time, as a regular expression may, cannot be limited.
"""

import contextvars
import ctypes
import queue
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from xorl_lab.errors import DataError

SECONDS = 60.0
"""For each call, unless something else is asked for."""
STUCK = 8
"""Abandoned calls that may be going on at a time; with one more the whole is given up."""
GRACE = 0.5
"""Seconds that a loop is given to end."""
ARRIVAL = 0.1
"""Seconds for which a thread that is to end waits for what ends it."""
NAME = "xorl-reward"
"""Of the threads."""
_OURS = frozenset(Path(__file__).with_name(name) for name in ("limit.py", "environments.py"))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a call."""

    value: object = None
    """What it returned."""
    error: Exception | None = None
    """What it raised, with the traceback."""
    late: str | None = None
    """Set if its time was up: in words, and where it was."""


class Limit:
    """Makes calls one after the other, each for at most so many seconds.

    >>> Limit(5.0)(lambda: 2 + 2).value
    4

    Args:
        seconds: for each call; None = any time, in the caller's own thread.
        what: names the limit in messages.
    """

    def __init__(self, seconds: float | None, what: str = "reward_timeout") -> None:
        self.seconds = seconds
        self._what = what
        self._worker: _Worker | None = None
        self._stuck: list[_Worker] = []

    def __call__(self, function: Callable[[], object]) -> Outcome:
        """Call the function.

        Raises:
            DataError: too many calls before this one never ended.
            BaseException: what the function raised, if it is no Exception.
        """
        if self.seconds is None:
            return _outcome(function)
        self._stuck = [worker for worker in self._stuck if worker.alive]
        if len(self._stuck) >= STUCK:
            raise DataError(
                f"{len(self._stuck)} calls took longer than {self._what}={self.seconds:g} s and "
                "still go on, in threads that cannot be ended: let the function wait for nothing "
                "without a time limit of its own, and restart the kernel to be rid of them"
            )
        if self._worker is None:
            self._worker = _Worker()
            weakref.finalize(self, self._worker.retire)
        call = _Call(function)
        try:
            self._worker.give(call)
            ended = call.ended.wait(self.seconds)
        except BaseException:  # an interrupt: nobody waits for this call any more
            self._abandon(self._worker, call)
            raise
        if not ended:
            place = self._abandon(self._worker, call)
            if place is not None:
                left = " (its thread cannot be ended and is left alone)" if self._stuck else ""
                return Outcome(
                    late=f"it took longer than {self._what}={self.seconds:g} s and was cut off"
                    f"{place}{left}"
                )
        if call.fatal is not None:
            raise call.fatal
        return call.outcome

    def _abandon(self, worker: "_Worker", call: "_Call") -> str | None:
        """End a call's thread if possible; says where it was, or None if it had just ended."""
        place = worker.cut(call)
        if place is None:
            return None
        self._worker = None
        if worker.alive:
            self._stuck.append(worker)
        return place


class _CutOff(BaseException):
    """Ends a call from outside; no Exception, so that a function's own ``except`` lets it pass."""


class _Call:
    """One call, and what became of it."""

    def __init__(self, function: Callable[[], object]) -> None:
        self.function = function
        self.context = contextvars.copy_context()
        self.ended = threading.Event()
        self.outcome = Outcome()
        self.fatal: BaseException | None = None

    def make(self) -> None:
        """Make the call; what it raises is kept."""
        try:
            self.outcome = self.context.run(_outcome, self.function)
        except _CutOff:
            raise
        except BaseException as error:  # noqa: BLE001 (raised again where it is waited for)
            self.fatal = error


class _Worker:
    """A thread that makes calls until one of them is cut off."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._cut = False
        self._thread = threading.Thread(target=self._run, name=NAME, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """True if the thread goes on."""
        return self._thread.is_alive()

    def give(self, call: _Call) -> None:
        """Let the thread make a call."""
        self._calls.put(call)

    def retire(self) -> None:
        """Let the thread end when it has nothing to do."""
        self._calls.put(None)

    def cut(self, call: _Call) -> str | None:
        """End the thread in the middle of a call, if it can be ended.

        Returns:
            Where the call was, to be put into a sentence; None if it had just ended by itself.
        """
        with self._lock:
            if call.ended.is_set():
                return None
            self._cut = True
            thread = self._thread.ident or 0
            frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage] (documented)
            place = _place(frames.get(thread))
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread), ctypes.py_object(_CutOff)
            )
        self._thread.join(GRACE)
        return place

    def _run(self) -> None:
        try:
            while (call := self._calls.get()) is not None:
                call.make()
                with self._lock:
                    call.ended.set()
                    cut = self._cut
                del call
                if cut:
                    # What ends this thread is on its way and is to arrive here, unless the call
                    # has caught it.
                    end = time.monotonic() + ARRIVAL
                    while time.monotonic() < end:
                        time.sleep(0.001)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(
                        ctypes.c_ulong(threading.get_ident()), None
                    )
                    return
        except _CutOff:
            pass


def described(error: Exception) -> str:
    """Type, message, and the line of the person's function, of an :attr:`Outcome.error`."""
    text = f"{type(error).__name__}: {error}"
    frames = _theirs(traceback.extract_tb(error.__traceback__))
    return f"{text} ({_line(frames[0])})" if frames else text


def _outcome(function: Callable[[], object]) -> Outcome:
    try:
        return Outcome(function())
    except Exception as error:  # noqa: BLE001 (whatever a person's function raises is data)
        return Outcome(error=error)


def _place(frame: FrameType | None) -> str:
    """The line of the person's function that a thread is at."""
    frames = traceback.extract_stack(frame) if frame is not None else []
    inner = [i for i, f in enumerate(frames) if f.filename == __file__ and f.name == "_outcome"]
    behind = _theirs(frames[inner[-1] + 1 :]) if inner else []
    return f" at {_line(behind[0])}" if behind else ""


def _theirs(frames: Sequence[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Without those of the modules that make the call."""
    return [f for f in frames if Path(f.filename) not in _OURS]


def _line(frame: traceback.FrameSummary) -> str:
    place = f"line {frame.lineno} of {frame.name}"
    return f"{place}: {frame.line}" if frame.line else place
