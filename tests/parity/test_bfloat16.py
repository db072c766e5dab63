"""In half precision the gap between trainer and sampler is real: it is bounded, and shown."""

from collections.abc import Sequence

import numpy as np
import pytest

import xorl_lab as xl
from tests.parity.check import Gap, learn, sample, show, trained_logprobs

MEAN_LIMIT = 0.08
"""Nats: mean gap between a bfloat16 sampler and its trainer."""
CHANGE = 0.15
"""Nats: once an update has changed the trainer's logprobs by this much in the mean, …"""
CORRELATION = 0.95
"""… the sampler's must have changed with them."""

PROMPTS = [list(b"Once upon a time"), list(b"a"), list(b"so it is")]
LESSONS = [list(b"to be or not to be, that is"), list(b"all that glitters is not gold")]


def given(client: xl.SamplingClient, texts: Sequence[Sequence[int]]) -> np.ndarray:
    """The sampler's logprobs of given texts, without their first tokens."""
    parts: list[float] = []
    for text in texts:
        response = client.sample(
            xl.ModelInput.from_ints(text), xl.SamplingParams(max_tokens=1), prompt_logprobs=True
        ).result()
        parts += response.prompt_logprobs[1:]
    return np.asarray(parts)


def trained(client: xl.TrainingClient, texts: Sequence[Sequence[int]]) -> np.ndarray:
    """The trainer's logprobs of the same."""
    data = [xl.Datum(xl.ModelInput.from_ints(t), {"labels": list(t)}) for t in texts]
    outputs = client.forward(data).result().loss_fn_outputs
    return np.concatenate([o.logprobs.to_numpy() for o in outputs]).astype(np.float64)


def check_update(
    trainer_change: np.ndarray, sampler_change: np.ndarray, what: str
) -> tuple[float, float]:
    """Assert that what an update did to the trainer it did to the sampler."""
    mean = float(np.abs(trainer_change).mean())
    correlation = float(np.corrcoef(trainer_change, sampler_change)[0, 1])
    share = float(np.polyfit(trainer_change, sampler_change, 1)[0])
    show(what, f"mean change {mean:.3f} nats, correlation {correlation:.3f}, share {share:.2f}")
    assert mean > CHANGE, "the update is too small to be seen through the rounding"
    assert correlation >= CORRELATION
    return mean, correlation


def counterpart(
    service: xl.ServiceClient, client: xl.TrainingClient, name: str
) -> xl.TrainingClient:
    """The same adapter on the base model of another precision, by way of a checkpoint."""
    path = client.save_state(name, overwrite=True).result().path
    return service.create_training_client_from_state(path, model_id=name)


def base_gaps(
    service: xl.ServiceClient, bfloat16: xl.ServiceClient, model: str, temperature: float
) -> tuple[Gap, float]:
    """The gap between a bfloat16 sampler and a float32 trainer of a base model, and its median."""
    trainer = service.create_lora_training_client(model, rank=2, model_id="half-base", seed=1)
    sampler = bfloat16.create_sampling_client(base_model=model)
    samples = sample(sampler, PROMPTS, temperature=temperature, max_tokens=30, num_samples=4)
    theirs = trained_logprobs(trainer, samples)
    gap = Gap.between(theirs, samples.logprobs)
    show(f"{model}, base, bf16 sampler, fp32 trainer, T={temperature}", gap)
    return gap, float(np.median(np.abs(theirs - samples.logprobs)))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_base_beside_a_float32_trainer(service, bfloat16, temperature):
    assert base_gaps(service, bfloat16, "tiny", temperature)[0].mean <= MEAN_LIMIT


def test_rounding_flips_some_choices_of_a_mixture_of_experts(service, bfloat16):
    # A router near a tie sends a token elsewhere in bfloat16, and its logprob is then another
    # number; what is routed alike is as close as in a dense model.
    gap, median = base_gaps(service, bfloat16, "tiny-moe", 1.0)
    assert median <= MEAN_LIMIT
    assert gap.max > 0.5


def test_adapter_beside_a_float32_trainer(service, bfloat16):
    trainer = service.create_lora_training_client("tiny", rank=8, model_id="half-lora", seed=1)
    before = counterpart(bfloat16, trainer, "half-before").save_weights_and_get_sampling_client()
    samples = sample(before, PROMPTS, temperature=1.0, max_tokens=30, num_samples=4)
    texts = [p + c for p, c in zip(samples.prompts, samples.completions, strict=True)] + LESSONS
    old = trained(trainer, texts), given(before, texts)
    learn(trainer, LESSONS, steps=5, rate=3e-3)
    after = counterpart(bfloat16, trainer, "half-after").save_weights_and_get_sampling_client()
    new = trained(trainer, texts), given(after, texts)
    check_update(new[0] - old[0], new[1] - old[1], "tiny, adapter, bf16 sampler, fp32 trainer")
    samples = sample(after, PROMPTS, temperature=1.0, max_tokens=30, num_samples=4)
    gap = Gap.between(trained_logprobs(trainer, samples), samples.logprobs)
    show("tiny, adapter after 5 updates, bf16 sampler, fp32 trainer", gap)
    assert gap.mean <= MEAN_LIMIT


