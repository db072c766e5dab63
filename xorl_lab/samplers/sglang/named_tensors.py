"""Tensors as SGLang takes them over HTTP: pickled by value, in requests of a bounded size."""

import base64
import pickle
from collections.abc import Iterable, Iterator

import torch

Named = tuple[str, torch.Tensor]
NARROW = {"bfloat16": torch.bfloat16, "float16": torch.float16, "half": torch.float16}
"""Names of dtypes in which a server would round to what it is sent anyway."""


def buckets(tensors: Iterable[Named], limit: int) -> Iterator[tuple[list[Named], bool]]:
    """Group tensors, in their order, so that no group is larger than a limit.

    Args:
        tensors: (name, values), looked at one by one.
        limit: bytes of a group; a tensor that is larger makes one of its own.

    Yields:
        A group, and whether it is the last.

    >>> four = [(name, torch.zeros(4)) for name in "abcd"]
    >>> [([name for name, _ in group], last) for group, last in buckets(four, 40)]
    [(['a', 'b'], False), (['c', 'd'], True)]
    """
    group: list[Named] = []
    size = 0
    for name, tensor in tensors:
        if group and size + tensor.nbytes > limit:
            yield group, False
            group, size = [], 0
        group.append((name, tensor))
        size += tensor.nbytes
    if group:
        yield group, True


def by_value(tensors: Iterable[Named], dtype: str, *, keyed: bool = False) -> str:
    """Pickle tensors with their values, as base64.

    Not by handles of shared memory, as torch.multiprocessing would: on a CPU they crash SGLang's
    scheduler, and they mean nothing on another machine.

    Args:
        tensors: (name, values), any device.
        dtype: the server's; where it is narrower, that is sent.
        keyed: as a dict, in which SGLang wants an adapter, not as a list of pairs.
    """
    listed = [(name, _plain(tensor, NARROW.get(dtype))) for name, tensor in tensors]
    return base64.b64encode(pickle.dumps(dict(listed) if keyed else listed)).decode()


def _plain(tensor: torch.Tensor, narrow: torch.dtype | None) -> torch.Tensor:
    """A tensor on the CPU that is all of its storage, since the whole storage is pickled."""
    tensor = tensor.detach()
    if narrow is not None and tensor.is_floating_point():
        tensor = tensor.to(narrow)
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
