import math
import re

import numpy as np
import pytest

from xorl_lab.errors import ConfigError
from xorl_lab.types import AdamParams, LoraRunSpec, SamplingParams

ABOVE_ZERO = [0, 0.0, -1.0, math.nan, math.inf, None, "1e-4", True]


def refused(message: str):
    return pytest.raises(ConfigError, match=f"^{re.escape(message)}$")


def test_defaults_are_those_of_xorl_client():
    assert AdamParams().to_dict() == {
        "learning_rate": 1e-4,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-12,
        "weight_decay": 0.0,
        "grad_clip_norm": 5.0,
    }


@pytest.mark.parametrize("value", ABOVE_ZERO)
@pytest.mark.parametrize("name", ["learning_rate", "eps"])
def test_learning_rate_and_eps_are_above_zero(name, value):
    with refused(f"{name} is {value!r}: pass a number > 0"):
        AdamParams(**{name: value})


@pytest.mark.parametrize("value", [-0.1, 1, 1.5, math.nan, None, "0.9"])
@pytest.mark.parametrize("name", ["beta1", "beta2"])
def test_betas_are_below_one(name, value):
    with refused(f"{name} is {value!r}: pass a number in [0, 1)"):
        AdamParams(**{name: value})


@pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf, None, "0"])
def test_weight_decay_is_not_negative(value):
    with refused(f"weight_decay is {value!r}: pass a number >= 0"):
        AdamParams(weight_decay=value)


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, None])
def test_clip_norm_is_not_negative(value):
    with refused(f"grad_clip_norm is {value!r}: pass a number >= 0 (0 = no clipping)"):
        AdamParams(grad_clip_norm=value)


def test_a_dict_will_do():
    assert AdamParams.of({"learning_rate": 1e-3}) == AdamParams(learning_rate=1e-3)
    assert AdamParams.of(AdamParams(beta1=0.5)).beta1 == 0.5


def test_unknown_fields_are_named():
    with refused(
        "unknown Adam parameters ['lr']: choose from ['beta1', 'beta2', 'eps', 'grad_clip_norm', "
        "'learning_rate', 'weight_decay']"
    ):
        AdamParams.of({"lr": 1e-3})


@pytest.mark.parametrize("value", [None, 1e-4, "adam", [1e-4]])
def test_other_things_are_refused(value):
    with refused(f"adam_params is a {type(value).__name__}: pass AdamParams(...) or a dict"):
        AdamParams.of(value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rank": 0}, "rank is 0: pass an integer >= 1"),
        ({"rank": 2.0}, "rank is 2.0: pass an integer >= 1"),
        ({"rank": True}, "rank is True: pass an integer >= 1"),
        ({"rank": "8"}, "rank is '8': pass an integer >= 1"),
        ({"alpha": 0}, "alpha is 0: pass a number > 0"),
        ({"alpha": math.nan}, "alpha is nan: pass a number > 0"),
        ({"dropout": 1.0}, "dropout is 1.0: pass a number in [0, 1)"),
        ({"dropout": -0.1}, "dropout is -0.1: pass a number in [0, 1)"),
        ({"seed": 1.5}, "seed is 1.5: pass an integer from 0 to 2**63 - 1, or None"),
        ({"seed": 2**70}, f"seed is {2**70}: pass an integer from 0 to 2**63 - 1, or None"),
        ({"train_mlp": "no"}, "train_mlp is 'no': pass True or False"),
        (
            {"train_mlp": False, "train_attn": False},
            "train_mlp, train_attn and train_unembed are all False, so nothing would be trained: "
            "switch one on",
        ),
    ],
)
def test_an_adapter_of_impossible_shape_is_refused(given, message):
    with refused(message):
        LoraRunSpec(**given)


def test_scalars_of_numpy_are_numbers():
    params = AdamParams(learning_rate=np.float32(0.5), beta1=np.float64(0.25))
    assert (params.learning_rate, type(params.learning_rate)) == (0.5, float)
    assert type(params.beta1) is float
    assert type(SamplingParams(max_tokens=np.int64(4)).max_tokens) is int
