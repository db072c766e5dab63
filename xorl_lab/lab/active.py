"""The runs under way in this process, and what happens to them when it ends."""

import atexit
import weakref
from collections.abc import Sequence
from pathlib import Path

from xorl_lab.errors import ConfigError
from xorl_lab.lab.run import Run

PATIENCE = 20.0
"""Seconds that the end of the process waits for runs to end and save."""
RUNS: "weakref.WeakSet[Run]" = weakref.WeakSet()
"""Those that are driven here."""


def others(root: Path) -> list[Run]:
    """Runs under way in this process whose record lies in the same store."""
    here = root.resolve()
    return [run for run in list(RUNS) if run.going and run.reader.path.resolve() == here]


def end(runs: Sequence[Run], why: str = "", patience: float = 60.0) -> list[str]:
    """Stop runs under way in this process, and wait for them.

    A loop of the caller's own is left alone: only its caller can end it.

    Args:
        runs: to be ended.
        why: in words, for their record.
        patience: seconds to wait for each.

    Returns:
        Names of those that were.

    Raises:
        ConfigError: one does not end.
    """
    going = [run for run in runs if run.info.kind != "custom"]
    for run in going:
        assert run.live is not None
        run.live.control.stop(why)
    for run in going:
        assert run.live is not None
        if not run.live.control.here and not run.live.ended.wait(patience):
            raise ConfigError(
                f"run {run.name!r} does not end, as its reward function does not return: restart "
                "the kernel, or pass concurrent=True to leave it alone"
            )
    return [run.name for run in going]


@atexit.register
def _end_all() -> None:
    """Let runs that are under way end and save when the process does."""
    lives = [r.live for r in list(RUNS) if r.live is not None and r.info.kind != "custom"]
    for live in lives:
        live.control.stop()
    for live in lives:
        live.ended.wait(PATIENCE)
