"""The adapted layer in three products is x W' + b + s (x A') B'."""

import copy
import math

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear as PeftLinear

from tests.closeness import assert_close
from tests.engine.support import accumulate, distance, supervised
from xorl_lab.engine import adapters
from xorl_lab.engine.adapters import PrivateDropout
from xorl_lab.engine.lora import ADAPTER, LoraLinear
from xorl_lab.engine.quiet import quiet
from xorl_lab.engine.trainer import Trained
from xorl_lab.types import LoraRunSpec

INPUTS, OUTPUTS, RANK, ALPHA = 7, 5, 3, 4.0
SCALE = ALPHA / RANK
SHAPES = [(6, INPUTS), (2, 3, INPUTS), (INPUTS,), (1, 1, INPUTS)]


def layer(kind: type = LoraLinear, *, bias: bool = False, dtype=torch.float64) -> PeftLinear:
    """An adapted layer of peft's making with random weights, the same ones for every kind."""
    draw = torch.Generator().manual_seed(0)
    model = torch.nn.ModuleDict({"part": torch.nn.Linear(INPUTS, OUTPUTS, bias=bias, dtype=dtype)})
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["part"])
    if kind is not PeftLinear:
        config._register_custom_module({torch.nn.Linear: kind})
    with quiet():
        inject_adapter_in_model(config, model, ADAPTER)
    made = model["part"]
    assert type(made) is kind
    fine = torch.float64 if dtype == torch.float64 else torch.float32
    for part in (made.lora_A[ADAPTER], made.lora_B[ADAPTER]):
        part.weight = torch.nn.Parameter(torch.randn(part.weight.shape, generator=draw, dtype=fine))
    for parameter in made.base_layer.parameters():
        values = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
        parameter.data.copy_(values)
        parameter.requires_grad_(False)
    return made


