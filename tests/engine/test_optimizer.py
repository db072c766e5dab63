import math

import numpy as np
import pytest
import torch

from tests.closeness import assert_close
from tests.engine.support import accumulate, exactly, gradient, rollouts, same, supervised
from xorl_lab.engine.optimizer import Optimizer
from xorl_lab.engine.sharing import clone
from xorl_lab.engine.trainer import Trained
from xorl_lab.errors import CheckpointError, EngineError
from xorl_lab.types import AdamParams, LoraRunSpec

SETTINGS = [
    AdamParams(learning_rate=0.1, grad_clip_norm=0),
    AdamParams(learning_rate=0.1, beta1=0.5, beta2=0.8, eps=1e-2, weight_decay=0.3),
    AdamParams(learning_rate=0.02, grad_clip_norm=0.7),
    AdamParams(learning_rate=0.3, beta1=0.0, beta2=0.0, eps=1e-8),
    AdamParams(learning_rate=0.05, weight_decay=1.0, grad_clip_norm=1e-3),
]


class ByHand:
    """AdamW as Loshchilov & Hutter (2019) write it, on one vector."""

    def __init__(self, weights: np.ndarray) -> None:
        self.weights = weights.astype(np.float64)
        self.mean = np.zeros_like(self.weights)
        self.square = np.zeros_like(self.weights)
        self.steps = 0

    def step(self, total: np.ndarray, divisor: float, adam: AdamParams) -> float:
        grad = total / divisor
        norm = float(np.sqrt((grad**2).sum()))
        if adam.grad_clip_norm and norm > adam.grad_clip_norm:
            grad = grad * adam.grad_clip_norm / norm
        self.steps += 1
        self.weights *= 1 - adam.learning_rate * adam.weight_decay
        self.mean = adam.beta1 * self.mean + (1 - adam.beta1) * grad
        self.square = adam.beta2 * self.square + (1 - adam.beta2) * grad**2
        mean = self.mean / (1 - adam.beta1**self.steps)
        square = self.square / (1 - adam.beta2**self.steps)
        self.weights -= adam.learning_rate * mean / (np.sqrt(square) + adam.eps)
        return norm


def parameter(values: list[float], dtype: torch.dtype = torch.float64) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor(values, dtype=dtype))


def test_steps_are_those_of_adamw_by_hand_whatever_changes_between_them():
    draw = np.random.default_rng(0)
    weights = {"a": parameter([0.3, -2.0, 0.0]), "b": parameter([[1.0], [5.0]])}
    optimizer = Optimizer(weights)
    hand = ByHand(np.concatenate([p.detach().numpy().ravel() for p in weights.values()]))
    for adam in SETTINGS * 2:
        total = draw.normal(size=5) * 20
        grads = {
            "a": torch.tensor(total[:3]),
            "b": torch.tensor(total[3:]).reshape(2, 1),
        }
        metrics = optimizer.step(grads, 7.0, adam)
        norm = hand.step(total, 7.0, adam)
        assert_close(metrics["grad_norm"], norm, rtol=1e-12)
        got = np.concatenate([p.detach().numpy().ravel() for p in weights.values()])
        assert_close(got, hand.weights, rtol=1e-10)


@pytest.mark.parametrize("changed", ["learning_rate", "beta1", "beta2", "eps", "weight_decay"])
def test_every_setting_has_an_effect(changed):
    values = {
        "learning_rate": 0.2,
        "beta1": 0.2,
        "beta2": 0.3,
        "eps": 0.5,
        "weight_decay": 0.4,
    }

    def run(**settings: float) -> torch.Tensor:
        weight = parameter([1.0, -2.0])
        optimizer = Optimizer({"a": weight})
        for grad in ([1.0, 0.2], [-0.3, 0.4]):
            optimizer.step(
                {"a": torch.tensor(grad, dtype=torch.float64)}, 1.0, AdamParams(**settings)
            )
        return weight.detach()

    common = {"learning_rate": 0.1}
    assert not torch.allclose(run(**common), run(**{**common, changed: values[changed]}), rtol=1e-3)


