"""Clients on the tiny model, in single precision."""

from pathlib import Path

import pytest

import xorl_lab as xl
from tests.samplers.support import Clock, Counter, ids, params


@pytest.fixture(scope="session")
def service(tmp_path_factory) -> xl.ServiceClient:
    home: Path = tmp_path_factory.mktemp("samplers")
    service = xl.ServiceClient(home=home, device="cpu", dtype="float32")
    # The first draw lays the weights out and checks them, which tests that count work leave out.
    service.create_sampling_client(base_model="tiny").sample(ids(1), params(), 1).result()
    return service


@pytest.fixture
def base(service) -> xl.SamplingClient:
    return service.create_sampling_client(base_model="tiny")


@pytest.fixture
def trainer(service) -> xl.TrainingClient:
    return service.create_lora_training_client("tiny", rank=4, model_id="sampled", seed=3)


@pytest.fixture
def counter(monkeypatch) -> Counter:
    return Counter(monkeypatch)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    return Clock(monkeypatch)
