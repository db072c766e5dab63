"""Settings of one call: the optimizer's, the sampler's, and those of a LoRA adapter."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from xorl_lab.errors import ConfigError


def _number(value: Any) -> bool:  # noqa: ANN401 (validates whatever a user passes)
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, slots=True)
class AdamParams:
    """Settings of one AdamW update (decoupled weight decay, Loshchilov & Hutter 2019).

    Defaults are those of xorl_client 0.1.0.
    """

    learning_rate: float = 1e-4
    """Step size, > 0."""
    beta1: float = 0.9
    """Decay of the mean of the gradient, in [0, 1)."""
    beta2: float = 0.95
    """Decay of the mean of the squared gradient, in [0, 1)."""
    eps: float = 1e-12
    """Added to the denominator, > 0."""
    weight_decay: float = 0.0
    """Weights are multiplied by 1 - learning_rate * weight_decay first; >= 0."""
    grad_clip_norm: float = 5.0
    """The gradient is scaled down to this L2 norm; 0 means no clipping."""

    def __post_init__(self) -> None:
        _plain(self)
        rules = {
            "learning_rate": (
                _number(self.learning_rate) and self.learning_rate > 0,
                "a number > 0",
            ),
            "beta1": (_number(self.beta1) and 0 <= self.beta1 < 1, "a number in [0, 1)"),
            "beta2": (_number(self.beta2) and 0 <= self.beta2 < 1, "a number in [0, 1)"),
            "eps": (_number(self.eps) and self.eps > 0, "a number > 0"),
            "weight_decay": (
                _number(self.weight_decay) and self.weight_decay >= 0,
                "a number >= 0",
            ),
            "grad_clip_norm": (
                _number(self.grad_clip_norm) and self.grad_clip_norm >= 0,
                "a number >= 0 (0 = no clipping)",
            ),
        }
        _check(self, rules)

    @classmethod
    def of(cls, value: "AdamParams | Mapping[str, Any]") -> "AdamParams":
        """Accept an AdamParams or a mapping with its field names."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(
                f"adam_params is a {type(value).__name__}: pass AdamParams(...) or a dict"
            )
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(value) - known)
        if unknown:
            raise ConfigError(f"unknown Adam parameters {unknown}: choose from {sorted(known)}")
        return cls(**value)

    def to_dict(self) -> dict[str, float]:
        """The JSON form."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw the tokens of a completion."""

    max_tokens: int = 128
    """Longest completion in tokens, >= 1."""
    temperature: float = 1.0
    """Divides the logits; 0 is greedy.  Logprobs are reported at this temperature (at 1 if 0)."""
    top_p: float = 1.0
    """Draw from the smallest set of tokens that holds this share of the probability."""
    top_k: int = -1
    """Draw from the k most likely tokens; -1 means all."""
    stop: str | list[str] | None = None
    """End at any of these strings; the text drops it, the tokens keep it."""
    stop_token_ids: list[int] | None = None
    """End at any of these ids, beside the model's own end-of-sequence ids."""
    return_routed_experts: bool = False
    """Report the experts that each token went through (mixture-of-experts models)."""
    seed: int | None = None
    """The same seed draws the same tokens, alone or in a batch.  None draws a fresh one."""
    sampling_seed: int | None = None
    """Another name of ``seed`` (SGLang's)."""

    def __post_init__(self) -> None:
        _plain(self)
        integer = lambda v: isinstance(v, int) and not isinstance(v, bool)  # noqa: E731
        rules = {
            "max_tokens": (integer(self.max_tokens) and self.max_tokens >= 1, "an integer >= 1"),
            "temperature": (
                _number(self.temperature) and self.temperature >= 0,
                "a number >= 0 (0 = greedy)",
            ),
            "top_p": (_number(self.top_p) and 0 < self.top_p <= 1, "a number in (0, 1]"),
            "top_k": (
                integer(self.top_k) and (self.top_k == -1 or self.top_k >= 1),
                "an integer >= 1, or -1 for all",
            ),
            "stop": (self._stop_is_valid(), "a non-empty string or a list of them"),
            "stop_token_ids": (self._ids_are_valid(), "a list of token ids, integers >= 0"),
            "return_routed_experts": (isinstance(self.return_routed_experts, bool), "a bool"),
            "seed": (self.seed is None or integer(self.seed), "an integer or None"),
            "sampling_seed": (
                self.sampling_seed is None or integer(self.sampling_seed),
                "an integer or None",
            ),
        }
        _check(self, rules)
        if None not in (self.seed, self.sampling_seed) and self.seed != self.sampling_seed:
            raise ConfigError(
                f"seed={self.seed} and sampling_seed={self.sampling_seed} are two names of one "
                "setting: pass one of them"
            )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple, empty if there is none."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def _stop_is_valid(self) -> bool:
        listed = isinstance(self.stop, list | tuple)
        return (
            self.stop is None
            or (isinstance(self.stop, str) and self.stop != "")
            or (listed and all(isinstance(s, str) and s for s in self.stop))
        )

    def _ids_are_valid(self) -> bool:
        ids = self.stop_token_ids
        whole = isinstance(ids, list | tuple) and all(
            isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids
        )
        return ids is None or whole

    @property
    def effective_seed(self) -> int | None:
        """The seed, under whichever name it was given."""
        return self.seed if self.seed is not None else self.sampling_seed


