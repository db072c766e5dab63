import pytest

from xorl_lab.store import Store


@pytest.fixture
def store(tmp_path) -> Store:
    return Store(tmp_path / "lab")


@pytest.fixture
def writer(store):
    """The writer of a run named "run"."""
    writer = store.create(name="run", kind="grpo", model="tiny")
    yield writer
    writer.close()
