"""What a widget may ask of a run.  Whoever drives the run hands this in; a widget knows no more."""

from collections.abc import Mapping
from typing import Protocol


class RunCommands(Protocol):
    """Steering of one run: methods return at once, and it obeys at its next stopping point."""

    def pause(self) -> None:
        """Halt before the next step."""
        ...

    def resume(self) -> None:
        """Go on after a pause."""
        ...

    def step(self) -> None:
        """Run one more step, then pause."""
        ...

    def stop(self) -> None:
        """End the run, inside a step if need be; what is finished stays, and is saved."""
        ...

    def set(self, name: str, value: float) -> None:
        """Change a knob from the next step on.

        Raises:
            ConfigError: there is no such knob, or the value is out of its range.
        """
        ...

    def knobs(self) -> Mapping[str, float]:
        """What can be changed while the run goes on, such as ``learning_rate``, and its value."""
        ...
