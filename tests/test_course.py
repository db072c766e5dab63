"""``xorl-lab notebooks``: copies of the course, and pages to read."""

import re
from pathlib import Path

import nbformat
import pytest
from rich.console import Console
from typer.testing import CliRunner

from xorl_lab.cli import app, course, formulas
from xorl_lab.errors import ConfigError


def run(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, ["notebooks", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


STILL = "<details><summary>kept</summary>its picture</details>"


@pytest.fixture
def one(tmp_path, monkeypatch):
    """A course of one notebook, with text of a model in it that means harm."""
    cells = [
        nbformat.v4.new_markdown_cell(
            "# A *title*\n\nWhat $x^2$ is about, [see](02_next.ipynb).\n\n"
            "| what | $a<b$ |\n|---|---|\n| a cell | $\\frac{a}{b}$ |\n\n"
            "$$L = \\sum_{k=1}^{K} g_k\n\\qquad (K > 0)$$\n\nNot a formula: `$x$`, 5 \\$."
        ),
        nbformat.v4.new_markdown_cell(
            "<details><summary>Solution</summary>\n\n```python\nanswer = 0.25\n```\n\n"
            "Why: $\\alpha$ is one.\n</details>"
        ),
        nbformat.v4.new_code_cell(
            "figure",
            outputs=[
                nbformat.v4.new_output(
                    "display_data",
                    {
                        course.PLOTLY: {
                            "data": [{"y": [1, 3], "name": "</script><b id=harm>"}],
                            "layout": {},
                        }
                    },
                ),
                nbformat.v4.new_output(
                    "display_data",
                    {course.WIDGET: {"model_id": "x"}, "text/plain": "a widget"},
                ),
                nbformat.v4.new_output("display_data", {"text/html": STILL}),
                nbformat.v4.new_output("stream", text="<b id=harm>"),
            ],
        ),
    ]
    folder = tmp_path / "course"
    folder.mkdir()
    nbformat.write(nbformat.v4.new_notebook(cells=cells), folder / "01_one.ipynb")
    monkeypatch.setattr(course, "folder", lambda: folder)
    return folder


def test_a_copy_keeps_what_a_person_has_changed(one, tmp_path):
    target = tmp_path / "mine"
    assert "01_one.ipynb: copied" in run(target)
    assert (target / "01_one.ipynb").read_bytes() == (one / "01_one.ipynb").read_bytes()
    assert "is there already" in run(target)
    (target / "01_one.ipynb").write_text("changed")
    assert "differs" in run(target)
    assert (target / "01_one.ipynb").read_text() == "changed"
    assert "replaced" in run(target, "--overwrite")
    assert (target / "01_one.ipynb").read_bytes() == (one / "01_one.ipynb").read_bytes()


def test_a_folder_that_is_a_file_is_an_error(one, tmp_path):
    (tmp_path / "file").write_text("")
    for html in ((), ("--html",)):
        result = CliRunner().invoke(app, ["notebooks", str(tmp_path / "file"), *html])
        assert isinstance(result.exception, ConfigError)
        assert "cannot be made a folder" in str(result.exception)


def test_an_installation_without_notebooks_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(course, "__file__", str(tmp_path / "xorl_lab" / "cli" / "course.py"))
    with pytest.raises(ConfigError, match="there are no notebooks beside"):
        course.folder()


def test_pages_escape_text_and_leave_widgets_to_their_pictures(one, tmp_path):
    run(tmp_path / "pages", "--html")
    page = (tmp_path / "pages" / "01_one.html").read_text()
    assert "<title>A title</title>" in page
    assert '<details open=""><summary>kept</summary>its picture</details>' in page
    assert "a widget" not in page
    assert "<b id=harm>" not in page.replace("<\\/script><b id=harm>", "")
    assert page.count("</script>") == 2  # what loads plotly, and what draws the figure
    assert 'href="02_next.html"' in page
    index = (tmp_path / "pages" / "index.html").read_text()
    assert 'is about, <a href="02_next.html">see</a>.' in index


def formulas_of(page: str) -> list[str]:
    return re.findall(r"<math.*?</math>", page, re.DOTALL)


def untranslated(page: str) -> list[str]:
    """LaTeX that is still there, in a formula or in its place."""
    left = [c for one in formulas_of(page) for c in re.findall(r">(\\\w+|&amp;)<", one)]
    return left + re.findall(r"<code>(\\[a-z][^<]*)</code>", page)


def test_formulas_need_no_script(one, tmp_path):
    run(tmp_path / "pages", "--html")
    page = (tmp_path / "pages" / "01_one.html").read_text()
    inline, less, fraction, block, letter = formulas_of(page)
    assert 'display="block"' in block
    assert not any('display="block"' in each for each in (inline, less, fraction, letter))
    assert "<mo>&lt;</mo>" in less
    assert "<mfrac>" in fraction
    assert "∑" in block
    assert "α" in letter
    assert "<code>$x$</code>" in page
    assert untranslated(page) == []
    assert "$" not in re.sub(r"<style>.*?</style>|<script>.*?</script>", "", page).replace(
        "<code>$x$</code>, 5 $.", ""
    )
    assert len(formulas_of((tmp_path / "pages" / "index.html").read_text())) == 1


@pytest.mark.parametrize(
    ("formula", "there"),
    [
        (r"\begin{aligned} a &= b \\ c &= d \end{aligned}", "text-align: left; padding-left: 0"),
        (r"\begin{cases} a & x > 0 \\ b & \text{otherwise} \end{cases}", "otherwise"),
        (r"x \sim p", "<mo>∼</mo>"),
        (r"\log x", '<mi style="padding-right: .17em">log</mi>'),
        (r"\text{<b>&}", "&lt;b&gt;&amp;"),
        (r"<\frac{", r"<code>&lt;\frac{</code>"),
    ],
)
def test_formulas_are_read_or_shown_as_they_are(formula, there):
    assert there in formulas.mathml(formula)
    assert formulas.mathml(formula, block=True) != formulas.mathml(formula) or "<code>" in there


def test_what_renders_formulas_is_asked_for(one, tmp_path, monkeypatch):
    monkeypatch.setattr(
        course.importlib.util, "find_spec", lambda name: None if name == "latex2mathml" else name
    )
    with pytest.raises(ConfigError, match="latex2mathml is not installed"):
        course.gallery(tmp_path / "pages", Console())


def test_the_real_course_becomes_pages_that_need_no_network(root, tmp_path):
    run(tmp_path, "--html")
    names = {path.stem for path in (root / "notebooks").glob("*.ipynb")}
    assert {path.stem for path in tmp_path.glob("*.html")} == names | {"index"}
    for path in tmp_path.glob("*.html"):
        loaded = re.findall(
            r'<(?:script|link|img|iframe)[^>]*(?:src|href)="([^"]+)"', path.read_text()
        )
        assert set(loaded) <= {course.SCRIPT} | {s for s in loaded if s.startswith("data:")}, path
        assert untranslated(path.read_text()) == [], path
        for target in re.findall(r'href="(?!https?:|#|data:)([^"#]+)', path.read_text()):
            assert (tmp_path / target).exists(), f"{path.name}: {target}"


def test_a_page_is_whole_offline(one, tmp_path):
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    from tests.widgets import jupyter

    if jupyter.chromium() is None:
        pytest.skip("chromium is not installed")
    run(tmp_path / "pages", "--html")
    with jupyter.browser() as browser:
        page = browser.new_context(offline=True).new_page()
        page.goto((tmp_path / "pages" / "01_one.html").as_uri())
        page.wait_for_selector(".js-plotly-plot .trace")
        assert page.locator("#harm").count() == 0
        drawn = page.locator("mfrac").bounding_box()
        row = page.locator("mfrac mrow, mfrac mi").first.bounding_box()
        assert drawn is not None
        assert row is not None
        assert drawn["height"] > 1.6 * row["height"]  # two stories
        solution = page.get_by_text("answer = 0.25")
        assert not solution.is_visible()
        page.get_by_text("Solution").click()
        assert solution.is_visible()
        assert page.locator("details math").is_visible()
