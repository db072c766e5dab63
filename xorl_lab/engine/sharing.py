"""Further modules on the same weights.

A base model is held once.  What trains or samples on it is a second tree of modules whose
parameters are the very same tensors, until some of them are replaced.
"""

import copy
from itertools import chain
from typing import TypeVar

import torch

Module = TypeVar("Module", bound=torch.nn.Module)


def share(module: Module) -> Module:
    """A structurally equal module whose parameters and buffers are those of ``module`` itself."""
    tensors = chain(module.parameters(), module.buffers())
    return copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})


def clone(module: Module) -> Module:
    """A structurally equal module with copies of the weights; tied weights stay tied."""
    return copy.deepcopy(module)


def tensor_bytes(module: torch.nn.Module) -> int:
    """Bytes of the distinct parameters of a module."""
    return sum(p.numel() * p.element_size() for p in module.parameters())
