"""A service in a folder of its own, and a client that trains a small adapter."""

from pathlib import Path

import pytest

import xorl_lab as xl


@pytest.fixture
def home(tmp_path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def service(home) -> xl.ServiceClient:
    return xl.ServiceClient(home=home, device="cpu", dtype="float32")


@pytest.fixture
def client(service) -> xl.TrainingClient:
    return service.create_lora_training_client("tiny", rank=4, seed=1)
