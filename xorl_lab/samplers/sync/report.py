"""What became of one push of weights to a sampler."""

from dataclasses import dataclass
from typing import Any

from xorl_lab.errors import SamplerError
from xorl_lab.samplers.sync.canary import Canary


class SyncError(SamplerError):
    """The sampler's weights are not those that it was sent."""


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What became of one push."""

    model_id: str
    """The trained model; empty for the base model."""
    version: int
    """Number of its weights."""
    name: str
    """What to ask the server for as ``lora_path``; empty = what it answers with without."""
    seconds: float
    """How long it took, the canary included."""
    bytes: int
    """Of the tensors that were sent; 0 if the server had them."""
    canary: Canary
    """Whether the weights have arrived."""
    mixed: bool = False
    """Requests were under way when full weights were replaced: their completions mix versions."""
    url: str = ""
    """The server."""

    @property
    def trained(self) -> bool:
        """False for weights that are the base model's: nothing can be told from those."""
        return self.version > 0 and self.canary.change > 0

    def describe(self) -> str:
        """One sentence."""
        what = f"version {self.version} of {self.model_id!r}" if self.model_id else "the base model"
        text = f"{self.url} has {what}: canary {self.canary}, {self.seconds:.1f} s"
        return f"{text}; completions under way mix versions" if self.mixed else text

    def data(self) -> dict[str, Any]:
        """The facts as JSON values."""
        return {
            "url": self.url,
            "model_id": self.model_id,
            "version": self.version,
            "name": self.name,
            "seconds": self.seconds,
            "bytes": self.bytes,
            "mixed": self.mixed,
            "verdict": self.canary.verdict,
            "gap": self.canary.gap,
            "change": self.canary.change,
            "noise": self.canary.noise,
        }
