"""Finding an environment with SGLang, and making one; pip is never run here."""

import subprocess
import sys
from pathlib import Path

import pytest

from xorl_lab.errors import ConfigError
from xorl_lab.samplers.sglang import install as installing

REQUIREMENTS = installing.CPU_FOLDER / "requirements.txt"


@pytest.fixture(autouse=True)
def _nothing_is_known(monkeypatch, tmp_path):
    monkeypatch.delenv(installing.VARIABLE, raising=False)
    monkeypatch.setattr(installing, "_KNOWN", {})
    monkeypatch.setattr(installing, "_places", lambda: iter([]))


def python(folder: Path, says: str, status: int = 0) -> Path:
    """A program that answers like the interpreter of an environment."""
    path = folder / "bin" / "python"
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\necho {says}\nexit {status}\n")
    path.chmod(0o755)
    return path


def test_the_first_place_that_has_it_is_taken(tmp_path, monkeypatch):
    without = python(tmp_path / "a", "nothing", status=1)
    first, second = python(tmp_path / "b", "0.5.23"), python(tmp_path / "c", "0.5.30")
    places = [tmp_path / "gone", without, first, second]
    monkeypatch.setattr(installing, "_places", lambda: iter(places))
    assert installing.interpreter() == first
    assert installing.version(second) == "0.5.30"
    assert installing.require() == first
    assert installing.require(second) == second


def test_one_that_is_installed_later_is_found(tmp_path, monkeypatch):
    path = python(tmp_path, "nothing", status=1)
    monkeypatch.setattr(installing, "_places", lambda: iter([path]))
    assert installing.interpreter() is None
    path.write_text("#!/bin/sh\necho 0.5.23\n")
    assert installing.interpreter() == path


def test_where_it_is_looked_for(tmp_path, monkeypatch, root, empty_home):
    monkeypatch.undo()
    monkeypatch.setenv("XORL_LAB_HOME", str(empty_home))
    monkeypatch.chdir(tmp_path)
    assert list(installing._places()) == [
        tmp_path / ".venv-sglang/bin/python",
        root / ".venv-sglang/bin/python",
        empty_home / "sglang/bin/python",
        Path(sys.executable),
    ]


def test_the_variable_decides(tmp_path, monkeypatch):
    path = python(tmp_path, "0.5.23")
    monkeypatch.setenv(installing.VARIABLE, str(path))
    assert installing.interpreter() == path


@pytest.mark.parametrize("named", ["/nowhere/python", sys.executable])
def test_a_variable_that_names_another_python_is_an_error(monkeypatch, named):
    monkeypatch.setattr(installing, "_ask", lambda path: None)
    monkeypatch.setenv(installing.VARIABLE, named)
    with pytest.raises(ConfigError, match=r"not a Python with SGLang.*xorl-lab sglang --install"):
        installing.interpreter()


def test_the_errors_say_how_to_get_one():
    with pytest.raises(ConfigError, match=r"no environment with SGLang.*sglang --install"):
        installing.require()
    with pytest.raises(ConfigError, match="python is '/nowhere', which has no SGLang"):
        installing.require("/nowhere")


def test_our_modules_are_not_shown_to_another_python(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/ours")
    monkeypatch.setenv("KEPT", "1")
    variables = installing.clean_environment()
    assert "PYTHONPATH" not in variables
    assert variables["KEPT"] == "1"


@pytest.fixture
def commands(monkeypatch):
    """What would have been run; it succeeds."""
    run: list[list[str]] = []

    def record(command, **_):
        run.append(command)
        if "venv" in command:
            python(Path(command[-1]), installing.VERSION)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(installing, "_ask", lambda path: installing.VERSION if run else None)
    monkeypatch.setattr(installing.subprocess, "run", record)
    return run


def test_what_installing_does(tmp_path, commands):
    said: list[str] = []
    made = installing.install(tmp_path / "sglang", say=said.append)
    assert made == tmp_path / "sglang/bin/python"
    venv, first, last = commands
    assert venv == [sys.executable, "-m", "venv", str(tmp_path / "sglang")]
    assert first[-2:] == ["--requirement", str(REQUIREMENTS)]
    assert last[-3:] == ["--no-deps", "sglang==0.5.23", "torchvision==0.28.0"]
    assert said[-1] == f"SGLang 0.5.23 is ready in {tmp_path / 'sglang'}"
    installing.install(tmp_path / "sglang")
    assert len(commands) == 3, "it was complete"


def test_for_a_gpu_it_brings_all_that_it_asks_for(tmp_path, commands):
    installing.install(tmp_path / "sglang", gpu=True)
    assert commands[-1][-1] == "sglang==0.5.23"
    assert "--no-deps" not in commands[-1]
    assert len(commands) == 2


def test_a_failure_of_pip_is_told_in_its_words(tmp_path, monkeypatch):
    def fail(command, **_):
        return subprocess.CompletedProcess(command, 1, "", "ERROR: no matching distribution")

    monkeypatch.setattr(installing, "_ask", lambda path: None)
    monkeypatch.setattr(installing.subprocess, "run", fail)
    with pytest.raises(ConfigError, match="no matching distribution"):
        installing.install(tmp_path / "sglang")


def test_a_full_disk_is_told_before_anything_is_done(tmp_path, monkeypatch, commands):
    monkeypatch.setattr(installing, "ROOM", 1e18)
    with pytest.raises(ConfigError, match=r"GB free, and SGLang takes 2\.3 GB"):
        installing.install(tmp_path / "sglang")
    assert commands == []


def test_elsewhere_than_on_linux_it_is_not_to_be_had(tmp_path, monkeypatch, commands):
    monkeypatch.setattr(installing.sys, "platform", "darwin")
    with pytest.raises(ConfigError, match="SGLang runs on Linux"):
        installing.install(tmp_path / "sglang")
    assert commands == []


def test_the_requirements_are_pins():
    lines = [line for line in REQUIREMENTS.read_text().splitlines() if not line.startswith("#")]
    assert all(line.count("==") == 1 for line in lines)
    assert {"transformers==5.19.0", "torch==2.13.0"} <= set(lines)
    assert not any("sglang" in line or "torchvision" in line for line in lines)
