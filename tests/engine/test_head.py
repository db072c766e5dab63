"""Logprobs through the frozen head, and through one that is trained, are log_softmax."""

import pytest
import torch

from tests.closeness import assert_close
from xorl_lab.engine.logprobs import frozen, token_logprobs

M, H, V = 7, 4, 11


def problem(rows: int = M, dtype=torch.float64, size: float = 1.0):
    """Hidden states, a head without bias, targets and a gradient of the logprobs."""
    draw = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, H, generator=draw, dtype=torch.float64).mul(size).to(dtype)
    head = torch.nn.Linear(H, V, bias=False, dtype=dtype)
    with torch.no_grad():
        head.weight.copy_(torch.randn(V, H, generator=draw, dtype=torch.float64))
    targets = torch.randint(0, V, (rows,), generator=draw)
    grad = torch.randn(rows, generator=draw, dtype=torch.float64)
    return hidden.requires_grad_(), head, targets, grad


def reference(hidden, head, targets, temperature: float) -> torch.Tensor:
    logprobs = torch.log_softmax(hidden.double() @ head.weight.double().T / temperature, -1)
    return logprobs[torch.arange(len(targets)), targets]


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("temperature", [1.0, 0.3, 2.5])
@pytest.mark.parametrize(("rows", "chunk"), [(M, 1), (M, 3), (M, M), (M, 1000), (1, 2)])
def test_logprobs_and_gradients_are_those_of_log_softmax(trained, temperature, rows, chunk):
    hidden, head, targets, grad = problem(rows)
    head.requires_grad_(trained)
    assert frozen(head) is not trained
    before = hidden.detach().clone(), head.weight.detach().clone()
    got = token_logprobs(hidden, head, targets, temperature=temperature, chunk=chunk)
    expected = reference(hidden, head, targets, temperature)
    assert_close(got, expected, rtol=1e-12, atol=1e-13)
    of = [hidden, head.weight] if trained else [hidden]
    wanted = torch.autograd.grad(expected, of, grad)
    for slope, exact in zip(torch.autograd.grad(got, of, grad), wanted, strict=True):
        assert_close(slope, exact, rtol=1e-11, atol=1e-12)
    assert torch.equal(hidden, before[0])
    assert torch.equal(head.weight, before[1])


def test_the_gradient_is_that_of_small_differences():
    hidden, head, targets, _ = problem()
    head.requires_grad_(False)
    assert torch.autograd.gradcheck(
        lambda h: token_logprobs(h, head, targets, temperature=0.7, chunk=3), (hidden,)
    )


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3, 1e6])
def test_huge_logits_neither_overflow_nor_vanish(trained, size):
    hidden, head, targets, grad = problem(dtype=torch.float32, size=size)
    head.requires_grad_(trained)
    got = token_logprobs(hidden, head, targets, temperature=0.5, chunk=3)
    assert got.dtype == torch.float32
    expected = reference(hidden, head, targets, 0.5)
    # A logprob is a difference of logits of this size.
    assert_close(got, expected, rtol=1e-6, atol=3e-6 * max(size, 1.0))
    (slope,) = torch.autograd.grad(got, hidden, grad.float())
    (wanted,) = torch.autograd.grad(expected, hidden, grad)
    assert_close(slope, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_bfloat16_states_give_float32_logprobs(trained):
    hidden, head, targets, grad = problem(dtype=torch.bfloat16)
    head.requires_grad_(trained)
    got = token_logprobs(hidden, head, targets, temperature=0.5, chunk=3)
    assert got.dtype == torch.float32
    expected = reference(hidden, head, targets, 0.5)
    # The logits, of a size up to 6 here, come out of the product rounded to 8 bits.
    assert_close(got, expected, rtol=0, atol=0.1)
    (slope,) = torch.autograd.grad(got, hidden, grad.float())
    assert slope.dtype == torch.bfloat16
    (wanted,) = torch.autograd.grad(expected, hidden, grad)
    assert float((slope - wanted).norm() / wanted.norm()) < 0.02


def kept(trained: bool, count: int) -> tuple[list[torch.Size], int]:
    """Shapes kept for the backward pass, and the largest result of any operation."""
    hidden, head, targets, _ = problem(count)
    head.requires_grad_(trained)
    shapes: list[torch.Size] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        shapes.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        token_logprobs(hidden, head, targets, temperature=0.5, chunk=4)
    return shapes, count * V


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_no_matrix_of_logits_is_kept_for_the_backward_pass(trained):
    shapes, matrix = kept(trained, 40)
    for shape in shapes:
        assert shape not in {(40, V), (V, 40), (4, V), (V, 4)}
        assert shape.numel() < matrix
    if not trained:
        assert shapes == [(40, H)]


def test_states_without_gradient_leave_nothing_behind():
    hidden, head, targets, _ = problem()
    head.requires_grad_(False)
    got = token_logprobs(hidden.detach(), head, targets)
    assert not got.requires_grad
    with torch.no_grad():
        assert_close(token_logprobs(hidden, head, targets), got, rtol=1e-12)


def test_only_a_plain_head_without_bias_or_gradient_counts_as_frozen():
    head = torch.nn.Linear(H, V, bias=False)
    assert not frozen(head)
    with torch.no_grad():
        assert frozen(head)
    assert frozen(head.requires_grad_(False))
    assert not frozen(torch.nn.Linear(H, V).requires_grad_(False))

    class Louder(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    loud = Louder(H, V, bias=False).requires_grad_(False)
    assert not frozen(loud)
    states, targets = torch.randn(3, H, generator=torch.Generator().manual_seed(0)), torch.arange(3)
    expected = torch.log_softmax(2 * states @ loud.weight.T, -1)[torch.arange(3), targets]
    assert_close(token_logprobs(states, loud, targets), expected, rtol=1e-5, atol=1e-6)


def test_a_bias_is_not_forgotten():
    hidden, _, targets, _ = problem()
    head = torch.nn.Linear(H, V, dtype=torch.float64).requires_grad_(False)
    with torch.no_grad():
        head.bias.copy_(torch.linspace(-3, 3, V))
        expected = torch.log_softmax(head(hidden), -1)[torch.arange(M), targets]
    assert_close(token_logprobs(hidden, head, targets, chunk=2), expected, rtol=1e-12)


def test_a_second_derivative_is_refused():
    hidden, head, targets, _ = problem()
    head.requires_grad_(False)

    def second(values: torch.Tensor) -> torch.Tensor:
        weights = torch.arange(1.0, M + 1, dtype=torch.float64, requires_grad=True)
        (slope,) = torch.autograd.grad((values * weights).sum(), hidden, create_graph=True)
        return torch.autograd.grad(slope.pow(2).sum(), hidden)[0]

    # Without the refusal the slopes would count as constants, and the answer be silently wrong.
    with pytest.raises(RuntimeError):
        second(token_logprobs(hidden, head, targets))
