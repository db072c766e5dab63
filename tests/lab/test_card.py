from types import SimpleNamespace

import pytest

from tests.lab.support import grpo, lab_in
from xorl_lab.lab import Lab, card

ROWS = [
    "model", "parameters", "computes in", "context", "memory to train", "trains", "folder",
    "on the disk",
]  # fmt: skip


def test_what_the_card_says(lab):
    facts = lab._facts()
    assert list(facts) == ROWS
    assert facts["model"].startswith("tiny")
    assert facts["computes in"] == "float32 on cpu"
    assert facts["context"] == "512 tokens"
    assert facts["trains"] == "an adapter of rank 4"
    assert facts["folder"] == str(lab.folder)
    assert facts["on the disk"].startswith("0 runs, record ")
    grpo(lab, steps=1)
    grown = lab._facts()["on the disk"]
    assert grown.startswith("1 run, record ")
    assert "checkpoints" in grown


@pytest.mark.parametrize("arguments", [{"rank": None}, {"rank": 2, "train_mlp": False}])
def test_cards_of_other_labs(tmp_path, arguments):
    facts = lab_in(tmp_path, **arguments)._facts()
    full = "the full weights" if arguments["rank"] is None else "an adapter of rank 2"
    assert facts["trains"] == full


def test_a_mixture_of_experts(tmp_path):
    assert "tiny-moe" in Lab("tiny-moe", folder=tmp_path, device="cpu")._facts()["model"]


def test_forms(lab):
    assert repr(lab) == "Lab('tiny')"
    html = lab._repr_html_()
    assert html.count("<tr>") == len(ROWS)
    lines = []
    lab._repr_pretty_(SimpleNamespace(text=lines.append), cycle=False)
    assert lines[0].count("\n") == len(ROWS) - 1


def test_html_is_escaped():
    html = card.markup({"folder": "/<script>&"})
    assert "<script" not in html
    assert "/&lt;script&gt;&amp;" in html
