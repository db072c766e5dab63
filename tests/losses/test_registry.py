"""Names, parameters and inputs: what is accepted, and the exact words for what is not."""

import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from tests.closeness import assert_close
from tests.losses import oracle
from xorl_lab import losses
from xorl_lab.errors import ConfigError, DataError, ShapeError
from xorl_lab.losses import kl

COMMON = {"logprob_temperature": 1.0, "return_terms": False}
POLICY = {
    "compute_kl_stats": False,
    "eps_clip": 0.2,
    "eps_clip_c": None,
    "eps_clip_high": 0.2,
    "icepop_beta": None,
    "kl_coef": 0.0,
    "kl_type": "k3",
    "tis_clip_high": 2.0,
    "tis_clip_low": 0.1,
    "use_tis": False,
}


def test_names() -> None:
    assert losses.names() == [
        "causallm_loss",
        "cispo",
        "cross_entropy",
        "drgrpo",
        "dro",
        "importance_sampling",
        "policy_loss",
        "ppo",
    ]
    assert all(losses.get(name).name == name for name in losses.names())


def test_public_names_are_sorted_and_there() -> None:
    assert sorted(losses.__all__) == losses.__all__
    assert all(hasattr(losses, name) for name in losses.__all__)


@pytest.mark.parametrize("name", ["policy_loss", " Policy_Loss\n", "POLICY_LOSS"])
def test_names_are_stripped_and_lower_cased(name: str) -> None:
    assert losses.get(name) is losses.get("policy_loss")


@pytest.mark.parametrize("name", ["grpo", "", None, 3])
def test_unknown_name(name: object) -> None:
    with pytest.raises(ConfigError) as caught:
        losses.get(name)
    assert str(caught.value) == (
        f"unknown loss {name!r}: choose from "
        "['causallm_loss', 'cispo', 'cross_entropy', 'drgrpo', 'dro', 'importance_sampling', "
        "'policy_loss', 'ppo']"
    )
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_specs_name_only_known_inputs() -> None:
    for spec in map(losses.get, losses.names()):
        assert {*spec.required, *spec.optional} <= set(losses.KNOWN_INPUTS)
        assert "weights" not in {*spec.required, *spec.optional}


def test_defaults() -> None:
    assert losses.COMMON_PARAMS == COMMON
    assert losses.check_params("policy_loss", None) == COMMON | POLICY
    assert losses.get("policy_loss").params == POLICY
    assert losses.check_params("cross_entropy", {}) == COMMON
    shared = ("compute_kl_stats", "kl_coef", "kl_type")
    expected = COMMON | {name: POLICY[name] for name in shared}
    assert losses.check_params("importance_sampling", {}) == expected


