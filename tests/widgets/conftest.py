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
def open_notebook(server, chrome, request):
    """Opens cells as a notebook; none may have errors, or ask another machine for something."""
    from tests.widgets.jupyter import Notebook

    pages = []

    def open_(cells, theme="light", width=1200, height=1200):
        name = f"{request.node.name.split('[')[0]}-{len(pages)}.ipynb"
        server.theme(theme)
        server.write(name, cells)
        return look(name, width, height)

    def look(name, width=1200, height=1200):
        page = chrome.new_page(viewport={"width": width, "height": height})
        pages.append(Notebook(page, server, name))
        pages[-1].idle()
        return pages[-1]

    open_.look = look
    yield open_
    for notebook in pages:
        assert notebook.errors == []
        assert notebook.outside == [], "the page asked another machine for something"
        notebook.page.close()


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
