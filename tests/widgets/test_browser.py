"""The dashboard in a real JupyterLab: what a person sees and does."""

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
from tests.widgets import runs  # noqa: E402
from tests.widgets.jupyter import chromium  # noqa: E402
from xorl_lab.widgets import export_html  # noqa: E402

pytestmark = [
    pytest.mark.skipif(
        chromium() is None, reason="chromium is not installed: apt-get install chromium"
    ),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

SETUP = """
import threading
from pathlib import Path
from tests.widgets import runs
from xorl_lab.store import Store
from xorl_lab.widgets import RunView
store = Store(Path("store"))
go = threading.Event()

class Steered(runs.Commands):
    def __init__(self, writer):
        super().__init__()
        self.writer = writer
        self.stopped = threading.Event()
        self.called = threading.Event()
    def stop(self):
        super().stop()
        self.stopped.set()
    def pause(self):
        super().pause()
        self.called.set()

def begin(name):
    global writer, commands, view
    writer = store.create(name=name, kind="grpo", model="tiny", total=4000)
    commands = Steered(writer)
    view = RunView([store.run(writer.info.id)], commands)

def train(pause=0.05, steps=4000):
    step = store.run(writer.info.id).status().step
    while step < steps and not commands.stopped.wait(pause):
        step += 1
        runs.record(writer, step, 4000)
    writer.status("stopped" if commands.stopped.is_set() else "finished")
    writer.close()
"""
THREAD = """
begin("in a thread")
thread = threading.Thread(target=train)
thread.start()
view.show();
"""
BLOCKING = """
begin("in a cell")
view.show()
train()
print("ended by", commands.calls)
"""
AGAIN = "again = RunView([store.run(writer.info.id)], commands); again.show();"
# Outputs that were loaded with the page cannot be replaced any more, only those displayed since.
END = "commands.stopped.set(); thread.join(); again.finish(); again.close(); view.close()"
LAST = """() => {
  const steps = [...document.querySelectorAll('.xl-steps')];
  return Math.max(0, ...steps.map(e => Number(e.textContent.match(/step (\\d+)/)?.[1] ?? 0)));
}"""
SHOWS = f"n => ({LAST})() >= n"
DRAWN = "() => document.querySelectorAll('.xl-panel canvas').length >= 6"
CELLS = "() => window.jupyterapp.shell.currentWidget.content.widgets.length"
INK = """() => {
  const canvas = document.querySelector('[data-panel^="reward"] canvas');
  const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  const inks = new Set();
  for (let i = 0; i < data.length; i += 4) {
    if (data[i + 3] > 250) inks.add([data[i], data[i + 1], data[i + 2]].join());
  }
  return [...inks];
}"""


def test_a_run_in_a_thread(open_notebook, server):
    notebook = open_notebook([SETUP, THREAD, AGAIN, END])
    page = notebook.page
    notebook.run(0)
    notebook.run(1)
    notebook.wait(DRAWN)
    notebook.wait(SHOWS, 5)
    first = page.evaluate(LAST)
    notebook.wait(SHOWS, first + 10)  # it goes on although no cell runs

    # A shortcut pressed on the charts stays there.
    cells = page.evaluate(CELLS)
    grid = page.locator(".xl-grid[tabindex]").first
    grid.focus()
    for key in ("b", "a", "ArrowRight", "ArrowRight", "x"):
        page.keyboard.press(key)
    assert page.evaluate(CELLS) == cells
    assert page.locator(".xl-where").first.text_content().startswith("step 2")
    page.keyboard.press("Escape")

    # Once the page is loaded again, another cell shows the run from its start.
    notebook.save()
    page.reload(wait_until="domcontentloaded")
    page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=90_000)
    notebook.idle()
    notebook.run(2)
    notebook.wait("() => document.querySelectorAll('.xl-dashboard').length >= 1")
    notebook.wait(SHOWS, first + 15)
    page.locator(".xl-dashboard").nth(1).wait_for()  # the saved output is live again too
    page.locator(".xl-grid[tabindex]").last.focus()
    page.keyboard.press("Home")
    page.locator(".xl-where").last.get_by_text("step 1", exact=False).wait_for()

    notebook.run(3)
    notebook.wait("() => document.querySelector('.jp-RenderedHTML img[src^=\"data:image/png\"]')")
    assert "stopped by hand" in page.locator(".jp-Notebook").inner_text()


def test_buttons_while_a_cell_blocks(open_notebook, a_second):
    notebook = open_notebook([SETUP, BLOCKING])
    page = notebook.page
    notebook.run(0)
    notebook.start(1)
    notebook.wait(SHOWS, 3)  # live points while the cell blocks
    notebook.wait("() => !document.querySelector('.xl-stop').disabled")
    field = page.locator(".xl-knob input")
    field.fill("3e-5")
    field.press("Enter")
    page.locator(".xl-knob input[title='now 3·10⁻⁵']").wait_for()
    page.locator(".xl-pause").click()
    start = page.evaluate("() => performance.now()")
    page.locator(".xl-stop").click()
    notebook.wait("i => window.xorlDone[i]", 1)
    assert page.evaluate("() => performance.now()") - start < 1000 * a_second
    said = "ended by [('learning_rate', 3e-05), 'pause', 'stop']"
    page.get_by_text(said).wait_for()
    notebook.wait("() => document.querySelector('.xl-state').textContent.includes('stopped')")
    notebook.wait(
        "() => [...document.querySelectorAll('.xl-controls .xl-button')].every(b => b.disabled)"
    )


