"""Small models, in single and double precision."""

import copy

import pytest
from transformers import PreTrainedModel

from xorl_lab.engine import models


@pytest.fixture(scope="session")
def tiny() -> PreTrainedModel:
    return models.load("tiny", device="cpu", dtype="float32").model


@pytest.fixture(scope="session")
def tiny64(tiny) -> PreTrainedModel:
    return copy.deepcopy(tiny).double()
