"""The faster product is the product."""

import gc
import weakref

import pytest
import torch

from tests.closeness import assert_close
from xorl_lab.engine import models, products
from xorl_lab.engine.products import Matrix, linear, prepare


def layer(inputs: int = 40, outputs: int = 70, *, bias: bool = True, seed: int = 0):
    draw = torch.Generator().manual_seed(seed)
    made = torch.nn.Linear(inputs, outputs, bias=bias).requires_grad_(False)
    for parameter in made.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=draw))
    return made


def rows(count: int, width: int = 40) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(count))


def layout_of(weight: torch.Tensor) -> torch.Tensor | None:
    return products._layouts.get(weight)


@pytest.fixture
def without_kernels(monkeypatch):
    monkeypatch.setattr(products, "_works", lambda: False)


CALLS = {
    "plain": (lambda x, m, _: linear(x, m.weight), lambda x, m, _: x @ m.weight.T),
    "bias": (lambda x, m, _: linear(x, m.weight, m.bias), lambda x, m, _: m(x)),
    "matrix": (lambda x, m, _: Matrix(m.weight)(x), lambda x, m, _: x @ m.weight.T),
    "matrix, bias": (lambda x, m, _: Matrix(m.weight, m.bias)(x), lambda x, m, _: m(x)),
    "matrix, plus": (
        lambda x, m, y: Matrix(m.weight, m.bias)(x, y),
        lambda x, m, y: m(x) + y,
    ),
    "matrix, copied": (
        lambda x, m, y: Matrix(m.weight.clone(), m.bias, copied=True)(x, y),
        lambda x, m, y: m(x) + y,
    ),
}


def check(name: str, module: torch.nn.Linear, count: int) -> None:
    x, plus = rows(count), rows(count, 70)
    before = plus.clone()
    got, wanted = (call(x, module, plus) for call in CALLS[name])
    assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(plus, before)
    got.add_(1)  # the result is the caller's own
    assert torch.equal(plus, before)


@pytest.mark.parametrize("count", [1, 3, 64, 200])
@pytest.mark.parametrize("name", CALLS)
def test_with_and_without_a_copy_in_the_kernel_s_layout(name, count):
    module = layer()
    check(name, module, count)
    assert layout_of(module.weight) is None
    prepare(module)
    check(name, module, count)
    assert not products._works() or name.endswith("copied") or layout_of(module.weight) is not None


@pytest.mark.parametrize("name", CALLS)
def test_without_the_kernels(name, without_kernels):
    module = layer()
    prepare(module)
    check(name, module, 5)
    assert layout_of(module.weight) is None


def test_the_kernels_work_here():
    # Where they do not the program is right but slow: on this project's machines they must.
    assert products._works()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_are_left_to_torch(dtype):
    module = layer().to(dtype)
    prepare(module)
    assert module.weight not in products._layouts
    x = rows(4).to(dtype)
    assert torch.equal(linear(x, module.weight, module.bias), module(x))


def test_columns_that_do_not_lie_together():
    module = layer()
    x = rows(6, 80)[:, ::2]
    assert_close(linear(x, module.weight, module.bias), module(x), rtol=1e-5, atol=1e-5)


def test_what_is_trained_and_what_is_too_big_is_not_copied(monkeypatch):
    trained = layer().requires_grad_(True)
    prepare(trained)
    assert trained.weight not in products._layouts
    big = layer()
    monkeypatch.setattr(products, "LIMIT", big.weight.nbytes - 1)
    prepare(big)
    assert big.weight not in products._layouts
    monkeypatch.setattr(products, "LIMIT", big.weight.nbytes)
    prepare(big)
    assert big.weight in products._layouts


def test_copies_go_with_the_model():
    module = layer()
    prepare(module)
    linear(rows(2), module.weight)
    copy = weakref.ref(layout_of(module.weight))
    del module
    gc.collect()
    assert copy() is None


def test_a_loaded_model_is_prepared():
    loaded = models.load("tiny")
    linears = [m for m in loaded.model.modules() if isinstance(m, torch.nn.Linear)]
    assert linears
    assert all(m.weight in products._layouts for m in linears)


@pytest.mark.parametrize("fault", [RuntimeError("no such operator"), None])
def test_kernels_that_fail_or_differ_are_not_used(monkeypatch, fault):
    real = products._product

    def broken(*args, **kwargs):
        if fault:
            raise fault
        return real(*args, **kwargs) * 1.01

    monkeypatch.setattr(products, "_product", broken)
    assert not products._works.__wrapped__()
