"""Properties that must hold on any batch."""

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
@given(batches(), st.sampled_from(["importance_sampling", "policy_loss"]))
def test_zero_advantage_gives_no_gradient_but_counts(tokens: Tokens, name: str) -> None:
    tokens = Tokens(**{**vars(tokens), "advantages": np.zeros_like(tokens.advantages)})
    loss, gradient, _ = oracle.run(
        losses, name, tokens, {"icepop_beta": 2.0} if "pol" in name else {}
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
@given(batches(), st.sampled_from(["importance_sampling", "policy_loss"]))
def test_metrics_are_finite(tokens: Tokens, name: str) -> None:
    for params in ({}, {"compute_kl_stats": True, "kl_coef": 0.1}):
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