def test_clipping_scales_the_gradient_and_reports_the_norm_before_it():
    weight = parameter([0.0, 0.0])
    optimizer = Optimizer({"a": weight})
    grad = {"a": torch.tensor([3.0, 4.0], dtype=torch.float64)}
    metrics = optimizer.step(grad, 1.0, AdamParams(grad_clip_norm=2.5))
    assert metrics == {"grad_norm": 5.0, "grad_scale": 0.5}
    assert_close(optimizer.state()["exp_avg.a"], [0.15, 0.2], rtol=1e-12)


@pytest.mark.parametrize("clip", [0.0, 5.0, 100.0])
def test_a_norm_within_bounds_is_reported_and_not_scaled(clip):
    optimizer = Optimizer({"a": parameter([0.0, 0.0])})
    grad = {"a": torch.tensor([3.0, 4.0], dtype=torch.float64)}
    assert optimizer.step(grad, 1.0, AdamParams(grad_clip_norm=clip)) == {
        "grad_norm": 5.0,
        "grad_scale": 1.0,
    }


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad):
    weight = parameter([1.0, 2.0])
    optimizer = Optimizer({"a": weight})
    optimizer.step({"a": torch.ones(2, dtype=torch.float64)}, 1.0, AdamParams())
    before, state = weight.detach().clone(), {k: v.clone() for k, v in optimizer.state().items()}
    with pytest.raises(EngineError, match=r"^the gradient's norm is (nan|inf), so the step was"):
        optimizer.step({"a": torch.tensor([1.0, bad], dtype=torch.float64)}, 1.0, AdamParams())
    assert torch.equal(weight, before)
    assert same(optimizer.state(), state)


def test_a_parameter_without_gradient_is_treated_as_having_none_this_time():
    weights = {"a": parameter([1.0]), "b": parameter([1.0])}
    optimizer = Optimizer(weights)
    optimizer.step({"a": torch.ones(1, dtype=torch.float64)}, 1.0, AdamParams(learning_rate=0.1))
    assert weights["b"].item() == 1.0
    assert weights["a"].item() != 1.0


def test_bfloat16_weights_move_by_less_than_their_rounding():
    """Near 1 the next bfloat16 number is 1/128 away: 40 steps of 0.001 only add up in a master."""
    weight = parameter([1.0], torch.bfloat16)
    optimizer = Optimizer({"a": weight})
    seen = []
    for _ in range(40):
        grad = {"a": torch.ones(1, dtype=torch.bfloat16)}
        optimizer.step(grad, 1.0, AdamParams(learning_rate=1e-3))
        seen.append(weight.item())
    assert seen[0] == 1.0
    assert_close(float(optimizer.state()["master.a"]), 0.96, rtol=1e-3)
    assert_close(seen[-1], 0.96, rtol=0, atol=1 / 256)


def test_state_round_trips():
    weights = [parameter([1.0, 2.0], torch.bfloat16) for _ in range(2)]
    first, second = (Optimizer({"a": w}) for w in weights)
    grads = [torch.tensor([1.0, -3.0]), torch.tensor([0.5, 0.1])]
    first.step({"a": grads[0]}, 1.0, AdamParams(learning_rate=0.1))
    with torch.no_grad():
        weights[1].copy_(weights[0])
    second.load_state(first.state())
    for optimizer in (first, second):
        optimizer.step({"a": grads[1]}, 1.0, AdamParams(learning_rate=0.1))
    assert torch.equal(weights[0], weights[1])
    assert same(first.state(), second.state())


def test_state_of_other_parameters_is_refused():
    first, second = Optimizer({"a": parameter([1.0])}), Optimizer({"b": parameter([1.0])})
    first.step({"a": torch.ones(1, dtype=torch.float64)}, 1.0, AdamParams())
    message = exactly(
        "checkpoint.optimizer_mismatch: the optimizer state does not fit the model: 6 tensors are "
        "missing or extra, e.g. exp_avg.a"
    )
    with pytest.raises(CheckpointError, match=message):
        second.load_state(first.state())


# The trainer's side: what is divided, when, and what is left behind.


@pytest.fixture
def trained(tiny64) -> Trained:
    return Trained("test", tiny64, LoraRunSpec(rank=4, seed=1))


