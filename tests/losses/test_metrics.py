"""Metrics: one number per call, however the call was cut, and never NaN."""

import numpy as np
import torch

from tests.closeness import assert_close
from tests.losses import oracle
from xorl_lab import losses

NAME, PARAMS = oracle.CONFIGS["everything"]


def _terms(tokens: oracle.Tokens) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    _, _, terms = oracle.run(losses, NAME, tokens, PARAMS)
    trained = torch.tensor(tokens.weights != 0)
    flat = {name: torch.tensor(values)[trained] for name, values in terms.items()}
    return flat, torch.tensor(tokens.weights)[trained]


def test_micro_batches_do_not_show() -> None:
    tokens = oracle.make_tokens(19, batch=5, length=7)
    whole = losses.summarize(NAME, *_terms(tokens), PARAMS)
    rows = [_terms(tokens.map(lambda array, i=i: array[i : i + 1])) for i in range(5)]
    terms = {name: torch.cat([row[0][name] for row in rows]) for name in rows[0][0]}
    weights = torch.cat([row[1] for row in rows])
    for metric, value in losses.summarize(NAME, terms, weights, PARAMS).items():
        assert_close(value, whole[metric], rtol=1e-12)


def test_untrained_tokens_are_left_out() -> None:
    tokens = oracle.make_tokens(19)
    terms, weights = _terms(tokens)
    expected = losses.summarize(NAME, terms, weights, PARAMS)
    padded = {
        name: torch.cat([term, torch.full((3,), 99).to(term)]) for name, term in terms.items()
    }
    padded["elementwise_loss"][-3:] = torch.nan
    assert losses.summarize(NAME, padded, torch.cat([weights, torch.zeros(3)]), PARAMS) == expected


def test_names_of_every_metric() -> None:
    assert set(losses.summarize(NAME, *_terms(oracle.make_tokens(19)), PARAMS)) == {
        "loss:sum",
        "loss:mean",
        "loss_sum",
        "loss_mean",
        "valid_tokens",
        "token_count",
        "pg_clipfrac",
        "ratio_mean",
        "ratio_min",
        "ratio_max",
        "kl_sample_train_k3",
        "entropy_sample",
        "icepop_maskfrac",
        "tis_mean",
        "tis_min",
        "tis_max",
        "tis_clipfrac",
        "kl_ref",
    }


def test_masked_tokens_stay_in_the_denominator() -> None:
    tokens = oracle.make_tokens(19)
    params = {"icepop_beta": 1.01}
    metrics = oracle.summary(losses, "policy_loss", tokens, params)
    valid = np.count_nonzero(tokens.weights)
    assert metrics["icepop_maskfrac"] > 0.5
    assert metrics["valid_tokens"] == valid
    assert_close(metrics["loss:mean"], metrics["loss:sum"] / valid, rtol=1e-12)


def test_values_are_plain_floats() -> None:
    metrics = losses.summarize(NAME, *_terms(oracle.make_tokens(19)), PARAMS)
    assert {type(value) for value in metrics.values()} == {float}


def test_small_divergences_keep_their_digits_in_float32() -> None:
    log_ratio = torch.full((100,), 1e-4)
    terms = {
        "elementwise_loss": torch.zeros(100),
        "ratio": log_ratio.exp(),
        "log_ratio": log_ratio,
        "old_logprobs": torch.full((100,), -2.0),
    }
    params = {"compute_kl_stats": True}
    metrics = losses.summarize("importance_sampling", terms, torch.ones(100), params)
    assert_close(metrics["kl_sample_train_k3"], 0.5e-8, rtol=1e-4)
    assert_close(metrics["entropy_sample"], 2.0, rtol=1e-12)
