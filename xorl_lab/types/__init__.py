"""The data that crosses the client API.  Nothing here imports torch.

Names, fields and defaults are those of xorl_client 0.1.0 and pytrio 0.2.9 where these have them.
"""

from xorl_lab.types.commands import (
    CheckpointCommands,
    InspectorCommands,
    LossCommands,
    RunCommands,
)
from xorl_lab.types.data import Datum, ModelInput, TensorData
from xorl_lab.types.params import AdamParams, LoraRunSpec, SamplingParams
from xorl_lab.types.records import Alternatives, Group, Rollout, StepRecord
from xorl_lab.types.results import (
    BatchSampleResult,
    ForwardBackwardOutput,
    LossFnOutput,
    OptimStepResponse,
    SampledSequence,
    SampleResponse,
    SaveWeightsResponse,
)

__all__ = [
    "AdamParams",
    "Alternatives",
    "BatchSampleResult",
    "CheckpointCommands",
    "Datum",
    "ForwardBackwardOutput",
    "Group",
    "InspectorCommands",
    "LoraRunSpec",
    "LossCommands",
    "LossFnOutput",
    "ModelInput",
    "OptimStepResponse",
    "Rollout",
    "RunCommands",
    "SampleResponse",
    "SampledSequence",
    "SamplingParams",
    "SaveWeightsResponse",
    "StepRecord",
    "TensorData",
]
