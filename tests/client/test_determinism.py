"""The same seed gives the same run, bit for bit, resumed or not, and in any surroundings."""

import contextlib
import hashlib
import json
import subprocess
import sys
from collections.abc import Generator

import pytest
import torch

import xorl_lab as xl
from tests.engine.support import (
    ADAM,
    exactly,
    moments,
    rollouts,
    same,
    step,
    supervised,
    weights,
    works,
)
from xorl_lab.engine import engine as engines
from xorl_lab.errors import CheckpointError

KINDS = ("lora", "dropout", "full")
STEPS, SAVED = 3, 2


def make(service: xl.ServiceClient, kind: str, model_id: str = "default") -> xl.TrainingClient:
    if kind == "full":
        return service.create_training_client("tiny", model_id=model_id)
    dropout = 0.3 if kind == "dropout" else 0.0
    return service.create_lora_training_client(
        "tiny", rank=4, seed=7, dropout=dropout, model_id=model_id
    )


def train(client: xl.TrainingClient, first: int, last: int) -> None:
    for i in range(first, last):
        client.forward_backward(supervised(3, seed=i))
        client.forward_backward(rollouts(3, seed=i), "policy_loss")
        client.optim_step(ADAM).result(60)


def digest(client: xl.TrainingClient) -> str:
    """Of weights, moments and a sample: all that a run leaves."""
    text = hashlib.sha256()
    for tensors in (weights(client), moments(client)):
        for name in sorted(tensors):
            text.update(name.encode() + tensors[name].numpy().tobytes())
    sampler = client.save_weights_and_get_sampling_client()
    params = xl.SamplingParams(max_tokens=6, seed=3)
    answer = sampler.sample(xl.ModelInput.from_ints([1, 2, 3]), params, 2).result(60)
    text.update(json.dumps([[s.tokens, s.logprobs] for s in answer.sequences]).encode())
    return text.hexdigest()


def whole(service: xl.ServiceClient, kind: str, model_id: str = "default") -> str:
    client = make(service, kind, model_id)
    train(client, 0, STEPS)
    return digest(client)


def half(service: xl.ServiceClient, kind: str) -> str:
    """The path of a checkpoint in the middle of the run."""
    client = make(service, kind, kind)
    train(client, 0, SAVED)
    return client.save_state("half").result(60).path


def rest(service: xl.ServiceClient, path: str, *, warm: bool = True) -> str:
    create = (
        service.create_training_client_from_state_with_optimizer
        if warm
        else service.create_training_client_from_state
    )
    client = create(path, model_id="again")
    train(client, SAVED, STEPS)
    return digest(client)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_run(service, kind):
    assert whole(service, kind) == whole(service, kind, "other")


def test_another_seed_gives_another_run(service):
    clients = [
        service.create_lora_training_client("tiny", rank=4, seed=s, model_id=f"m{s}")
        for s in (1, 2)
    ]
    assert not same(weights(clients[0]), weights(clients[1]))


