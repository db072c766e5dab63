"""A real SGLang reports the trainer's logprobs; greedy tokens are the embedded sampler's."""

from pathlib import Path

import pytest

import xorl_lab as xl
from tests.parity.check import check_parity, learn, show
from tests.parity.test_float32 import LESSONS, TEMPERATURES, TEXTS, encode
from tests.server.conftest import Live
from xorl_lab.checkpoints import Address
from xorl_lab.samplers.sglang.controls import SGLang
from xorl_lab.samplers.sglang.server import SGLangServer
from xorl_lab.server import ServerSettings

SMOL = "SmolLM2-135M-Instruct"
LIMIT = 1e-3
"""Nats, for every token."""
MODELS = ["tiny", pytest.param(SMOL, marks=pytest.mark.slow)]
pytestmark = pytest.mark.timeout(900)  # a server that starts beside other work
GREEDY = xl.SamplingParams(max_tokens=12, temperature=0)


@pytest.fixture(scope="module", params=MODELS)
def model(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def place(model, sglang_server):
    """URL of a real server of the model, in float32."""
    if model == "tiny":
        yield sglang_server.url
        return
    with SGLangServer.start(model, dtype="float32", device="cpu", max_rank=32) as server:
        yield server.url


@pytest.fixture(scope="module")
def base(place) -> xl.SamplingClient:
    return xl.SamplingClient(place)


@pytest.fixture(scope="module")
def trained(service, model) -> xl.TrainingClient:
    """A LoRA adapter after five updates."""
    client = service.create_lora_training_client(model, rank=8, model_id=f"sglang-{model}", seed=1)
    learn(client, encode(client, LESSONS), steps=5, rate=1e-2 if model == "tiny" else 1e-3)
    return client


@pytest.fixture(scope="module")
def adapter(trained, place, home) -> xl.SamplingClient:
    """The same, as SGLang samples from it."""
    path = trained.save_weights_for_sampler("parity").result().path
    folder: Path = Address.parse(path).folder(home / "checkpoints")
    server = SGLang(place)
    name = f"parity-{trained.model_id}"
    server.load_adapter(name, folder)
    yield xl.SamplingClient(place, name)
    server.unload_adapter(name)
    server.close()


def same_greedy(ours: xl.SamplingClient, theirs: xl.SamplingClient) -> int:
    """Both draw the same; how many tokens."""
    prompts = [xl.ModelInput.from_ints(p) for p in encode(ours, TEXTS)]
    found = [client.sample_batch(prompts, GREEDY).result(300) for client in (ours, theirs)]
    assert [len(result.completed) for result in found] == [len(prompts)] * 2
    drawn = [[response.tokens for _, response in result.completed] for result in found]
    assert drawn[0] == drawn[1]
    return sum(len(tokens) for tokens in drawn[0])


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_base(service, model, base, temperature):
    trainer = service.create_lora_training_client(model, rank=2, model_id=f"fresh-{model}", seed=1)
    gap = check_parity(trainer, base, encode(trainer, TEXTS), temperature=temperature, limit=LIMIT)
    show(f"{model}, base, T={temperature}, SGLang", gap)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_adapter_after_updates(trained, model, adapter, temperature):
    gap = check_parity(
        trained, adapter, encode(trained, TEXTS), temperature=temperature, limit=LIMIT
    )
    show(f"{model}, adapter after 5 updates, T={temperature}, SGLang", gap)


def test_the_adapter_is_not_the_base(trained, base, adapter):
    """Or the checks above would compare the base with itself."""
    prompts = encode(trained, TEXTS)
    with pytest.raises(AssertionError, match="trainer and sampler disagree"):
        check_parity(trained, base, prompts, limit=LIMIT)


def test_greedy_tokens_of_the_base(service, model, base):
    same_greedy(service.create_sampling_client(base_model=model), base)


def test_greedy_tokens_of_the_adapter(trained, adapter):
    same_greedy(trained.save_weights_and_get_sampling_client(), adapter)


def test_the_logprobs_of_a_prompt_are_the_trainers(trained, adapter):
    tokens = encode(trained, LESSONS)[0]
    datum = xl.Datum(xl.ModelInput.from_ints(tokens), {"labels": tokens})
    wanted = trained.forward([datum]).result().loss_fn_outputs[0].logprobs.tolist()
    prompt = xl.ModelInput.from_ints(tokens)
    params = xl.SamplingParams(max_tokens=1, temperature=0.5)
    got = adapter.sample(prompt, params, prompt_logprobs=True).result().prompt_logprobs
    assert got[0] is None
    assert max(abs(a - b) for a, b in zip(got[1:], wanted, strict=True)) <= LIMIT


def a_notebook(service: xl.ServiceClient, model: str, model_id: str) -> list[list[int]]:
    """What a person's cells do, whatever samples: train a little, and look at what is drawn."""
    client = service.create_lora_training_client(model, rank=8, seed=1, model_id=model_id)
    drawn = []
    for _ in range(2):
        learn(client, encode(client, LESSONS), steps=2, rate=1e-2 if model == "tiny" else 1e-3)
        sampler = client.save_weights_and_get_sampling_client()
        prompts = [xl.ModelInput.from_ints(p) for p in encode(client, TEXTS)]
        result = sampler.sample_batch(prompts, GREEDY, num_samples=1).result(300)
        drawn += [response.tokens for _, response in result.completed]
    assert len(drawn) == 2 * len(TEXTS)
    return drawn


def test_the_same_notebook_draws_the_same_wherever_it_samples(model, place, home, tmp_path):
    settings = {"device": "cpu", "dtype": "float32"}
    embedded = a_notebook(xl.ServiceClient(home=home, **settings), model, "nb-embedded")
    outside = xl.ServiceClient(home=home, sampler=place, **settings)
    assert a_notebook(outside, model, "nb-sglang") == embedded
    server = SGLang(place)
    server.name_weights("default")
    server.close()
    live = Live(ServerSettings(model=model, home=tmp_path, port=0, sampler_port=0))
    served = xl.ServiceClient(base_url=live.url)
    try:
        assert a_notebook(served, model, "nb-served") == embedded
    finally:
        served._service.close()
        live.stop()
    assert embedded[: len(TEXTS)] != embedded[len(TEXTS) :], "it has learned something"
