"""A real run in a real JupyterLab, steered by its buttons."""

import time

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
from tests.widgets.jupyter import Notebook, Server, browser, chromium  # noqa: E402
from xorl_lab.home import home  # noqa: E402

pytestmark = [
    pytest.mark.skipif(
        chromium() is None, reason="chromium is not installed: apt-get install chromium"
    ),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

SETUP = """
import os, time
os.environ["XORL_LAB_HOME"] = {home!r}
import xorl_lab as xl
lab = xl.Lab({model!r}, rank=4, folder="lab")
# The rewards of a group differ, and at this rate they still do after thousands of steps.
def reward(tokens):
    time.sleep(0.01)  # leaves the processor to the page
    return sum(t % 7 for t in tokens) / len(tokens)
settings = dict(steps=100_000, learning_rate=1e-5, preflight=False, save_every=0)
settings |= dict(max_tokens={tokens}, group_size=4, prompts_per_step=2)
"""
BEGIN = "run = lab.grpo(['one', 'two', 'three'], reward, **settings)\nrun"
BLOCK = "run = lab.grpo(['one', 'two', 'three'], reward, background=False, **settings)"
ELSEWHERE = "import xorl_lab as xl\nseen = xl.Lab('tiny', rank=4, folder='lab').run('grpo-1')\nseen"
TOLD = """
run.wait()
rates = run.metrics["learning_rate"]
turned = [e for e in run.reader.events() if e.kind == "knob"][0]
print(run.status.state, turned.text, rates[turned.step], rates[turned.step + 1])
"""
STEP = """() => Math.max(0, ...[...document.querySelectorAll('.xl-steps')].map(
  e => Number(e.textContent.match(/step (\\d+)/)?.[1] ?? 0)))"""
SHOWS = f"n => ({STEP})() >= n"
READY = "() => document.querySelector('.xl-stop') && !document.querySelector('.xl-stop').disabled"
LOADING = 120
"""Seconds that importing torch and loading a model may take beside other work."""
SHOWN = ".jp-CodeCell:nth-of-type(4)"
STOPPED = """() => [...document.querySelectorAll('.xl-state')].every(
  e => e.textContent.includes('stopped'))"""


@pytest.fixture
def server(root, tmp_path):
    started = Server(tmp_path / "jupyter", root)
    yield started
    started.close()


@pytest.fixture
def open_notebook(server):
    with browser() as chrome:

        def open_(name, cells, theme="light"):
            server.theme(theme)
            server.write(name, cells)
            notebook = Notebook(
                chrome.new_page(viewport={"width": 1200, "height": 1200}), server, name
            )
            notebook.idle()
            light = notebook.page.evaluate("() => document.body.dataset.jpThemeLight")
            assert light == str(theme == "light").lower()
            return notebook

        yield open_


def setup(model="tiny", tokens=8):
    return SETUP.format(home=str(home()), model=model, tokens=tokens)


def stop(notebook, seconds):
    """Press Stop, and hold how long the run takes to end against ``seconds``."""
    begun = time.perf_counter()
    notebook.page.locator(".xl-stop").last.click()
    notebook.wait(STOPPED, seconds=30)
    assert time.perf_counter() - begun < seconds


def test_a_run_in_the_background(open_notebook, a_second):
    notebook = open_notebook("a.ipynb", [setup(), BEGIN, TOLD, "run"])
    page = notebook.page
    notebook.run(0, LOADING)
    notebook.run(1, LOADING)
    notebook.wait(SHOWS, 3)
    first = page.evaluate(STEP)
    notebook.wait(SHOWS, first + 3)  # it goes on although no cell runs

    # Another notebook, another kernel, the same run.
    other = open_notebook("b.ipynb", [ELSEWHERE], "dark")
    other.run(0, LOADING)
    other.wait(SHOWS, first + 3)
    second = other.page.evaluate(STEP)
    other.wait(SHOWS, second + 3)
    assert other.page.locator(".xl-stop").is_disabled()

    # The page is loaded again while the run goes on; another cell shows it from its start.
    notebook.save()
    notebook.open()
    notebook.idle()
    notebook.run(3)
    page.locator(SHOWN).first.wait_for(timeout=60_000)
    notebook.wait(SHOWS, second + 3)
    page.locator(f"{SHOWN} .xl-grid[tabindex]").focus()
    page.keyboard.press("Home")
    page.locator(f"{SHOWN} .xl-where").get_by_text("step 1", exact=False).wait_for()

    # Another learning rate, from the next step on; then the end.
    page.locator(f"{SHOWN} .xl-stop:enabled").wait_for()
    field = page.locator(f"{SHOWN} .xl-knob input").first
    field.fill("2e-6")
    field.press("Enter")
    page.locator(f"{SHOWN} .xl-knob input[title='now 2·10⁻⁶']").first.wait_for()
    notebook.wait(SHOWS, page.evaluate(STEP) + 2)
    stop(notebook, a_second)
    # The first view was restored with the page, where no picture can take its place: it stays.
    restored = page.locator(".jp-CodeCell").nth(1)
    assert "stopped" in restored.locator(".xl-state").inner_text()
    page.locator(".jp-CodeCell").nth(3).locator("img[src^='data:image/png']").wait_for()
    assert restored.locator(".xl-grid canvas").count() > 3
    notebook.run(2)
    assert "stopped learning_rate: 1e-05 → 2e-06 1e-05 2e-06" in notebook.output(2)
    assert notebook.errors == other.errors == []


def test_a_run_in_a_cell_that_blocks(open_notebook, a_second):
    notebook = open_notebook("a.ipynb", [setup(), BLOCK], "dark")
    notebook.run(0, LOADING)
    notebook.start(1)
    notebook.wait(SHOWS, 3, 60)
    notebook.wait(READY)
    stop(notebook, a_second)
    notebook.wait("i => window.xorlDone[i]", 1)
    assert notebook.errors == []


@pytest.mark.slow
@pytest.mark.parametrize("cell", [BEGIN, BLOCK], ids=["background", "blocking"])
def test_stop_lands_inside_a_step_of_a_real_model(open_notebook, cell):
    # A step of some twenty seconds, most of it drawing.
    notebook = open_notebook("a.ipynb", [setup("SmolLM2-135M-Instruct", 200), cell])
    notebook.run(0, LOADING)
    notebook.start(1)
    notebook.wait(READY, seconds=60)
    notebook.page.wait_for_timeout(3000)
    assert notebook.page.evaluate(STEP) == 0
    stop(notebook, 1.0)