def test_the_sum_is_divided_once_by_all_trained_tokens_of_the_window(trained):
    grads = gradient(trained, supervised())
    output = accumulate(trained, supervised())
    response = trained.optim_step(AdamParams())
    total = torch.sqrt(sum((g**2).sum() for g in grads.values()))
    valid = output.metrics["valid_tokens"]
    assert_close(response.metrics["grad_norm"], float(total) / valid, rtol=1e-9)
    assert response.metrics["valid_tokens"] == valid


def test_two_calls_and_a_step_are_one_call_and_a_step(tiny64):
    ends = []
    for parts in ([rollouts()], [rollouts()[:2], rollouts()[2:]]):
        made = Trained("test", tiny64, LoraRunSpec(rank=4, seed=1))
        for _ in range(3):
            for part in parts:
                accumulate(made, part, "policy_loss")
            made.optim_step(AdamParams(learning_rate=1e-2))
        ends.append(made.weights())
    for name in ends[0]:
        assert_close(ends[1][name], ends[0][name], rtol=1e-7, atol=1e-10)


def test_full_weights_step_as_adamw_by_hand_does(tiny64):
    made = Trained("test", tiny64, None)
    flat = lambda tensors: np.concatenate([t.numpy().ravel() for t in tensors])  # noqa: E731
    hand = ByHand(flat(made.weights().values()))
    for adam in SETTINGS[:3]:
        grads = gradient(made, supervised())
        valid = accumulate(made, supervised()).metrics["valid_tokens"]
        made.optim_step(adam)
        hand.step(flat(grads[n] for n in made.parameters), valid, adam)
        assert_close(flat(made.weights().values()), hand.weights, rtol=1e-8, atol=1e-12)


def test_nothing_accumulated_is_an_error(trained):
    message = exactly(
        "optim_step has nothing to apply: call forward_backward first "
        "(each optim_step empties what was accumulated)"
    )
    with pytest.raises(EngineError, match=message):
        trained.optim_step(AdamParams())
    accumulate(trained, supervised())
    trained.optim_step(AdamParams())
    with pytest.raises(EngineError, match=message):
        trained.optim_step(AdamParams())
    assert (trained.steps, trained.version) == (1, 1)


def test_a_window_without_trained_tokens_is_skipped_and_says_so(trained):
    before = {k: v.clone() for k, v in trained.weights().items()}
    silent = rollouts(1)[0]
    silent.loss_fn_inputs["weights"].data[:] = [0.0] * len(silent.loss_fn_inputs["weights"].data)
    accumulate(trained, [silent], "policy_loss")
    response = trained.optim_step(AdamParams(weight_decay=0.1))
    assert response.metrics["grad_norm"] == 0.0
    assert response.metrics["step"] == 0.0
    assert response.info == {
        "skipped": "no token of the data was trained, so there was nothing to learn from"
    }
    assert same(before, trained.weights())


def test_a_window_that_overflows_is_refused_and_emptied(trained):
    before = {k: v.clone() for k, v in trained.weights().items()}
    accumulate(trained, supervised())
    name = next(iter(trained.window.grads))
    trained.window.grads[name] = torch.full_like(trained.window.grads[name], math.inf)
    with pytest.raises(EngineError, match=r"^the gradient's norm is inf, so the step was refused"):
        trained.optim_step(AdamParams())
    assert same(before, trained.weights())
    assert (trained.steps, trained.version, trained.window.calls) == (0, 0, 0)


def test_full_weights_in_bfloat16_learn_through_their_masters(tiny):
    base = clone(tiny).bfloat16().requires_grad_(False)
    made = Trained("test", base, None)
    start = {k: v.clone() for k, v in made.weights().items()}
    for _ in range(3):
        accumulate(made, supervised())
        made.optim_step(AdamParams(learning_rate=1e-5))
    norm = "model.norm.weight"
    assert torch.equal(made.weights()[norm], start[norm])
    master = made.optimizer.state()[f"master.{norm}"]
    assert master.dtype == torch.float32
    assert_close((master - start[norm]).abs().max(), 3e-5, rtol=0, atol=1.5e-5)
