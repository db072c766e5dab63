"""Checks of the losses against the formulas, each a function of the package to check.

So the same checks that pass on the real one can be shown to fail on planted mutants.
"""

import math
from collections.abc import Callable, Mapping
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import torch

from tests.closeness import assert_close
from tests.losses.formulas import (
    CONFIGS,
    Tokens,
    expected_metrics,
    expected_terms,
    expected_tokens,
    extreme_tokens,
    make_tokens,
    needs,
)

RTOL = 1e-6
EXTREME = -1
"""In place of a seed: the batch of ``extreme_tokens``."""


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


@cache
def case(config: str, seed: int) -> tuple[Tokens, list[dict[str, float] | None]]:
    """The batch of one seed and what one configuration must give on it."""
    name, params = CONFIGS[config]
    tokens = extreme_tokens() if seed == EXTREME else make_tokens(seed)
    return tokens, expected_tokens(name, tokens, params)


def compare(losses: ModuleType, config: str, seed: int) -> None:
    """Assert value, gradient and every term of one configuration on one batch."""
    name, params = CONFIGS[config]
    tokens, expected = case(config, seed)
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
        compare(losses, config, 7)


def check_extremes(losses: ModuleType) -> None:
    unbounded = ("importance sampling", "default clip", "dual clip", "icepop", "tis")
    for config in (*unbounded, "ppo", "narrow cispo", "dro", "drgrpo"):
        compare(losses, config, EXTREME)


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
    coefficients = {"importance_sampling": "kl_coef", "policy_loss": "kl_coef", "drgrpo": "beta"}
    for name, coefficient in coefficients.items():
        loss, gradient, _ = run(losses, name, tokens, {})
        assert loss == 0.0
        assert not gradient.any()
        assert summary(losses, name, tokens, {})["valid_tokens"] == np.count_nonzero(tokens.weights)
        _, pull, _ = run(losses, name, tokens, {coefficient: 0.1, "kl_type": "k2"})
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


def check_weights_are_constants(losses: ModuleType) -> None:
    """Unclipped, cispo has the gradient of importance_sampling: r * dlogp = dr."""
    tokens = make_tokens(43)
    _, expected, _ = run(losses, "importance_sampling", tokens, {})
    _, gradient, terms = run(losses, "cispo", tokens, {"clip_high_threshold": 1e9})
    assert_close(gradient, expected, rtol=RTOL)
    assert not terms["clipped"].any()


def check_rest_of_dro(losses: ModuleType) -> None:
    """The gradient of dro vanishes where the logprob is old + A / beta, and only there."""
    tokens = make_tokens(47)
    rest = Tokens(**{**vars(tokens), "old": tokens.new - tokens.advantages / 0.7})
    _, gradient, _ = run(losses, "dro", rest, {"beta": 0.7})
    assert_close(gradient, np.zeros_like(gradient), rtol=0.0, atol=1e-12)
    _, gradient, _ = run(losses, "dro", tokens, {"beta": 0.7})
    assert np.count_nonzero(gradient) == np.count_nonzero(tokens.weights)


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
    for name in ("ppo", "cispo", "dro", "drgrpo"):
        assert required(name, {}) == ("logprobs", "advantages"), name
    assert "ref_logprobs" in required("drgrpo", {"beta": 0.1})


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
    check_advantages,
    check_kl_of_training,
    check_reference_kl_gradients,
    check_tis_bridges_policies,
    check_weights_are_constants,
    check_rest_of_dro,
    check_penalty_without_advantage,
    check_formulas,
    check_extremes,
    check_metrics,
    check_no_valid_token,
    check_untrained_garbage,
)
"""Cheap ones first: a mutant runs until the first that catches it."""


def check_all(losses: ModuleType) -> None:
    """Run every check; the first difference raises AssertionError."""
    for check in CHECKS:
        check(losses)