def test_a_sampler_that_misses_the_update_is_noticed(service, bfloat16):
    trainer = service.create_lora_training_client("tiny", rank=8, model_id="half-stale", seed=1)
    stale = counterpart(bfloat16, trainer, "half-stale-1").save_weights_and_get_sampling_client()
    old = trained(trainer, LESSONS), given(stale, LESSONS)
    learn(trainer, LESSONS, steps=5, rate=3e-3)
    new = trained(trainer, LESSONS), given(stale, LESSONS) + 1e-3 * np.arange(len(old[1]))
    with pytest.raises(AssertionError):
        check_update(new[0] - old[0], new[1] - old[1], "tiny, stale adapter")


@pytest.mark.parametrize("kind", ["adapter", "full weights"])
def test_trainer_and_sampler_both_in_bfloat16(bfloat16, kind):
    if kind == "adapter":
        trainer = bfloat16.create_lora_training_client("tiny", rank=8, model_id="both", seed=1)
    else:
        trainer = bfloat16.create_training_client("tiny", model_id="both")
    before = trainer.save_weights_and_get_sampling_client()
    old = trained(trainer, LESSONS), given(before, LESSONS)
    learn(trainer, LESSONS, steps=5, rate=3e-3)
    after = trainer.save_weights_and_get_sampling_client()
    new = trained(trainer, LESSONS), given(after, LESSONS)
    check_update(new[0] - old[0], new[1] - old[1], f"tiny, {kind}, both bf16")
    samples = sample(after, PROMPTS, temperature=1.0, max_tokens=30, num_samples=4)
    gap = Gap.between(trained_logprobs(trainer, samples), samples.logprobs)
    show(f"tiny, {kind} after 5 updates, both bf16", gap)
    assert gap.mean <= MEAN_LIMIT


def test_a_small_update_comes_through_in_bfloat16(bfloat16):
    # Merged into bfloat16 weights, what is smaller than half a unit in their last place would be
    # lost: 83 % of a first update was.  Adapters stay beside the weights, in both.
    trainer = bfloat16.create_lora_training_client("tiny", rank=16, model_id="small", seed=1)
    before = trainer.save_weights_and_get_sampling_client()
    samples = sample(before, PROMPTS, temperature=1.0, max_tokens=40, num_samples=8)
    texts = [p + c for p, c in zip(samples.prompts, samples.completions, strict=True)]
    old = trained(trainer, texts), given(before, texts)
    learn(trainer, LESSONS, steps=1, rate=1e-3)
    after = trainer.save_weights_and_get_sampling_client()
    new = trained(trainer, texts), given(after, texts)
    mean = float(np.abs(new[0] - old[0]).mean())
    share = float(np.polyfit(new[0] - old[0], new[1] - old[1], 1)[0])
    show("tiny, first update, both bf16", f"mean change {mean:.3f} nats, share {share:.2f}")
    # The change is four times the rounding of both, whose share of the variance is within 0.15.
    assert 0.02 < mean < CHANGE
    assert 0.85 < share < 1.15


SMOL = "SmolLM2-135M-Instruct"
SENTENCES = [
    "To be, or not to be, that is the question",
    "The weather in Paris is often mild and rainy in spring",
    "All that glitters is not gold, as the old proverb says",
    "Water boils at 100 degrees Celsius at sea level pressure",
]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_pretrained_adapter_beside_a_float32_trainer(service, bfloat16):
    trainer = service.create_lora_training_client(SMOL, rank=8, model_id="half-smol", seed=1)
    texts = [trainer.get_tokenizer().encode(s) for s in SENTENCES]
    before = bfloat16.create_sampling_client(base_model=SMOL)
    old = trained(trainer, texts), given(before, texts)
    gap = Gap.between(*old)
    show(f"{SMOL}, base, bf16 sampler, fp32 trainer", gap)
    assert gap.mean <= MEAN_LIMIT
    learn(trainer, texts, steps=5, rate=1e-4)
    half = counterpart(bfloat16, trainer, "half-smol-1")
    after = half.save_weights_and_get_sampling_client()
    new = trained(trainer, texts), given(after, texts)
    check_update(new[0] - old[0], new[1] - old[1], f"{SMOL}, adapter, fp32 trainer, bf16 sampler")
    prompts = [trainer.get_tokenizer().encode(p) for p in ("Once upon a time", "The answer is")]
    samples = sample(after, prompts, temperature=1.0, max_tokens=12)
    for kind, client in (("fp32", trainer), ("bf16", half)):
        gap = Gap.between(trained_logprobs(client, samples), samples.logprobs)
        show(f"{SMOL}, adapter after 5 updates, bf16 sampler, {kind} trainer", gap)
        assert gap.mean <= MEAN_LIMIT
