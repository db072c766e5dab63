"""Chosen experts over HTTP: told by /generate, replayed by forward, the same as in this process."""

import base64

import numpy as np
import pytest

import xorl_lab as xl
from tests.closeness import assert_close
from tests.server.test_own_client import closed
from xorl_lab.errors import DataError

__all__ = ["closed"]

PROMPT = list(b"which experts")
ONE = {"max_new_tokens": 4, "seed": 1}
DENSE = "this model has no experts (LlamaForCausalLM is dense)"


@pytest.fixture
def moe(start):
    return start(model="tiny-moe")


def asked(**fields: object) -> xl.SamplingParams:
    return xl.SamplingParams(
        **({"max_tokens": 6, "seed": 5, "return_routed_experts": True} | fields)
    )


def test_generate_tells_them_as_sglang_does(moe):
    body = {"input_ids": PROMPT, "sampling_params": ONE}
    meta = moe.ask("/generate", **body, return_routed_experts=True)["meta_info"]
    numbers = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32)
    rows = len(PROMPT) + 4 - 1
    assert meta["routed_experts_shape"] == [rows, 4, 2]
    experts = numbers.reshape(rows, 4, 2)
    assert experts.min() >= 0
    assert experts.max() < 8
    plain = moe.ask("/generate", **body)
    assert "routed_experts" not in plain["meta_info"]
    tail = moe.ask(
        "/generate", **body, return_routed_experts=True, routed_experts_start_len=len(PROMPT)
    )["meta_info"]
    cut = np.frombuffer(base64.b64decode(tail["routed_experts"]), np.int32)
    assert cut.tolist() == experts[len(PROMPT) :].ravel().tolist()


def test_each_completion_has_its_own(moe):
    both = moe.ask(
        "/generate",
        input_ids=[PROMPT, PROMPT[:3]],
        sampling_params={**ONE, "n": 2},
        return_routed_experts=True,
    )
    shapes = [o["meta_info"]["routed_experts_shape"][0] for o in both]
    assert shapes == [len(PROMPT) + 3] * 2 + [6] * 2


def test_what_cannot_be_told_is_refused(api, moe):
    body = {"input_ids": [1, 2], "sampling_params": ONE, "return_routed_experts": True}
    dense = api.post("/generate", **body)
    assert dense.status_code == 400
    assert DENSE in dense.text
    beyond = moe.post("/generate", **body, routed_experts_start_len=3)
    assert beyond.status_code == 400
    assert "routed_experts_start_len is 3, but the prompt has 2 tokens" in beyond.text


def drive(service):
    """Sample with experts, and judge the samples with and without them."""
    client = service.create_lora_training_client("tiny-moe", 4, seed=7)
    sampler = client.save_weights_and_get_sampling_client("first")
    prompt = xl.ModelInput.from_ints(PROMPT)
    sequences = sampler.sample(prompt, asked(), 2).result().sequences
    data = []
    for sequence in sequences:
        tokens = [*PROMPT, *sequence.tokens]
        inputs = {"target_tokens": tokens[1:]}
        turned = (sequence.routed_experts + 1) % 8
        for experts in (None, sequence.routed_experts, turned):
            data.append(xl.Datum(xl.ModelInput.from_ints(tokens[:-1]), inputs, experts))
    outputs = client.forward_backward(data).result().loss_fn_outputs
    metrics = client.optim_step(xl.AdamParams(learning_rate=1e-2)).result().metrics
    wrong = xl.Datum(data[0].model_input, data[0].loss_fn_inputs, sequences[0].routed_experts[:3])
    with pytest.raises(DataError, match=r"data\[0\].routed_experts has shape \(3, 4, 2\)"):
        client.forward([wrong]).result()
    experts = [s.routed_experts.tolist() for s in sequences]
    return experts, [o.logprobs.tolist() for o in outputs], metrics["grad_norm"]


@pytest.mark.usefixtures("closed")
def test_over_http_as_in_process(live, tmp_path):
    here = drive(xl.ServiceClient(home=tmp_path / "own", device="cpu", dtype="float32"))
    server = live(model="tiny-moe")
    there = drive(xl.ServiceClient(base_url=server.url))
    assert there[0] == here[0]
    for mine, theirs in zip(here[1], there[1], strict=True):
        assert_close(theirs, mine, rtol=0, atol=1e-6)
    assert there[2] == pytest.approx(here[2], rel=1e-5)
    free, own, turned = (np.asarray(x) for x in here[1][:3])
    assert_close(own, free, rtol=0, atol=1e-5)
    assert np.abs(turned - free).max() > 0.1


@pytest.mark.usefixtures("closed")
def test_a_dense_model_over_http_says_so(live):
    service = xl.ServiceClient(base_url=live().url)
    client = service.create_lora_training_client("tiny", 4, seed=7)
    with pytest.raises(DataError, match="this model has no experts"):
        client.save_weights_and_get_sampling_client("a").sample("a", asked()).result()
    datum = xl.Datum(xl.ModelInput.from_ints([1, 2]), {"labels": [1, 2]}, [[[0]]] * 2)
    with pytest.raises(DataError, match="has routed_experts, but this model has no experts"):
        client.forward([datum]).result()
