"""Where a run is shown: in a live notebook, or as lines on a terminal."""

import sys
import time
from importlib import import_module
from typing import Any

from rich.console import Console
from rich.text import Text

from xorl_lab.types import StepRecord

SHOWN = ("reward", "loss:mean", "kl_base", "kl_sampler", "held_out:accuracy", "held_out:loss")
"""Numbers of a step's line, those that it has."""
MACHINE = ("seconds:", "memory:")
"""Begin the names of what says more of the machine than of the run."""
TOTALS = ("seconds:total", "seconds:step")
"""What says how long the whole step took."""

SOON, OFTEN = 1.0, 0.25
"""Seconds before progress is shown, and between two looks."""


def in_live_notebook() -> bool:
    """True in a kernel whose page a thread can update: JupyterLab, not Colab or a script."""
    if "ipykernel" not in sys.modules or "google.colab" in sys.modules:
        return False
    shell: Any = import_module("IPython").get_ipython()
    return shell is not None and hasattr(shell, "kernel")


class Counting:
    """One line on standard error that says how far a work is, once it takes more than a moment.

    Args:
        quiet: write nothing.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._began = self._last = time.monotonic()
        self._told = False

    def __call__(self, done: int, total: int, what: str) -> None:
        """``done`` of ``total`` are done, and ``what`` is what they are or what comes next."""
        now = time.monotonic()
        if not self._quiet and now - self._began > SOON and now - self._last > OFTEN:
            self._write(done, total, what)
            self._last, self._told = now, True

    def finish(self, total: int, what: str) -> None:
        """All are done."""
        if self._told:
            self._write(total, total, what)
            sys.stderr.write("\n")

    def _write(self, done: int, total: int, what: str) -> None:
        sys.stderr.write(f"\r{done} of {total} {what}".ljust(60))
        sys.stderr.flush()


class Teller:
    """Writes a line for each step to standard error, and each warning once.

    Args:
        total: number of steps.
        quiet: write nothing.
    """

    def __init__(self, total: int, *, quiet: bool) -> None:
        self._total = total
        self._output = None if quiet else Console(stderr=True)
        self._warned: set[str] = set()

    def step(self, record: StepRecord) -> None:
        """A step was taken."""
        metrics = record.metrics
        names = [name for name in SHOWN if name in metrics]
        if not names:  # of a loop of the caller's own
            names = [name for name in metrics if not name.startswith(MACHINE)][: len(SHOWN)]
        numbers = [f"{name} {metrics[name]:.4g}" for name in names]
        numbers += [f"{metrics[name]:.1f} s" for name in TOTALS if name in metrics]
        self._print(Text("   ".join((f"step {record.step} of {self._total}", *numbers))))
        for warning in record.warnings:
            self.warn(warning)

    def warn(self, warning: str) -> None:
        """Something that the person at the screen should know."""
        if warning not in self._warned:
            self._warned.add(warning)
            self._print(Text(f"  {warning}", style="yellow"))

    def _print(self, line: Text) -> None:
        if self._output is not None:
            self._output.print(line, soft_wrap=True)
