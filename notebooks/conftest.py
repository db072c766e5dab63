"""What nbval does not compare: drawings, and what differs between machines."""

import pytest

SKIPPED = (
    "text/html",
    "application/vnd.plotly.v1+json",
    "application/javascript",
    "image/png",
    "image/svg+xml",
    "stderr",
)


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Leave these kinds of output out of the comparison; text and stdout stay in."""
    if hasattr(collector, "skip_compare"):
        collector.skip_compare = (*collector.skip_compare, *SKIPPED)
