"""What every test may use, and the settings under which all of them run."""

import os

# Before torch and transformers are imported: nothing may ask a network for anything.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path

import pytest
from hypothesis import settings
from xdist.remote import Producer

from tests.sglang import sglang_server, still_served
from tests.workers import Division

__all__ = ["a_second", "empty_home", "root", "sglang_server", "still_served"]

settings.register_profile("repeatable", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("repeatable")


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Division:
    return Division(config, log)


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the repository."""
    return Path(__file__).resolve().parents[1]


@pytest.fixture
def empty_home(tmp_path, monkeypatch) -> Path:
    """A home folder of xorl_lab with nothing in it."""
    folder = tmp_path / "home"
    monkeypatch.setenv("XORL_LAB_HOME", str(folder))
    return folder


@pytest.fixture(params=[10.0, pytest.param(1.0, marks=pytest.mark.slow)], ids=["busy", "quiet"])
def a_second(request) -> float:
    """What a second may take: ten where other work goes on, one where the machine is quiet."""
    return request.param
