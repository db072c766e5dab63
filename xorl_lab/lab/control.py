"""Steering a run from outside: pause, stop, knobs."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

from xorl_lab import futures
from xorl_lab.errors import ConfigError
from xorl_lab.recipes.settings import suggest

POLL = 0.02
"""Seconds between looks at what a step that is to be given up is waiting for."""
_ON_BEHALF: ContextVar["Control | None"] = ContextVar("the run whose step this is", default=None)
"""Known to what a step calls in threads of their own, too: reward functions have one."""


@dataclass(frozen=True, slots=True)
class Change:
    """A knob that was turned."""

    after: int
    """The last step that does not see it."""
    name: str
    """Of the knob."""
    old: float
    """Its value before."""
    new: float
    """Its value from the next step on."""


class Control:
    """What widgets, signals and other threads ask of a run, and what the run's loop does about it.

    It is a :class:`~xorl_lab.types.RunCommands`.

    Args:
        knobs: what may be changed on the way, with its first value.
        check: raises a ConfigError if a value does not fit its knob.
        version: number of the weights as they are now.
        changed: told of each change.
        done: steps taken already.
        planned: changes to be made again once their steps are taken, unless the knob is turned
            before.
    """

    def __init__(
        self,
        knobs: Mapping[str, float],
        check: Callable[[str, float], None],
        version: Callable[[], int],
        changed: Callable[[Change], None],
        *,
        done: int = 0,
        planned: Sequence[Change] = (),
    ) -> None:
        self._knobs = dict(knobs)
        self._in_use = dict(knobs)
        self._check = check
        self._version = version
        self._changed = changed
        self._begun = done
        self._planned = list(planned)
        # The lock is one that its owner may take again: the handler of a signal runs in between.
        self._signal = threading.Condition()
        self._paused = False
        self._steps = 0
        self._stopping = False
        self._why = ""
        self._thread: int | None = None
        self._driver: int | None = None
        self._started_with = 0

    # What others ask.

    def pause(self) -> None:
        """Halt before the next step."""
        self._tell(paused=True)

    def resume(self) -> None:
        """Go on after a pause."""
        self._tell(paused=False)

    def step(self) -> None:
        """Run one more step, then pause."""
        self._tell(paused=True, steps=1)

    def stop(self, why: str = "") -> None:
        """End the run.  A step is given up unless it has changed the weights already.

        Args:
            why: in words, for the record; empty if a person asked for it.
        """
        with self._signal:
            first, self._stopping = not self._stopping, True
            self._why = why if first else self._why
            self._signal.notify_all()
        if not first:
            return
        try:
            threading.Thread(target=self._give_up, name="xorl-stop", daemon=True).start()
        except RuntimeError:  # Python is ending, and starts no more threads
            self._give_up()

    def set(self, name: str, value: float) -> None:
        """Change a knob from the next step on.

        Raises:
            ConfigError: there is no such knob, or the value is out of its range.
        """
        if name not in self._knobs:
            hint = suggest(name, self._knobs) if self._knobs else ": this run has no knobs"
            raise ConfigError(f"{name!r} cannot be changed while the run goes on{hint}")
        self._check(name, value)
        with self._signal:
            self._planned = [c for c in self._planned if c.name != name]
            change = self._turn(name, float(value))
        self._report([change])

    def knobs(self) -> dict[str, float]:
        """What can be changed, and its value from the next step on."""
        with self._signal:
            return dict(self._knobs)

    # What the loop does.

    @property
    def in_use(self) -> dict[str, float]:
        """The knobs as they were when the present step began."""
        return self._in_use

    @property
    def stopping(self) -> bool:
        """True once the run was asked to end."""
        return self._stopping

    @property
    def why(self) -> str:
        """Why it was asked to end, if that was not a person's wish."""
        return self._why

    @property
    def paused(self) -> bool:
        """True if no step is due."""
        with self._signal:
            return self._halted()

    @property
    def here(self) -> bool:
        """True for whoever must not wait for the run's end, as it is its own doing."""
        mine = threading.get_ident() in (self._thread, self._driver)
        return mine or _ON_BEHALF.get() is self

    @property
    def begun(self) -> int:
        """Number of the latest step that was begun."""
        return self._begun

    def drive(self, here: bool) -> None:
        """Steps are taken by this thread from now on; or no longer, at the end."""
        self._driver = threading.get_ident() if here else None

    def wait(self, seconds: float) -> bool:
        """While paused, wait at most so long.  True if a step is due or the run is to end."""
        with self._signal:
            return self._signal.wait_for(lambda: not self._halted(), seconds)

    def enter(self, step: int) -> bool:
        """A step begins on this thread; False if it must not, as the run is to end.

        Args:
            step: its number; that of the last one for what is done between steps.
        """
        with self._signal:
            if self._stopping:
                return False
            changes = self._begin(step)
            self._thread = threading.get_ident()
        _ON_BEHALF.set(self)
        self._report(changes)
        return True

    def begin(self, step: int) -> None:
        """A step begins that is not to be given up."""
        with self._signal:
            changes = self._begin(step)
        self._report(changes)

    def leave(self) -> None:
        """The step has ended."""
        _ON_BEHALF.set(None)
        with self._signal:
            self._thread = None

    @property
    def untouched(self) -> bool:
        """True if the weights are those with which the latest step began."""
        return self._version() == self._started_with

    def _begin(self, step: int) -> list[Change]:
        due = [c for c in self._planned if c.after < step]
        self._planned = [c for c in self._planned if c.after >= step]
        changes = [self._turn(c.name, c.new) for c in due]
        self._in_use = dict(self._knobs)
        if step > self._begun:
            self._steps = max(0, self._steps - 1)
        self._begun = step
        self._started_with = self._version()
        return changes

    def _turn(self, name: str, value: float) -> Change:
        old, self._knobs[name] = self._knobs[name], value
        return Change(self._begun, name, old, value)

    def _report(self, changes: Sequence[Change]) -> None:
        for change in changes:
            if change.old != change.new:
                self._changed(change)

    def _halted(self) -> bool:
        return self._paused and not self._steps and not self._stopping

    def _tell(self, *, paused: bool, steps: int = 0) -> None:
        with self._signal:
            self._paused = paused
            self._steps = self._steps + steps if steps else 0
            self._signal.notify_all()

    def _give_up(self) -> None:
        """Cancel whatever the step waits for, until it ends or has changed the weights."""
        while True:
            with self._signal:
                thread = self._thread
            if thread is None:
                return
            future = futures.awaited_by(thread)
            # A future of this step is held here: if the weights move now, it has ended and
            # cancelling it does nothing.  An optimizer step is let through: its gradient would
            # stay behind, for whoever takes the next one.
            if future is not None and self.untouched and not _is_update(future):
                future.cancel()
            time.sleep(POLL)


def _is_update(future: object) -> bool:
    return getattr(future, "name", "") == "optim_step"
