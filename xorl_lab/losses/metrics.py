"""Metrics of a call, from the per-token terms of all its trained tokens."""

from collections.abc import Mapping

import torch

from xorl_lab.errors import ShapeError
from xorl_lab.losses.kl import kl_sample_train_k3


def summarize_terms(
    terms: Mapping[str, torch.Tensor], weights: torch.Tensor, kl_stats: bool
) -> dict[str, float]:
    """Summarise the per-token terms of a loss.

    Taking all tokens of a call at once makes every number independent of how the call was cut into
    micro-batches, which no mean of means is.

    Args:
        terms: (M,) each, over M tokens, in any order that all share; from ``LossOutput.terms``.
        weights: (M,) float; tokens with weight 0 are left out.
        kl_stats: report ``kl_sample_train_k3`` and ``entropy_sample`` too.

    Returns:
        Finite floats, reduced in float64: see ``losses.summarize``.

    Raises:
        ShapeError: the terms and weights disagree; names each with its shape.
    """
    shapes = {"weights": tuple(weights.shape)}
    shapes |= {name: tuple(term.shape) for name, term in terms.items()}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ShapeError(f"loss terms differ in shape: {listed}: give all the same shape")
    trained = (weights != 0).cpu()
    values = {name: term.detach().cpu().double()[trained] for name, term in terms.items()}
    valid = int(trained.sum())
    metrics = _totals(float(values["elementwise_loss"].sum()), valid)
    if valid:
        metrics |= _ratio_metrics(values, kl_stats) | _option_metrics(values)
    return metrics


def _totals(loss: float, valid: int) -> dict[str, float]:
    mean = loss / valid if valid else 0.0
    return {
        "loss:sum": loss,
        "loss:mean": mean,
        "valid_tokens": float(valid),
        "loss_sum": loss,
        "loss_mean": mean,
        "token_count": float(valid),
    }


def _spread(name: str, values: torch.Tensor) -> dict[str, float]:
    return {
        f"{name}_mean": float(values.mean()),
        f"{name}_min": float(values.min()),
        f"{name}_max": float(values.max()),
    }


def _ratio_metrics(values: Mapping[str, torch.Tensor], kl_stats: bool) -> dict[str, float]:
    if "ratio" not in values:
        return {}
    metrics = _spread("ratio", values["ratio"])
    if kl_stats:
        metrics["kl_sample_train_k3"] = float(kl_sample_train_k3(values["log_ratio"]))
        metrics["entropy_sample"] = float(-values["old_logprobs"].mean())
    return metrics


def _option_metrics(values: Mapping[str, torch.Tensor]) -> dict[str, float]:
    means = {
        "pg_clipfrac": "clipped",
        "icepop_maskfrac": "masked",
        "tis_clipfrac": "tis_clipped",
        "kl_ref": "kl",
    }
    metrics = {name: float(values[term].mean()) for name, term in means.items() if term in values}
    if "tis_weight" in values:
        metrics |= _spread("tis", values["tis_weight"])
    return metrics