def test_without_a_seed_each_run_has_its_own_and_records_it(service):
    clients = [
        service.create_lora_training_client("tiny", rank=4, model_id=f"m{i}") for i in range(2)
    ]
    assert clients[0].lora.seed != clients[1].lora.seed


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_the_uninterrupted_one(service, kind):
    assert rest(service, half(service, kind)) == whole(service, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cold_optimizer_gives_another_run(service, kind):
    assert rest(service, half(service, kind), warm=False) != whole(service, kind)


def test_a_resumed_client_has_the_counters_of_the_saved_one(service):
    client = make(service, "lora")
    train(client, 0, 2)
    path = client.save_state("a").result().path
    warm = service.create_training_client_from_state_with_optimizer(path, model_id="warm")
    cold = service.create_training_client_from_state(path, "tiny", model_id="cold")
    assert (warm.version, warm.lora) == (client.version, client.lora)
    assert step(warm)["step"] == 3
    assert step(cold)["step"] == 1


def test_saving_changes_nothing(service):
    client = make(service, "dropout")
    for i in range(STEPS):
        train(client, i, i + 1)
        client.save_state(f"at-{i}").result()
    assert digest(client) == whole(service, "dropout", "other")


def test_sampling_between_the_steps_changes_nothing(service):
    client = make(service, "dropout")
    pending = []
    for i in range(STEPS):
        sampler = client.save_weights_and_get_sampling_client()
        pending.append(sampler.sample("a", xl.SamplingParams(max_tokens=12)))
        client.forward(supervised())
        train(client, i, i + 1)
    for future in pending:
        future.result(60)
    assert digest(client) == whole(service, "dropout", "other")


def test_other_clients_between_the_steps_change_nothing(service):
    client, other = make(service, "dropout"), make(service, "dropout", "other")
    for i in range(STEPS):
        train(client, i, i + 1)
        step(other)
    assert digest(client) == whole(service, "dropout", "third")


# The caller's own torch.


def drawn(service: xl.ServiceClient) -> None:
    """Everything that could draw a random number."""
    client = make(service, "dropout")
    step(client)
    client.save_state("a").result()
    client.save_weights_and_get_sampling_client().sample("a").result(60)
    service.create_training_client("tiny", model_id="full")


def test_the_global_generator_is_left_alone(service):
    before = torch.get_rng_state()
    drawn(service)
    assert torch.equal(torch.get_rng_state(), before)


@contextlib.contextmanager
def seeded() -> Generator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(123)
        torch.rand(7)
        yield


@contextlib.contextmanager
def doubled() -> Generator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.fixture
def fresh_engines() -> Generator[None]:
    """Engines of this test's own, so that loading a model is tested too."""
    kept = dict(engines._engines)
    engines._engines.clear()
    yield
    for engine in engines._engines.values():
        engine.scheduler.close()
    engines._engines.clear()
    engines._engines.update(kept)


SETTINGS = {
    "seeded": seeded,
    "float64": doubled,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "meta": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_of_the_calling_thread_change_nothing(service, fresh_engines, setting):
    expected = whole(service, "dropout")
    engines.close_all()
    with SETTINGS[setting]():
        assert whole(service, "dropout", "other") == expected


def test_settings_of_the_calling_thread_do_not_matter_to_full_weights(service, fresh_engines):
    expected = whole(service, "full")
    engines.close_all()
    with doubled(), torch.inference_mode():
        assert whole(service, "full", "other") == expected


# Another process.

PROCESS = """
import sys
from pathlib import Path
import xorl_lab as xl
from tests.client import test_determinism as m
service = xl.ServiceClient(home=Path(sys.argv[1]), device="cpu", dtype="float32")
for kind in m.KINDS:
    print(m.whole(service, kind), m.rest(service, f"xorl://{kind}/weights/half"))
"""


def test_another_process_gives_the_same_run_and_continues_it(service, root, home):
    for kind in KINDS:
        half(service, kind)
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, str(home)],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    assert [line.split() for line in done.stdout.splitlines()] == [
        [whole(service, kind, "here")] * 2 for kind in KINDS
    ]


# What does not fit.


def test_another_base_model_is_refused(service, client):
    path = client.save_state("a").result().path
    with pytest.raises(
        CheckpointError,
        match=exactly(
            "validation.checkpoint_config_mismatch: checkpoint xorl://default/weights/a is of base "
            "model 'tiny', but 'tiny-moe' was asked for: leave base_model out"
        ),
    ):
        service.create_training_client_from_state(path, "tiny-moe")
    assert works(client)


def test_another_precision_is_refused_with_the_optimizer(client, home):
    step(client)
    path = client.save_state("a").result().path
    coarse = xl.ServiceClient(home=home, device="cpu", dtype="bfloat16")
    with pytest.raises(CheckpointError, match=r"^checkpoint\.dtype_mismatch: "):
        coarse.create_training_client_from_state_with_optimizer(path)
    assert works(coarse.create_training_client_from_state(path))


def test_a_taken_name_is_refused_and_overwritten_when_asked(service, client):
    client.save_state("a").result()
    with pytest.raises(CheckpointError, match=r"^checkpoint\.exists: "):
        client.save_state("a").result()
    step(client)
    path = client.save_state("a", overwrite=True).result().path
    again = service.create_training_client_from_state(path, model_id="again")
    assert same(weights(again), weights(client))


def test_saves_keep_their_place_in_the_order_of_calls(service, client):
    paths = []
    for i in range(3):
        client.forward_backward(supervised())
        client.optim_step(ADAM)
        paths.append(client.save_state())
        client.forward_backward(supervised(seed=i))
        client.optim_step(ADAM)
    assert [p.result().path for p in paths] == [
        f"xorl://default/weights/step-{n}" for n in (1, 3, 5)
    ]
    resumed = service.create_training_client_from_state_with_optimizer(
        paths[1].result().path, model_id="again"
    )
    assert resumed.version == 3
