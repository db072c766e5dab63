"""Immutable versions of the weights, for whoever samples from them."""

from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel


@dataclass(eq=False, slots=True, weakref_slot=True)
class WeightsVersion:
    """Weights as they were after some step.  The numbers never change.

    LoRA versions own copies of the adapter.  A version of the full weights reads the trained
    model itself for as long as that stands still; the trainer gives it a copy before it moves on.
    """

    model_id: str
    """The model that it is a version of; empty for the base model."""
    number: int
    """0 = as created; each optimizer step and each load adds 1."""
    adapter: dict[str, torch.Tensor] | None = None
    """The adapter under PEFT's file names, or None."""
    scale: float = 1.0
    """alpha / r of the adapter."""
    full: PreTrainedModel | None = field(default=None, repr=False)
    """The full weights, or None."""

    @property
    def kind(self) -> str:
        """``base``, ``lora`` or ``full``."""
        if self.adapter is not None:
            return "lora"
        return "base" if self.full is None else "full"
