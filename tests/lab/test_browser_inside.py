"""A real run, looked into and gone back to in a real JupyterLab."""

import math

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
from tests.closeness import assert_close  # noqa: E402
from tests.widgets.jupyter import Notebook, Server, browser, chromium  # noqa: E402
from xorl_lab.home import home  # noqa: E402
from xorl_lab.store import Store  # noqa: E402

pytestmark = [
    pytest.mark.skipif(
        chromium() is None, reason="chromium is not installed: apt-get install chromium"
    ),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

SMOL = "SmolLM2-135M-Instruct"
RECORD = """
import os
os.environ["XORL_LAB_HOME"] = {home!r}
import xorl_lab as xl
lab = xl.Lab({model!r}, rank=4, folder="lab")
def reward(tokens): return sum(t % 7 for t in tokens) / len(tokens)
run = lab.grpo(
    ["one two", "three four", "five six"], reward, steps=3, save_every=1, learning_rate=1e-4,
    max_tokens=12, group_size=4, prompts_per_step=2, preflight=False, background=False,
    report_base_kl=True,
)
print(run.status.state)
"""
INSPECT = "run.inspect()"
BROWSE = "lab.browse()"
BRANCHED = """
child = lab.run("grpo-1-branch").wait()
print(child.status.state, child.info.parent.checkpoint, child.status.step)
print(sorted(lab.checkpoints("grpo-1")["name"]))
"""
FLOW = ".xl-column > .xl-flow"
TOKEN = """() => [...document.querySelectorAll('.xl-token')].map(card => ({
  token: Number(card.dataset.token), id: Number(card.dataset.id),
  values: Object.fromEntries([...card.querySelectorAll('[data-measure]')]
    .map(e => [e.dataset.measure, e.dataset.value === '' ? null : Number(e.dataset.value)])),
  tops: [...card.querySelectorAll('.xl-alternatives li')].map(e => Number(e.dataset.id)),
}))"""
LINES = "n => document.querySelectorAll('.xl-tr[data-id]').length >= n"
SELECTED = """name => document.querySelector(
  ".xl-row[aria-selected='true'] .xl-name")?.title === name"""
CASES = [
    pytest.param("tiny", "light", id="tiny"),
    pytest.param(SMOL, "light", id="real-light", marks=pytest.mark.slow),
    pytest.param(SMOL, "dark", id="real-dark", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("model", "theme"), CASES)
def test_a_run_is_looked_into_and_gone_back_to(root, tmp_path, model, theme):
    server = Server(tmp_path / "jupyter", root)
    try:
        server.theme(theme)
        setup = RECORD.format(home=str(home()), model=model)
        server.write("a.ipynb", [setup, INSPECT, BROWSE, BRANCHED])
        with browser() as chrome:
            page = chrome.new_page(viewport={"width": 1200, "height": 1400})
            notebook = Notebook(page, server, "a.ipynb")
            notebook.idle()
            notebook.run(0, 240)
            assert "finished" in notebook.output(0)
            looked_into(notebook, Store(server.work / "lab").run("grpo-1"))
            gone_back_to(notebook)
            page.screenshot(path=tmp_path / f"{model}-{theme}.png", full_page=True)
            assert notebook.errors == notebook.outside == []
    finally:
        server.close()


def looked_into(notebook, record):
    page = notebook.page
    notebook.run(1, 60)
    notebook.wait(LINES, 1)
    frame = record.rollouts()

    # Filter and sort, open the best, and read every token of it with the keyboard alone.
    page.get_by_label("first step").fill("2")
    page.get_by_role("columnheader", name="reward").get_by_role("button").click()
    wanted = frame[frame.step >= 2].sort_values("reward", ascending=False, kind="stable")
    best = int(wanted.index[0])
    page.locator(f".xl-tr[data-line='0'][data-id='{best}']").click()
    page.locator(f"{FLOW} .xl-t").first.wait_for()
    stored = record.rollout(best)
    page.locator(FLOW).focus()
    page.keyboard.press("Home")
    seen = 0
    while seen < len(stored.tokens):
        for card in page.evaluate(TOKEN):
            assert card["token"] == seen
            assert card["id"] == stored.tokens[seen]
            check(card["values"], stored, seen)
            assert card["tops"][:5] == stored.top_ids[seen].tolist()  # the drawn one may follow
            seen += 1
        page.keyboard.press("ArrowRight")
    page.keyboard.press("6")
    assert page.locator(".xl-segment[aria-checked='true']").last.inner_text() == "entropy"

    # The second best beside it; then other words from its third token on, by the base model.
    page.locator(".xl-tr[data-line='1']").click(modifiers=["Shift"])
    page.locator(".xl-two").wait_for()
    page.get_by_role("button", name="Show the first rollout alone").click()
    page.locator(FLOW).focus()
    for key in ("Home", "ArrowRight", "ArrowRight", "r"):
        page.keyboard.press(key)
    page.get_by_label("weights").select_option("base")
    page.get_by_label("max tokens").fill("5")
    page.get_by_role("button", name="Draw", exact=True).click()
    page.locator(".xl-branch").nth(1).wait_for(timeout=60_000)


def check(shown, stored, at):
    """The values of a token beside those of the record."""
    sampler, trainer = float(stored.logprobs[at]), float(stored.streams["trainer_logprobs"][at])
    d = trainer - float(stored.streams["ref_logprobs"][at])
    known = {
        "logprob": sampler,
        "advantage": stored.advantage,
        "gap": trainer - sampler,
        "kl": math.exp(-d) + d - 1,
        "entropy": float(stored.streams["entropies"][at]),
        "ratio": float(stored.streams["ratio"][at]),
    }
    for name, value in known.items():
        if math.isnan(value):
            assert shown[name] is None
        else:
            assert_close(shown[name], value, rtol=1e-9, atol=1e-12)


def gone_back_to(notebook):
    page = notebook.page
    notebook.run(2, 60)
    panel = page.locator(".xl-panelbody:not([hidden])")
    choose(notebook, "grpo-1/step-1")

    # Branch from step 1, sample from it, compare it with the base model, delete it.
    page.get_by_role("tab", name="Branch").click()
    panel.get_by_label("learning rate").fill("1e-5")
    panel.get_by_role("button", name="Start a run from here").click()
    panel.get_by_text("grpo-1-branch").first.wait_for(timeout=60_000)
    page.get_by_role("tab", name="Sample").click()
    panel.get_by_label("Prompt").fill("one two")
    panel.get_by_role("button", name="Sample").click()
    page.locator(".xl-samples li").first.wait_for(timeout=120_000)
    page.get_by_role("tab", name="Compare").click()
    panel.get_by_label("Prompts").fill("one two\nthree four")
    panel.get_by_role("button", name="Compare").click()
    page.locator(".xl-pair").nth(1).wait_for(timeout=120_000)
    page.get_by_role("tab", name="Delete").click()
    panel.get_by_role("button", name="Delete …").click()
    panel.get_by_role("button", name="Delete it").click()
    page.locator(".xl-of-gone", has_text="step-1").wait_for(timeout=60_000)
    notebook.run(3, 120)
    assert "finished step-1 3" in notebook.output(3)
    assert "['step-2', 'step-3']" in notebook.output(3)


def choose(notebook, name):
    """Select a checkpoint by its whole name, with the filter and the arrow keys."""
    page = notebook.page
    page.get_by_label("Filter the checkpoints").fill(name)
    page.keyboard.press("ArrowDown")
    page.keyboard.press("End")
    notebook.wait(SELECTED, name)
    page.get_by_label("Filter the checkpoints").fill("")
