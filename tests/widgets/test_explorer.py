"""The explorer of losses: what its page is told, and what a saved notebook keeps."""

import gc
import json
import weakref

import pytest

import xorl_lab as xl
from tests.closeness import assert_close
from xorl_lab.errors import ConfigError
from xorl_lab.lab.explorer import Losses
from xorl_lab.widgets import LossExplorer

TOKEN = {"ratio": 1.5, "advantage": 1.0}


class Told:
    """An explorer whose answers are collected instead of sent."""

    def __init__(self, explorer):
        self.explorer = explorer
        self.answers = []
        explorer.curves.send = self._send

    def _send(self, content, _buffers=None):
        json.dumps(content, allow_nan=False).encode()
        self.answers.append(content)

    def ask(self, kind, **content):
        self.explorer.curves._hear(None, {"kind": kind, "id": "p-1", **content}, None)
        return self.answers[-1]


@pytest.fixture
def explorer():
    made = xl.explore_losses("ppo", ratio=1.5)
    yield made
    made.close()


@pytest.fixture
def told(explorer):
    return Told(explorer)


def test_the_page_has_forms_and_a_curve_from_the_start(explorer):
    first = explorer.curves.get_state()["first"]
    assert [form["name"] for form in first["forms"]] == sorted(f["name"] for f in Losses().forms())
    assert first["curve"]["params"]["clip_high_threshold"] == pytest.approx(1.2)
    json.dumps(first, allow_nan=False)


def test_a_person_can_begin_anywhere():
    made = xl.explore_losses(
        "policy_loss", ratio=5.0, token={"advantage": -2.0}, eps_clip_c=3.0, icepop_beta=4.0
    )
    assert made.curve["params"]["icepop_beta"] == pytest.approx(4.0)
    assert repr(made) == (
        "LossExplorer(policy_loss: ratio 5, advantage -2, value 0, gradient 0, clipped, masked)"
    )
    made.close()


def test_what_the_page_asks_for_is_what_the_loss_says(told):
    params = {"clip_low_threshold": 0.5, "clip_high_threshold": 3.0}
    token = {"ratio": 2.0, "advantage": -1.5}
    curve = told.ask("curve", loss="ppo", params=params, token=token)["curve"]
    frame = xl.loss_curve("ppo", curve["ratios"], {"advantage": -1.5}, **params)
    assert_close(curve["values"], frame["value"], rtol=1e-9)
    inside = (abs(frame["ratio"] - 0.5) > 1e-9) & (abs(frame["ratio"] - 3) > 1e-9)  # no corner
    assert_close(
        [g for g, there in zip(curve["gradients"], inside, strict=True) if there],
        frame["gradient"][inside],
        rtol=1e-9,
    )
    row = xl.loss_curve("ppo", [2.0], {"advantage": -1.5}, **params).iloc[0]
    assert_close(curve["mark"]["value"], row["value"], rtol=1e-9)
    assert told.explorer.curve["token"]["ratio"] == pytest.approx(2.0)


def test_a_page_that_is_loaded_again_is_told_what_was_asked_last(told):
    told.ask("curve", loss="dro", params={"beta": 0.5}, token=TOKEN)
    assert told.ask("hello")["curve"]["loss"] == "dro"
    assert repr(told.explorer).startswith("LossExplorer(dro: ratio 1.5")


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"kind": "curve"}, "unknown loss 'None'"),
        ({"kind": "curve", "loss": "ppo"}, "the token is a NoneType: pass a mapping"),
        ({"kind": "curve", "loss": "ppo", "params": 3, "token": {}}, "the parameters of ppo are"),
        (
            {"kind": "curve", "loss": "ppo", "params": {"clip_low_threshold": "<b>"}, "token": {}},
            "clip_low_threshold is '<b>': pass a number from 0 to 1",
        ),
        ({"kind": "curve", "loss": "cispo", "params": {}, "token": {"ratio": -1}}, "ratio is -1"),
        ({"kind": "curve", "loss": "cispo", "params": {}, "token": {"b": 1}}, "a token has no"),
        ({"kind": "shell"}, "'shell' is no request: pass hello or curve"),
        ({}, "None is no request"),
    ],
)
def test_what_makes_no_sense_is_answered_in_words(told, request_, message):
    before = told.explorer.curve
    content = dict(request_)
    answer = told.ask(content.pop("kind", None), **content)
    assert message in answer["error"]
    assert "curve" not in answer
    assert told.explorer.curve is before


def test_numbers_that_overflow_are_left_out(told):
    answer = told.ask("curve", loss="ppo", params={}, token={"ratio": 8.0, "advantage": -1e308})
    assert answer["curve"]["values"][-1] is None


def test_it_is_refused_at_once_if_a_person_is_wrong():
    with pytest.raises(ConfigError, match=r"eps_clip_c is 0\.5: pass a number > 1"):
        xl.explore_losses("policy_loss", eps_clip_c=0.5)


def test_a_saved_notebook_keeps_a_picture_and_the_numbers(explorer):
    html = explorer.still()
    assert "data:image/png;base64," in html
    assert "<b>ppo</b>: compute_kl_stats=False, clip_low_threshold=0.8" in html
    assert "<td>value</td><td>-1.2</td>" in html
    assert "<td>clipped</td><td>yes</td>" in html
    assert "clipped (hatched /): ratio 1.2 to 8" in html
    assert len(html) < 30_000
    for word in ("<script", "<style", "<svg", "style="):
        assert word not in html


def test_the_picture_survives_what_cannot_be_drawn(told):
    told.ask("curve", loss="ppo", params={}, token={"ratio": 8.0, "advantage": -1e308})
    html = told.explorer.still()
    assert "The picture of the curves could not be drawn: " in html
    assert "<td>clipped</td><td>no</td>" in html


def test_what_a_page_says_is_escaped_in_the_saved_notebook():
    class Evil(Losses):
        def curve(self, loss, params, token):
            return {**super().curve(loss, params, token), "loss": "<img src=x>"}

    made = LossExplorer(Evil(), "ppo", {}, TOKEN)
    assert "<img src=x>" not in made.still()
    made.close()


def test_a_closed_explorer_is_freed():
    made = xl.explore_losses("ppo")
    widget = weakref.ref(made.curves)
    made.close()
    assert made.closed
    del made
    gc.collect()
    assert widget() is None
