"""What is believed of the experts in an answer of ``/generate``."""

import base64
import re

import numpy as np
import pytest

import xorl_lab as xl
from xorl_lab.client.generation import payload, response, spread_payload
from xorl_lab.engine import models
from xorl_lab.engine.routing import Experts
from xorl_lab.errors import ConfigError, SamplerError
from xorl_lab.samplers.base import SampleRequest

PROMPT, TOKENS = (1, 2, 3), [4, 5]
EXPERTS = np.random.default_rng(0).random((4, 4, 8)).argsort(-1)[..., :2].astype(np.int32)
NUMBERS = base64.b64encode(EXPERTS.tobytes()).decode()


def asked(count: int = 1, *, experts: bool = True) -> SampleRequest:
    params = xl.SamplingParams(max_tokens=2, return_routed_experts=experts)
    return SampleRequest(PROMPT, params, count, 1, return_logprobs=False)


def item(**meta: object) -> dict[str, object]:
    known = {"finish_reason": {"type": "length"}, "routed_experts": NUMBERS}
    kept = {k: v for k, v in (known | meta).items() if v is not None}
    return {"output_ids": TOKENS, "text": "", "meta_info": kept}


def known() -> Experts:
    return Experts((0, 1, 2, 3), depth=4, count=8, chosen=2)


def test_they_are_asked_for_only_if_wanted():
    for make in (lambda r: payload(r, "", "r"), lambda r: spread_payload(r, "", ["r"])):
        assert make(asked())["return_routed_experts"] is True
        assert "return_routed_experts" not in make(asked(experts=False))


def test_each_completion_keeps_its_own():
    other = base64.b64encode(EXPERTS[::-1].tobytes()).decode()
    got = response([item(), item(routed_experts=other)], asked(2), 9, known)
    first, second = (s.routed_experts for s in got.sequences)
    assert first.dtype == np.int16
    assert first.tolist() == EXPERTS.tolist()
    assert second.tolist() == EXPERTS[::-1].tolist()
    assert "routed_experts" not in got.meta_info


def test_unasked_they_are_left_out():
    got = response(item(), asked(experts=False), 9, known)
    assert got.sequences[0].routed_experts is None
    assert "routed_experts" not in got.meta_info


def test_what_was_given_up_may_have_none():
    given_up = item(routed_experts=None, finish_reason={"type": "abort"})
    assert response(given_up, asked(), 9, known).sequences[0].routed_experts is None
    empty = given_up | {"output_ids": []}
    assert response(empty, asked(), 9, known).sequences[0].routed_experts is None


def no_files() -> Experts:
    raise ConfigError("base model 'm' is neither a folder nor in the local Hugging Face cache")


@pytest.mark.parametrize(
    ("meta", "experts", "message"),
    [
        (
            {"routed_experts": None},
            known,
            "it does not say which experts were chosen: start SGLang with "
            "--enable-return-routed-experts",
        ),
        (
            {"routed_experts": base64.b64encode(EXPERTS[:3].tobytes()).decode()},
            known,
            "routed_experts has 24 numbers, but 4 tokens, 4 layers and 2 experts per token make 32",
        ),
        (
            {"routed_experts": base64.b64encode((EXPERTS + 1).tobytes()).decode()},
            known,
            "routed_experts has expert 8 at",
        ),
        ({"routed_experts": "???"}, known, "routed_experts is not base64"),
        ({}, no_files, "what shape they have cannot be told here (base model 'm' is neither"),
    ],
)
def test_what_cannot_be_right_is_refused(meta, experts, message):
    with pytest.raises(SamplerError, match=re.escape(message)):
        response(item(**meta), asked(), 9, experts)


def test_the_shape_is_known_from_a_models_files(tmp_path):
    """Of a model that is made in memory, and of a folder, whose weights are not read."""
    expected = Experts((0, 1, 2, 3), depth=4, count=8, chosen=2)
    assert models.experts("tiny-moe") == expected
    models.load("tiny-moe", "cpu", "float32").model.config.save_pretrained(tmp_path)
    assert models.experts(str(tmp_path)) == expected
    with pytest.raises(ConfigError, match="this model has no experts"):
        models.experts("tiny")
