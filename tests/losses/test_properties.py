"""Properties that must hold on any batch."""

from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.closeness import assert_close
from tests.losses import oracle
from tests.losses.oracle import Tokens
from xorl_lab import losses

EXACT = 1e-10
quick = settings(max_examples=40, deadline=None, derandomize=True)
configs = st.sampled_from(sorted(oracle.CONFIGS))


def _floats(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, allow_nan=False, width=32)


@st.composite
def batches(draw: st.DrawFn) -> Tokens:
    shape = (draw(st.integers(1, 4)), draw(st.integers(1, 6)))
    logprobs = hnp.arrays(np.float64, shape, elements=_floats(-4.0, 0.0))
    advantages = hnp.arrays(np.float64, shape, elements=_floats(-3.0, 3.0))
    weights = hnp.arrays(np.float64, shape, elements=st.sampled_from([0.0, 0.25, 1.0, 2.0]))
    return Tokens(
        new=draw(logprobs),
        old=draw(logprobs),
        rollout=draw(logprobs),
        ref=draw(logprobs),
        advantages=draw(advantages),
        weights=draw(weights),
    )


@quick
@given(batches(), st.floats(0.0, 0.9), st.floats(0.0, 0.9))
def test_at_ratio_one_the_clip_changes_nothing(tokens: Tokens, low: float, high: float) -> None:
    tokens = Tokens(**{**vars(tokens), "old": tokens.new})
    params = {"eps_clip": low, "eps_clip_high": high, "eps_clip_c": 3.0, "icepop_beta": 2.0}
    loss, gradient, terms = oracle.run(losses, "policy_loss", tokens, params)
    expected, slopes, _ = oracle.run(losses, "importance_sampling", tokens, {})
    assert_close(loss, expected, rtol=EXACT)
    assert_close(gradient, slopes, rtol=EXACT)
    assert not terms["clipped"].any()
    assert not terms["masked"].any()


@quick
@given(batches(), st.sampled_from(["ppo", "cispo", "dro", "drgrpo", "policy_loss"]))
def test_at_ratio_one_all_are_the_policy_gradient(tokens: Tokens, name: str) -> None:
    tokens = Tokens(**{**vars(tokens), "old": tokens.new})
    _, gradient, _ = oracle.run(losses, name, tokens, {})
    assert_close(gradient, -tokens.weights * tokens.advantages, rtol=EXACT)


@quick
@given(batches(), st.floats(0.0, 1.0), st.floats(0.0, 3.0), st.sampled_from(["k1", "k2", "k3"]))
def test_names_of_the_clip_do_not_matter(
    tokens: Tokens, low: float, high: float, kl_type: str
) -> None:
    """Ppo and drgrpo are policy_loss under other parameters."""
    clip = {"eps_clip": low, "eps_clip_high": high}
    plain = oracle.run(losses, "policy_loss", tokens, clip)
    bounds = {"clip_low_threshold": 1 - low, "clip_high_threshold": 1 + high}
    _assert_same(oracle.run(losses, "ppo", tokens, bounds), plain)
    penalty = {"kl_coef": 0.4, "kl_type": kl_type}
    pulled = oracle.run(losses, "policy_loss", tokens, clip | penalty)
    distances = {"clip_low": low, "clip_high": high, "beta": 0.4, "kl_type": kl_type}
    _assert_same(oracle.run(losses, "drgrpo", tokens, distances), pulled)