def test_a_second_kernel_shows_the_same_run_live_and_dark(open_notebook, server):
    store, _ = runs.finished(server.work / "elsewhere", 20, name="shared")
    writer = store.create(name="watched", kind="grpo", model="tiny", total=400)
    watch = """
from pathlib import Path
from xorl_lab.store import Store
from xorl_lab.widgets import RunView
store = Store(Path("elsewhere"))
view = RunView([store.run("watched"), store.run("shared")])
view
"""
    for step in range(1, 6):
        runs.record(writer, step, 400)
    notebook = open_notebook([watch], theme="dark")
    page = notebook.page
    notebook.run(0)
    notebook.wait(DRAWN)
    for step in range(6, 31):
        runs.record(writer, step, 400)
    notebook.wait(SHOWS, 30)
    assert page.locator(".xl-stop").is_disabled()
    page.get_by_text("not driven from this kernel").wait_for()
    assert page.evaluate("() => document.body.dataset.jpThemeLight") == "false"
    wanted = "86,180,233"  # the sky blue of the dark palette, as ink
    notebook.wait(f"() => ({INK})().includes('{wanted}')")
    writer.status("failed", "<b>out of memory</b>")
    writer.close()
    page.locator(".xl-is-failed").wait_for()
    assert page.locator(".xl-message b").count() == 0


def test_a_narrow_page_has_no_overlap(open_notebook, server):
    runs.finished(server.work / "narrow", 40, name="narrow run with a rather long name")
    watch = """
from pathlib import Path
from xorl_lab.store import Store
from xorl_lab.widgets import RunView
store = Store(Path("narrow"))
for run in store.runs():
    view = RunView([store.run(run.id)])
    view.show()
"""
    notebook = open_notebook([watch], width=600)
    notebook.run(0)
    notebook.wait(DRAWN)
    overlaps = """() => {
      const found = [];
      const root = document.querySelector('.xl-dashboard').getBoundingClientRect();
      for (const selector of ['.xl-run > *', '.xl-panel', '.xl-head > *', '.xl-tools > *']) {
        const parents = new Map();
        for (const e of document.querySelectorAll(selector)) {
          const r = e.getBoundingClientRect();
          if (!r.width) continue;
          if (r.right > root.right + 1) found.push([selector, 'sticks out']);
          const beside = parents.get(e.parentElement) ?? [];
          for (const o of beside) {
            const wide = Math.min(r.right, o.right) - Math.max(r.left, o.left);
            const high = Math.min(r.bottom, o.bottom) - Math.max(r.top, o.top);
            if (wide > 1 && high > 1) found.push([selector, e.textContent]);
          }
          parents.set(e.parentElement, [...beside, r]);
        }
      }
      return found;
    }"""
    assert notebook.page.evaluate(overlaps) == []


@pytest.mark.parametrize("times", [8, pytest.param(30, marks=pytest.mark.slow)])
def test_running_a_cell_again_frees_the_old_view(open_notebook, server, times):
    runs.finished(server.work / f"again-{times}", 20, name="shown")
    cells = [
        """
import gc, weakref
from pathlib import Path
from xorl_lab.store import Store
from xorl_lab.widgets import RunView
store, made = Store(Path("again-TIMES")), []
""".replace("TIMES", str(times)),
        """
view = RunView([store.run("shown")])
made += [weakref.ref(w) for w in (view, view.dashboard, view.controls, view._box)]
view.show();
""",
        "gc.collect(); print('alive', sum(ref() is not None for ref in made), 'of', len(made))",
    ]
    notebook = open_notebook(cells)
    notebook.run(0)
    for _ in range(times):
        notebook.run(1)
    notebook.wait(DRAWN)
    assert notebook.page.locator(".xl-dashboard").count() == 1
    notebook.run(2)
    assert notebook.output(2).strip() == f"alive 4 of {4 * times}"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_exported_page_needs_nothing(chrome, tmp_path, scheme):
    store, name = runs.finished(tmp_path / "store", 60)
    branch = runs.branched(store, name)
    path = export_html([store.run(name), store.run(branch)], tmp_path / "run.html")
    context = chrome.new_context(color_scheme=scheme, offline=True)
    page = context.new_page()
    errors = []
    page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda e: errors.append(str(e)))
    asked = []
    page.on("request", lambda r: asked.append(r.url))
    page.goto(path.as_uri())
    page.wait_for_function(DRAWN)
    assert page.locator(".xl-panel").first.is_visible()

    # Drag to zoom, double click to see all; a mark says what happened.
    box = page.locator("[data-panel='loss'] .u-over").bounding_box()
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.8 * box["width"], box["y"] + 30, steps=4)
    page.mouse.up()
    reset = page.get_by_role("button", name="Reset zoom")
    reset.wait_for()
    assert reset.is_enabled()
    page.mouse.dblclick(box["x"] + 0.3 * box["width"], box["y"] + 20)
    page.wait_for_function("() => document.querySelector('.xl-tools .xl-button').disabled")
    page.locator(".xl-mark").first.hover()
    assert "checkpoint step-20 saved" in page.locator(".xl-note.xl-on").inner_text()
    assert errors == []
    assert [url for url in asked if not url.startswith(("file:", "blob:", "data:"))] == []
    context.close()
