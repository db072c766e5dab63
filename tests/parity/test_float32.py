"""In single precision the sampler reports the trainer's logprobs: base, adapter, full weights."""

import pytest

import xorl_lab as xl
from tests.parity.check import check_parity, learn, show

TEXTS = ["Once upon a time", "a", "The answer to 17 + 25 is the number", "so"]
LESSONS = ["to be or not to be, that is the question", "all that glitters"]
TEMPERATURES = [1.0, 0.7]


def encode(client: xl.TrainingClient | xl.SamplingClient, texts: list[str]) -> list[list[int]]:
    return [client.get_tokenizer().encode(t, add_special_tokens=False) for t in texts]


@pytest.fixture(scope="module", params=["tiny", "tiny-moe"])
def model(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def adapter(service, model) -> xl.TrainingClient:
    """A LoRA adapter after five updates."""
    client = service.create_lora_training_client(model, rank=8, model_id=f"{model}-lora", seed=1)
    learn(client, encode(client, LESSONS), steps=5, rate=1e-2)
    assert client.version == 5
    return client


@pytest.fixture(scope="module")
def full(service, model) -> xl.TrainingClient:
    """Full weights after three updates."""
    client = service.create_training_client(model, model_id=f"{model}-full")
    learn(client, encode(client, LESSONS), steps=3, rate=3e-3)
    return client


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_base(service, model, temperature):
    trainer = service.create_lora_training_client(model, rank=2, model_id="fresh", seed=1)
    sampler = service.create_sampling_client(base_model=model)
    gap = check_parity(trainer, sampler, encode(sampler, TEXTS), temperature=temperature)
    show(f"{model}, base, T={temperature}", gap)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_adapter_after_updates(adapter, model, temperature):
    sampler = adapter.save_weights_and_get_sampling_client()
    gap = check_parity(adapter, sampler, encode(adapter, TEXTS), temperature=temperature)
    show(f"{model}, adapter, T={temperature}", gap)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_full_weights_after_updates(full, model, temperature):
    sampler = full.save_weights_and_get_sampling_client()
    gap = check_parity(full, sampler, encode(full, TEXTS), temperature=temperature)
    show(f"{model}, full weights, T={temperature}", gap)


def test_adapter_with_dropout_is_sampled_without_it(service, model):
    client = service.create_lora_training_client(
        model, rank=8, model_id="dropout", seed=1, dropout=0.5
    )
    learn(client, encode(client, LESSONS), steps=3, rate=1e-2)
    check_parity(client, client.save_weights_and_get_sampling_client(), encode(client, TEXTS))


def test_adapter_of_the_head_too(service, model):
    client = service.create_lora_training_client(
        model, rank=8, model_id="head", seed=1, train_unembed=True
    )
    learn(client, encode(client, LESSONS), steps=3, rate=1e-2)
    check_parity(client, client.save_weights_and_get_sampling_client(), encode(client, TEXTS))


def test_adapter_scaled_by_alpha_over_rank(service, model):
    client = service.create_lora_training_client(
        model, rank=4, model_id="alpha", seed=1, alpha=20.0
    )
    learn(client, encode(client, LESSONS), steps=3, rate=1e-2)
    check_parity(client, client.save_weights_and_get_sampling_client(), encode(client, TEXTS))


def test_adapter_restored_from_a_checkpoint(service, adapter, model):
    path = adapter.save_state("parity", overwrite=True).result().path
    restored = service.create_training_client_from_state(path, model_id="restored")
    sampler = restored.save_weights_and_get_sampling_client()
    check_parity(adapter, sampler, encode(adapter, TEXTS))


def test_long_and_short_rows_side_by_side(service, model):
    trainer = service.create_lora_training_client(model, rank=2, model_id="fresh", seed=1)
    sampler = service.create_sampling_client(base_model=model)
    prompts = [[(7 * i) % 251 for i in range(n)] for n in (1, 63, 64, 65, 200)]
    check_parity(trainer, sampler, prompts, max_tokens=70, num_samples=1)


SMOL = "SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def smol(service) -> xl.TrainingClient:
    return service.create_lora_training_client(SMOL, rank=8, model_id="smol", seed=1)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_pretrained_base(service, smol, temperature):
    sampler = service.create_sampling_client(base_model=SMOL)
    fresh = service.create_lora_training_client(SMOL, rank=2, model_id="smol-fresh", seed=1)
    gap = check_parity(
        fresh, sampler, encode(sampler, TEXTS), temperature=temperature, max_tokens=8, num_samples=1
    )
    show(f"{SMOL}, base, T={temperature}", gap)


def test_pretrained_adapter_after_updates(smol):
    learn(smol, encode(smol, ["to be or not to be"]), steps=5, rate=1e-3)
    sampler = smol.save_weights_and_get_sampling_client()
    for temperature in TEMPERATURES:
        gap = check_parity(
            smol,
            sampler,
            encode(smol, TEXTS),
            temperature=temperature,
            max_tokens=8,
            num_samples=1,
        )
        show(f"{SMOL}, adapter, T={temperature}", gap)


@pytest.mark.slow
def test_pretrained_full_weights_after_updates(service):
    client = service.create_training_client(SMOL, model_id="smol-full")
    learn(client, encode(client, LESSONS), steps=2, rate=1e-4)
    sampler = client.save_weights_and_get_sampling_client()
    for temperature in TEMPERATURES:
        gap = check_parity(
            client, sampler, encode(client, TEXTS), temperature=temperature, max_tokens=16
        )
        show(f"{SMOL}, full weights, T={temperature}", gap)
