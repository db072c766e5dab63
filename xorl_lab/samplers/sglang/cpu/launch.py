"""Starts SGLang on a CPU; its arguments are those of ``python -m sglang.launch_server``.

SGLang's wheel is made for CUDA.  Three things keep it from running without: operators that it
registers shapes for and that only torchvision's compiled part defines, memory pinned for a GPU (as
that in which it notes chosen experts), and the package ``sgl_kernel``, whose stand-in lies beside
this file and so comes first on the path.
Its worker processes import this file again, as ``__mp_main__``, and are adapted in the same way.
"""

import functools
import runpy
import types
from collections.abc import Callable
from typing import Any

import torch

MAKERS = ("tensor", "empty", "zeros", "ones", "full", "arange", "empty_like", "zeros_like")
"""Functions of torch that take ``pin_memory``."""
UNPINNING = types.SimpleNamespace(
    cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0, cudaGetErrorString=str
)
"""CUDA's library where memory is pinned in place: it says that all went well."""
BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
"""Signature of the operators ``nms`` and ``qnms``."""


def unpinned(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, which leaves ``pin_memory`` out: there is nothing to pin it for."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 (those of the function)
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)

    return call


def adapt() -> torch.library.Library:
    """Adapt torch in this process.

    Returns:
        What holds the operators: they are there for as long as it lives.
    """
    operators = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        operators.define(name + BOXES)
    for name in MAKERS:
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_args, **_kwargs: self
    torch.cuda.cudart = lambda: UNPINNING
    return operators


if __name__ in ("__main__", "__mp_main__"):
    OPERATORS = adapt()
if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
