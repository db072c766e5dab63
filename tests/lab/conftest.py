import pytest

from tests.lab.support import lab_in
from xorl_lab.lab import active


@pytest.fixture
def lab(tmp_path):
    """A lab in a folder of its own; what it left under way is ended."""
    yield lab_in(tmp_path / "lab")
    for run in list(active.RUNS):
        run.stop(wait=False)
    for run in list(active.RUNS):
        run.live.ended.wait(20)
