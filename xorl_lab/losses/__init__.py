"""Losses: pure maths on per-token tensors, and the registry through which the engine calls them.

Shapes: B sequences of T target tokens.  Logprobs are natural logarithms (nats).  A loss is a sum;
the optimizer step divides by the valid tokens.  To add a loss, write one function
(see ``clipped.py``) and add one entry to ``_SPECS``.
"""

from collections.abc import Mapping
from typing import Any

import torch

from xorl_lab.errors import ConfigError
from xorl_lab.losses.advantages import group_normalized, leave_one_out, mean_centered
from xorl_lab.losses.base import CommonParams, LossOutput, LossParams, LossSpec, defaults
from xorl_lab.losses.clipped import DrgrpoParams, PpoParams, drgrpo, ppo
from xorl_lab.losses.inputs import KNOWN_INPUTS, clean
from xorl_lab.losses.kl import kl_sample_train_k3, reference_kl
from xorl_lab.losses.metrics import summarize_terms
from xorl_lab.losses.offpolicy import CispoParams, DroParams, cispo, dro
from xorl_lab.losses.policy import (
    ImportanceSamplingParams,
    PolicyLossParams,
    importance_sampling,
    policy_loss,
)
from xorl_lab.losses.supervised import causallm_loss, cross_entropy

__all__ = [
    "COMMON_PARAMS",
    "KNOWN_INPUTS",
    "LossOutput",
    "LossSpec",
    "check_params",
    "evaluate",
    "get",
    "group_normalized",
    "kl_sample_train_k3",
    "leave_one_out",
    "mean_centered",
    "names",
    "reference_kl",
    "required_inputs",
    "silent_without_advantage",
    "summarize",
]

COMMON_PARAMS: dict[str, Any] = defaults(CommonParams)
"""Parameters that every loss understands, with their defaults; the engine acts on them."""

_ENTRIES: tuple[LossSpec[Any], ...] = (
    LossSpec("causallm_loss", causallm_loss, LossParams),
    LossSpec(
        "cispo",
        cispo,
        CispoParams,
        required=("logprobs", "advantages"),
        scaled_by_advantage=True,
    ),
    LossSpec("cross_entropy", cross_entropy, LossParams),
    LossSpec(
        "drgrpo",
        drgrpo,
        DrgrpoParams,
        required=("logprobs", "advantages"),
        optional=("ref_logprobs",),
        scaled_by_advantage=True,
    ),
    LossSpec("dro", dro, DroParams, required=("logprobs", "advantages")),
    LossSpec(
        "importance_sampling",
        importance_sampling,
        ImportanceSamplingParams,
        required=("logprobs", "advantages"),
        optional=("ref_logprobs",),
        scaled_by_advantage=True,
    ),
    LossSpec(
        "policy_loss",
        policy_loss,
        PolicyLossParams,
        required=("logprobs", "advantages"),
        optional=("rollout_logprobs", "ref_logprobs"),
        scaled_by_advantage=True,
    ),
    LossSpec(
        "ppo",
        ppo,
        PpoParams,
        required=("logprobs", "advantages"),
        scaled_by_advantage=True,
    ),
)
_SPECS = {spec.name: spec for spec in _ENTRIES}


def names() -> list[str]:
    """Return the names of all losses, sorted."""
    return sorted(_SPECS)


def get(name: str) -> LossSpec[Any]:
    """Look up a loss; case and surrounding blanks of the name do not matter.

    Raises:
        ConfigError: there is no such loss; lists those there are.
    """
    spec = _SPECS.get(str(name).strip().lower())
    if spec is None:
        raise ConfigError(f"unknown loss {name!r}: choose from {names()}")
    return spec


