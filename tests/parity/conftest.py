"""Services whose checkpoints are thrown away."""

import pytest

import xorl_lab as xl


@pytest.fixture(scope="session")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("parity")


@pytest.fixture(scope="session")
def service(home) -> xl.ServiceClient:
    return xl.ServiceClient(home=home, device="cpu", dtype="float32")


@pytest.fixture(scope="session")
def bfloat16(home) -> xl.ServiceClient:
    return xl.ServiceClient(home=home, device="cpu", dtype="bfloat16")
