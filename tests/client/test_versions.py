"""A sampling client is one immutable version; what nobody holds is let go."""

import gc
import threading
import weakref

import pytest
import torch

import xorl_lab as xl
from tests.closeness import assert_close
from tests.engine.support import ADAM, exactly, labelled, step, supervised, works
from xorl_lab.engine import trainer
from xorl_lab.engine.versions import WeightsVersion
from xorl_lab.errors import CancelledError, EngineError

PROMPT = xl.ModelInput.from_ints([10, 20, 30])
PARAMS = xl.SamplingParams(max_tokens=8, seed=5)
DATA = [labelled([10, 20, 30, 40, 50])]


@pytest.fixture(params=["lora", "full"])
def client(request, service) -> xl.TrainingClient:
    if request.param == "full":
        return service.create_training_client("tiny")
    return service.create_lora_training_client("tiny", rank=4, seed=1)


def drawn(sampler: xl.SamplingClient) -> tuple[list[int], list[float]]:
    response = sampler.sample(PROMPT, PARAMS).result(60)
    return response.tokens, response.logprobs or []


def version(sampler: xl.SamplingClient) -> WeightsVersion:
    """The weights that a client in this process samples from."""
    held = sampler if hasattr(sampler, "_version") else sampler._source
    return next(v for v in vars(held).values() if isinstance(v, WeightsVersion))


def logprob(sampler: xl.SamplingClient) -> float:
    """Logprob of a fixed token: it moves with the weights, if only a little."""
    prompt = xl.ModelInput.from_ints([10, 20, 30, 40])
    response = sampler.sample(prompt, PARAMS, prompt_logprobs=True).result(60)
    assert response.prompt_logprobs is not None
    return response.prompt_logprobs[-1] or 0.0


def test_a_version_samples_the_same_after_a_step(client):
    step(client, DATA)
    sampler = client.save_weights_and_get_sampling_client()
    before = drawn(sampler), logprob(sampler)
    step(client, DATA)
    after = client.save_weights_and_get_sampling_client()
    assert (drawn(sampler), logprob(sampler)) == before
    assert logprob(after) > before[1] + 0.05
    assert (sampler.version, after.version) == (1, 2)


def test_a_version_agrees_with_the_trainer(client):
    for _ in range(3):
        step(client, DATA)
    sampler = client.save_weights_and_get_sampling_client()
    trained = client.forward(DATA).result().loss_fn_outputs[0].logprobs.data[2]
    assert_close(logprob(sampler), trained, rtol=0, atol=1e-4)


def test_a_sample_under_way_keeps_its_version(client):
    """Sampling goes on between the steps that move the weights."""
    sampler = client.save_weights_and_get_sampling_client()
    params = xl.SamplingParams(max_tokens=60, seed=5)
    alone = sampler.sample(PROMPT, params).result(60)
    under_way = sampler.sample(PROMPT, params)
    for _ in range(6):
        client.forward_backward(DATA)
        client.optim_step(ADAM)
    again = under_way.result(60)
    assert again.tokens == alone.tokens
    assert_close(again.logprobs, alone.logprobs, rtol=0, atol=1e-5)
    assert again.meta_info is not None
    assert again.meta_info["weight_version"] == 0


def test_two_samplers_of_one_version_share_it(client):
    first = client.save_weights_and_get_sampling_client()
    second = client.save_weights_and_get_sampling_client()
    assert version(first) is version(second)


def test_the_base_never_changes(service, client):
    base = service.create_sampling_client(base_model="tiny")
    before = drawn(base), logprob(base)
    logprobs = client.forward_base(DATA).result().loss_fn_outputs[0].logprobs.data
    for _ in range(3):
        step(client, DATA)
    assert (drawn(base), logprob(base)) == before
    assert client.forward_base(DATA).result().loss_fn_outputs[0].logprobs.data == logprobs


