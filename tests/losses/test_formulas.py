"""The losses against formulas written a second time, float64, rtol 1e-6."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from tests.losses import oracle
from xorl_lab import losses


@pytest.mark.parametrize("check", oracle.CHECKS, ids=lambda check: check.__name__)
def test_oracle(check: Callable[[ModuleType], None]) -> None:
    check(losses)


@pytest.mark.parametrize("config", oracle.CONFIGS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_value_gradient_and_terms(config: str, seed: int) -> None:
    oracle.compare(losses, config, seed)


@pytest.mark.parametrize("seed", [7])
def test_oracle_tokens_reach_every_region(seed: int) -> None:
    tokens = oracle.make_tokens(seed)
    configs = {"default clip", "dual clip", "icepop", "tis", "narrow tis", "everything"}
    for config in sorted(configs | {"ppo", "asymmetric ppo", "cispo", "narrow cispo", "drgrpo"}):
        name, params = oracle.CONFIGS[config]
        rows = [row for row in oracle.expected_tokens(name, tokens, params) if row]
        for flag in oracle.expected_terms(name, params) & {"clipped", "masked", "tis_clipped"}:
            assert {row[flag] for row in rows} == {0.0, 1.0}, (config, flag)


@pytest.mark.parametrize("config", [name for name in oracle.CONFIGS if "cispo" not in name])
def test_gradcheck(config: str) -> None:
    """Cispo's weight is a constant only for autograd: differences of its value see it move."""
    name, params = oracle.CONFIGS[config]
    tokens = oracle.make_tokens(23, batch=2, length=6)
    inputs = tokens.inputs()
    new = torch.tensor(tokens.new, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda logprobs: losses.evaluate(name, logprobs, inputs, params).loss, (new,)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("config", oracle.CONFIGS)
def test_dtype_is_kept(config: str, dtype: torch.dtype) -> None:
    name, params = oracle.CONFIGS[config]
    tokens = oracle.make_tokens(29)
    inputs = tokens.inputs(torch.float64)
    new = torch.tensor(tokens.new, dtype=dtype, requires_grad=True)
    output = losses.evaluate(name, new, inputs, params)
    output.loss.backward()
    assert output.loss.dtype == dtype
    assert new.grad is not None
    assert new.grad.dtype == dtype
    assert {term.dtype for term in output.terms.values()} <= {dtype, torch.bool}


def test_no_gradient_reaches_the_constants() -> None:
    tokens = oracle.make_tokens(31)
    inputs = {key: value.requires_grad_() for key, value in tokens.inputs().items()}
    new = torch.tensor(tokens.new, requires_grad=True)
    name, params = oracle.CONFIGS["everything"]
    losses.evaluate(name, new, inputs, params).loss.backward()
    assert all(value.grad is None for value in inputs.values())


@pytest.mark.parametrize("config", oracle.CONFIGS)
def test_nan_at_a_trained_token_is_not_hidden(config: str) -> None:
    name, params = oracle.CONFIGS[config]
    tokens = oracle.make_tokens(37)
    inputs = tokens.inputs()
    new = torch.tensor(tokens.new)
    row, column = (int(index[0]) for index in (tokens.weights != 0).nonzero())
    new[row, column] = inputs["logprobs"][row, column]  # inside every clip and mask
    used = losses.required_inputs(name, params)
    assert losses.evaluate(name, new, inputs, params).loss.isfinite()
    for key in used:
        spoiled = inputs[key].clone()
        spoiled[row, column] = torch.nan
        assert losses.evaluate(name, new, {**inputs, key: spoiled}, params).loss.isnan(), key
    new[row, column] = torch.nan
    assert losses.evaluate(name, new, inputs, params).loss.isnan()
