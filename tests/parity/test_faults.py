"""The check of parity notices what it is there for: each planted fault must fail it."""

import pytest
import torch

import xorl_lab as xl
from tests.parity.check import check_parity, learn
from tests.samplers.support import sampler_of
from xorl_lab.samplers import embedded
from xorl_lab.samplers.cache import RowCache
from xorl_lab.samplers.lean import LeanWeights
from xorl_lab.samplers.networks import Networks

PROMPTS = [list(b"Once upon a time"), list(b"a"), list(b"so it is")]
DISAGREE = "trainer and sampler disagree"


@pytest.fixture(scope="module")
def trainer(service) -> xl.TrainingClient:
    client = service.create_lora_training_client("tiny", rank=8, model_id="faults", seed=1)
    learn(client, [list(b"to be or not to be")], steps=5, rate=1e-2)
    return client


@pytest.fixture(autouse=True)
def sound(trainer):
    """Without the fault the check passes, before and after."""
    check_parity(trainer, trainer.save_weights_and_get_sampling_client(), PROMPTS)
    yield
    check_parity(trainer, trainer.save_weights_and_get_sampling_client(), PROMPTS)


@pytest.mark.parametrize("shift", [-1, 1])
def test_position_ids_off_by_one(trainer, monkeypatch, shift):
    real = RowCache.begin_step

    def shifted(self: RowCache, device: torch.device):
        positions, mask = real(self, device)
        return positions + shift, mask

    monkeypatch.setattr(RowCache, "begin_step", shifted)
    with pytest.raises(AssertionError, match=DISAGREE):
        check_parity(trainer, trainer.save_weights_and_get_sampling_client(), PROMPTS)


def test_a_cache_that_is_written_one_position_early(trainer, monkeypatch):
    real = RowCache.begin_step

    def early(self: RowCache, device: torch.device):
        result = real(self, device)
        self._index, self._place = self._index - 1, self._place - 1
        return result

    monkeypatch.setattr(RowCache, "begin_step", early)
    with pytest.raises(AssertionError, match=DISAGREE):
        check_parity(trainer, trainer.save_weights_and_get_sampling_client(), PROMPTS)


def test_a_mask_that_hides_the_newest_position(trainer, monkeypatch):
    real = RowCache.begin_step

    def blind(self: RowCache, device: torch.device):
        positions, mask = real(self, device)
        return positions, mask & (torch.arange(mask.shape[-1]) < positions[:, :, None, None])

    monkeypatch.setattr(RowCache, "begin_step", blind)
    with pytest.raises(AssertionError, match=DISAGREE):
        check_parity(trainer, trainer.save_weights_and_get_sampling_client(), PROMPTS)


def test_a_mask_that_shows_the_padding_of_shorter_rows(trainer, monkeypatch):
    real = RowCache.begin_step

    def leaky(self: RowCache, device: torch.device):
        positions, mask = real(self, device)
        return positions, torch.ones_like(mask)

    monkeypatch.setattr(RowCache, "begin_step", leaky)
    with pytest.raises(AssertionError, match=DISAGREE):
        check_parity(trainer, trainer.save_weights_and_get_sampling_client(), PROMPTS)


def test_rows_that_are_mixed_up_when_one_leaves(trainer, monkeypatch):
    real = RowCache.keep
    monkeypatch.setattr(RowCache, "keep", lambda self, rows: real(self, list(rows)[::-1]))
    with pytest.raises(AssertionError, match=DISAGREE):
        check_parity(trainer, trainer.save_weights_and_get_sampling_client(), PROMPTS)


def test_a_sampler_that_ignores_the_adapter(trainer, monkeypatch):
    sampler = trainer.save_weights_and_get_sampling_client()
    real = Networks.acquire
    base = sampler_of(sampler).engine.base_version
    monkeypatch.setattr(Networks, "acquire", lambda self, _: real(self, base))
    with pytest.raises(AssertionError, match=DISAGREE):
        check_parity(trainer, trainer.save_weights_and_get_sampling_client(), PROMPTS)


def test_an_adapter_of_half_its_strength(trainer, monkeypatch):
    real = LeanWeights.deltas
    monkeypatch.setattr(LeanWeights, "deltas", lambda self, t, scale: real(self, t, scale / 2))
    # A version of its own, or the network that is there already would be used.
    learn(trainer, [list(b"to be or not to be")], steps=1, rate=1e-3)
    with pytest.raises(AssertionError, match=DISAGREE):
        check_parity(trainer, trainer.save_weights_and_get_sampling_client(), PROMPTS)
    learn(trainer, [list(b"to be or not to be")], steps=1, rate=1e-3)


def test_logprobs_that_ignore_the_temperature(trainer, monkeypatch):
    real = embedded.draw

    def at_one(logits, *asked):
        drawn = real(logits, *asked)
        drawn.logprobs[:] = torch.log_softmax(logits.double(), -1).gather(
            -1, drawn.tokens[:, None]
        )[:, 0]
        return drawn

    monkeypatch.setattr(embedded, "draw", at_one)
    sampler = trainer.save_weights_and_get_sampling_client()
    check_parity(trainer, sampler, PROMPTS, temperature=1.0)
    with pytest.raises(AssertionError, match=DISAGREE):
        check_parity(trainer, sampler, PROMPTS, temperature=0.7)


def test_logprobs_of_the_token_before(trainer, monkeypatch):
    real = embedded.draw
    kept = []

    def late(*asked):
        drawn = real(*asked)
        now = drawn.logprobs.clone()
        if kept and len(kept[-1]) == len(now):
            drawn.logprobs[:] = kept[-1]
        kept.append(now)
        return drawn

    monkeypatch.setattr(embedded, "draw", late)
    with pytest.raises(AssertionError, match=DISAGREE):
        check_parity(trainer, trainer.save_weights_and_get_sampling_client(), PROMPTS)


def test_a_stale_version_of_the_adapter(service):
    client = service.create_lora_training_client("tiny", rank=8, model_id="stale", seed=1)
    learn(client, [list(b"to be or not to be")], steps=5, rate=1e-2)
    old = client.save_weights_and_get_sampling_client()
    check_parity(client, old, PROMPTS)
    learn(client, [list(b"to be or not to be")], steps=1, rate=1e-2)
    with pytest.raises(AssertionError, match=DISAGREE):
        check_parity(client, old, PROMPTS)


def test_a_stale_version_of_full_weights(service):
    client = service.create_training_client("tiny", model_id="stale-full")
    old = client.save_weights_and_get_sampling_client()
    check_parity(client, old, PROMPTS)
    learn(client, [list(b"to be or not to be")], steps=1, rate=1e-3)
    with pytest.raises(AssertionError, match=DISAGREE):
        check_parity(client, old, PROMPTS)
