"""What nbval does not compare: drawings, what differs between machines, and what is left out."""

import os
from functools import cache
from pathlib import Path

import pytest

SKIPPED = (
    "text/html",
    "application/vnd.plotly.v1+json",
    "application/javascript",
    "image/png",
    "image/svg+xml",
    "stderr",
)
NEED_SGLANG = ("14_sglang.ipynb",)
LONG = tuple(
    f"{name}.ipynb"
    for name in ("02_watch_and_steer", "03_teach_a_fact", "09_checkpoints", "10_many_adapters")
)
"""Left to ``make accept``, so that ``make test`` stays short; ``COURSE=whole`` runs them too."""


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out what is long, and what needs a SGLang server where there is none; CI has one."""
    return True if left_out(collection_path.name) else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was left out; whoever divides the work among processes collects nothing itself."""
    asked = {Path(argument).name for argument in terminalreporter.config.args}
    for name in (*LONG, *NEED_SGLANG):
        if name not in asked and (why := left_out(name)):
            terminalreporter.write_line(f"{name} was left out, as {why}")


@cache
def left_out(name: str) -> str:
    """Why a notebook is not run here; empty if it is."""
    if name in LONG and os.environ.get("COURSE") != "whole":
        return "it is long: run `make accept`, or set COURSE=whole"
    if name in NEED_SGLANG and os.environ.get("CI") != "true":
        from xorl_lab.samplers.sglang.server import interpreter  # noqa: PLC0415 (imports torch)

        return "" if interpreter() else "it needs SGLang: run `make sglang`"
    return ""


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Leave these kinds of output out of the comparison; text and stdout stay in."""
    if hasattr(collector, "skip_compare"):
        collector.skip_compare = (*collector.skip_compare, *SKIPPED)