def test_other_clients_are_not_touched(service, client):
    others = [
        service.create_lora_training_client("tiny", rank=4, seed=1, model_id="a"),
        service.create_training_client("tiny", model_id="b"),
    ]
    before = [o.forward(DATA).result().metrics for o in others]
    step(client, DATA)
    assert [o.forward(DATA).result().metrics for o in others] == before
    assert [o.version for o in others] == [0, 0]


def settle(client: xl.TrainingClient) -> None:
    """Let the worker finish what it is at, and free what nobody holds."""
    client._session.engine.scheduler.submit(lambda _: None, name="settle").result(60)
    gc.collect()


# Full weights are copied only while somebody holds a version of them.


@pytest.fixture
def full(service) -> xl.TrainingClient:
    return service.create_training_client("tiny")


def test_full_weights_are_not_copied_for_a_version_at_rest(full):
    sampler = full.save_weights_and_get_sampling_client()
    assert version(sampler).full is full._session.trained.model


def test_full_weights_are_copied_when_they_move_under_a_version(full):
    sampler = full.save_weights_and_get_sampling_client()
    step(full)
    copy = version(sampler).full
    assert copy is not full._session.trained.model
    step(full)
    assert version(sampler).full is copy
    assert not any(p.requires_grad for p in copy.parameters())
    ties = copy.get_input_embeddings().weight is copy.get_output_embeddings().weight
    assert ties


def test_full_weights_are_not_copied_once_nobody_holds_the_version(full, monkeypatch):
    made: list[object] = []
    original = trainer.clone
    monkeypatch.setattr(trainer, "clone", lambda m: made.append(m) or original(m))
    sampler = full.save_weights_and_get_sampling_client()
    drawn(sampler)
    del sampler
    settle(full)
    step(full)
    assert made == []
    assert len(full._session.trained._copies) == 0


def test_a_copy_is_freed_with_its_last_reader(full):
    sampler = full.save_weights_and_get_sampling_client()
    drawn(sampler)
    step(full)
    drawn(sampler)
    copy = weakref.ref(version(sampler).full)
    assert len(full._session.trained._copies) == 1
    del sampler
    settle(full)
    assert copy() is None
    assert len(full._session.trained._copies) == 0


def test_more_copies_than_the_budget_are_refused(full, monkeypatch):
    monkeypatch.setattr(trainer, "COPY_BUDGET", 0)
    sampler = full.save_weights_and_get_sampling_client()
    full.forward_backward(supervised()).result()
    with pytest.raises(
        EngineError,
        match=exactly(
            "1 sampling clients hold older versions of the full weights (0.0 GiB each), over the "
            "budget of 0 GiB: drop those that are no longer needed"
        ),
    ):
        full.optim_step(ADAM).result()
    assert full.version == 0
    del sampler
    settle(full)
    assert works(full)


# What is dropped is freed, though the worker thread lives on.


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_models_are_freed_with_their_clients(service, kind):
    create = {
        "lora": lambda: service.create_lora_training_client("tiny", rank=4, model_id="freed"),
        "full": lambda: service.create_training_client("tiny", model_id="freed"),
    }[kind]
    made = create()
    kept = [made.forward_backward(supervised()), made.optim_step(ADAM), made.forward(DATA)]
    for future in kept:
        future.result()
    with pytest.raises(EngineError):
        made.optim_step(ADAM).result()
    model, session = (weakref.ref(o) for o in (made._session.trained.model, made._session))
    del made
    gc.collect()
    assert session() is None
    assert model() is None
    assert kept[0].result().metrics["valid_tokens"] > 0


def test_a_cancelled_call_does_not_keep_its_model(service):
    made = service.create_lora_training_client("tiny", rank=4, model_id="freed")
    gate = threading.Event()
    scheduler = made._session.engine.scheduler
    busy = scheduler.submit(lambda _: gate.wait(60), name="hold")
    future = made.forward_backward(supervised())
    assert future.cancel()
    gate.set()
    busy.result(60)
    session = weakref.ref(made._session)
    del made
    gc.collect()
    assert session() is None
    assert future.cancelled()