DEFAULT_ALPHA = 32.0
"""alpha of an adapter if none is given, whatever its rank (tinker's documented value)."""


@dataclass(frozen=True, slots=True)
class LoraRunSpec:
    """Shape of a LoRA adapter (Hu et al. 2021): W + alpha / rank * B A."""

    rank: int = 32
    """Inner dimension r of the product."""
    alpha: float = DEFAULT_ALPHA
    """The update is scaled by alpha / rank."""
    dropout: float = 0.0
    """Share of the adapter's inputs that are zeroed while training."""
    seed: int | None = None
    """Seed of A's initial values and of the dropout; None draws one."""
    train_mlp: bool = True
    """Adapt the linear layers of the MLP blocks."""
    train_attn: bool = True
    """Adapt the linear layers of the attention blocks."""
    train_unembed: bool = False
    """Adapt the unembedding (head)."""
    target_modules: tuple[str, ...] | None = None
    """Names of the linear layers to adapt; None means those of the switches above."""

    def __post_init__(self) -> None:
        _plain(self)
        integer = isinstance(self.rank, int) and not isinstance(self.rank, bool)
        rules = {
            "rank": (integer and self.rank >= 1, "an integer >= 1"),
            "alpha": (_number(self.alpha) and self.alpha > 0, "a number > 0"),
            "dropout": (_number(self.dropout) and 0 <= self.dropout < 1, "a number in [0, 1)"),
            "seed": (_seed(self.seed), "an integer from 0 to 2**63 - 1, or None"),
            **{
                name: (isinstance(getattr(self, name), bool), "True or False")
                for name in ("train_mlp", "train_attn", "train_unembed")
            },
        }
        _check(self, rules)
        if self.target_modules is None and not (
            self.train_mlp or self.train_attn or self.train_unembed
        ):
            raise ConfigError(
                "train_mlp, train_attn and train_unembed are all False, so nothing would be "
                "trained: switch one on"
            )


def _seed(value: object) -> bool:
    if value is None:
        return True
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _plain(owner: object) -> None:
    """Turn scalars of numpy or torch into Python's numbers."""
    for field in fields(owner):  # pyright: ignore[reportArgumentType]  (always a dataclass)
        value = getattr(owner, field.name)
        if callable(getattr(value, "item", None)) and getattr(value, "ndim", None) == 0:
            object.__setattr__(owner, field.name, value.item())


def _check(owner: object, rules: Mapping[str, tuple[bool, str]]) -> None:
    for name, (holds, expected) in rules.items():
        if not holds:
            raise ConfigError(f"{name} is {getattr(owner, name)!r}: pass {expected}")
