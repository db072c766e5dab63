"""Losses on preferences, against closed forms."""

import math

import pytest
import torch

from tests.closeness import assert_close
from xorl_lab.client import ServiceClient
from xorl_lab.errors import ConfigError, ShapeError
from xorl_lab.losses.preference import Preferences, dpo, dpo_weight, ipo, preferences
from xorl_lab.types import AdamParams, Datum, ModelInput

MARGINS = [-40.0, -3.0, -0.1, 0.0, 0.5, 7.0, 400.0]
BETAS = [0.01, 0.1, 1.0, 5.0]


def margins() -> torch.Tensor:
    return torch.tensor(MARGINS, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("beta", BETAS)
def test_dpo_against_the_closed_form(beta):
    margin = margins()
    loss = dpo(margin, beta)
    expected = [
        math.log1p(math.exp(-abs(beta * m))) + max(-beta * m, 0.0) for m in MARGINS
    ]  # -log sigma(x), written so that nothing overflows
    assert_close(loss.detach(), expected, rtol=1e-12)
    (grad,) = torch.autograd.grad(loss.sum(), margin)
    assert_close(grad, -beta * dpo_weight(margin, beta), rtol=1e-9, atol=1e-300)
    assert torch.autograd.gradcheck(lambda m: dpo(m, beta), margin[1:6].detach().requires_grad_())


@pytest.mark.parametrize("beta", BETAS)
def test_the_weight_is_a_constant_that_falls_from_one_to_nothing(beta):
    weight = dpo_weight(margins(), beta)
    assert not weight.requires_grad
    assert weight[MARGINS.index(0.0)] == 0.5
    assert (weight.diff() < 0).all()
    assert weight[0] > 0.5 > weight[-1]


@pytest.mark.parametrize("beta", BETAS)
def test_ipo_is_least_at_its_own_margin(beta):
    wanted = 1 / (2 * beta)
    margin = torch.tensor([wanted, wanted + 2, wanted - 2], dtype=torch.float64)
    assert_close(ipo(margin, beta), [0.0, 4.0, 4.0], rtol=1e-9, atol=1e-9)


def test_sequences_are_summed_and_paired():
    own = [torch.tensor(v, requires_grad=True) for v in ([-1.0, 0.0, -2.0], [-4.0], [-3.0], [-5.0])]
    ref = [torch.tensor(v) for v in ([-2.0, 0.0, -3.0], [-3.0], [-3.0], [-6.0])]
    both = preferences(own, ref)
    assert both.preferred.tolist() == [2.0, 0.0]
    assert both.rejected.tolist() == [-1.0, 1.0]
    assert both.margin.tolist() == [3.0, -1.0]
    assert both.metrics() == {"margin": 1.0, "accuracy": 0.5, "preferred": 1.0, "rejected": 0.0}
    both.margin.sum().backward()
    assert [float(t.grad.sum()) for t in own] == [3.0, -1.0, 1.0, -1.0]


def test_no_gradient_reaches_the_reference():
    own = [torch.tensor([-1.0], requires_grad=True) for _ in range(2)]
    ref = [torch.tensor([-1.0], requires_grad=True) for _ in range(2)]
    dpo(preferences(own, ref).margin, 0.1).sum().backward()
    assert ref[0].grad is None
    assert own[0].grad is not None


def test_a_pair_that_is_as_likely_as_before_is_not_accurate():
    zero = torch.zeros(3)
    assert Preferences(zero, zero).metrics()["accuracy"] == 0.0


@pytest.mark.parametrize(
    ("own", "ref", "words"),
    [
        ([(1,)], [(1,)], "1 sequences: pass pairs"),
        ([], [], "0 sequences"),
        ([(1,), (1,)], [(1,)], "2 sequences but 1"),
        ([(1,), (2,)], [(1,), (3,)], r"sequence 1 .*\(2,\).*\(3,\)"),
    ],
)
def test_what_does_not_fit_is_an_error_in_words(own, ref, words):
    with pytest.raises(ShapeError, match=words):
        preferences([torch.zeros(s) for s in own], [torch.zeros(s) for s in ref])


@pytest.mark.parametrize("function", [dpo, dpo_weight, ipo])
@pytest.mark.parametrize("beta", [0.0, -1.0, math.nan])
def test_beta_is_positive(function, beta):
    with pytest.raises(ConfigError, match="beta"):
        function(torch.zeros(1), beta)


def test_a_model_learns_what_is_preferred(tmp_path):
    service = ServiceClient(home=tmp_path, device="cpu", dtype="float32")
    client = service.create_lora_training_client("tiny", 4, seed=7)
    texts = [(1, 2, 3), (1, 2, 4, 5), (6, 7), (6, 8)]
    data = [Datum(ModelInput.from_ints(t), {"labels": t}) for t in texts]
    reference = [o.logprobs.to_torch() for o in client.forward(data).result().loss_fn_outputs]

    def loss(_data, logprobs):
        both = preferences(logprobs, reference)
        return dpo(both.margin, 0.1).mean(), both.metrics()

    seen = []
    for _ in range(6):
        seen.append(client.forward_backward_custom(data, loss).result().metrics)
        client.optim_step(AdamParams(learning_rate=1e-2)).result()
    assert_close(seen[0]["loss:sum"], math.log(2), rtol=1e-6)
    assert seen[0]["margin"] == pytest.approx(0.0, abs=1e-5)
    assert seen[-1]["margin"] > 1
    assert seen[-1]["accuracy"] == 1.0
