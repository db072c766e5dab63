"""Losses as curves: the same numbers as the losses and autograd give."""

import math

import numpy as np
import pytest
import torch

import xorl_lab as xl
from tests.closeness import assert_close
from xorl_lab import losses
from xorl_lab.errors import ConfigError
from xorl_lab.lab import explorer
from xorl_lab.lab.curves import Token

RATIOS = [0.02, 0.3, 0.79, 0.81, 1.0, 1.19, 1.21, 1.9, 2.1, 3.9, 4.1, 30.0]
SETTINGS = [
    ("ppo", {}),
    ("ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}),
    ("drgrpo", {"beta": 0.3, "kl_type": "k1"}),
    ("importance_sampling", {"kl_coef": 0.2, "kl_type": "k2"}),
    ("cispo", {"clip_low_threshold": 0.8, "clip_high_threshold": 2.0}),
    ("dro", {"beta": 0.5}),
    ("policy_loss", {}),
    ("policy_loss", {"eps_clip_c": 2.0, "icepop_beta": 4.0}),
    ("policy_loss", {"use_tis": True, "kl_coef": 0.1, "tis_clip_high": 1.5}),
]


@pytest.mark.parametrize("advantage", [-1.5, 0.0, 2.0])
@pytest.mark.parametrize(("loss", "params"), SETTINGS)
def test_a_curve_is_what_the_loss_and_autograd_say_of_each_token(loss, params, advantage):
    token = Token(advantage, old_logprob=-2.0, rollout_gap=0.7, ref_gap=-0.4)
    frame = xl.loss_curve(loss, RATIOS, token, **params)
    for row, ratio in zip(frame.to_dict("records"), RATIOS, strict=True):
        one = torch.ones(1, 1, dtype=torch.float64)
        logprobs = (-2.0 * one + math.log(ratio)).requires_grad_()
        inputs = {
            "weights": one,
            "logprobs": -2.0 * one,
            "advantages": advantage * one,
            "rollout_logprobs": -2.7 * one,
            "ref_logprobs": -1.6 * one,
        }
        output = losses.evaluate(loss, logprobs, inputs, params)
        output.loss.backward()
        assert_close(row["value"], output.loss.item(), rtol=1e-9)
        assert_close(row["gradient"], logprobs.grad.item(), rtol=1e-9)
        for flag in ("clipped", "masked"):
            expected = output.terms.get(flag, torch.zeros(1, 1))
            assert row[flag] == bool(expected.item())
        for name in ("tis_weight", "kl"):
            assert (name in row) == (name in output.terms)
            if name in row:
                assert_close(row[name], output.terms[name].item(), rtol=1e-9)


@pytest.mark.parametrize(("loss", "params"), SETTINGS)
def test_the_gradient_is_the_slope_of_the_value(loss, params):
    """By differences; cispo's weight is constant by design, so its value has another slope."""
    if loss == "cispo":
        return
    step = 1e-6
    ratios = [0.7, 1.05, 2.7]
    token = {"advantage": -1.0, "rollout_gap": 0.2, "ref_gap": 0.3}
    low, middle, high = (
        xl.loss_curve(loss, [r * math.exp(k * step) for r in ratios], token, **params)
        for k in (-1, 0, 1)
    )
    slope = (high["value"] - low["value"]) / (2 * step)
    assert_close(middle["gradient"], slope, rtol=1e-5, atol=1e-7)


def test_the_region_of_a_clip_and_of_a_mask_is_found_to_five_digits():
    curve = explorer.Losses().curve(
        "policy_loss",
        {"eps_clip": 0.3, "eps_clip_c": 2.0, "icepop_beta": 4.0},
        {"advantage": -1.0, "ratio": 5.0},
    )
    found = [(r["kind"], r["low"], r["high"]) for r in curve["regions"]]
    assert [kind for kind, *_ in found] == ["clipped", "clipped", "masked", "masked"]
    edges = [edge for _, *pair in found for edge in pair]
    expected = [1 / 8, 0.7, 2, 8, 1 / 8, 0.25, 4, 8]
    assert_close(edges, expected, rtol=1e-5)
    assert curve["mark"]["masked"] is True
    assert_close(curve["metrics"]["icepop_maskfrac"], 1.0, rtol=1e-9)
    ratios = np.array(curve["ratios"])
    inside = (ratios > 0.7001) & (ratios < 1.9999)
    assert (np.array(curve["gradients"])[inside] > 0).all()
    assert not np.array(curve["gradients"])[~inside & (abs(ratios - 0.7) > 1e-4)].max() > 2


def test_a_mark_beyond_the_edge_widens_the_curve():
    curve = explorer.Losses().curve("dro", {}, {"ratio": 1000.0})
    assert_close([curve["ratios"][0], curve["ratios"][-1]], [1e-3, 1e3], rtol=1e-6)
    assert curve["regions"] == []


def test_metrics_are_those_of_a_batch_of_this_token():
    curve = explorer.Losses().curve("ppo", {"compute_kl_stats": True}, {"ratio": 2.0})
    metrics = curve["metrics"]
    assert_close(metrics["ratio_max"], 2.0, rtol=1e-9)
    assert_close(metrics["kl_sample_train_k3"], 1 - math.log(2), rtol=1e-9)
    assert_close(metrics["entropy_sample"], 3.0, rtol=1e-9)


def test_gradients_are_there_whatever_the_mode_of_the_caller():
    with torch.inference_mode():
        frame = xl.loss_curve("importance_sampling", [2.0])
    with torch.no_grad():
        other = xl.loss_curve("importance_sampling", [2.0])
    assert_close([frame["gradient"][0], other["gradient"][0]], [-2.0, -2.0], rtol=1e-9)


def test_the_form_has_every_policy_loss_and_every_parameter():
    forms = {form["name"]: form for form in explorer.Losses().forms()}
    assert set(forms) == {"policy_loss", "ppo", "drgrpo", "importance_sampling", "cispo", "dro"}
    for name, form in forms.items():
        fields = {field["name"]: field for field in form["params"]}
        assert {n: f["default"] for n, f in fields.items()} == losses.get(name).params
        assert "loss = sum(weights *" in form["formula"]
        assert form["about"].endswith(".")
        for field in fields.values():
            if field["kind"] == "number" and field["default"] is not None:
                assert field["low"] <= field["default"] <= field["high"]
    policy = {field["name"]: field for field in forms["policy_loss"]["params"]}
    assert {n: f["kind"] for n, f in policy.items() if f["kind"] != "number"} == {
        "compute_kl_stats": "flag",
        "use_tis": "flag",
        "kl_type": "choice",
    }
    assert {n for n, f in policy.items() if f.get("on") is not None} == {
        "eps_clip_c",
        "icepop_beta",
    }
    for name, field in policy.items():  # what is switched on is valid
        if field.get("on") is not None:
            losses.check_params("policy_loss", {name: field["on"]})


def test_needs_say_which_of_the_token_is_read():
    ask = explorer.Losses().curve
    assert ask("policy_loss", {}, {})["needs"] == ["logprobs", "advantages"]
    needs = ask("policy_loss", {"use_tis": True, "kl_coef": 0.1}, {})["needs"]
    assert set(needs) == {"logprobs", "advantages", "rollout_logprobs", "ref_logprobs"}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            ("ppo", {"clip_high_threshold": 0.5}, {}),
            "clip_high_threshold is 0.5: pass a number >= 1",
        ),
        (("ppo", {"eps": 1}, {}), "ppo has no parameters ['eps']: choose from"),
        (("ppo", [], {}), "the parameters of ppo are a list: pass a dict or None"),
        (("ppo", {}, [1]), "the token is a list: pass a mapping"),
        (("ppo", {}, {"ratio": 0}), "ratio is 0: pass a number > 0, from exp(-20) to exp(20)"),
        (("ppo", {}, {"ratio": "x"}), "ratio is 'x': pass a number > 0"),
        (("ppo", {}, {"advantage": math.nan}), "advantage is nan: pass a number"),
        (("ppo", {}, {"old_logprob": 0.1}), "old_logprob is 0.1: pass a number <= 0, in nats"),
        (("ppo", {}, {"A": 1}), "a token has no ['A']: choose from ['advantage'"),
        (("ppo", {"logprob_temperature": 2.0}, {}), "logprob_temperature acts on the logprobs"),
        (("cross_entropy", {}, {}), "cross_entropy has no ratio: choose from ['cispo'"),
        (("pppo", {}, {}), "unknown loss 'pppo'"),
    ],
)
def test_what_is_out_of_range_is_said_in_words(call, message):
    with pytest.raises(ConfigError) as caught:
        explorer.Losses().curve(*call)
    assert message in str(caught.value)


def test_a_curve_without_ratios_is_empty():
    assert xl.loss_curve("ppo", []).empty
    assert list(xl.loss_curve("ppo", []))[:3] == ["ratio", "value", "gradient"]
