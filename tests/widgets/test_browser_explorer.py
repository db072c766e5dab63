"""The explorer of losses in a real JupyterLab: sliders move, picture and numbers follow."""

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
import xorl_lab as xl
explorer = xl.explore_losses("policy_loss", ratio=1.5, eps_clip_c=None)
explorer
"""
ASKED = """
curve = explorer.curve
frame = xl.loss_curve(curve["loss"], [curve["token"]["ratio"]],
    {k: v for k, v in curve["token"].items() if k != "ratio"}, **curve["params"])
print(json.dumps([curve["params"], curve["token"], frame.to_dict("records")[0]]))
"""
BLOCKING = "import time; time.sleep(6); print('done')"
ALIVE = """
import gc
print(sum(type(o).__name__ == "Curves" and o.comm is not None for o in gc.get_objects()))
"""
CELLS = "() => window.jupyterapp.shell.currentWidget.content.widgets.length"
NUMBER = "name => document.querySelector(`[data-number='${name}'] dd`)?.textContent"
IS = f"([name, text]) => ({NUMBER})(name) === text"
LINES = "() => [...document.querySelectorAll('.xl-line')].map(e => e.getAttribute('d')).join()"
MOVED = f"before => ({LINES})() !== before"


@pytest.fixture
def show(open_notebook):
    """Open a notebook whose first cell shows the explorer."""

    def show_(*more, theme="light", width=1200):
        notebook = open_notebook([SETUP, ASKED, *more], theme, width, 1100)
        notebook.run(0, 90)
        notebook.page.locator(".xl-explorer .xl-line").first.wait_for()
        return notebook

    return show_


def field(page, name):
    return page.locator(f".xl-explorer [data-field='{name}']")


def press(page, name, *keys):
    """Move a slider as a keyboard does."""
    field(page, name).locator("input[type=range]").focus()
    for key in keys:
        page.keyboard.press(key)


def asked(notebook):
    notebook.run(1)
    return json.loads(notebook.output(1))


@pytest.mark.parametrize("theme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_sliders_move_the_picture_and_the_numbers(show, theme):
    notebook = show(theme=theme)
    page = notebook.page
    assert page.evaluate(NUMBER, "value") == "−1.20"
    assert page.evaluate(NUMBER, "clipped") == "yes"
    cells = page.evaluate(CELLS)

    # The clip is widened by keys until the mark is inside.
    before = page.evaluate(LINES)
    press(page, "eps_clip_high", *["ArrowRight"] * 40)
    notebook.wait(IS, ["clipped", "no"])
    notebook.wait(IS, ["value", "−1.50"])
    notebook.wait(MOVED, before)

    # The token: a negative advantage; then the dual clip and the mask are switched on.
    field(page, "advantage").locator("input[type=text]").fill("-2")
    page.keyboard.press("Enter")
    notebook.wait(IS, ["value", "3.00"])
    field(page, "eps_clip_c").locator("input[type=checkbox]").check()
    field(page, "eps_clip_c").locator("input[type=text]").fill("1.25")
    page.keyboard.press("Tab")
    notebook.wait(IS, ["value", "2.50"])
    notebook.wait(IS, ["gradient", "0"])
    assert set(page.locator(".xl-word").all_text_contents()) == {"clipped"}
    field(page, "icepop_beta").locator("input[type=checkbox]").check()
    press(page, "icepop_beta", "Home", *["ArrowRight"] * 4)
    notebook.wait(IS, ["masked", "yes"])
    assert page.locator(".xl-region.xl-of-masked").count() == 4  # two in each plot
    assert set(page.locator(".xl-word").all_text_contents()) == {"masked"}  # it hides the clip

    # TIS and the penalty bring the fields that they read.
    assert not field(page, "rollout_gap").is_visible()
    field(page, "use_tis").locator("input").check()
    press(page, "rollout_gap", "End")
    notebook.wait(IS, ["tis_weight", "2"])
    field(page, "kl_coef").locator("input[type=text]").fill("0.5")
    page.keyboard.press("Enter")
    field(page, "kl_type").locator("select").select_option("k1")
    field(page, "compute_kl_stats").locator("input").check()
    notebook.wait(IS, ["entropy_sample", "3"])
    params, token, row = asked(notebook)
    assert params["use_tis"] is True
    assert params["kl_type"] == "k1"
    assert params["icepop_beta"] == pytest.approx(1.2)
    assert token["rollout_gap"] == pytest.approx(3.0)
    assert row["masked"] is True
    assert row["tis_weight"] == pytest.approx(2.0)

    # Out of range: the words of the loss; and back.
    field(page, "icepop_beta").locator("input[type=text]").fill("0.5")
    page.keyboard.press("Enter")
    page.get_by_role("alert").get_by_text("icepop_beta is 0.5: pass a number > 1").wait_for()
    page.get_by_role("button", name="Defaults").click()
    notebook.wait(IS, ["value", "−1"])
    assert page.get_by_role("alert").inner_text() == ""

    # Another loss; a kept curve behind it; the mark by mouse.
    page.get_by_role("button", name="Keep this curve").click()
    page.locator(".xl-choose select").select_option("cispo")
    notebook.wait("() => document.querySelectorAll('.xl-kept').length === 2")
    box = page.locator("[data-plot=values] svg").bounding_box()
    page.mouse.click(box["x"] + box["width"] - 12, box["y"] + 90)
    notebook.wait(IS, ["clipped", "yes"])
    assert asked(notebook)[2]["gradient"] == pytest.approx(-4.0)

    # Keys of a focused slider are no shortcuts of the notebook; nothing is as wide as to scroll.
    press(page, "ratio", "b", "a", "x", "d", "d")
    assert page.evaluate(CELLS) == cells
    rgb = page.locator(".xl-explorer select").first.evaluate(
        "e => getComputedStyle(e).backgroundColor"
    )
    bright = sum(int(n) for n in rgb[rgb.index("(") + 1 : -1].split(",")[:3])
    assert (bright > 600) == (theme == "light")


def test_it_answers_while_a_cell_blocks_and_leaves_nothing_behind(show):
    notebook = show(BLOCKING, ALIVE)
    page = notebook.page
    press(page, "ratio", "ArrowRight")  # the page and the kernel have met
    notebook.wait(IS, ["ratio", "1.52"])
    notebook.start(2)
    press(page, "ratio", "End")
    notebook.wait(IS, ["ratio", "8.00"], 20)
    notebook.wait("i => window.xorlDone[i]", 2)
    for _ in range(2):
        notebook.run(0, 60)
    notebook.run(3)
    assert notebook.output(3).strip() == "1", "explorers of earlier runs of the cell are open"
    assert page.locator(".xl-explorer").count() == 1
    outputs = json.loads(notebook.save())["cells"][0]["outputs"]
    html = "".join("".join(o["data"].get("text/html", "")) for o in outputs if "data" in o)
    assert "data:image/png;base64," in html
    assert "<td>value</td><td>-1.2</td>" in html
    assert "LossExplorer(policy_loss: ratio 1.5, advantage 1" in str(outputs)
    page.set_viewport_size({"width": 620, "height": 1000})
    wide = page.evaluate(
        "() => { const e = document.querySelector('.xl-explorer');"
        " return e.scrollWidth - e.clientWidth; }"
    )
    assert wide <= 0
