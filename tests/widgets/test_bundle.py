import re
import shutil
import sys
from pathlib import Path

import pytest

from xorl_lab.widgets import bundle, colours


@pytest.fixture
def hook(root, monkeypatch):
    pytest.importorskip("hatchling")
    monkeypatch.syspath_prepend(str(root))
    monkeypatch.delitem(sys.modules, "hatch_build", raising=False)
    import hatch_build

    return hatch_build


def test_the_bundle_was_built_of_these_sources(hook, root):
    assert bundle.recorded_hash() == hook.sources_hash(root), "run `make front`"


def test_the_bundle_is_small():
    assert (bundle.STATIC / "dashboard.js").stat().st_size < 120_000
    assert (bundle.STATIC / "controls.js").stat().st_size < 30_000


def test_the_bundle_is_text_so_that_closed_widgets_are_freed(monkeypatch):
    assert isinstance(bundle.script("dashboard"), str)
    monkeypatch.setenv("ANYWIDGET_HMR", "1")
    assert isinstance(bundle.script("dashboard"), Path)


def test_a_missing_bundle_says_so_in_the_page():
    assert "not built" in bundle.script("nothing")


def test_the_bundle_loads_nothing(root):
    for path in bundle.STATIC.glob("*.js"):
        text = path.read_text()
        found = set(re.findall(r"https?://[^\s\"'`)]+", text)) - {"http://www.w3.org/2000/svg"}
        assert found == set(), path.name


def test_data_is_never_set_as_html(root):
    ways = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write"
    for path in (root / "widgets" / "src").glob("*.js"):
        assert not re.search(ways, path.read_text()), path.name


def test_python_and_the_page_draw_with_the_same_colours(root):
    looks = (root / "widgets" / "src" / "looks.js").read_text()
    listed = re.search(r"export const COLOURS = \[(.*?)\]", looks)[1]
    assert tuple(re.findall(r"#\w{6}", listed)) == colours.COLOURS
    dashes = re.search(r"export const DASHES = \[(.*)\];", looks)[1]
    assert dashes.replace(" ", "") == str([list(d) for d in colours.DASHES]).replace(" ", "")[1:-1]
    style = (root / "widgets" / "src" / "style.css").read_text()
    dark = re.findall(r"#\w{6}", re.search(r"COLOURS_DARK = \[(.*?)\]", looks)[1])
    for number, (light, other) in enumerate(zip(colours.COLOURS, dark, strict=True)):
        said = re.search(rf"--xl-c{number}: (.*);", style)[1].lower()
        assert light.lower() in said
        assert other.lower() in said


def copy(root, target):
    shutil.copytree(
        root / "widgets", target / "widgets", ignore=shutil.ignore_patterns("node_modules")
    )
    return target


def test_the_hook_skips_what_is_up_to_date(hook, root, monkeypatch):
    monkeypatch.setattr(hook, "_run", lambda *_: pytest.fail("was built again"))
    assert hook.build_front_end(root) is False


def test_the_hook_builds_what_is_missing(hook, root, tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(hook, "_run", lambda command, _: commands.append(command[1:3]))
    assert hook.build_front_end(copy(root, tmp_path)) is True
    assert commands == [["ci", "--omit=dev"], ["run", "build"]]


def test_the_hook_says_when_npm_is_missing(hook, root, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"npm was not found: install Node\.js 20"):
        hook.build_front_end(copy(root, tmp_path))


def test_the_hook_needs_no_sources_beside_a_bundle(hook, tmp_path):
    with pytest.raises(RuntimeError, match="neither built nor"):
        hook.build_front_end(tmp_path)
    static = tmp_path / "xorl_lab" / "widgets" / "static"
    static.mkdir(parents=True)
    (static / "sources.sha256").write_text("0")
    assert hook.build_front_end(tmp_path) is False