def check_params(name: str, params: Mapping[str, Any] | None) -> dict[str, Any]:
    """Check the parameters of a loss and fill in the defaults.

    Args:
        name: the loss.
        params: what the caller gave; None = nothing.

    Returns:
        Every parameter of the loss and those of ``COMMON_PARAMS``.

    Raises:
        ConfigError: unknown loss or parameter (lists the valid ones), or a value out of range.
    """
    spec = get(name)
    # Callers without a type checker pass anything.
    if params is not None and not isinstance(params, Mapping):
        raise ConfigError(
            f"the parameters of {spec.name} are a {type(params).__name__}: pass a dict or None"
        )
    merged = {**COMMON_PARAMS, **spec.params}
    unknown = sorted(set(params or ()) - set(merged), key=str)
    if unknown:
        raise ConfigError(f"{spec.name} has no parameters {unknown}: choose from {sorted(merged)}")
    merged.update(params or {})
    CommonParams(**{key: merged[key] for key in COMMON_PARAMS})
    _settings(spec, merged)
    return merged


def required_inputs(name: str, params: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return the per-token inputs that a loss needs with these parameters, beside ``weights``.

    Raises:
        ConfigError: as ``check_params``.
    """
    spec = get(name)
    return spec.required + _settings(spec, check_params(name, params)).needs()


def silent_without_advantage(name: str, params: Mapping[str, Any] | None) -> bool:
    """Return whether a token whose advantage is 0 has no gradient, with these parameters.

    Raises:
        ConfigError: as ``check_params``.
    """
    needed = required_inputs(name, params)
    return get(name).scaled_by_advantage and "ref_logprobs" not in needed


def evaluate(
    name: str,
    logprobs: torch.Tensor,
    inputs: Mapping[str, torch.Tensor],
    params: Mapping[str, Any] | None,
) -> LossOutput:
    """Evaluate a loss on one micro-batch.

    Args:
        name: the loss.
        logprobs: (B, T) float, nats, of the policy being trained; the only input with gradient.
            Computation is in its dtype: give at least float32, ratios need the digits.
        inputs: (B, T) each, by their names in a Datum: ``weights`` always (0 = not trained: the
            other inputs may hold anything there), ``logprobs`` (old policy), ``advantages``,
            ``rollout_logprobs``, ``ref_logprobs``.  Known inputs without a use are fine.
        params: result of ``check_params``, or what it would accept.

    Returns:
        LossOutput: the sum over trained tokens, and per-token terms.

    Raises:
        ConfigError: as ``check_params``.
        DataError: an input is missing or unknown.
        ShapeError: the inputs disagree; names each with its shape.
    """
    spec = get(name)
    settings = _settings(spec, check_params(name, params))
    needed = spec.required + settings.needs()
    trained_logprobs, constants = clean(spec.name, logprobs, inputs, needed)
    return spec.function(trained_logprobs, constants, settings)


def summarize(
    name: str,
    terms: Mapping[str, torch.Tensor],
    weights: torch.Tensor,
    params: Mapping[str, Any] | None,
) -> dict[str, float]:
    """Return the metrics of a call, over all its trained tokens.

    Args:
        name: the loss.
        terms: (M,) each: the terms of all micro-batches at the trained tokens, concatenated.
        weights: (M,) float, of the same tokens.
        params: result of ``check_params``, or what it would accept.

    Returns:
        Always ``loss:sum``, ``loss:mean`` (per valid token), ``valid_tokens`` and the aliases
        ``loss_sum``, ``loss_mean``, ``token_count``.  With at least one valid token also what
        applies of ``ratio_mean``/``_min``/``_max`` (before any clip), ``pg_clipfrac``,
        ``kl_sample_train_k3`` and ``entropy_sample`` (compute_kl_stats), ``icepop_maskfrac``,
        ``tis_mean``/``_min``/``_max`` (clipped weights) and ``tis_clipfrac``, ``kl_ref`` (nats).

    Raises:
        ConfigError: as ``check_params``.
        ShapeError: the terms and weights disagree.
    """
    checked = check_params(name, params)
    return summarize_terms(terms, weights, bool(checked.get("compute_kl_stats", False)))


def _settings(spec: LossSpec[Any], checked: Mapping[str, Any]) -> LossParams:
    return spec.settings(**{key: checked[key] for key in spec.params})
