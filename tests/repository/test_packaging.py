"""What is installed, where it is written down, and whether the places agree."""

import ast
import itertools
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import xorl_lab


@pytest.fixture(scope="session")
def project(root) -> dict[str, Any]:
    return tomllib.loads((root / "pyproject.toml").read_text())["project"]


def requirements(lines: list[str]) -> dict[str, Requirement]:
    parsed = [Requirement(line) for line in lines]
    return {canonicalize_name(r.name): r for r in parsed}


def constraints(root: Path) -> dict[str, Requirement]:
    lines = (root / "constraints.txt").read_text().splitlines()
    return requirements([line for line in lines if line and not line.startswith("#")])


def test_one_version(root, project):
    released = re.findall(
        r"^## \[(\d+\.\d+\.\d+)\]", (root / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert project["version"] == xorl_lab.__version__ == released[0]


def test_conda_environment_is_in_step(root, project):
    environment = yaml.safe_load((root / "environment.yml").read_text())
    conda = [entry for entry in environment["dependencies"] if isinstance(entry, str)]
    (pip,) = [entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict)]
    assert conda == [f"python{project['requires-python']}", "pip"]
    assert pip[-1] == "-e ."
    expected = {*project["dependencies"], *project["optional-dependencies"]["notebook"]}
    assert len(pip[:-1]) == len(set(pip[:-1]))
    assert set(pip[:-1]) == expected


def test_dependencies_are_ranges(project):
    extras = project["optional-dependencies"].values()
    every = [*project["dependencies"], *itertools.chain.from_iterable(extras)]
    for line in every:
        assert not any(s.operator in ("==", "===", "~=") for s in Requirement(line).specifier), line


@pytest.mark.parametrize(
    ("name", "versions"),
    [
        ("torch", ["2.11.0", "2.13.0", "2.14.1"]),
        ("transformers", ["5.17.0", "5.19.0", "5.24.0"]),
    ],
)
def test_ranges_admit_what_gpu_users_have(project, name, versions):
    specifier = requirements(project["dependencies"])[name].specifier
    assert all(specifier.contains(version) for version in versions)


def test_constraints_are_pins_within_the_ranges(root, project):
    ranges = requirements(project["dependencies"])
    for extra in ("notebook", "test", "dev"):
        ranges |= requirements(project["optional-dependencies"][extra])
    pins = constraints(root)
    assert {"torch", "transformers", "peft", "accelerate", "gguf"} <= pins.keys()
    for name, pin in pins.items():
        (clause,) = pin.specifier
        assert clause.operator == "==", f"{pin} is not a pin"
        if name in ranges:
            assert ranges[name].specifier.contains(clause.version), name


def test_sglang_is_an_extra_of_its_own(project):
    extras = project["optional-dependencies"]
    for name, lines in extras.items():
        assert name == "sglang" or not any("sglang" in line for line in lines)
    assert not any("sglang" in line for line in project["dependencies"])


def test_no_place_to_download_from_is_written_down(root):
    for name in ("pyproject.toml", "constraints.txt", "environment.yml", "Makefile", ".ci/run"):
        text = (root / name).read_text()
        assert "://" not in text, name
        assert "index-url" not in text, name


def test_every_import_is_declared(root, project):
    extra = project["optional-dependencies"]["notebook"]  # `xorl-lab notebooks --html` alone
    declared = {*requirements(project["dependencies"]), *requirements(extra)}
    distributions = metadata.packages_distributions()
    imported: dict[str, str] = {}
    for path in (root / "xorl_lab").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            imported |= {name.split(".")[0]: path.name for name in names}
    foreign = imported.keys() - sys.stdlib_module_names - {"xorl_lab"}
    for module in sorted(foreign):
        owners = {canonicalize_name(d) for d in distributions.get(module, [module])}
        assert owners & declared, f"{imported[module]} imports {module}: declare it in pyproject"


def test_the_wheel_holds_the_package(root, tmp_path):
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=root, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        entry = archive.read(next(n for n in names if n.endswith("entry_points.txt"))).decode()
    assert "xorl_lab/py.typed" in names
    assert "xorl_lab/engine/models.py" in names
    assert any(n.endswith("licenses/LICENSE") for n in names)
    for needed in ("launch.py", "requirements.txt", "sgl_kernel/__init__.py"):
        assert f"xorl_lab/samplers/sglang/cpu/{needed}" in names
    course = {f"xorl_lab/notebooks/{path.name}" for path in (root / "notebooks").glob("*.ipynb")}
    assert course == {name for name in names if name.startswith("xorl_lab/notebooks/")} != set()
    assert not any(n.startswith("tests") for n in names)
    assert "xorl-lab = xorl_lab.cli:main" in entry


def test_make_is_the_one_entry(root):
    targets = set(re.findall(r"^([a-z]+):", (root / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "lab", "test", "accept", "check", "fix"} <= targets
    run = root / ".ci/run"
    assert os.access(run, os.X_OK)
    assert run.read_text().splitlines()[:2] == ["#!/usr/bin/env bash", "set -euo pipefail"]
    assert run.read_text().rstrip().splitlines()[-1] == "make test"


def test_what_ci_runs(root, tmp_path):
    done = subprocess.run(
        ["make", "-n", "test", f"VENV={tmp_path / 'venv'}"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    steps = ["-m venv", "pip install", "ruff check", "ruff format --check", "basedpyright"]
    steps += ["lint-imports", "models --fetch", 'pytest -m "not slow"', "pytest --nbval"]
    places = [done.stdout.index(step) for step in steps]
    assert places == sorted(places)
    assert "-c constraints.txt" in done.stdout
