"""Stands in for SGLang's compiled kernels, whose wheels are for CUDA only.

Every name can be imported, and calling one raises.  What SGLang asks for by ``hasattr`` of
``torch.ops.sgl_kernel`` is not there, so it takes the way that needs torch alone.
"""

from collections.abc import Callable
from typing import NoReturn

import torch

__version__ = "0.0.0+standin"


def _nothing(*_args: object, **_kwargs: object) -> None:
    """Called when SGLang starts on aarch64, whether there are kernels or not."""


for _name in ("init_cpu_threads_env", "initialize"):
    setattr(torch.ops.sgl_kernel, _name, _nothing)


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is compiled for CUDA: not available on a CPU")

    missing.__name__ = name
    return missing