def draw(*shape: int, seed: int = 1, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def weights(made: PeftLinear) -> list[torch.nn.Parameter]:
    return [made.lora_A[ADAPTER].weight, made.lora_B[ADAPTER].weight]


def plain(made: PeftLinear, x: torch.Tensor) -> torch.Tensor:
    """The formula, for autograd."""
    a, b = weights(made)
    bias = 0 if made.base_layer.bias is None else made.base_layer.bias
    return x @ made.base_layer.weight.T + bias + SCALE * ((x @ a.T) @ b.T)


def grads(value: torch.Tensor, of: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(value, of, draw(*value.shape, seed=2, dtype=value.dtype))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_it_is_the_formula_and_so_is_its_gradient(shape, bias):
    made, x = layer(bias=bias), draw(*shape).requires_grad_()
    got, expected = made(x), plain(made, x)
    assert_close(got, expected, rtol=1e-12, atol=1e-13)
    of = [x, *weights(made)]
    for slope, wanted in zip(grads(got, of), grads(expected, of), strict=True):
        assert_close(slope, wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("bias", [False, True])
def test_the_gradient_is_that_of_small_differences(bias):
    x = draw(2, 3, INPUTS).requires_grad_()
    made = layer(bias=bias)

    def function(*inputs: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(
            made,
            {f"lora_{n}.{ADAPTER}.weight": w for n, w in zip("AB", inputs[1:], strict=True)},
            inputs[:1],
        )

    assert torch.autograd.gradcheck(function, (x, *weights(made)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_it_is_peft_s_own_layer(shape, bias):
    ours, theirs = layer(bias=bias), layer(PeftLinear, bias=bias)
    x = draw(*shape).requires_grad_()
    assert theirs.scaling[ADAPTER] == SCALE
    got, expected = ours(x), theirs(x)
    assert_close(got, expected, rtol=1e-12, atol=1e-13)
    slopes = grads(got, [x, *weights(ours)])
    for slope, wanted in zip(slopes, grads(expected, [x, *weights(theirs)]), strict=True):
        assert_close(slope, wanted, rtol=1e-11, atol=1e-12)


def test_an_input_without_gradient_gets_none_and_the_adapter_does():
    made, x = layer(bias=True), draw(2, 3, INPUTS)
    got = made(x)
    for slope, wanted in zip(
        grads(got, weights(made)), grads(plain(made, x), weights(made)), strict=True
    ):
        assert_close(slope, wanted, rtol=1e-11, atol=1e-12)
    assert x.grad is None


def test_the_base_layer_gets_no_gradient():
    made = layer(bias=True)
    made(draw(4, INPUTS).requires_grad_()).sum().backward()
    assert all(p.grad is not None for p in weights(made))
    assert all(p.grad is None for p in made.base_layer.parameters())


def test_an_expanded_gradient_and_a_turned_input_are_read_as_they_are():
    made = layer(bias=True)
    x = draw(INPUTS, 4).T.requires_grad_()
    assert not x.is_contiguous()
    of = [x, *weights(made)]
    slopes = torch.autograd.grad(made(x).sum(), of)
    for slope, wanted in zip(slopes, torch.autograd.grad(plain(made, x).sum(), of), strict=True):
        assert_close(slope, wanted, rtol=1e-11, atol=1e-12)


def test_nothing_it_was_given_is_changed():
    made, x = layer(bias=True), draw(4, INPUTS).requires_grad_()
    before = [t.detach().clone() for t in (x, *made.parameters())]
    value = made(x)
    kept, gradient = value.detach().clone(), draw(4, OUTPUTS)
    given = gradient.clone()
    torch.autograd.grad(value, [x, *weights(made)], gradient)
    for now, then in zip(
        (x, *made.parameters(), value, gradient), (*before, kept, given), strict=True
    ):
        assert torch.equal(now, then)


def test_without_gradient_it_computes_the_same():
    made, x = layer(bias=True), draw(4, INPUTS)
    with torch.no_grad():
        got = made(x)
    assert not got.requires_grad
    assert torch.equal(got, made(x).detach())


@pytest.mark.parametrize("shape", [(0, INPUTS), (2, 0, INPUTS)], ids=str)
def test_no_rows_are_no_error(shape):
    # As an expert gets them to which no token went.
    made, x = layer(bias=True), draw(*shape).requires_grad_()
    got = made(x)
    assert got.shape == (*shape[:-1], OUTPUTS)
    for slope, of in zip(
        torch.autograd.grad(got.sum(), [x, *weights(made)]), [x, *weights(made)], strict=True
    ):
        assert slope.shape == of.shape
        assert not slope.any()


# Dropout.


def test_active_dropout_drops_what_the_adapter_reads_and_nothing_else():
    made, x = layer(bias=True), draw(50, INPUTS).requires_grad_()
    generator = torch.Generator().manual_seed(5)
    dropout = PrivateDropout(0.4, generator)
    made.lora_dropout[ADAPTER] = dropout
    assert_close(made(x), plain(made, x), rtol=1e-12, atol=1e-13)
    dropout.active = True
    keep = torch.rand(x.shape, generator=torch.Generator().manual_seed(5)) >= 0.4
    a, b = weights(made)
    expected = made.base_layer(x) + SCALE * (((x * keep / 0.6) @ a.T) @ b.T)
    got = made(x)
    assert_close(got, expected, rtol=1e-12, atol=1e-13)
    of = [x, a, b]
    for slope, wanted in zip(grads(got, of), grads(expected, of), strict=True):
        assert_close(slope, wanted, rtol=1e-11, atol=1e-12)
    assert not torch.equal(made(x), got)
    dropout.active = False
    assert_close(made(x), plain(made, x), rtol=1e-12, atol=1e-13)


# bfloat16.


@pytest.mark.parametrize("dropped", [False, True])
def test_a_float32_adapter_on_a_bfloat16_layer_gets_its_gradient_in_float32(dropped):
    made = layer(bias=True, dtype=torch.bfloat16)
    if dropped:
        made.lora_dropout[ADAPTER] = PrivateDropout(0.0, torch.Generator())
        made.lora_dropout[ADAPTER].active = True
    assert [w.dtype for w in weights(made)] == [torch.float32] * 2
    x = draw(40, INPUTS).bfloat16().requires_grad_()
    got = made(x)
    assert got.dtype == torch.bfloat16
    fine = copy.deepcopy(made).double()
    wide = x.detach().double().requires_grad_()
    expected = plain(fine, wide)
    # Each of a handful of roundings is half a unit in the last of 8 bits.
    assert float((got - expected).detach().norm() / expected.detach().norm()) < 1e-2
    slopes = grads(got, [x, *weights(made)])
    wanted = grads(expected, [wide, *weights(fine)])
    assert [s.dtype for s in slopes] == [torch.bfloat16, torch.float32, torch.float32]
    for slope, exact in zip(slopes, wanted, strict=True):
        assert float((slope - exact).norm() / exact.norm()) < 1e-2


def test_the_adapter_is_rounded_at_each_use_and_keeps_its_exact_values():
    made = layer(dtype=torch.bfloat16)
    exact = [w.detach().clone() for w in weights(made)]
    x = draw(4, INPUTS).bfloat16()
    first = made(x).detach()
    with torch.no_grad():
        for weight in weights(made):
            weight.copy_(weight.bfloat16())
    assert torch.equal(made(x).detach(), first)
    with torch.no_grad():
        for weight, value in zip(weights(made), exact, strict=True):
            weight.copy_(value)
            assert not torch.equal(value, value.bfloat16().float())
    made(x).sum().backward()
    assert all(torch.equal(w, e) for w, e in zip(weights(made), exact, strict=True))


# In a model.


@pytest.mark.parametrize("unembed", [False, True])
def test_a_model_trains_as_one_of_peft_s_layers(tiny64, monkeypatch, unembed):
    spec = LoraRunSpec(rank=3, alpha=8.0, seed=1, train_unembed=unembed)
    gradients = []
    for function in (LoraLinear.forward, PeftLinear.forward):
        monkeypatch.setattr(LoraLinear, "forward", function)
        trained = Trained("test", tiny64, spec)
        layers = adapters.lora_layers(trained.model)
        assert len(layers) == 14 + unembed
        assert all(m.scaling[ADAPTER] == 8.0 / 3 for m in layers.values())
        draws = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for name, parameter in trained.parameters.items():
                if ".lora_B." in name:
                    parameter.copy_(
                        torch.randn(parameter.shape, generator=draws, dtype=torch.float64)
                        / math.sqrt(parameter.shape[0])
                    )
        accumulate(trained, supervised())
        gradients.append(trained.window.grads)
    assert distance(*gradients) < 1e-10
