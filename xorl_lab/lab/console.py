"""Where a run is shown: in a live notebook, or as lines on a terminal."""

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from rich.console import Console
from rich.text import Text

from xorl_lab.types import StepRecord

SHOWN = ("reward", "loss:mean", "kl_base", "kl_sampler", "held_out:accuracy", "held_out:loss")
"""Numbers of a step's line, those that it has."""


def in_live_notebook() -> bool:
    """True in a kernel whose page a thread can update: JupyterLab, not Colab or a script."""
    if "ipykernel" not in sys.modules or "google.colab" in sys.modules:
        return False
    shell: Any = import_module("IPython").get_ipython()
    return shell is not None and hasattr(shell, "kernel")


def teller(total: int, *, quiet: bool) -> Callable[[StepRecord], None]:
    """What writes a line for each step to standard error.

    Args:
        total: number of steps.
        quiet: write nothing.
    """
    if quiet:
        return lambda _: None
    output = Console(stderr=True)
    warned: set[str] = set()

    def tell(record: StepRecord) -> None:
        metrics = record.metrics
        numbers = [f"{name} {metrics[name]:.4g}" for name in SHOWN if name in metrics]
        seconds = sum(v for k, v in metrics.items() if k.startswith("seconds:"))
        line = f"step {record.step} of {total}   {'   '.join(numbers)}   {seconds:.1f} s"
        output.print(Text(line), soft_wrap=True)
        for warning in record.warnings:
            if warning not in warned:
                warned.add(warning)
                output.print(Text(f"  {warning}", style="yellow"), soft_wrap=True)

    return tell
