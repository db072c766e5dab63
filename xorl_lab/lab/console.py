"""Where a run is shown: in a live notebook, or as lines on a terminal."""

import sys
from importlib import import_module
from typing import Any

from rich.console import Console
from rich.text import Text

from xorl_lab.types import StepRecord

SHOWN = ("reward", "loss:mean", "kl_base", "kl_sampler", "held_out:accuracy", "held_out:loss")
"""Numbers of a step's line, those that it has."""
TOTALS = ("seconds:total", "seconds:step")
"""What says how long the whole step took."""


def in_live_notebook() -> bool:
    """True in a kernel whose page a thread can update: JupyterLab, not Colab or a script."""
    if "ipykernel" not in sys.modules or "google.colab" in sys.modules:
        return False
    shell: Any = import_module("IPython").get_ipython()
    return shell is not None and hasattr(shell, "kernel")


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
        numbers = [f"{name} {metrics[name]:.4g}" for name in SHOWN if name in metrics]
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
