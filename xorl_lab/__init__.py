"""Reinforcement learning of language models on one machine.

Importing this package is cheap: torch is imported when a name that needs it is first used.

>>> import xorl_lab as xl
>>> xl.ModelInput.from_ints([1, 2, 3]).length
3
"""

import importlib
import os
from typing import TYPE_CHECKING

from xorl_lab import errors, types
from xorl_lab.futures import APIFuture
from xorl_lab.types import (
    AdamParams,
    BatchSampleResult,
    Datum,
    ForwardBackwardOutput,
    ModelInput,
    OptimStepResponse,
    SampledSequence,
    SampleResponse,
    SamplingParams,
    SaveWeightsResponse,
    TensorData,
)

if TYPE_CHECKING:
    from xorl_lab import losses
    from xorl_lab.client import SamplingClient, ServiceClient, TrainingClient
    from xorl_lab.lab import Lab, Run, Track, explore_losses, loss_curve

__version__ = "0.1.0"

__all__ = [
    "APIFuture",
    "AdamParams",
    "BatchSampleResult",
    "Datum",
    "ForwardBackwardOutput",
    "Lab",
    "ModelInput",
    "OptimStepResponse",
    "Run",
    "SampleResponse",
    "SampledSequence",
    "SamplingClient",
    "SamplingParams",
    "SaveWeightsResponse",
    "ServiceClient",
    "TensorData",
    "Track",
    "TrainingClient",
    "__version__",
    "errors",
    "explore_losses",
    "loss_curve",
    "losses",
    "types",
]

# How long the threads of a product wait for each other awake, in turns of a loop.  Without an end,
# as is usual, they hold cores that others need: beside one busy program loading a model took five
# times as long.  Asleep at once, they would be woken a thousand times per decode step.  This is
# read when torch is imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")

_LAZY_MODULES = frozenset({"losses"})
_LAZY_NAMES = {
    **dict.fromkeys(("SamplingClient", "ServiceClient", "TrainingClient"), "xorl_lab.client"),
    **dict.fromkeys(("Lab", "Run", "Track", "explore_losses", "loss_curve"), "xorl_lab.lab"),
}


def __getattr__(name: str) -> object:
    """Import on first use what brings torch with it."""
    if name in _LAZY_MODULES:
        return importlib.import_module(f"xorl_lab.{name}")
    if name in _LAZY_NAMES:
        return getattr(importlib.import_module(_LAZY_NAMES[name]), name)
    raise AttributeError(f"module 'xorl_lab' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