STATS = {"compute_kl_stats": False}
OTHERS = {
    "ppo": STATS | {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": STATS | {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    "dro": STATS | {"beta": 0.05},
    "drgrpo": STATS | {"clip_low": 0.2, "clip_high": 0.28, "beta": 0.0, "kl_type": "k3"},
}


@pytest.mark.parametrize("name", OTHERS)
def test_defaults_of_ppo_and_its_kin(name: str) -> None:
    spec = losses.get(name)
    assert spec.params == OTHERS[name]
    assert losses.check_params(name, None) == COMMON | OTHERS[name]
    assert spec.required == ("logprobs", "advantages")
    assert spec.optional == (("ref_logprobs",) if name == "drgrpo" else ())


def test_given_values_win_and_checking_twice_changes_nothing() -> None:
    given = {
        "eps_clip": 0,
        "eps_clip_c": 3,
        "use_tis": True,
        "logprob_temperature": np.float64(0.7),
    }
    once = losses.check_params("policy_loss", given)
    assert once == COMMON | POLICY | given
    assert losses.check_params("policy_loss", once) == once


BAD_VALUES: list[tuple[str, Any, str]] = [
    ("eps_clip", -0.1, "a number >= 0"),
    ("eps_clip", None, "a number >= 0"),
    ("eps_clip", True, "a number >= 0"),
    ("eps_clip", "0.2", "a number >= 0"),
    ("eps_clip_high", -1, "a number >= 0"),
    ("eps_clip_high", math.inf, "a number >= 0"),
    ("eps_clip_c", 1.0, "a number > 1, or None to leave it out"),
    ("eps_clip_c", math.nan, "a number > 1, or None to leave it out"),
    ("icepop_beta", 1, "a number > 1, or None to leave it out"),
    ("icepop_beta", 0.5, "a number > 1, or None to leave it out"),
    ("use_tis", 1, "True or False"),
    ("use_tis", None, "True or False"),
    ("compute_kl_stats", "yes", "True or False"),
    ("return_terms", 0, "True or False, or a list of names"),
    ("return_terms", ["ratio", 1], "True or False, or a list of names"),
    ("return_terms", "ratio", "True or False, or a list of names"),
    ("tis_clip_low", -0.1, "a number >= 0"),
    ("tis_clip_low", "0.1", "a number >= 0"),
    ("tis_clip_low", 2.5, None),
    ("tis_clip_high", 0.05, "a number > 0 and >= tis_clip_low (0.1)"),
    ("tis_clip_high", math.inf, "a number > 0 and >= tis_clip_low (0.1)"),
    ("kl_coef", -0.1, "a number >= 0 (0 = no penalty)"),
    ("kl_coef", math.nan, "a number >= 0 (0 = no penalty)"),
    ("kl_type", "k4", "one of ['k1', 'k2', 'k3']"),
    ("kl_type", ["k3"], "one of ['k1', 'k2', 'k3']"),
    ("logprob_temperature", 0, "a number > 0"),
    ("logprob_temperature", -1.0, "a number > 0"),
    ("logprob_temperature", math.nan, "a number > 0"),
    ("logprob_temperature", None, "a number > 0"),
]


@pytest.mark.parametrize(("param", "value", "expected"), BAD_VALUES)
def test_values_out_of_range(param: str, value: object, expected: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        losses.check_params("policy_loss", {param: value})
    message = f"{param} is {value!r}: pass {expected}"
    if expected is None:
        message = "tis_clip_high is 2.0: pass a number > 0 and >= tis_clip_low (2.5)"
    assert str(caught.value) == message


RATIO_NOTE = "(it bounds the ratio itself, not its distance from 1)"
BAD_VALUES_OF_OTHERS: list[tuple[str, dict[str, Any], str, str]] = [
    ("ppo", {"clip_low_threshold": 1.1}, "clip_low_threshold", f"from 0 to 1 {RATIO_NOTE}"),
    ("ppo", {"clip_low_threshold": -0.2}, "clip_low_threshold", f"from 0 to 1 {RATIO_NOTE}"),
    ("ppo", {"clip_low_threshold": None}, "clip_low_threshold", f"from 0 to 1 {RATIO_NOTE}"),
    ("ppo", {"clip_high_threshold": 0.2}, "clip_high_threshold", f">= 1 {RATIO_NOTE}"),
    ("ppo", {"clip_high_threshold": math.inf}, "clip_high_threshold", f">= 1 {RATIO_NOTE}"),
    ("ppo", {"clip_high_threshold": True}, "clip_high_threshold", f">= 1 {RATIO_NOTE}"),
    ("cispo", {"clip_low_threshold": -1}, "clip_low_threshold", ">= 0"),
    ("cispo", {"clip_low_threshold": "0"}, "clip_low_threshold", ">= 0"),
    (
        "cispo",
        {"clip_low_threshold": 0.9, "clip_high_threshold": 0.8},
        "clip_high_threshold",
        "> 0 and >= clip_low_threshold (0.9)",
    ),
    (
        "cispo",
        {"clip_high_threshold": 0},
        "clip_high_threshold",
        "> 0 and >= clip_low_threshold (0.0)",
    ),
    (
        "cispo",
        {"clip_high_threshold": math.nan},
        "clip_high_threshold",
        "> 0 and >= clip_low_threshold (0.0)",
    ),
    ("dro", {"beta": -0.05}, "beta", ">= 0 (0 = no pull)"),
    ("dro", {"beta": math.inf}, "beta", ">= 0 (0 = no pull)"),
    ("dro", {"beta": None}, "beta", ">= 0 (0 = no pull)"),
    ("drgrpo", {"clip_low": -0.2}, "clip_low", ">= 0"),
    ("drgrpo", {"clip_high": math.nan}, "clip_high", ">= 0"),
    ("drgrpo", {"beta": -1}, "beta", ">= 0 (0 = no penalty)"),
]


@pytest.mark.parametrize(("name", "given", "param", "expected"), BAD_VALUES_OF_OTHERS)
def test_values_out_of_range_of_ppo_and_its_kin(
    name: str, given: dict[str, Any], param: str, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        losses.check_params(name, given)
    assert str(caught.value) == f"{param} is {given[param]!r}: pass a number {expected}"


@pytest.mark.parametrize("name", OTHERS)
def test_what_ppo_and_its_kin_share(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        losses.check_params(name, {"compute_kl_stats": 1})
    assert str(caught.value) == "compute_kl_stats is 1: pass True or False"
    with pytest.raises(ConfigError) as caught:
        losses.check_params(name, {"eps_clip": 0.2})
    assert str(caught.value) == (
        f"{name} has no parameters ['eps_clip']: choose from {sorted(COMMON | OTHERS[name])}"
    )


def test_kl_type_of_drgrpo() -> None:
    with pytest.raises(ConfigError) as caught:
        losses.check_params("drgrpo", {"kl_type": "k4"})
    assert str(caught.value) == "kl_type is 'k4': pass one of ['k1', 'k2', 'k3']"


def test_reference_only_where_beta_calls_for_it() -> None:
    tokens = oracle.make_tokens(2)
    inputs = {key: value for key, value in tokens.inputs().items() if key != "ref_logprobs"}
    new = torch.tensor(tokens.new)
    assert losses.evaluate("drgrpo", new, inputs, {}).loss.isfinite()
    with pytest.raises(DataError) as caught:
        losses.evaluate("drgrpo", new, inputs, {"beta": 0.1})
    assert str(caught.value) == (
        "drgrpo with these parameters needs "
        "['logprobs', 'advantages', 'ref_logprobs', 'weights'], and "
        "['ref_logprobs'] are missing: pass one value per target token for each"
    )


def test_unknown_parameters_list_the_valid_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        losses.check_params("importance_sampling", {"eps_clip": 0.2, "beta": 1})
    assert str(caught.value) == (
        "importance_sampling has no parameters ['beta', 'eps_clip']: choose from "
        "['compute_kl_stats', 'kl_coef', 'kl_type', 'logprob_temperature', 'return_terms']"
    )


def test_parameters_must_be_a_mapping() -> None:
    with pytest.raises(ConfigError) as caught:
        losses.check_params("policy_loss", [("eps_clip", 0.2)])  # type: ignore[arg-type]
    assert str(caught.value) == "the parameters of policy_loss are a list: pass a dict or None"


def test_common_parameters_change_nothing_here() -> None:
    tokens = oracle.make_tokens(1)
    plain = oracle.run(losses, "policy_loss", tokens, {})
    common = {"logprob_temperature": 0.5, "return_terms": True}
    assert oracle.run(losses, "policy_loss", tokens, common)[0] == plain[0]


def test_missing_inputs() -> None:
    new = torch.zeros(2, 3)
    inputs = {"weights": torch.ones(2, 3), "logprobs": torch.zeros(2, 3)}
    with pytest.raises(DataError) as caught:
        losses.evaluate("policy_loss", new, inputs, {"use_tis": True})
    assert str(caught.value) == (
        "policy_loss with these parameters needs "
        "['logprobs', 'advantages', 'rollout_logprobs', 'weights'], and "
        "['advantages', 'rollout_logprobs'] are missing: pass one value per target token for each"
    )
    with pytest.raises(DataError, match=r"needs \['weights'\], and \['weights'\] are missing"):
        losses.evaluate("cross_entropy", new, {}, {})


def test_unknown_inputs() -> None:
    inputs = {"weights": torch.ones(1, 2), "advantage": torch.ones(1, 2)}
    with pytest.raises(DataError) as caught:
        losses.evaluate("cross_entropy", torch.zeros(1, 2), inputs, {})
    assert str(caught.value) == (
        "unknown loss inputs ['advantage']: known are "
        "['advantages', 'logprobs', 'ref_logprobs', 'rollout_logprobs', 'weights']"
    )


def test_known_inputs_without_a_use_are_fine() -> None:
    tokens = oracle.make_tokens(2)
    loss, _, _ = oracle.run(losses, "cross_entropy", tokens, {})
    assert_close(loss, -(tokens.weights * tokens.new).sum(), rtol=1e-12)


def test_shapes_that_differ() -> None:
    inputs = {
        "weights": torch.ones(2, 3),
        "logprobs": torch.zeros(2, 4),
        "advantages": torch.zeros(3),
    }
    with pytest.raises(ShapeError) as caught:
        losses.evaluate("policy_loss", torch.zeros(2, 3), inputs, {})
    assert str(caught.value) == (
        "policy_loss got shapes that differ: new logprobs (2, 3), weights (2, 3), "
        "logprobs (2, 4), advantages (3,): give all the same shape"
    )


def test_summary_of_terms_that_differ_in_shape() -> None:
    terms = {"elementwise_loss": torch.zeros(3)}
    with pytest.raises(ShapeError) as caught:
        losses.summarize("cross_entropy", terms, torch.ones(2), {})
    assert str(caught.value) == (
        "loss terms differ in shape: weights (2,), elementwise_loss (3,): give all the same shape"
    )


def test_unknown_kl_type() -> None:
    with pytest.raises(ConfigError) as caught:
        kl.reference_kl(torch.zeros(1), torch.zeros(1), "k5")
    assert str(caught.value) == "kl_type is 'k5': pass one of ['k1', 'k2', 'k3']"


def test_empty_batch_has_a_zero_loss() -> None:
    new = torch.zeros(0, 5, requires_grad=True)
    empty = {name: torch.zeros(0, 5) for name in losses.KNOWN_INPUTS}
    output = losses.evaluate("policy_loss", new, empty, {"use_tis": True, "kl_coef": 1.0})
    output.loss.backward()
    assert output.loss.item() == 0.0
