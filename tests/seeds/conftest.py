"""The seed documents, and a home that is thrown away."""

from pathlib import Path

import pytest

from tests.seeds.cut import folder


@pytest.fixture
def documents(empty_home) -> Path:
    """The folder of the documents; checkpoints of the test go to a home of their own."""
    return folder()
