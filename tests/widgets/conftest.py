import pytest

from tests.widgets import runs
from xorl_lab.store import Store
from xorl_lab.widgets.sender import SENDER


@pytest.fixture(scope="module")
def server(root, tmp_path_factory):
    """A JupyterLab; for tests in a browser alone, which need playwright."""
    from tests.widgets.jupyter import Server

    started = Server(tmp_path_factory.mktemp("lab"), root)
    yield started
    started.close()


@pytest.fixture(scope="module")
def chrome():
    from tests.widgets.jupyter import browser

    with browser() as started:
        yield started


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
