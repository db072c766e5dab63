import sys
from types import ModuleType, SimpleNamespace

import pytest

from xorl_lab.lab.console import Teller, in_live_notebook
from xorl_lab.types import StepRecord

METRICS = {
    "reward": 0.5, "seconds:sample": 1.0, "seconds:train": 2.0, "seconds:total": 3.25, "other": 1.0,
}  # fmt: skip


def test_a_line_for_each_step_with_its_own_time(capsys):
    Teller(7, quiet=False).step(StepRecord(2, METRICS))
    assert capsys.readouterr().err == "step 2 of 7   reward 0.5   3.2 s\n"


def test_a_warning_is_printed_once_and_brackets_are_text(capsys):
    teller = Teller(2, quiet=False)
    for step in (1, 2):
        teller.step(StepRecord(step, {}, warnings=["look at [red]this[/red]"]))
    assert capsys.readouterr().err.count("  look at [red]this[/red]\n") == 1


def test_quiet(capsys):
    teller = Teller(2, quiet=True)
    teller.step(StepRecord(1, METRICS, warnings=["a"]))
    teller.warn("b")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("modules", "shell", "live"),
    [
        ([], None, False),
        (["ipykernel"], None, False),
        (["ipykernel"], SimpleNamespace(), False),
        (["ipykernel"], SimpleNamespace(kernel=1), True),
        (["ipykernel", "google.colab"], SimpleNamespace(kernel=1), False),
    ],
)
def test_where_a_page_can_be_updated(monkeypatch, modules, shell, live):
    for name in ("ipykernel", "google.colab"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in modules:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    ipython = ModuleType("IPython")
    ipython.get_ipython = lambda: shell
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    assert in_live_notebook() is live
