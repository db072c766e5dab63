"""Small models, in single and double precision."""

import copy

import pytest
import torch
from transformers import PreTrainedModel

from xorl_lab.engine import models


class Norm(torch.nn.Module):
    """RMS norm in the precision of its input; transformers' own computes in float32 always."""

    def __init__(self, weight: torch.nn.Parameter, epsilon: float) -> None:
        super().__init__()
        self.weight = weight
        self.epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon))


@pytest.fixture(scope="session")
def tiny() -> PreTrainedModel:
    return models.load("tiny", device="cpu", dtype="float32").model


@pytest.fixture(scope="session")
def tiny64(tiny) -> PreTrainedModel:
    model = copy.deepcopy(tiny).double()
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            model.set_submodule(name, Norm(module.weight, module.variance_epsilon))
    return model
