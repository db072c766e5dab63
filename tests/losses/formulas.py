"""What the losses must compute, written a second time: one token at a time, in plain floats.

Values and derivatives come from a case distinction by hand instead of min, max and autograd.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "cross entropy": ("cross_entropy", {}),
    "causal lm": ("causallm_loss", {}),
    "importance sampling": ("importance_sampling", {}),
    "importance sampling, k1": ("importance_sampling", {"kl_coef": 0.3, "kl_type": "k1"}),
    "importance sampling, k2": ("importance_sampling", {"kl_coef": 0.3, "kl_type": "k2"}),
    "importance sampling, k3": ("importance_sampling", {"kl_coef": 0.3}),
    "default clip": ("policy_loss", {}),
    "asymmetric clip": ("policy_loss", {"eps_clip": 0.1, "eps_clip_high": 0.7}),
    "dual clip": ("policy_loss", {"eps_clip_c": 1.5}),
    "icepop": ("policy_loss", {"icepop_beta": 1.6, "eps_clip": 0.5, "eps_clip_high": 0.8}),
    "tis": ("policy_loss", {"use_tis": True}),
    "narrow tis": ("policy_loss", {"use_tis": True, "tis_clip_low": 0.5, "tis_clip_high": 1.2}),
    "policy k1": ("policy_loss", {"kl_coef": 0.2, "kl_type": "k1"}),
    "policy k2": ("policy_loss", {"kl_coef": 0.2, "kl_type": "k2"}),
    "policy k3": ("policy_loss", {"kl_coef": 0.2, "kl_type": "k3"}),
    "everything": (
        "policy_loss",
        {
            "eps_clip": 0.1,
            "eps_clip_high": 0.3,
            "eps_clip_c": 2.0,
            "icepop_beta": 2.5,
            "use_tis": True,
            "kl_coef": 0.2,
            "compute_kl_stats": True,
        },
    ),
    "ppo": ("ppo", {}),
    "asymmetric ppo": ("ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 1.9}),
    "cispo": ("cispo", {}),
    "narrow cispo": ("cispo", {"clip_low_threshold": 0.6, "clip_high_threshold": 1.5}),
    "dro": ("dro", {}),
    "strong dro": ("dro", {"beta": 0.7}),
    "drgrpo": ("drgrpo", {}),
    "drgrpo k1": ("drgrpo", {"beta": 0.3, "kl_type": "k1"}),
    "drgrpo k2": ("drgrpo", {"beta": 0.3, "kl_type": "k2", "clip_low": 0.4, "clip_high": 0.6}),
    "drgrpo k3": ("drgrpo", {"beta": 0.3}),
}
POLICY_DEFAULTS: dict[str, Any] = {
    "eps_clip": 0.2,
    "eps_clip_high": 0.2,
    "eps_clip_c": None,
    "icepop_beta": None,
    "use_tis": False,
    "tis_clip_low": 0.1,
    "tis_clip_high": 2.0,
    "kl_coef": 0.0,
    "kl_type": "k3",
}


@dataclass(frozen=True)
class Tokens:
    """(B, T) float64 arrays of one batch."""

    new: np.ndarray
    old: np.ndarray
    rollout: np.ndarray
    ref: np.ndarray
    advantages: np.ndarray
    weights: np.ndarray

    def inputs(self, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
        arrays = {
            "logprobs": self.old,
            "rollout_logprobs": self.rollout,
            "ref_logprobs": self.ref,
            "advantages": self.advantages,
            "weights": self.weights,
        }
        return {name: torch.tensor(array, dtype=dtype) for name, array in arrays.items()}

    def map(self, change: Callable[[np.ndarray], np.ndarray]) -> "Tokens":
        return Tokens(**{name: change(array) for name, array in vars(self).items()})


def make_tokens(seed: int, batch: int = 4, length: int = 32) -> Tokens:
    """Draw tokens whose ratios fall on all sides of all clips, old ≠ new ≠ rollout ≠ ref."""
    rng = np.random.default_rng(seed)
    shape = (batch, length)
    new = -rng.exponential(2.0, shape)
    advantages = rng.normal(0.0, 1.0, shape) * rng.choice([0.0, 1.0, 1.0, 1.0], shape)
    old = new + rng.normal(0.0, 0.8, shape)
    return Tokens(
        new=new,
        old=old,
        rollout=old + rng.normal(0.2, 1.2, shape),
        ref=new + rng.normal(0.3, 0.7, shape),
        advantages=advantages,
        weights=rng.choice([0.0, 0.5, 1.0, 1.0, 2.0], shape),
    )


def extreme_tokens() -> Tokens:
    """Log ratios beyond ±20, with either sign of the advantage."""
    gap = np.array([[30.0, 30.0, -30.0, -30.0, 0.0, 19.0]])
    old = np.full_like(gap, -35.0)
    return Tokens(
        new=old + gap,
        old=old,
        rollout=old - gap,
        ref=old + gap,
        advantages=np.array([[1.0, -1.0, 1.0, -1.0, 0.5, -1.0]]),
        weights=np.ones_like(gap),
    )


def reference_kl(d: float, kl_type: str) -> tuple[float, float]:
    """Value and derivative by d of an estimate of the reference KL."""
    if kl_type == "k1":
        return d, 1.0
    if kl_type == "k2":
        return 0.5 * d**2, d
    return math.exp(-d) + d - 1.0, 1.0 - math.exp(-d)


def bounded_ratio(log_ratio: float) -> tuple[float, float]:
    """The ratio and its derivative by the new logprob."""
    ratio = math.exp(min(max(log_ratio, -20.0), 20.0))
    return ratio, ratio if abs(log_ratio) < 20.0 else 0.0


def clipped_objective(
    ratio: float, advantage: float, low: float, high: float, cap: float = math.inf
) -> tuple[float, bool]:
    """The clipped objective by cases, and whether a clip is active."""
    if advantage > 0 and ratio > high:
        return -high * advantage, True
    if advantage < 0 and ratio < low:
        return -low * advantage, True
    if advantage < 0 and ratio > cap:
        return -cap * advantage, True
    return -ratio * advantage, False


def policy_token(token: Mapping[str, float], params: Mapping[str, Any]) -> dict[str, float]:
    """Unweighted value, derivative and flags of policy_loss at one token."""
    params = {**POLICY_DEFAULTS, **params}
    ratio, slope = bounded_ratio(token["new"] - token["old"])
    advantage = token["advantages"]
    low, high = 1 - params["eps_clip"], 1 + params["eps_clip_high"]
    cap = math.inf if params["eps_clip_c"] is None else params["eps_clip_c"]
    value, clipped = clipped_objective(ratio, advantage, low, high, cap)
    gradient = 0.0 if clipped else -slope * advantage
    raw, _ = bounded_ratio(token["old"] - token["rollout"])
    weight = min(max(raw, params["tis_clip_low"]), params["tis_clip_high"])
    tis = weight if params["use_tis"] else 1.0
    kl, kl_slope = reference_kl(token["new"] - token["ref"], params["kl_type"])
    value, gradient = tis * value, tis * gradient
    value += params["kl_coef"] * kl
    gradient += params["kl_coef"] * kl_slope
    beta = params["icepop_beta"]
    masked = beta is not None and not 1 / beta <= ratio <= beta
    return {
        "value": 0.0 if masked else value,
        "gradient": 0.0 if masked else gradient,
        "clipped": float(clipped),
        "masked": float(masked),
        "tis_weight": weight,
        "tis_clipped": float(weight != raw),
        "kl": kl,
    }


def unclipped_token(token: Mapping[str, float], params: Mapping[str, Any]) -> dict[str, float]:
    """importance_sampling at one token: policy_loss with bounds that nothing reaches."""
    return policy_token(token, {**params, "eps_clip": math.inf, "eps_clip_high": math.inf})


def supervised_token(token: Mapping[str, float], params: Mapping[str, Any]) -> dict[str, float]:
    """cross_entropy at one token."""
    del params
    return {"value": -token["new"], "gradient": -1.0}


def ppo_token(token: Mapping[str, float], params: Mapping[str, Any]) -> dict[str, float]:
    """Ppo at one token."""
    ratio, slope = bounded_ratio(token["new"] - token["old"])
    low = params.get("clip_low_threshold", 0.8)
    high = params.get("clip_high_threshold", 1.2)
    value, clipped = clipped_objective(ratio, token["advantages"], low, high)
    gradient = 0.0 if clipped else -slope * token["advantages"]
    return {"value": value, "gradient": gradient, "clipped": float(clipped)}


def drgrpo_token(token: Mapping[str, float], params: Mapping[str, Any]) -> dict[str, float]:
    """Drgrpo at one token."""
    ratio, slope = bounded_ratio(token["new"] - token["old"])
    low, high = 1 - params.get("clip_low", 0.2), 1 + params.get("clip_high", 0.28)
    value, clipped = clipped_objective(ratio, token["advantages"], low, high)
    gradient = 0.0 if clipped else -slope * token["advantages"]
    beta, kl_type = params.get("beta", 0.0), params.get("kl_type", "k3")
    kl, kl_slope = reference_kl(token["new"] - token["ref"], kl_type)
    return {
        "value": value + beta * kl,
        "gradient": gradient + beta * kl_slope,
        "clipped": float(clipped),
        "kl": kl,
    }


def cispo_token(token: Mapping[str, float], params: Mapping[str, Any]) -> dict[str, float]:
    """Cispo at one token."""
    ratio, _ = bounded_ratio(token["new"] - token["old"])
    weight = ratio
    if ratio > params.get("clip_high_threshold", 4.0):
        weight = params.get("clip_high_threshold", 4.0)
    elif ratio < params.get("clip_low_threshold", 0.0):
        weight = params.get("clip_low_threshold", 0.0)
    gradient = -weight * token["advantages"]
    clipped = weight != ratio and token["advantages"] != 0
    return {"value": gradient * token["new"], "gradient": gradient, "clipped": float(clipped)}


def dro_token(token: Mapping[str, float], params: Mapping[str, Any]) -> dict[str, float]:
    """Dro at one token."""
    beta, gap = params.get("beta", 0.05), token["new"] - token["old"]
    value = -token["new"] * token["advantages"] + 0.5 * beta * gap * gap
    return {"value": value, "gradient": beta * gap - token["advantages"]}


FORMULAS: dict[str, Callable[[Mapping[str, float], Mapping[str, Any]], dict[str, float]]] = {
    "causallm_loss": supervised_token,
    "cispo": cispo_token,
    "cross_entropy": supervised_token,
    "dro": dro_token,
    "drgrpo": drgrpo_token,
    "importance_sampling": unclipped_token,
    "policy_loss": policy_token,
    "ppo": ppo_token,
}
CLIPPED = {"cispo", "drgrpo", "policy_loss", "ppo"}


def expected_tokens(
    name: str, tokens: Tokens, params: Mapping[str, Any]
) -> list[dict[str, float] | None]:
    """Expected numbers of every token in reading order; None where weights is 0."""
    expected: list[dict[str, float] | None] = []
    columns = {key: array.ravel() for key, array in vars(tokens).items()}
    for index, weight in enumerate(columns["weights"]):
        if weight == 0:
            expected.append(None)
            continue
        token = {key: float(column[index]) for key, column in columns.items()}
        result = FORMULAS[name](token, params)
        result["elementwise_loss"] = weight * result.pop("value")
        result["gradient"] *= weight
        result["log_ratio"] = token["new"] - token["old"]
        result["ratio"], _ = bounded_ratio(result["log_ratio"])
        result["old_logprobs"], result["entropy"] = token["old"], -token["old"]
        expected.append(result)
    return expected


def needs(name: str) -> tuple[str, ...]:
    """Inputs that a loss always needs."""
    return () if FORMULAS[name] is supervised_token else ("logprobs", "advantages")


def penalised(name: str, params: Mapping[str, Any]) -> bool:
    """Whether a loss has a KL penalty with these parameters."""
    return bool(params.get("kl_coef") or (name == "drgrpo" and params.get("beta")))


def expected_terms(name: str, params: Mapping[str, Any]) -> set[str]:
    """Names of the terms that a loss must report."""
    terms = {"elementwise_loss"}
    if needs(name):
        terms |= {"ratio", "log_ratio", "old_logprobs", "entropy"}
    if name in CLIPPED:
        terms |= {"clipped"}
    if params.get("use_tis"):
        terms |= {"tis_weight", "tis_clipped"}
    if params.get("icepop_beta"):
        terms |= {"masked"}
    if penalised(name, params):
        terms |= {"kl"}
    return terms


def expected_metrics(name: str, tokens: Tokens, params: Mapping[str, Any]) -> dict[str, float]:
    """Metrics by name, from the expected numbers of the trained tokens."""
    rows = [row for row in expected_tokens(name, tokens, params) if row is not None]
    total, count = math.fsum(row["elementwise_loss"] for row in rows), len(rows)
    metrics = {"loss:sum": total, "loss:mean": total / count, "valid_tokens": float(count)}
    metrics |= {"loss_sum": total, "loss_mean": total / count, "token_count": float(count)}
    present = expected_terms(name, params)
    spreads = {"ratio": "ratio", "tis": "tis_weight"}
    for metric, term in spreads.items():
        if term in present:
            values = [row[term] for row in rows]
            metrics[f"{metric}_mean"] = math.fsum(values) / count
            metrics[f"{metric}_min"] = min(values)
            metrics[f"{metric}_max"] = max(values)
    means = {"pg_clipfrac": "clipped", "icepop_maskfrac": "masked"}
    means |= {"tis_clipfrac": "tis_clipped", "kl_ref": "kl"}
    for metric, term in means.items():
        if term in present:
            metrics[metric] = math.fsum(row[term] for row in rows) / count
    if params.get("compute_kl_stats"):
        k3 = [row["ratio"] - row["log_ratio"] - 1 for row in rows]
        metrics["kl_sample_train_k3"] = math.fsum(k3) / count
        metrics["entropy_sample"] = -math.fsum(row["old_logprobs"] for row in rows) / count
    return metrics