def test_a_sampler_outlives_its_client(service):
    made = service.create_training_client("tiny", model_id="freed")
    step(made, DATA)
    sampler = made.save_weights_and_get_sampling_client()
    before = drawn(sampler)
    del made
    gc.collect()
    assert drawn(sampler) == before


def test_cancelling_a_batch_of_samples_raises(service):
    base = service.create_sampling_client(base_model="tiny")
    params = xl.SamplingParams(max_tokens=400)
    future = base.sample_batch([PROMPT] * 3, params)
    if future.cancel():
        with pytest.raises(CancelledError):
            future.result(60)
    else:
        assert len(future.result(60).completed) == 3


def test_versions_hold_copies_of_an_adapter(service):
    lora = service.create_lora_training_client("tiny", rank=4, seed=1)
    sampler = lora.save_weights_and_get_sampling_client()
    held = {k: v.clone() for k, v in version(sampler).adapter.items()}
    step(lora)
    assert all(torch.equal(held[k], v) for k, v in version(sampler).adapter.items())
    assert not {v.data_ptr() for v in version(sampler).adapter.values()} & {
        p.data_ptr() for p in lora._session.trained.parameters.values()
    }


def test_a_refused_copy_leaves_window_and_version_as_they_were(full, monkeypatch):
    sampler = full.save_weights_and_get_sampling_client()
    before = drawn(sampler)
    monkeypatch.setattr(trainer, "COPY_BUDGET", 0)
    full.forward_backward(DATA).result(60)
    for _ in range(2):
        with pytest.raises(EngineError, match="over the budget"):
            full.optim_step(ADAM).result(60)
    assert drawn(sampler) == before
    monkeypatch.undo()
    assert full.optim_step(ADAM).result(60).metrics["step"] == 1
    assert drawn(sampler) == before


def test_a_prompt_that_comes_again_in_a_batch_is_drawn_anew(service):
    base = service.create_sampling_client(base_model="tiny")
    params = xl.SamplingParams(max_tokens=8, seed=5)
    batch = base.sample_batch([PROMPT] * 4, params).result(60)
    tokens = [tuple(response.tokens) for _, response in batch.completed]
    assert len(set(tokens)) == 4
    assert tokens[0] == tuple(base.sample(PROMPT, params).result(60).tokens)
    again = base.sample_batch([PROMPT] * 4, params).result(60)
    assert [tuple(response.tokens) for _, response in again.completed] == tokens


def test_a_client_whose_model_is_gone_still_says_what_it_was(service):
    client = service.create_lora_training_client("tiny", rank=4, seed=1)
    step(client, DATA)
    client.unload()
    late = client.forward_backward(DATA) if client._session.closed is None else None
    assert late is None or "was unloaded" in str(late.exception(60))
    assert client.version == 1
    assert "version 1" in repr(client)


def test_a_number_is_not_given_to_other_weights_by_a_load(service):
    client = service.create_lora_training_client("tiny", rank=4, seed=1)
    step(client, DATA)
    path = client.save_state("one").result(60).path
    step(client, DATA)
    from xorl_lab.checkpoints import Address

    client._session.load(Address.parse(path), with_optimizer=True).result(60)
    assert client.version == 3


def test_a_sampler_goes_on_after_a_fault_outside_its_lanes(service, monkeypatch):
    client = service.create_lora_training_client("tiny", rank=4, seed=1)
    sampler = client._session.sampler

    def broken() -> None:
        raise OSError("planted")

    monkeypatch.setattr(sampler, "_admit", broken)
    base = service.create_sampling_client(base_model="tiny")
    error = base.sample("once", xl.SamplingParams(max_tokens=2)).exception(60)
    assert str(error) == "sampling failed (OSError: planted)"
    monkeypatch.undo()
    assert len(base.sample("once", xl.SamplingParams(max_tokens=2)).result(60).tokens) >= 1
    assert works(client)