def _assert_same(got: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    assert got[0] == expected[0]
    assert (got[1] == expected[1]).all()
    assert set(got[2]) == set(expected[2])
    assert all((got[2][term] == values).all() for term, values in expected[2].items())


@quick
@given(batches(), st.floats(0.0, 1.0), st.floats(1.0, 5.0))
def test_cispo_bounds_the_gradient_and_drops_no_token(
    tokens: Tokens, low: float, high: float
) -> None:
    params = {"clip_low_threshold": low, "clip_high_threshold": high}
    _, gradient, terms = oracle.run(losses, "cispo", tokens, params)
    size, signal = np.abs(gradient), np.abs(tokens.weights * tokens.advantages)
    assert (size <= high * signal * (1 + EXACT)).all()
    assert (size >= low * signal * (1 - EXACT)).all()
    assert ((gradient != 0) == (signal != 0)).all()
    assert (np.sign(gradient) == -np.sign(tokens.weights * tokens.advantages)).all()
    assert not terms["clipped"][signal == 0].any()


@quick
@given(batches(), st.floats(0.0, 2.0))
def test_dro_pulls_towards_the_old_policy(tokens: Tokens, beta: float) -> None:
    """The loss with beta minus the loss without is beta times the squared distance, halved."""
    loss, gradient, _ = oracle.run(losses, "dro", tokens, {"beta": beta})
    bare, slopes, _ = oracle.run(losses, "dro", tokens, {"beta": 0})
    gap = tokens.new - tokens.old
    distance = (tokens.weights * gap**2).sum()
    assert_close(loss - bare, beta / 2 * distance, rtol=EXACT, atol=EXACT)
    assert_close(gradient - slopes, beta * tokens.weights * gap, rtol=EXACT, atol=EXACT)


@quick
@given(configs, batches(), st.randoms(use_true_random=False))
def test_order_of_rows_and_tokens_does_not_matter(
    config: str, tokens: Tokens, random: object
) -> None:
    name, params = oracle.CONFIGS[config]
    order = list(range(tokens.new.size))
    random.shuffle(order)
    shuffled = tokens.map(lambda array: array.ravel()[order].reshape(array.shape))
    loss, gradient, _ = oracle.run(losses, name, tokens, params)
    got, slopes, _ = oracle.run(losses, name, shuffled, params)
    assert_close(got, loss, rtol=EXACT, atol=EXACT)
    assert_close(slopes.ravel(), gradient.ravel()[order], rtol=EXACT)


@quick
@given(configs, batches(), st.integers(1, 5), st.sampled_from([0.0, -100.0, np.nan, np.inf]))
def test_padding_does_not_matter(config: str, tokens: Tokens, extra: int, filler: float) -> None:
    name, params = oracle.CONFIGS[config]
    padded = tokens.map(lambda a: np.pad(a, ((0, 1), (extra, extra)), constant_values=filler))
    weights = np.pad(tokens.weights, ((0, 1), (extra, extra)))
    padded = Tokens(**{**vars(padded), "weights": weights})
    loss, gradient, _ = oracle.run(losses, name, tokens, params)
    got, slopes, _ = oracle.run(losses, name, padded, params)
    assert_close(got, loss, rtol=EXACT, atol=EXACT)
    assert_close(slopes[:-1, extra:-extra], gradient, rtol=EXACT)
    assert np.count_nonzero(slopes) == np.count_nonzero(gradient)
    metrics = oracle.summary(losses, name, padded, params)
    for metric, value in oracle.summary(losses, name, tokens, params).items():
        assert_close(metrics[metric], value, rtol=EXACT, atol=EXACT)


@quick
@given(configs, batches())
def test_micro_batches_sum_up(config: str, tokens: Tokens) -> None:
    name, params = oracle.CONFIGS[config]
    loss, gradient, terms = oracle.run(losses, name, tokens, params)
    rows = [tokens.map(lambda array, i=i: array[i : i + 1]) for i in range(len(tokens.new))]
    parts = [oracle.run(losses, name, row, params) for row in rows]
    assert_close(sum(part[0] for part in parts), loss, rtol=EXACT, atol=EXACT)
    assert_close(np.concatenate([part[1] for part in parts]), gradient, rtol=EXACT)
    for term, values in terms.items():
        assert_close(np.concatenate([part[2][term] for part in parts]), values, rtol=EXACT)


@pytest.mark.parametrize("config", oracle.CONFIGS)
def test_float32_gradient_is_near_the_float64_one(config: str) -> None:
    name, params = oracle.CONFIGS[config]
    tokens = oracle.make_tokens(41)
    _, exact, _ = oracle.run(losses, name, tokens, params)
    new = torch.tensor(tokens.new, dtype=torch.float32, requires_grad=True)
    losses.evaluate(name, new, tokens.inputs(torch.float32), params).loss.backward()
    assert new.grad is not None
    gap = np.linalg.norm(new.grad.double().numpy() - exact) / np.linalg.norm(exact)
    assert gap < 1e-5


@quick
@given(batches(), st.sampled_from(["cispo", "drgrpo", "importance_sampling", "policy_loss", "ppo"]))
def test_zero_advantage_gives_no_gradient_but_counts(tokens: Tokens, name: str) -> None:
    tokens = Tokens(**{**vars(tokens), "advantages": np.zeros_like(tokens.advantages)})
    loss, gradient, _ = oracle.run(
        losses, name, tokens, {"icepop_beta": 2.0} if name == "policy_loss" else {}
    )
    assert loss == 0.0
    assert not gradient.any()
    valid = oracle.summary(losses, name, tokens, {})["valid_tokens"]
    assert valid == np.count_nonzero(tokens.weights)


@quick
@given(configs, batches(), st.floats(0.1, 10.0))
def test_weights_scale_value_and_gradient(config: str, tokens: Tokens, scale: float) -> None:
    name, params = oracle.CONFIGS[config]
    scaled = Tokens(**{**vars(tokens), "weights": tokens.weights * scale})
    loss, gradient, _ = oracle.run(losses, name, tokens, params)
    got, slopes, _ = oracle.run(losses, name, scaled, params)
    assert_close(got, scale * loss, rtol=EXACT, atol=EXACT)
    assert_close(slopes, scale * gradient, rtol=EXACT)


@quick
@given(batches(), configs)
def test_metrics_are_finite(tokens: Tokens, config: str) -> None:
    name, given_params = oracle.CONFIGS[config]
    stats = {"compute_kl_stats": True} if oracle.needs(name) else {}
    for params in (given_params, given_params | stats):
        assert all(map(np.isfinite, oracle.summary(losses, name, tokens, params).values()))


rewards = st.lists(st.none() | _floats(-1e6, 1e6), max_size=9)


@quick
@given(rewards)
def test_advantages_sum_to_zero_and_keep_the_order(values: list[float | None]) -> None:
    kept = [i for i, value in enumerate(values) if value is not None]
    for function in (losses.group_normalized, losses.mean_centered, losses.leave_one_out):
        got = function(values)
        assert len(got) == len(values)
        assert all(map(np.isfinite, got))
        assert all(got[i] == 0.0 for i in range(len(values)) if i not in kept)
        assert_close(sum(got), 0.0, rtol=0.0, atol=1e-9 * max([1.0, *map(abs, got)]))
        ranked = sorted(kept, key=lambda i: values[i])
        assert [got[i] for i in ranked] == sorted(got[i] for i in kept)
        assert function([values[i] for i in kept]) == [got[i] for i in kept]
