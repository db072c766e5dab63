"""The same code with the embedded sampler, over HTTP and with a real SGLang: the same answers."""

import pytest

from tests.closeness import assert_close
from xorl_lab.client import ServiceClient, outside
from xorl_lab.lab import Lab
from xorl_lab.samplers.sglang.controls import SGLang
from xorl_lab.types import AdamParams, Datum, ModelInput, SamplingParams

CHATS = [
    [{"role": "user", "content": word}, {"role": "assistant", "content": word.upper()}]
    for word in ("one", "two", "three", "four")
]


def notebook(lab):
    """What somebody types: try, train, try again."""
    prompts = ["Hello", "1, 2, 3"]
    greedy = {"max_tokens": 8, "temperature": 0}
    before = [lab.sample(prompt, **greedy) for prompt in prompts]
    run = lab.sft(
        CHATS, steps=3, batch_size=2, learning_rate=3e-2, preflight=False, quiet=True, seed=1
    )
    after = [lab.sample(prompt, checkpoint=run.name, **greedy) for prompt in prompts]
    return [answer for samples in (*before, *after) for answer in samples.sequences]


@pytest.fixture
def answers(empty_home, live, sglang_server, tmp_path):
    served = live(dtype="float32", device="cpu")
    settings = {"rank": 8, "seed": 5, "device": "cpu", "dtype": "float32"}
    labs = {
        "embedded": Lab("tiny", folder=tmp_path / "a", **settings),
        "served": Lab("tiny", folder=tmp_path / "b", base_url=served.url, **settings),
        "sglang": Lab("tiny", folder=tmp_path / "c", sampler=sglang_server.url, **settings),
    }
    yield {name: notebook(lab) for name, lab in labs.items()}
    labs["served"].service.close()
    for used in list(outside._known.values()):
        sync, _ = used.awake()
        sync.push(sync.trainer.base)
        sync.server.name_weights("default")
    outside.close_all()


@pytest.mark.parametrize("other", ["served", "sglang"])
def test_greedy_completions_are_the_same(answers, other):
    for mine, wanted in zip(answers[other], answers["embedded"], strict=True):
        assert mine.tokens == wanted.tokens
        assert mine.text == wanted.text
        assert mine.stop_reason == wanted.stop_reason
        assert_close(mine.logprobs, wanted.logprobs, rtol=0, atol=1e-3)
    trained = [a.tokens for a in answers[other][2:]]
    assert trained != [a.tokens for a in answers[other][:2]], "training changes them"


def test_ones_own_client_samples_from_a_server_that_is_registered(live, sglang_server, empty_home):
    served = live(dtype="float32", device="cpu")
    port = int(sglang_server.url.rsplit(":", 1)[1])
    greedy = SamplingParams(max_tokens=6, temperature=0)
    data = [Datum(ModelInput.from_ints(list(b"Hello")), {"labels": list(b"Hello")})]
    with ServiceClient(served.url) as service:
        client = service.create_lora_training_client("tiny", rank=8, seed=1)
        added = client.add_inference_endpoint("127.0.0.1", port).result()
        assert added.success, added.message
        client.forward_backward(data).result()
        client.optim_step(AdamParams(learning_rate=3e-2)).result()
        there = client.save_weights_and_get_sampling_client(inference_base_url=sglang_server.url)
        here = client.save_weights_and_get_sampling_client()
        prompt = ModelInput.from_ints(list(b"Hello"))
        got, wanted = (s.sample(prompt, greedy).result() for s in (there, here))
        assert got.tokens == wanted.tokens
        assert_close(got.logprobs, wanted.logprobs, rtol=0, atol=1e-4)
        assert client.remove_inference_endpoint("127.0.0.1", port).result().success
        there._source.close()
    server = SGLang(sglang_server.url)
    server.name_weights("default")
    server.close()
