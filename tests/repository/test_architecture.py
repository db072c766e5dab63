"""The walls of the house: layers, and the documents that describe them."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LINT = (
    "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
)


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """Check the layers of the package in a folder that has a pyproject.toml."""
    return subprocess.run(
        [sys.executable, "-c", LINT], cwd=folder, capture_output=True, text=True, check=False
    )


@pytest.fixture
def copy(root, tmp_path) -> Path:
    """A copy of the package that may be spoilt."""
    shutil.copy(root / "pyproject.toml", tmp_path)
    ignore = shutil.ignore_patterns("__pycache__", "static")
    shutil.copytree(root / "xorl_lab", tmp_path / "xorl_lab", ignore=ignore)
    return tmp_path


def test_dependencies_point_down(copy):
    done = lint(copy)
    assert done.returncode == 0, done.stdout
    assert "0 broken" in done.stdout


@pytest.mark.parametrize(
    ("module", "line", "complaint"),
    [
        ("types/params.py", "import xorl_lab.futures", "Dependencies point down BROKEN"),
        ("engine/tiny.py", "import xorl_lab.samplers", "Dependencies point down BROKEN"),
        ("engine/tiny.py", "from xorl_lab.recipes import sft", "Dependencies point down BROKEN"),
        ("losses/kl.py", "import xorl_lab.checkpoints", "Dependencies point down BROKEN"),
        ("types/params.py", "import torch", "need no tensor library BROKEN"),
        ("checkpoints/names.py", "import torch", "need no tensor library BROKEN"),
        ("checkpoints/names.py", "import xorl_lab.engine", "Dependencies point down BROKEN"),
        ("utils.py", "", "utils"),
    ],
)
def test_a_planted_violation_is_found(copy, module, line, complaint):
    path = copy / "xorl_lab" / module
    path.write_text((path.read_text() if path.exists() else "") + f"\n{line}\n")
    done = lint(copy)
    assert done.returncode != 0
    assert complaint in done.stdout


def expanded(names: str) -> list[str]:
    """Names in a line, those in braces too."""
    parts = [re.fullmatch(r"(.*)\{(.*)\}(.*)", name) for name in names.split(", ")]
    return [
        f"{part[1]}{inner}{part[3]}" if part else name
        for name, part in zip(names.split(", "), parts, strict=True)
        for inner in (part[2].split(",") if part else [""])
    ]


def listed(document: str) -> set[str]:
    """The modules in the tree of ARCHITECTURE.md, as paths below xorl_lab."""
    block = re.search(r"```\nxorl_lab/\n(.*?)```", document, re.DOTALL)
    assert block, "ARCHITECTURE.md has no block that begins with xorl_lab/"
    found: set[str] = set()
    folder = ""
    for line in block[1].splitlines():
        indent = len(line) - len(line.lstrip())
        # Several modules may share a line: "a.py, sub/{b,c}.py   what they do".
        names = expanded(re.split(r"\s{2,}", line.strip())[0])
        if indent == 2:
            folder = names[0] if names[0].endswith("/") else ""
        found.update(names if indent == 2 else [folder + name for name in names])
    return found


def real(package: Path) -> set[str]:
    """The modules and packages that are there; ``__init__`` goes without saying."""
    modules = {p.relative_to(package).as_posix() for p in package.rglob("*.py")}
    inner = {m for m in modules if "/" in m and not m.endswith("/__init__.py")}
    folders = {m.split("/")[0] + "/" for m in modules if "/" in m}
    return inner | folders | {m for m in modules if "/" not in m}


def test_the_tree_of_architecture_is_that_of_the_package(root):
    drawn, there = listed((root / "ARCHITECTURE.md").read_text()), real(root / "xorl_lab")
    assert drawn == there, f"not drawn: {sorted(there - drawn)}; not there: {sorted(drawn - there)}"


@pytest.mark.parametrize(("name", "limit"), [("ARCHITECTURE.md", 150), ("CONTRIBUTING.md", 100)])
def test_documents_stay_short(root, name, limit):
    assert len((root / name).read_text().splitlines()) <= limit


def test_architecture_defines_the_letters(root):
    document = (root / "ARCHITECTURE.md").read_text()
    assert all(re.search(rf"^\| `{letter}` \|", document, re.MULTILINE) for letter in "BGTVLK")
