"""Steering a run from outside: pause, stop, knobs."""

import threading
import time
from collections.abc import Callable, Mapping

from xorl_lab import futures
from xorl_lab.errors import ConfigError

POLL = 0.02
"""Seconds between looks at what a step that is to be given up is waiting for."""


class Control:
    """What widgets, signals and other threads ask of a run, and what the run's loop does about it.

    It is a :class:`~xorl_lab.types.RunCommands`.

    Args:
        knobs: what may be changed on the way, with its first value.
        check: raises a ConfigError if a value does not fit its knob.
        version: number of the weights as they are now.
        changed: called with a knob's name, old and new value when it was changed.
    """

    def __init__(
        self,
        knobs: Mapping[str, float],
        check: Callable[[str, float], None],
        version: Callable[[], int],
        changed: Callable[[str, float, float], None],
    ) -> None:
        self._knobs = dict(knobs)
        self._check = check
        self._version = version
        self._changed = changed
        self._signal = threading.Condition()
        self._paused = False
        self._steps = 0
        self._stopping = False
        self._thread: int | None = None
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

    def stop(self) -> None:
        """End the run.  A step is given up unless it has changed the weights already."""
        with self._signal:
            first, self._stopping = not self._stopping, True
            self._signal.notify_all()
        if first:
            threading.Thread(target=self._give_up, name="xorl-stop", daemon=True).start()

    def set(self, name: str, value: float) -> None:
        """Change a knob from the next step on.

        Raises:
            ConfigError: there is no such knob, or the value is out of its range.
        """
        if name not in self._knobs:
            known = ", ".join(sorted(self._knobs)) or "none"
            raise ConfigError(f"{name!r} cannot be changed while the run goes on: choose {known}")
        self._check(name, value)
        with self._signal:
            old, self._knobs[name] = self._knobs[name], float(value)
        if old != value:
            self._changed(name, old, float(value))

    def knobs(self) -> dict[str, float]:
        """What can be changed, and its value."""
        with self._signal:
            return dict(self._knobs)

    # What the loop does.

    @property
    def stopping(self) -> bool:
        """True once the run was asked to end."""
        return self._stopping

    @property
    def paused(self) -> bool:
        """True if no step is due."""
        with self._signal:
            return self._halted()

    def wait(self, seconds: float) -> bool:
        """While paused, wait at most so long.  True if a step is due or the run is to end."""
        with self._signal:
            return self._signal.wait_for(lambda: not self._halted(), seconds)

    def enter(self) -> bool:
        """A step begins on this thread; False if it must not, as the run is to end."""
        with self._signal:
            if self._stopping:
                return False
            self._steps = max(0, self._steps - 1)
            self._started_with = self._version()
            self._thread = threading.get_ident()
            return True

    def leave(self) -> None:
        """The step has ended."""
        with self._signal:
            self._thread = None

    @property
    def untouched(self) -> bool:
        """True if the weights are those with which the latest step began."""
        return self._version() == self._started_with

    def _halted(self) -> bool:
        return self._paused and not self._steps and not self._stopping

    def _tell(self, *, paused: bool, steps: int = 0) -> None:
        with self._signal:
            self._paused = paused
            self._steps = self._steps + steps if paused else 0
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
            # cancelling it does nothing.
            if future is not None and self.untouched:
                future.cancel()
            time.sleep(POLL)
