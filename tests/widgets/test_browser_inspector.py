"""The inspector of rollouts in a real JupyterLab: what a person sees and does."""

import math

import numpy as np
import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
from tests.closeness import assert_close  # noqa: E402
from tests.widgets import rollouts  # noqa: E402
from tests.widgets.jupyter import Notebook, chromium  # noqa: E402
from xorl_lab.store import Store  # noqa: E402
from xorl_lab.widgets.inspector_export import export_rollouts  # noqa: E402

pytestmark = [
    pytest.mark.skipif(
        chromium() is None, reason="chromium is not installed: apt-get install chromium"
    ),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

SHOW = """
from pathlib import Path
from tests.widgets import rollouts
from xorl_lab.store import Store
from xorl_lab.widgets import RolloutInspector
store = Store(Path("{folder}"))
commands = rollouts.Commands(pause={pause})
view = RolloutInspector([store.run(info.id) for info in store.runs()], commands)
view
"""
CELLS = "() => window.jupyterapp.shell.currentWidget.content.widgets.length"
FLOW = ".xl-column > .xl-flow"
READY = "n => document.querySelectorAll('.xl-tr[data-id]').length >= n"
COUNT = "text => document.querySelector('.xl-desk-head').textContent.includes(text)"
COLOURS = """() => [...document.querySelectorAll('.xl-column .xl-flow .xl-t')]
  .map(e => [e.className.match(/xl-([sd]-?\\d|void)/)[1], getComputedStyle(e).backgroundColor])"""
TOKEN = """() => [...document.querySelectorAll('.xl-token')].map(card => ({
  token: Number(card.dataset.token), id: Number(card.dataset.id),
  piece: card.querySelector('.xl-piece').textContent,
  values: Object.fromEntries([...card.querySelectorAll('[data-measure]')]
    .map(e => [e.dataset.measure, e.dataset.value === '' ? null : Number(e.dataset.value)])),
  tops: [...card.querySelectorAll('.xl-alternatives li')]
    .map(e => [Number(e.dataset.id), Number(e.dataset.value)]),
}))"""
LONGEST = """() => new Promise(done => {
  let worst = 0, last = performance.now(), frames = 0;
  const tick = now => {
    worst = Math.max(worst, now - last); last = now; frames += 1;
    frames < 30 ? requestAnimationFrame(tick) : done(worst);
  };
  requestAnimationFrame(tick);
})"""


@pytest.fixture
def inspect(server, chrome, request):
    opened = []

    def inspect_(folder, theme="light", pause=0.0, cells=(), width=1200):
        name = f"{request.node.name.split('[')[0]}-{theme}.ipynb"
        server.theme(theme)
        server.write(name, [SHOW.format(folder=folder, pause=pause), *cells])
        page = chrome.new_page(viewport={"width": width, "height": 1400})
        dialogs = []
        page.on("dialog", lambda d: (dialogs.append(d.message), d.dismiss()))
        opened.append((Notebook(page, server, name), dialogs))
        notebook = opened[-1][0]
        notebook.idle()
        page.evaluate("() => window.jupyterapp.shell.collapseLeft()")
        notebook.run(0)
        notebook.wait(READY, 1)
        return notebook

    yield inspect_
    for notebook, dialogs in opened:
        assert notebook.errors == []
        assert notebook.outside == [], "the page asked another machine for something"
        assert dialogs == []
        notebook.page.close()


def open_row(page, row):
    page.locator(f".xl-tr[data-line='{row}'][data-id]").click()
    page.locator(f".xl-tr.xl-open[data-line='{row}']").wait_for()
    return int(page.locator(".xl-tr.xl-open").get_attribute("data-id"))


def expected(stored, token):
    """Each value of a token, worked out from the store."""
    streams = {n: v.astype(np.float64) for n, v in stored.streams.items()}
    logprobs = stored.logprobs.astype(np.float64)
    trainer, ref = streams["trainer_logprobs"], streams["ref_logprobs"]
    d = trainer[token] - ref[token]
    return {
        "logprob": logprobs[token],
        "advantage": stored.advantage,
        "ratio": streams["ratio"][token],
        "gap": trainer[token] - logprobs[token],
        "kl": math.exp(-d) + d - 1,
        "entropy": streams["entropies"][token],
    }


def check_token(card, stored):
    token = card["token"]
    assert card["id"] == stored.tokens[token]
    for name, value in expected(stored, token).items():
        if math.isnan(value):
            assert card["values"][name] is None
        else:
            assert_close(card["values"][name], value, rtol=1e-9, atol=1e-12)
    tops = list(zip(stored.top_ids[token].tolist(), stored.top_logprobs[token], strict=True))
    for (shown, logprob), (number, recorded) in zip(card["tops"], tops, strict=False):
        assert shown == number
        assert_close(logprob, float(recorded), rtol=1e-12)


@pytest.mark.parametrize("theme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_filter_sort_open_recolour_compare_resample(inspect, server, theme):
    folder = f"run-{theme}"
    run = rollouts.run(Store(server.work / folder), steps=20)
    notebook = inspect(folder, theme, pause=1.0)
    page = notebook.page
    assert (
        page.evaluate("() => document.body.dataset.jpThemeLight") == str(theme == "light").lower()
    )
    frame = run.rollouts()

    # Filter and sort.
    page.get_by_label("first step").fill("5")
    page.get_by_label("Search in text and prompt").fill("carry")
    wanted = frame[(frame.step >= 5) & frame.text.str.contains("carry")]
    notebook.wait(COUNT, f"{len(wanted)} rollouts")
    page.get_by_role("columnheader", name="reward").get_by_role("button").click()
    page.locator("[aria-sort='descending']").wait_for()
    best = wanted.sort_values("reward", ascending=False, kind="stable").index[0]
    page.locator(f".xl-tr[data-line='0'][data-id='{best}']").wait_for()

    # Open; every value of every token as it is in the store, by keyboard.
    assert open_row(page, 0) == best
    stored = run.rollout(int(best))
    flow = page.locator(FLOW)
    flow.focus()
    cells = page.evaluate(CELLS)
    seen = 0
    page.keyboard.press("Home")
    while seen < len(stored.tokens):
        for card in page.evaluate(TOKEN):
            assert card["token"] == seen
            check_token(card, stored)
            seen += 1
        page.keyboard.press("ArrowRight")
    for key in ("b", "a", "x", "d", "d", "ArrowUp", "ArrowDown", "n", "p", "End", "PageUp"):
        page.keyboard.press(key)
    assert page.evaluate(CELLS) == cells, "a shortcut reached the notebook"

    # Recolour: what is drawn follows the values, and a token without value is apart.
    first = page.evaluate(COLOURS)
    page.keyboard.press("5")
    second = page.evaluate(COLOURS)
    assert {name[0] for name, _ in first} == {"s"}
    missing = np.isnan(stored.streams["ref_logprobs"])
    assert [name == "void" for name, _ in second] == missing.tolist()
    assert len({colour for _, colour in second}) > 2
    assert page.locator(".xl-segment[aria-checked='true']").last.inner_text() == "KL to reference"

    # Two side by side.
    page.locator(".xl-tr[data-line='1']").click(modifiers=["Shift"])
    page.locator(".xl-two").wait_for()
    second_id = int(page.locator(".xl-tr[data-line='1']").get_attribute("data-id"))
    other = run.rollout(second_id).tokens
    least = min(len(other), len(stored.tokens))
    differing = np.flatnonzero(other[:least] != stored.tokens[:least])
    shared = int(differing[0]) if len(differing) else least
    said = page.locator(".xl-reading .xl-status").inner_text()
    assert f"The first {shared} tokens" in said or shared == least or "first token on" in said
    page.get_by_role("button", name="Show the first rollout alone").click()

    # Draw anew from the fourth token, while the page stays live.
    flow = page.locator(FLOW)
    flow.focus()
    for key in ("Home", "ArrowRight", "ArrowRight", "ArrowRight", "r"):
        page.keyboard.press(key)
    page.locator(".xl-from", has_text="token 4").wait_for()
    page.get_by_label("max tokens").fill("7")
    page.get_by_role("button", name="Draw", exact=True).click()
    page.get_by_text("drawing …").wait_for()
    flow.focus()
    page.keyboard.press("1")
    assert page.locator(".xl-segment[aria-checked='true']").last.inner_text() == "logprob"
    page.locator(".xl-branch").nth(2).wait_for()
    drawn = rollouts.Commands().resample(0, 3, "base", {"n": 2, "seed": 0, "max_tokens": 7})
    for i, sequence in enumerate(drawn):
        text = "".join(page.locator(".xl-branch").nth(i + 1).locator(".xl-t").all_text_contents())
        assert text == b"".join(rollouts.TOKENIZER.pieces(sequence.tokens)).decode()
    page.get_by_label("weights").select_option("addition/step-10")
    page.get_by_role("button", name="Draw", exact=True).click()
    page.get_by_text("addition/step-10 was <b>deleted</b>").wait_for()

    # Tags, and the same prompt across steps.
    tags = page.get_by_role("textbox", name="Tags, with a space between them", exact=True)
    tags.fill("hack odd")
    tags.press("Enter")
    page.get_by_text("saved", exact=True).wait_for()
    assert run.table([int(best)])["tags"] == [("hack", "odd")]
    page.get_by_role("button", name="All rollouts on this prompt, across steps").click()
    page.locator(".xl-kin-dot").first.wait_for()
    assert page.locator(".xl-kin-dot").count() == len(run.same_prompt(int(best)))

    # Groups.
    page.get_by_role("radio", name="Groups").click()
    page.locator(".xl-group .xl-dots i").first.wait_for()


def test_new_rollouts_show_while_a_cell_blocks(inspect, server):
    writer = Store(server.work / "live").create(name="live", kind="grpo", model="tiny")
    for step in (1, 2):
        rollouts.record(writer, step)
    notebook = inspect("live", cells=["import threading\nstop = threading.Event()\nstop.wait(60);"])
    page = notebook.page
    notebook.wait(COUNT, "24 rollouts")
    notebook.start(1)  # the kernel's main thread is busy from here on
    rollouts.record(writer, 3)
    page.evaluate("() => document.activeElement?.blur()")
    notebook.wait(COUNT, "36 rollouts")
    page.locator(".xl-table").focus()
    rollouts.record(writer, 4)
    page.get_by_role("button", name="12 new").click()
    notebook.wait(COUNT, "48 rollouts")
    open_row(page, 0)
    page.locator(f"{FLOW} .xl-t").first.wait_for()
    writer.status("finished")
    writer.close()
    page.evaluate("() => window.jupyterapp.commands.execute('notebook:interrupt-kernel')")
    notebook.wait("i => window.xorlDone[i]", 1)


def test_hostile_rollouts_do_nothing(inspect, server, a_second):
    run = rollouts.hostile(Store(server.work / "hostile"))
    notebook = inspect("hostile")
    page = notebook.page
    total = run.count()
    for row in range(total):
        page.locator(".xl-table").evaluate("(e, row) => (e.scrollTop = 26 * row - 60)", row)
        number = open_row(page, row)
        stored = run.rollout(number)
        page.locator(f"{FLOW} .xl-t").first.wait_for()
        assert page.evaluate(LONGEST) < 1500 * a_second
        page.locator(".xl-reading-tools input").click()  # raw, and back
        page.locator(FLOW).focus()
        for key in ("Home", "ArrowRight", "PageDown", "End", "2", "1", "w"):
            page.keyboard.press(key)
        last = page.evaluate(TOKEN)[-1]
        assert (last["token"], last["id"]) == (len(stored.tokens) - 1, stored.tokens[-1])
        page.locator(".xl-prompt summary").click()
    assert page.evaluate("() => window.pwned") is None
    made = (
        "() => document.querySelectorAll('.xl-inspector :is(script, img, iframe, svg, a)').length"
    )
    assert page.evaluate(made) == 0
    signs = r"\0-\x08\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u2028-\u202e\u2066-\u2069"
    raw = f"() => /[{signs}]/.test(document.querySelector('.xl-inspector').textContent)"
    assert page.evaluate(raw) is False
    # What the saved notebook keeps is text too: no formula was set, no element made.
    page.get_by_text("What the saved notebook keeps").click()
    kept = page.locator(".jp-RenderedHTML")
    assert "\\frac{1}{2}" in kept.inner_text()
    assert (
        page.locator(".jp-RenderedHTML :is(script, img, iframe, svg, a, mjx-container)").count()
        == 0
    )


def test_neighbours_keep_their_order_whatever_their_direction(inspect, server):
    text = "a \u05d0\u05d1 1 \u202e\u0627\u0644 b \u2067c d\u2069 e"
    with Store(server.work / "bidi").create(name="bidi", kind="grpo", model="t") as writer:
        group = rollouts.Group("p", [65], [rollouts.rollout(text, 1)])
        writer.step(rollouts.StepRecord(1, {}, [group]))
    page = inspect("bidi").page
    open_row(page, 0)
    lefts = page.locator(f"{FLOW} .xl-t").evaluate_all(
        "spans => spans.map(e => e.getBoundingClientRect().left)"
    )
    assert lefts == sorted(lefts)


def test_a_narrow_page_has_no_overlap(inspect, server):
    rollouts.run(Store(server.work / "narrow"), steps=4, name="a run with a rather long name")
    page = inspect("narrow", width=800).page
    open_row(page, 1)
    sticking = """() => {
      const root = document.querySelector('.xl-inspector').getBoundingClientRect();
      return [...document.querySelectorAll('.xl-inspector :is(header, .xl-filters, .xl-reading) *')]
        .filter(e => e.getBoundingClientRect().right > root.right + 1
          && !e.closest('.xl-table, .xl-flow, .xl-first, .xl-row-of, .xl-hidden'))
        .map(e => e.outerHTML.slice(0, 80));
    }"""
    assert page.evaluate(sticking) == []


def test_the_exported_page_needs_nothing(chrome, tmp_path):
    run = rollouts.run(Store(tmp_path / "store"), steps=10)
    path = export_rollouts([run], tmp_path / "rollouts.html", rollouts.Commands(), rollouts=60)
    context = chrome.new_context(offline=True)
    page = context.new_page()
    errors, asked = [], []
    page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda e: errors.append(str(e)))
    page.on("request", lambda r: asked.append(r.url))
    page.goto(path.as_uri())
    page.wait_for_function(READY, arg=1)
    page.get_by_label("least reward").fill("0.3")
    newest = run.rollouts().iloc[-60:]
    page.wait_for_function(COUNT, arg=f"{int((newest.reward >= 0.3).sum())} rollouts")
    page.get_by_role("columnheader", name="reward").get_by_role("button").click()
    best = newest.reward.max()
    page.locator(".xl-tr[data-line='0']", has_text=f"{best:.3g}").wait_for()
    stored = run.rollout(open_row(page, 0))
    page.locator(FLOW).focus()
    page.keyboard.press("ArrowRight")
    check_token(page.evaluate(TOKEN)[0], stored)
    page.get_by_role("radio", name="Groups").click()
    page.locator(".xl-group").first.wait_for()
    assert page.get_by_role("button", name="Resample from here").is_disabled()
    assert errors == []
    assert [url for url in asked if not url.startswith(("file:", "blob:", "data:"))] == []
    context.close()
