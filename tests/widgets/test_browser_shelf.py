"""The browser of checkpoints in a real JupyterLab: what a person sees and does."""

import json

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
from tests.widgets.jupyter import chromium  # noqa: E402

pytestmark = [
    pytest.mark.skipif(
        chromium() is None, reason="chromium is not installed: apt-get install chromium"
    ),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

SETUP = """
import json
from tests.widgets import shelves
from xorl_lab.widgets import CheckpointBrowser
commands = shelves.Commands()
browser = CheckpointBrowser(commands)
browser
"""
CALLS = "print(json.dumps(commands.calls))"
CELLS = "() => window.jupyterapp.shell.currentWidget.content.widgets.length"
SELECTED = """() => document.querySelector(
  ".xl-row[aria-selected='true'] .xl-name")?.title ?? ''"""
SELECTS = f"name => ({SELECTED})() === name"


@pytest.fixture
def show(open_notebook):
    """Open a notebook whose first cell shows the browser."""

    def show_(*more, setup=SETUP, theme="light", width=1200):
        notebook = open_notebook([setup, CALLS, *more], theme, width, 1300)
        notebook.run(0, 60)
        notebook.page.locator(".xl-row").first.wait_for()
        return notebook

    return show_


def calls(notebook):
    notebook.run(1)
    return json.loads(notebook.output(1))


def panel(page):
    return page.locator(".xl-panelbody:not([hidden])")


def choose(notebook, name):
    """Select a checkpoint by its whole name, with the filter and the arrow keys."""
    page = notebook.page
    page.get_by_label("Filter the checkpoints").fill(name)
    page.keyboard.press("ArrowDown")
    page.keyboard.press("End")
    notebook.wait(SELECTS, name)
    page.get_by_label("Filter the checkpoints").fill("")


@pytest.mark.parametrize("theme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_what_a_person_does(show, theme):
    notebook = show(theme=theme)
    page = notebook.page
    assert page.locator(".xl-row").first.inner_text().startswith("▾")
    # The newest is selected and in sight.
    notebook.wait(SELECTS, "grpo-2/step-70")
    assert page.locator(".xl-row[aria-selected='true']").is_visible()
    rgb = page.locator(".xl-tree").evaluate("e => getComputedStyle(e).backgroundColor")
    bright = sum(int(n) for n in rgb[rgb.index("(") + 1 : -1].split(",")[:3])
    assert (bright > 600) == (theme == "light")

    # Branch from a step.
    choose(notebook, "grpo-1/step-30")
    page.get_by_role("tab", name="Branch").click()
    panel(page).get_by_label("learning rate").fill("1e-5")
    panel(page).get_by_label("Other settings").fill("kl_coef=0.1")
    panel(page).get_by_role("button", name="Start a run from here").click()
    panel(page).get_by_text("lab.run(").wait_for()
    assert "Run grpo-4 goes on from grpo-1/step-30" in panel(page).inner_text()
    page.locator(".xl-row", has_text="grpo-4").wait_for()  # it is in the tree by itself

    # Sample.
    page.get_by_role("tab", name="Sample").click()
    panel(page).get_by_label("Prompt").fill("What is 6 times 7?")
    panel(page).get_by_role("button", name="Sample").click()
    page.locator(".xl-samples li").nth(1).wait_for()

    # Compare: the second one by Shift and click.
    page.locator(".xl-row[aria-level='3']", has_text="step-10").click(modifiers=["Shift"])
    assert panel(page).get_by_label("what it is compared with").input_value() == "grpo-1/step-10"
    panel(page).get_by_label("Prompts").fill("What is 6 times 7?\nWhat is 3 + 4?")
    panel(page).get_by_role("button", name="Compare").click()
    page.locator(".xl-pair").nth(1).wait_for()
    token = page.locator(".xl-left .xl-token").nth(3)
    token.hover()
    assert ", token 4: " in page.locator(".xl-readout").first.inner_text()
    forks = page.locator(".xl-pair").first.locator(".xl-fork")
    assert forks.count() == 2

    # Delete: cancelled, then not.
    page.get_by_role("tab", name="Delete").click()
    panel(page).get_by_role("button", name="Delete …").click()
    assert "grpo-1/step-30" in panel(page).get_by_role("alertdialog").inner_text()
    assert page.evaluate("() => document.activeElement.textContent") == "Cancel"
    page.keyboard.press("Enter")
    panel(page).get_by_role("alertdialog").wait_for(state="hidden")
    panel(page).get_by_role("button", name="Delete …").click()
    panel(page).get_by_role("button", name="Delete it").click()
    panel(page).get_by_text("grpo-1/step-30 was deleted").wait_for()
    # The branch stays, below a mark of what is gone.
    page.locator(".xl-of-gone", has_text="step-30").wait_for()
    assert page.locator(".xl-of-run", has_text="grpo-4").count() == 1
    how = {"max_tokens": 64, "temperature": 0.0, "seed": 0}
    assert calls(notebook) == [
        ["branch", "grpo-1/step-30", {"learning_rate": 1e-5, "kl_coef": 0.1}],
        ["sample", "grpo-1/step-30", "What is 6 times 7?", {**how, "n": 2, "temperature": 1.0}],
        [
            "compare",
            "grpo-1/step-30",
            "grpo-1/step-10",
            ["What is 6 times 7?", "What is 3 + 4?"],
            how,
        ],
        ["delete", "grpo-1/step-30"],
    ]


def test_by_keys_alone(show):
    notebook = show()
    page = notebook.page
    keys = page.keyboard
    count = page.evaluate(CELLS)
    page.locator(".xl-tree").focus()
    keys.press("Home")
    notebook.wait(SELECTS, "base")
    for key in ("ArrowDown", "ArrowLeft"):
        keys.press(key)
    assert page.locator(".xl-row").count() == 2  # its checkpoints are folded away
    keys.press("ArrowRight")
    keys.type("step-40")
    notebook.wait(SELECTS, "grpo-1/step-40")
    keys.press("Space")  # the other side of the comparison
    keys.press("ArrowUp")
    notebook.wait(SELECTS, "grpo-1/step-30")
    keys.press("Enter")
    assert page.evaluate("() => document.activeElement.textContent") == "Compare"
    for _ in range(3):  # to B, Swap, the prompts
        keys.press("Tab")
    keys.type("one")
    keys.press("Enter")
    keys.type("two")
    keys.press("Control+Enter")
    page.locator(".xl-pair").nth(1).wait_for()
    page.locator(".xl-left .xl-token[tabindex='0']").first.focus()
    for key in ("Home", "ArrowRight", "ArrowDown"):
        keys.press(key)
    assert page.locator(".xl-readout").first.inner_text().startswith("grpo-1/step-40, token 2: ")
    keys.press("d")
    assert "xl-after" in page.evaluate("() => document.activeElement.className")
    keys.press("Escape")
    assert page.evaluate("() => document.activeElement.getAttribute('role')") == "treegrid"
    keys.press("Enter")
    for _ in range(4):
        keys.press("ArrowRight")
    assert page.evaluate("() => document.activeElement.textContent") == "Delete"
    keys.press("Tab")
    keys.press("Enter")
    assert page.evaluate("() => document.activeElement.textContent") == "Cancel"
    keys.press("Escape")
    assert page.evaluate("() => document.activeElement.textContent") == "Delete …"
    keys.press("Enter")
    keys.press("Tab")
    keys.press("Enter")
    panel(page).get_by_text("grpo-1/step-30 was deleted").wait_for()
    keys.press("Escape")
    for key in ("b", "a", "x", "d", "d", "m"):  # no shortcut of the notebook
        keys.press(key)
    assert page.evaluate(CELLS) == count
    assert [call[0] for call in calls(notebook)] == ["compare", "delete"]


def test_errors_and_reasons_are_words(show):
    notebook = show()
    page = notebook.page
    page.get_by_role("tab", name="Delete").click()
    assert "grpo-2 is running and would resume from it" in panel(page).inner_text()
    assert panel(page).get_by_role("button", name="Delete …").is_disabled()
    choose(notebook, "grpo-1/for-sampling")
    page.get_by_role("tab", name="Branch").click()
    assert "for sampling only" in panel(page).inner_text()
    assert panel(page).get_by_role("button", name="Start").is_disabled()
    choose(notebook, "grpo-1/step-20")
    panel(page).get_by_label("Other settings").fill("learning_rat=3")
    panel(page).get_by_role("button", name="Start").click()
    panel(page).get_by_text("did you mean 'learning_rate'?").wait_for()
    panel(page).get_by_label("Other settings").fill("nonsense")
    panel(page).get_by_role("button", name="Start").click()
    panel(page).get_by_text("'nonsense' is not name=value").wait_for()
    page.get_by_role("tab", name="Export").click()
    panel(page).get_by_label("Folder").fill("/proc/no")
    panel(page).get_by_role("button", name="Export").click()
    panel(page).get_by_text("/proc/no cannot be written to").wait_for()
    panel(page).get_by_label("Folder").fill("out")
    panel(page).get_by_label("merged").check()
    panel(page).get_by_role("button", name="Export").click()
    panel(page).get_by_text("out/grpo-1-step-20-merged").wait_for()
    page.get_by_role("tab", name="Load").click()
    panel(page).get_by_role("button", name="Load").click()
    panel(page).get_by_text("browser.client trains on it").wait_for()


WAITING = "import threading; commands.go.clear(); threading.Timer(4, commands.go.set).start()"


def test_the_view_stays_alive_while_something_takes_long(show):
    notebook = show(WAITING)
    page = notebook.page
    page.get_by_role("tab", name="Sample").click()
    panel(page).get_by_label("Prompt").fill("slow")
    notebook.run(2)
    panel(page).get_by_role("button", name="Sample").click()
    panel(page).get_by_text("Sampling from grpo-2/step-70").wait_for()
    page.locator(".xl-clock", has_text="1 s").wait_for()
    choose(notebook, "grpo-1/step-20")  # meanwhile another one
    page.get_by_role("tab", name="Details").click()
    assert "grpo-1/step-20" in panel(page).inner_text()
    assert not page.evaluate("() => document.querySelector('.xl-samples')")
    page.get_by_role("tab", name="Sample").click()
    page.locator(".xl-samples li").first.wait_for()
    assert "grpo-2/step-70" in page.locator(".xl-result header").inner_text()


HOSTILE = """
from tests.widgets import shelves
from xorl_lab.types.results import SampledSequence
from xorl_lab.widgets import CheckpointBrowser
names = ["<img src=x onerror='window.bad=1'>", "\\u202egnirts", "\\ud800 **b** $x$", "\\x1b[31m\\0"]
text = "<script>window.bad=1</script>\\ud83d\\x00\\u200b" + "x" * 1_000_000
side = {"pieces": ["<b>", "", "\\n", "\\ud800"]}
side |= {"logprobs": [-1.0, float("-inf"), -0.5, -2.0], "other": [-1.0, -1.0, float("nan"), -2.0]}
class Bad(shelves.Commands):
    def sample(self, checkpoint, prompt, params):
        return [SampledSequence([1], "stop", [float("nan")], text)]
    def compare(self, left, right, prompts, params):
        return [{"prompt": p, "left": side, "right": side, "divergence": None} for p in prompts]
def bad(name):
    return shelves.checkpoint(name, 1, settings={name: name}, metrics={name: float("nan")})
tree = {"checkpoints": [bad(name) for name in names], "disk": {"used": 0, "budget": 0}}
tree["runs"] = [shelves.run(name, state=name) for name in names]
browser = CheckpointBrowser(Bad(tree))
commands = browser._commands
browser
"""


def test_hostile_text_is_text(show):
    notebook = show(setup=HOSTILE)
    page = notebook.page
    names = page.locator(".xl-name").all_text_contents()
    assert {"⟨202E⟩gnirts", "<img src=x onerror='window.bad=1'>"} <= set(names)
    page.get_by_role("tab", name="Sample").click()
    panel(page).get_by_label("Prompt").fill("<i>")
    panel(page).get_by_role("button", name="Sample").click()
    page.locator(".xl-text").wait_for()
    assert len(page.locator(".xl-text").text_content()) > 1_000_000
    page.get_by_role("tab", name="Compare").click()
    panel(page).get_by_label("Prompts").fill("<u>")
    panel(page).get_by_role("button", name="Compare").click()
    page.locator(".xl-pair").wait_for()
    assert page.locator(".xl-left .xl-token").all_text_contents() == ["<b>", "∅", "⏎\n", "\\ud800"]
    for tag in ("img", "i", "u", "b", "script"):
        assert page.locator(f".xl-shelf {tag}").count() == 0
    assert page.evaluate("() => window.bad") is None


MANY = """
import time
from tests.widgets import shelves
from xorl_lab.widgets import CheckpointBrowser
browser = CheckpointBrowser(shelves.Commands(shelves.large(1000, now=time.time())))
browser
"""
SCROLLED = """() => {
  const tree = document.querySelector('.xl-tree');
  const times = [];
  for (let n = 0; n < 60; n += 1) {
    const begun = performance.now();
    tree.scrollTop = (n * 397) % tree.scrollHeight;
    tree.dispatchEvent(new Event('scroll'));
    tree.lastChild.getBoundingClientRect();
    times.push(performance.now() - begun);
  }
  return times.sort((a, b) => a - b)[30];
}"""


def test_a_thousand_checkpoints(show, a_second):
    notebook = show(setup=MANY)
    page = notebook.page
    assert page.locator(".xl-tree").get_attribute("aria-rowcount") == "1022"
    assert page.locator(".xl-row").count() < 60
    # Milliseconds for half a page of new rows, laid out.
    assert page.evaluate(SCROLLED) < 80 * a_second
    page.get_by_role("button", name="reward").click()
    first, second = (
        float(page.locator(f".xl-row[data-index='{i}'] [role='gridcell']").nth(2).inner_text())
        for i in (0, 1)
    )
    assert first >= second > 0.99


def test_it_fits_a_narrow_page_and_stays_in_the_saved_notebook(show):
    notebook = show(width=800)
    page = notebook.page
    wide = page.evaluate(
        "() => document.querySelector('.xl-shelf').scrollWidth"
        " - document.querySelector('.xl-shelf').clientWidth"
    )
    assert wide <= 0
    saved = json.loads(notebook.save())
    outputs = saved["cells"][0]["outputs"]
    html = "".join("".join(o["data"].get("text/html", "")) for o in outputs if "data" in o)
    assert "<td>grpo-1/step-40</td><td>40</td><td>grpo-1/step-30</td>" in html
    assert "CheckpointBrowser(11 checkpoints of 3 runs)" in str(outputs)
