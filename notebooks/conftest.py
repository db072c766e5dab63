"""What nbval does not compare: drawings, what differs between machines, and what cannot run."""

import os
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
LEFT_OUT: list[str] = []


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out what needs a SGLang server where there is none; CI has to have it."""
    if collection_path.name not in NEED_SGLANG or os.environ.get("CI") == "true":
        return None
    from xorl_lab.samplers.sglang.server import interpreter  # noqa: PLC0415 (imports torch)

    if interpreter() is not None:
        return None
    LEFT_OUT.append(collection_path.name)
    return True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was left out."""
    for name in dict.fromkeys(LEFT_OUT):
        terminalreporter.write_line(f"{name} was left out, as it needs SGLang: run `make sglang`")


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Leave these kinds of output out of the comparison; text and stdout stay in."""
    if hasattr(collector, "skip_compare"):
        collector.skip_compare = (*collector.skip_compare, *SKIPPED)
