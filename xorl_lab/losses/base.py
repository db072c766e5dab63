"""What every loss has in common: its output, its parameters, its entry in the registry."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeGuard, TypeVar

import torch

from xorl_lab.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LossOutput:
    """One loss on one (B, T) micro-batch."""

    loss: torch.Tensor
    """0-d, with gradient: the sum over trained tokens (not a mean)."""
    terms: dict[str, torch.Tensor]
    """Detached (B, T) tensors.  Always ``elementwise_loss`` (weights applied; sums to the loss),
    and what applies of ``ratio`` and ``log_ratio`` (raw, before any clip), ``clipped``, ``masked``
    and ``tis_clipped`` (bool), ``tis_weight`` (clipped), ``kl`` (estimate of the reference KL,
    nats), ``old_logprobs`` and ``entropy`` (nats; minus the old logprob, a one-sample estimate).
    Where ``weights`` is 0 a term has no meaning."""


@dataclass(frozen=True, slots=True)
class LossParams:
    """Parameters of a loss without parameters, and the base of all others."""

    def needs(self) -> tuple[str, ...]:
        """Names of the per-token inputs needed because of these values, beyond the fixed ones."""
        return ()


@dataclass(frozen=True, slots=True)
class CommonParams(LossParams):
    """Parameters that every loss understands; the engine acts on them, no loss sees them."""

    logprob_temperature: float = 1.0
    """Divides the logits before the logprobs are taken, > 0; the sampling temperature."""
    return_terms: bool | Sequence[str] = False
    """Return the per-token terms of the loss with the outputs: all, with the entropy of each
    token's distribution, which takes a look at the whole vocabulary; or those of these names, as
    far as the loss has them."""

    def __post_init__(self) -> None:
        check_ranges(
            {
                "logprob_temperature": (
                    self.logprob_temperature,
                    is_number(self.logprob_temperature) and self.logprob_temperature > 0,
                    "a number > 0",
                ),
                "return_terms": (
                    self.return_terms,
                    isinstance(self.return_terms, bool) or _are_names(self.return_terms),
                    "True or False, or a list of names",
                ),
            }
        )


P = TypeVar("P", bound=LossParams)


@dataclass(frozen=True, slots=True)
class LossSpec(Generic[P]):
    """A loss as the registry knows it."""

    name: str
    """What ``loss_fn`` calls it."""
    function: Callable[[torch.Tensor, Mapping[str, torch.Tensor], P], LossOutput]
    """The maths: new logprobs (B, T), cleaned inputs (B, T) by name, parameters."""
    settings: type[P]
    """Frozen dataclass of its parameters; checks their ranges when made."""
    required: tuple[str, ...] = ()
    """Inputs that it always needs beside ``weights``; ``logprobs`` means the old ones."""
    optional: tuple[str, ...] = ()
    """Inputs that some values of its parameters call for."""
    scaled_by_advantage: bool = False
    """True if the gradient is proportional to the advantage, but for a penalty on ``ref_logprobs``.
    """

    @property
    def params(self) -> dict[str, Any]:
        """Its parameters with their defaults, without those common to all losses."""
        return defaults(self.settings)


def defaults(settings: type[LossParams]) -> dict[str, Any]:
    """Return the fields of a class of parameters with their default values."""
    return {field.name: field.default for field in fields(settings)}


def _are_names(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a finite int or float; a bool is not."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value)


def flag(value: object) -> tuple[object, bool, str]:
    """Return the rule for a parameter that must be True or False."""
    return value, isinstance(value, bool), "True or False"


def check_ranges(rules: Mapping[str, tuple[object, bool, str]]) -> None:
    """Check parameters.

    Args:
        rules: name -> (value, whether it is valid, what is valid in words).

    Raises:
        ConfigError: names the first parameter that is not valid, its value and what is.
    """
    for name, (value, valid, expected) in rules.items():
        if not valid:
            raise ConfigError(f"{name} is {value!r}: pass {expected}")
