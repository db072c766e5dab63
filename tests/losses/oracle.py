"""What the losses must compute, written a second time: one token at a time, in plain floats.

Every check takes the package to check as an argument, so that the same checks that pass on the real
one can be shown to fail on planted mutants.  Values and derivatives come from a case distinction by
hand instead of min, max and autograd.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch

from tests.closeness import assert_close

RTOL = 1e-6
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
}
DEFAULTS: dict[str, Any] = {
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


def run(
    losses: ModuleType, name: str, tokens: Tokens, params: Mapping[str, Any]
) -> tuple[float, np.ndarray, dict[str, np.ndarray]]:
    """Evaluate a loss of the package: value, gradient, terms."""
    new = torch.tensor(tokens.new, requires_grad=True)
    output = losses.evaluate(name, new, tokens.inputs(), losses.check_params(name, params))
    (gradient,) = torch.autograd.grad(output.loss, new)
    assert output.loss.dtype == torch.float64
    assert output.loss.shape == ()
    assert not any(term.requires_grad for term in output.terms.values())
    return output.loss.item(), gradient.numpy(), {k: v.numpy() for k, v in output.terms.items()}


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
    ratio: float, advantage: float, params: Mapping[str, Any]
) -> tuple[float, bool]:
    """The clipped objective by cases, and whether a clip is active."""
    cap = params["eps_clip_c"]
    if advantage > 0 and ratio > 1 + params["eps_clip_high"]:
        return -(1 + params["eps_clip_high"]) * advantage, True
    if advantage < 0 and ratio < 1 - params["eps_clip"]:
        return -(1 - params["eps_clip"]) * advantage, True
    if advantage < 0 and cap is not None and ratio > cap:
        return -cap * advantage, True
    return -ratio * advantage, False


def policy_token(token: Mapping[str, float], params: Mapping[str, Any]) -> dict[str, float]:
    """Unweighted value, derivative and flags of policy_loss at one token."""
    ratio, slope = bounded_ratio(token["new"] - token["old"])
    advantage = token["advantages"]
    value, clipped = clipped_objective(ratio, advantage, params)
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
        "ratio": ratio,
        "log_ratio": token["new"] - token["old"],
        "old_logprobs": token["old"],
        "entropy": -token["old"],
        "clipped": float(clipped),
        "masked": float(masked),
        "tis_weight": weight,
        "tis_clipped": float(weight != raw),
        "kl": kl,
    }


def expected_tokens(
    name: str, tokens: Tokens, params: Mapping[str, Any]
) -> list[dict[str, float] | None]:
    """Expected numbers of every token in reading order; None where weights is 0."""
    full = {**DEFAULTS, **params}
    if name == "importance_sampling":
        full |= {"eps_clip": math.inf, "eps_clip_high": math.inf}
    expected: list[dict[str, float] | None] = []
    columns = {key: array.ravel() for key, array in vars(tokens).items()}
    for index, weight in enumerate(columns["weights"]):
        token = {key: float(column[index]) for key, column in columns.items()}
        if weight == 0:
            expected.append(None)
            continue
        supervised = {"value": -token["new"], "gradient": -1.0}
        result = policy_token(token, full) if "logprobs" in needs(name) else supervised
        result["elementwise_loss"] = weight * result.pop("value")
        result["gradient"] *= weight
        expected.append(result)
    return expected


def needs(name: str) -> tuple[str, ...]:
    """Inputs that a loss always needs."""
    return () if name in {"cross_entropy", "causallm_loss"} else ("logprobs", "advantages")


def expected_terms(name: str, params: Mapping[str, Any]) -> set[str]:
    """Names of the terms that a loss must report."""
    terms = {"elementwise_loss"}
    if needs(name):
        terms |= {"ratio", "log_ratio", "old_logprobs", "entropy"}
    if name == "policy_loss":
        terms |= {"clipped"}
    if params.get("use_tis"):
        terms |= {"tis_weight", "tis_clipped"}
    if params.get("icepop_beta"):
        terms |= {"masked"}
    if params.get("kl_coef"):
        terms |= {"kl"}
    return terms


def compare(losses: ModuleType, config: str, tokens: Tokens) -> None:
    """Assert value, gradient and every term of one configuration on one batch."""
    name, params = CONFIGS[config]
    expected = expected_tokens(name, tokens, params)
    loss, gradient, terms = run(losses, name, tokens, params)
    rows = [row for row in expected if row is not None]
    slopes = [0.0 if row is None else row["gradient"] for row in expected]
    assert_close(loss, math.fsum(row["elementwise_loss"] for row in rows), rtol=RTOL)
    assert_close(gradient.ravel(), slopes, rtol=RTOL, atol=1e-300)
    assert set(terms) == expected_terms(name, params)
    trained = tokens.weights.ravel() != 0
    assert not terms["elementwise_loss"].ravel()[~trained].any()
    for term, values in terms.items():
        assert values.shape == tokens.new.shape
        assert (values.dtype == np.bool_) == (term in {"clipped", "masked", "tis_clipped"})
        assert_close(values.ravel()[trained], [row[term] for row in rows], rtol=RTOL, atol=1e-12)


def check_formulas(losses: ModuleType) -> None:
    for config in CONFIGS:
        compare(losses, config, make_tokens(7))


def check_extremes(losses: ModuleType) -> None:
    for config in ("importance sampling", "default clip", "dual clip", "icepop", "tis"):
        compare(losses, config, extreme_tokens())


def check_untrained_garbage(losses: ModuleType) -> None:
    """Where weights is 0 nothing matters: not inf, not NaN, not a huge number."""
    tokens = make_tokens(3)
    untrained = tokens.weights == 0
    for config, (name, params) in CONFIGS.items():
        loss, gradient, _ = run(losses, name, tokens, params)
        for garbage in (math.nan, math.inf, -math.inf, 1e300):
            spoiled = tokens.map(lambda array, g=garbage: np.where(untrained, g, array))
            spoiled = Tokens(**{**vars(spoiled), "weights": tokens.weights})
            got, slopes, terms = run(losses, name, spoiled, params)
            assert_close(got, loss, rtol=0.0)
            assert_close(slopes, gradient, rtol=0.0)
            assert not slopes[untrained].any(), config
            assert not terms["elementwise_loss"][untrained].any(), config


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


def summary(
    losses: ModuleType, name: str, tokens: Tokens, params: Mapping[str, Any]
) -> dict[str, float]:
    """Metrics as the package gives them, from the trained tokens in reading order."""
    _, _, terms = run(losses, name, tokens, params)
    trained = torch.tensor(tokens.weights != 0)
    flat = {key: torch.tensor(values)[trained] for key, values in terms.items()}
    weights = torch.tensor(tokens.weights)[trained]
    return losses.summarize(name, flat, weights, losses.check_params(name, params))


def check_metrics(losses: ModuleType) -> None:
    tokens = make_tokens(11)
    for name, params in CONFIGS.values():
        for stats in ({}, {"compute_kl_stats": True}) if needs(name) else ({},):
            expected = expected_metrics(name, tokens, {**params, **stats})
            got = summary(losses, name, tokens, {**params, **stats})
            assert set(got) == set(expected)
            for metric, value in expected.items():
                assert_close(got[metric], value, rtol=RTOL)


def check_no_valid_token(losses: ModuleType) -> None:
    tokens = make_tokens(5)
    tokens = Tokens(**{**vars(tokens), "weights": np.zeros_like(tokens.weights)})
    zero = ["loss:sum", "loss:mean", "valid_tokens", "loss_sum", "loss_mean", "token_count"]
    for name, params in CONFIGS.values():
        loss, gradient, _ = run(losses, name, tokens, params)
        assert loss == 0.0
        assert not gradient.any()
        assert summary(losses, name, tokens, params) == dict.fromkeys(zero, 0.0)


def check_penalty_without_advantage(losses: ModuleType) -> None:
    """Zero advantages give no policy gradient, but the KL penalty still pulls."""
    tokens = make_tokens(13)
    tokens = Tokens(**{**vars(tokens), "advantages": np.zeros_like(tokens.advantages)})
    for name in ("importance_sampling", "policy_loss"):
        loss, gradient, _ = run(losses, name, tokens, {})
        assert loss == 0.0
        assert not gradient.any()
        assert summary(losses, name, tokens, {})["valid_tokens"] == np.count_nonzero(tokens.weights)
        _, pull, _ = run(losses, name, tokens, {"kl_coef": 0.1, "kl_type": "k2"})
        assert_close(pull, 0.1 * tokens.weights * (tokens.new - tokens.ref), rtol=RTOL)


def check_tis_bridges_policies(losses: ModuleType) -> None:
    """Where nothing clips, r * w is the ratio of the new policy to the rollout policy."""
    tokens = make_tokens(17)
    wide = {"eps_clip": 1.0, "eps_clip_high": 1e9, "tis_clip_low": 0.0, "tis_clip_high": 1e9}
    loss, gradient, terms = run(losses, "policy_loss", tokens, {**wide, "use_tis": True})
    direct = Tokens(**{**vars(tokens), "old": tokens.rollout})
    expected, slopes, other = run(losses, "importance_sampling", direct, {})
    assert_close(loss, expected, rtol=RTOL)
    assert_close(gradient, slopes, rtol=RTOL, atol=1e-12)
    trained = tokens.weights != 0
    bridged = (terms["ratio"] * terms["tis_weight"])[trained]
    assert_close(bridged, other["ratio"][trained], rtol=RTOL)


def check_required_inputs(losses: ModuleType) -> None:
    required = losses.required_inputs
    assert required("cross_entropy", {}) == ()
    assert required("importance_sampling", {}) == ("logprobs", "advantages")
    assert set(required("policy_loss", {"use_tis": True})) == {
        "logprobs",
        "advantages",
        "rollout_logprobs",
    }
    assert set(required("policy_loss", {"use_tis": True, "kl_coef": 0.1})) == {
        "logprobs",
        "advantages",
        "rollout_logprobs",
        "ref_logprobs",
    }
    assert "ref_logprobs" in required("importance_sampling", {"kl_coef": 0.1})


def check_kl_of_training(losses: ModuleType) -> None:
    """With the whole vocabulary as the sample, weighted by the old policy, k3 is the KL itself."""
    counts = np.array([5, 2, 2, 1])
    old = np.log(counts / counts.sum())
    new = np.log(np.array([0.2, 0.4, 0.1, 0.3]))
    log_ratio = torch.tensor(np.repeat(new - old, counts))
    kl = float(np.sum(np.exp(old) * (old - new)))
    assert_close(losses.kl_sample_train_k3(log_ratio), kl, rtol=RTOL)


def check_reference_kl_gradients(losses: ModuleType) -> None:
    """Expected gradient of each estimate, exactly, over a vocabulary of four."""
    logits = torch.tensor([0.3, -0.7, 1.1, 0.2], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.9, -0.1, -0.4, 0.5], dtype=torch.float64).log_softmax(0)
    policy = logits.log_softmax(0)
    forward = (policy.exp() * (policy - ref)).sum()
    reverse = (ref.exp() * (ref - policy)).sum()
    targets = {"k1": 0.0 * forward, "k2": forward, "k3": reverse}
    for kl_type, target in targets.items():
        estimate = losses.reference_kl(policy, ref, kl_type)
        expectation = (policy.detach().exp() * estimate).sum()
        (got,) = torch.autograd.grad(expectation, logits, retain_graph=True)
        (wanted,) = torch.autograd.grad(target, logits, retain_graph=True)
        assert_close(got, wanted, rtol=RTOL, atol=1e-12)
        if kl_type in {"k1", "k3"}:
            assert_close(expectation, forward, rtol=RTOL)


def check_advantages(losses: ModuleType) -> None:
    rewards = [1.0, 0.0, None, 4.0, -2.5]
    present = np.array([1.0, 0.0, 4.0, -2.5])
    centred = present - present.mean()
    others = [x - np.mean(np.delete(present, i)) for i, x in enumerate(present)]
    cases = {
        losses.group_normalized: centred / np.sqrt(np.mean(centred**2)),
        losses.mean_centered: centred,
        losses.leave_one_out: np.array(others),
    }
    for function, expected in cases.items():
        assert_close(function(rewards), np.insert(expected, 2, 0.0), rtol=RTOL)
        for silent in ([], [None], [3.0], [None, 3.0], [0.1] * 3, [0.3, 0.1 + 0.2]):
            assert function(silent) == [0.0] * len(silent), (function.__name__, silent)


CHECKS: tuple[Callable[[ModuleType], None], ...] = (
    check_required_inputs,
    check_formulas,
    check_extremes,
    check_untrained_garbage,
    check_metrics,
    check_no_valid_token,
    check_penalty_without_advantage,
    check_tis_bridges_policies,
    check_kl_of_training,
    check_reference_kl_gradients,
    check_advantages,
)


def check_all(losses: ModuleType) -> None:
    """Run every check; the first difference raises AssertionError."""
    for check in CHECKS:
        check(losses)
