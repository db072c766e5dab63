"""The demo on the model ``tiny``: everything but the learning."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading

import pytest
import typer
from rich.console import Console

from xorl_lab.client import ServiceClient
from xorl_lab.errors import ConfigError
from xorl_lab.recipes import console as shown
from xorl_lab.recipes import demo
from xorl_lab.types import StepRecord


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("XORL_LAB_HOME", str(tmp_path / "home"))


def _console():
    return Console(file=io.StringIO(), width=100, highlight=False)


def _run(tmp_path, **options):
    console = _console()
    given = {"model": "tiny", "steps": 2, "report": tmp_path / "report.html", **options}
    return demo.run_demo(demo.DemoOptions(**given), console=console), console.file.getvalue()


def test_it_trains_reports_and_saves(tmp_path):
    result, text = _run(tmp_path, seed=3)
    assert result.outcome.steps == 2
    assert not result.interrupted
    page = result.report.read_text()
    for fact in ("tiny", "float32", "LoRA, rank 16, alpha 32", "Seconds by step", "learning_rate"):
        assert fact in page
    for line in ("held-out accuracy", "mean reward", "checkpoint", "Held-out prompts, greedy"):
        assert line in text
    assert re.search(r"^   2  reward \d\.\d{3}", text, re.MULTILINE)
    again = ServiceClient().create_training_client_from_state(result.checkpoint)
    assert again.base_model == "tiny"


def test_the_result_is_json(tmp_path):
    result, _ = _run(tmp_path)
    values = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert (values["task"], values["model"], values["seed"]) == ("addition", "tiny", 0)
    assert values["accuracy_before"] == 0.0
    assert values["seconds"] > 0


def test_a_supervised_task(tmp_path):
    result, text = _run(tmp_path, task="password")
    assert result.outcome.steps == 2
    assert "loss" in text
    assert result.to_dict()["reward_last"] is None


def test_wrong_options(tmp_path):
    with pytest.raises(ConfigError, match="unknown task 'chess'"):
        _run(tmp_path, task="chess")
    with pytest.raises(ConfigError, match="steps is 0"):
        _run(tmp_path, steps=0)


def test_the_command_writes_json(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        demo.main(["--model", "tiny", "--steps", "1", "--seed", "5", "--json", "out/result.json"])
    assert ended.value.code == 0
    assert json.loads((tmp_path / "out" / "result.json").read_text())["steps"] == 1
    assert (tmp_path / "reports" / "demo-5.html").exists()


def test_the_first_interrupt_ends_after_the_step_and_the_second_at_once():
    def steps():
        yield StepRecord(1, {"reward": 0.5})
        os.kill(os.getpid(), signal.SIGINT)
        yield StepRecord(2, {"reward": 0.5})
        raise AssertionError("a step was taken after the interrupt")

    before = signal.getsignal(signal.SIGINT)
    records = []
    console = _console()
    with shown.interrupts(console) as stop:
        shown.train(steps(), 9, records, console, stop)
        assert stop.is_set()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert [r.step for r in records] == [1, 2]
    assert "stopping after this step" in console.file.getvalue()
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupted_step_is_given_up():
    def steps():
        yield StepRecord(1, {"reward": 0.5})
        raise KeyboardInterrupt

    records = []
    shown.train(steps(), 9, records, _console(), threading.Event())
    assert [r.step for r in records] == [1]


def test_a_warning_is_shown_once_and_is_not_markup():
    console = _console()
    records = [StepRecord(i, {"reward": 0.5}, warnings=["[red]odd[/] [/wrong]"]) for i in (1, 2)]
    shown.train(iter(records), 2, [], console, threading.Event())
    assert console.file.getvalue().count("[red]odd[/] [/wrong]") == 1


def test_ctrl_c_in_a_terminal_leaves_checkpoint_and_report(tmp_path):
    code = "import sys; from xorl_lab.cli import main; sys.argv[0] = 'xorl-lab'; main()"
    command = [sys.executable, "-u", "-c", code, "demo", "--model", "tiny", "--steps", "100000"]
    process = subprocess.Popen(
        [*command, "--report", str(tmp_path / "r.html"), "--json", str(tmp_path / "r.json")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.getcwd(), "COLUMNS": "100"},
    )
    try:
        seen = []
        for line in process.stdout:
            seen.append(line)
            if line.startswith("   3  reward"):
                process.send_signal(signal.SIGINT)
                break
        seen += process.communicate(timeout=120)[0].splitlines(keepends=True)
    finally:
        process.kill()
        process.wait()
    text = "".join(seen)
    assert process.returncode == demo.INTERRUPTED, text
    assert "stopping after this step" in text
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["interrupted"] is True
    assert 3 <= result["steps"] < 100000
    note = f"Interrupted after step {result['steps']}."
    assert note in (tmp_path / "r.html").read_text()
    assert ServiceClient().create_training_client_from_state(result["checkpoint"]).version >= 0


def test_exit_status_after_an_interrupt(tmp_path, monkeypatch):
    result, _ = _run(tmp_path, steps=1)
    stopped = demo.DemoResult(**{
        name: getattr(result, name) for name in demo.DemoResult.__dataclass_fields__
    } | {"interrupted": True})  # fmt: skip
    monkeypatch.setattr(demo, "run_demo", lambda _: stopped)
    with pytest.raises(typer.Exit) as ended:
        demo.demo_command()
    assert ended.value.exit_code == demo.INTERRUPTED
