import pytest

from tests.widgets import runs
from xorl_lab.store import Store
from xorl_lab.widgets.sender import SENDER


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


@pytest.fixture
def writer(store):
    with store.create(name="addition", kind="grpo", model="tiny", total=100) as writer:
        yield writer


@pytest.fixture
def reader(store, writer):
    return store.run(writer.info.id)


@pytest.fixture
def commands():
    return runs.Commands()


@pytest.fixture(autouse=True)
def _nothing_is_left():
    yield
    assert len(SENDER) == 0, "a test left a dashboard open"
