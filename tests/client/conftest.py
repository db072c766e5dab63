"""A service in a folder of its own, and a client that trains a small adapter."""

import pytest

import xorl_lab as xl


@pytest.fixture
def service(tmp_path) -> xl.ServiceClient:
    return xl.ServiceClient(home=tmp_path / "home", device="cpu", dtype="float32")


@pytest.fixture
def client(service) -> xl.TrainingClient:
    return service.create_lora_training_client("tiny", rank=4, seed=1)
