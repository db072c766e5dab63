"""The gradient against a plain implementation, and what it must not depend on."""

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tests.closeness import assert_close
from tests.engine.support import (
    Tensors,
    accumulate,
    batch,
    distance,
    gradient,
    labelled,
    plain_logprobs,
    plain_loss,
    rollouts,
    shifted,
    supervised,
)
from xorl_lab import losses
from xorl_lab.engine import adapters, trainer
from xorl_lab.engine.packing import pack
from xorl_lab.engine.quiet import quiet
from xorl_lab.engine.sharing import clone
from xorl_lab.engine.trainer import Trained
from xorl_lab.types import Datum, LoraRunSpec, ModelInput, TensorData

SPEC = LoraRunSpec(rank=4, alpha=8.0, seed=5)
LOSSES = {"cross_entropy": supervised, "policy_loss": rollouts}
EXACT, SINGLE = 1e-10, 1e-5


def trained(base: PreTrainedModel, spec: LoraRunSpec | None) -> Trained:
    """A model whose adapter, if it has one, is not at its start, where half the gradient is 0."""
    made = Trained("test", base, spec)
    if spec is not None:
        draw = torch.Generator().manual_seed(9)
        with torch.no_grad():
            for name, parameter in made.parameters.items():
                if ".lora_B." in name:
                    noise = torch.randn(parameter.shape, generator=draw, dtype=parameter.dtype)
                    parameter.add_(0.05 * noise)
    return made


def plain(base: PreTrainedModel, made: Trained) -> tuple[torch.nn.Module, Tensors]:
    """The same model by transformers and peft alone, and its parameters by our names."""
    if made.spec is None:
        model = clone(base).requires_grad_(True)
        return model, dict(model.named_parameters())
    config = LoraConfig(
        r=made.spec.rank,
        lora_alpha=int(made.spec.alpha),
        target_modules=adapters.target_names(base, made.spec),
        task_type="CAUSAL_LM",
    )
    with quiet():
        model = get_peft_model(clone(base), config).to(base.dtype)
    ours = {n.replace(".default", ""): p for n, p in model.named_parameters() if "lora_" in n}
    with torch.no_grad():
        for name, value in made.weights().items():
            ours[name].copy_(value)
    return model, ours


def plain_gradient(
    base: PreTrainedModel, made: Trained, data: list[Datum], loss_fn: str
) -> Tensors:
    model, parameters = plain(base, made)
    loss = plain_loss(model, data, loss_fn)
    grads = torch.autograd.grad(loss, list(parameters.values()))
    return dict(zip(parameters, grads, strict=True))


@pytest.mark.parametrize("spec", [SPEC, None], ids=["lora", "full"])
@pytest.mark.parametrize("loss_fn", LOSSES)
def test_gradient_is_that_of_padded_rows_and_a_whole_softmax(tiny64, spec, loss_fn):
    data = LOSSES[loss_fn]()
    made = trained(tiny64, spec)
    assert distance(gradient(made, data, loss_fn), plain_gradient(tiny64, made, data, loss_fn)) < (
        EXACT
    )


@pytest.mark.parametrize("spec", [SPEC, None], ids=["lora", "full"])
@pytest.mark.parametrize("loss_fn", LOSSES)
def test_gradient_in_single_precision(tiny, spec, loss_fn):
    data = LOSSES[loss_fn]()
    made = trained(tiny, spec)
    assert distance(gradient(made, data, loss_fn), plain_gradient(tiny, made, data, loss_fn)) < (
        SINGLE
    )


def test_logprobs_and_loss_are_those_of_padded_rows(tiny64):
    data = supervised()
    output = accumulate(trained(tiny64, None), data)
    expected = plain_logprobs(tiny64, data)
    total = 0.0
    for i, (datum, got) in enumerate(zip(data, output.loss_fn_outputs, strict=True)):
        given = np.asarray(datum.loss_fn_inputs["weights"].data)[1:]
        wanted = np.where(given != 0, expected[i, : len(given)].detach(), 0.0)
        assert_close(got.logprobs.to_numpy(), wanted, rtol=1e-6)
        assert_close(got.elementwise_loss.to_numpy(), -given * wanted, rtol=1e-6)
        assert_close(got.loss, -(given * wanted).sum(), rtol=1e-6)
        total += got.loss
    assert_close(output.metrics["loss:sum"], total, rtol=1e-6)
    valid = sum(int(np.count_nonzero(d.loss_fn_inputs["weights"].data[1:])) for d in data)
    assert output.metrics["valid_tokens"] == valid
    assert_close(output.metrics["loss:mean"], total / valid, rtol=1e-6)


def test_temperature_divides_the_logits(tiny64):
    data = [labelled([1, 2, 3, 4, 5])]
    output = accumulate(trained(tiny64, None), data, logprob_temperature=0.7)
    expected = plain_logprobs(tiny64, data, temperature=0.7)[0]
    assert_close(output.loss_fn_outputs[0].logprobs.to_numpy(), expected, rtol=1e-6)


def test_forward_reports_what_forward_backward_reports(tiny64):
    made = trained(tiny64, SPEC)
    data = rollouts()
    params = losses.check_params("policy_loss", {"return_terms": True})
    forward = made.forward(batch(data, "policy_loss"), "policy_loss", params, lambda: None)
    backward = accumulate(made, data, "policy_loss", return_terms=True)
    assert forward.metrics == pytest.approx(backward.metrics, rel=1e-12)
    for one, other in zip(forward.loss_fn_outputs, backward.loss_fn_outputs, strict=True):
        assert set(one) == set(other) > {"ratio", "entropy", "clipped"}
        for name in one.terms:
            assert_close(one[name].to_numpy(), other[name].to_numpy(), rtol=1e-6)


def test_forward_with_adapters_off_is_the_base_model(tiny64):
    made = trained(tiny64, SPEC)
    data = [labelled([1, 2, 3, 4])]
    params = losses.check_params("cross_entropy", None)
    off = made.forward(batch(data), "cross_entropy", params, lambda: None, adapters_off=True)
    assert_close(
        off.loss_fn_outputs[0].logprobs.to_numpy(), plain_logprobs(tiny64, data)[0], rtol=1e-6
    )


def test_labels_and_target_tokens_give_the_same(tiny64):
    made = trained(tiny64, SPEC)
    rows = [(d.model_input.to_ints(), d.loss_fn_inputs) for d in rollouts()]
    extras = [{k: v.data for k, v in inputs.items() if k != "labels"} for _, inputs in rows]
    forms = [
        [labelled(t, **e) for (t, _), e in zip(rows, extras, strict=True)],
        [
            labelled(t, **{k: v[1:] for k, v in e.items()})
            for (t, _), e in zip(rows, extras, strict=True)
        ],
        [
            shifted(t, **{k: v[1:] for k, v in e.items()})
            for (t, _), e in zip(rows, extras, strict=True)
        ],
    ]
    outputs = [accumulate(made, data, "policy_loss") for data in forms]
    grads = [gradient(made, data, "policy_loss") for data in forms]
    for output, grad in zip(outputs[1:], grads[1:], strict=True):
        assert output.metrics == outputs[0].metrics
        assert all(torch.equal(grad[k], grads[0][k]) for k in grads[0])
        for one, other in zip(output.loss_fn_outputs, outputs[0].loss_fn_outputs, strict=True):
            assert one.logprobs.data == other.logprobs.data


@pytest.mark.parametrize("spec", [SPEC, None], ids=["lora", "full"])
@pytest.mark.parametrize("double", [True, False], ids=["float64", "float32"])
def test_order_of_the_data_does_not_matter(tiny, tiny64, spec, double):
    made = trained(tiny64 if double else tiny, spec)
    data = rollouts() + rollouts()[:2]
    expected = gradient(made, data, "policy_loss")
    turned = gradient(made, data[::-1], "policy_loss")
    assert distance(turned, expected) < (EXACT if double else SINGLE)


@pytest.mark.parametrize("spec", [SPEC, None], ids=["lora", "full"])
@pytest.mark.parametrize("double", [True, False], ids=["float64", "float32"])
def test_one_call_of_n_is_n_calls_of_one(tiny, tiny64, spec, double):
    made = trained(tiny64 if double else tiny, spec)
    data = supervised()
    expected = gradient(made, data)
    for datum in data:
        accumulate(made, [datum])
    assert distance(made.window.grads, expected) < (EXACT if double else SINGLE)
    assert made.window.valid_tokens == batch(data).valid_tokens
    assert made.window.calls == len(data)


@pytest.mark.parametrize("double", [True, False], ids=["float64", "float32"])
@pytest.mark.parametrize("max_row", [1, 16, 40])
def test_micro_batches_do_not_matter(tiny, tiny64, monkeypatch, double, max_row):
    made = trained(tiny64 if double else tiny, SPEC)
    data = rollouts()
    whole, expected = accumulate(made, data, "policy_loss"), gradient(made, data, "policy_loss")
    monkeypatch.setattr(trainer, "MAX_ROW", max_row)
    assert len(trainer._packed(batch(data, "policy_loss"), share=True)) > 1
    cut = accumulate(made, data, "policy_loss")
    assert cut.metrics == pytest.approx(whole.metrics, rel=EXACT if double else SINGLE)
    assert distance(gradient(made, data, "policy_loss"), expected) < (EXACT if double else SINGLE)


@pytest.mark.parametrize("double", [True, False], ids=["float64", "float32"])
def test_sharing_of_prefixes_does_not_matter(tiny, tiny64, monkeypatch, double):
    made = trained(tiny64 if double else tiny, SPEC)
    data = rollouts()
    expected = gradient(made, data, "policy_loss")
    monkeypatch.setattr(trainer, "pack", lambda s, *, max_row, share, experts: pack(s, share=False))
    assert distance(gradient(made, data, "policy_loss"), expected) < (EXACT if double else SINGLE)


def test_what_follows_the_last_trained_token_does_not_matter(tiny64):
    made = trained(tiny64, SPEC)
    short = gradient(made, [labelled([1, 2, 3, 4], weights=[0, 0, 1, 0])])
    other = gradient(made, [labelled([1, 2, 3, 200], weights=[0, 0, 1, 0])])
    assert distance(other, short) == 0


def test_an_untrained_target_gives_no_gradient_and_no_loss(tiny64):
    made = trained(tiny64, None)
    masked = [Datum(ModelInput.from_ints([1, 2, 3]), {"labels": [1, -100, 3]})]
    weighted = [labelled([1, 2, 3], weights=[0, 0, 1])]
    assert distance(gradient(made, masked), gradient(made, weighted)) == 0
    output = accumulate(made, masked)
    assert output.loss_fn_outputs[0].logprobs.data[0] == 0.0
    assert output.metrics["valid_tokens"] == 1


def test_weights_scale_the_gradient(tiny64):
    made = trained(tiny64, SPEC)
    once = gradient(made, [labelled([1, 2, 3], weights=[0, 1, 1])])
    thrice = gradient(made, [labelled([1, 2, 3], weights=[0, 3, 3])])
    assert distance(thrice, {k: 3 * g for k, g in once.items()}) < EXACT


def test_a_row_without_signal_changes_nothing_but_its_count(tiny64):
    made = trained(tiny64, SPEC)
    silent = labelled([9, 8, 7], logprobs=[0, 0, 0], advantages=[0, 0, 0])
    data = rollouts(3)
    expected = gradient(made, data, "policy_loss")
    assert distance(gradient(made, [silent, *data], "policy_loss"), expected) == 0
    output = accumulate(made, [silent, *data], "policy_loss")
    assert output.metrics["rows_without_signal"] == 1
    assert output.loss_fn_outputs[0].logprobs.data == [0.0, 0.0]
    assert output.loss_fn_outputs[0].loss == 0.0
    assert len(output.loss_fn_outputs) == 4


def test_equal_rewards_give_zero_gradient_but_count_as_valid(tiny64):
    made = trained(tiny64, SPEC)
    data = [labelled([1, 2, 3], logprobs=[0, -4, -4], advantages=[0, 0, 0])]
    assert gradient(made, data, "policy_loss") == {}
    assert accumulate(made, data, "policy_loss").metrics["valid_tokens"] == 2


def constant(datum: Datum, value: float) -> TensorData:
    return TensorData.from_list([value] * datum.model_input.length)


def silence(datum: Datum) -> None:
    datum.loss_fn_inputs["advantages"] = constant(datum, 0.0)


SILENT = ["cispo", "drgrpo", "importance_sampling", "policy_loss", "ppo"]


@pytest.mark.parametrize("loss_fn", SILENT)
def test_a_rollout_with_advantage_zero_costs_no_backward_pass(tiny64, monkeypatch, loss_fn):
    made = trained(tiny64, SPEC)
    loud, silent = rollouts(4), rollouts(3, seed=1)
    for datum in silent:
        silence(datum)
    data = [silent[0], *loud[:2], silent[1], *loud[2:], silent[2]]
    got, output = gradient(made, data, loss_fn), accumulate(made, data, loss_fn)
    made.drop_window()
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "_silent", lambda *_: [])
        expected, whole = gradient(made, data, loss_fn), accumulate(made, data, loss_fn)
    made.drop_window()
    assert distance(got, expected) < EXACT
    assert set(output.metrics) == set(whole.metrics)
    for name, value in whole.metrics.items():
        assert_close(output.metrics[name], value, rtol=1e-6)
    for a, b in zip(output.loss_fn_outputs, whole.loss_fn_outputs, strict=True):
        assert_close(a.logprobs.data, b.logprobs.data, rtol=1e-6)
    backward: list[int] = []
    real = Trained._gradient
    monkeypatch.setattr(Trained, "_gradient", lambda *a: backward.append(1) or real(*a))
    assert gradient(made, silent, loss_fn) == {}
    assert not backward


@pytest.mark.parametrize(
    ("loss_fn", "params"),
    [
        ("dro", {}),
        ("cross_entropy", {}),
        ("policy_loss", {"kl_coef": 0.1}),
        ("importance_sampling", {"kl_coef": 0.1}),
        ("drgrpo", {"beta": 0.1}),
    ],
)
def test_other_gradients_do_not_vanish_with_the_advantage(tiny64, loss_fn, params):
    made = trained(tiny64, SPEC)
    data = rollouts(3)
    for datum in data:
        silence(datum)
        datum.loss_fn_inputs["ref_logprobs"] = constant(datum, -4.0)
    assert any(g.any() for g in gradient(made, data, loss_fn, **params).values())


def test_the_end_token_is_learned_even_if_it_is_the_padding_token_too():
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        eos_token_id=3,
        pad_token_id=3,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        base = LlamaForCausalLM(config).eval().requires_grad_(False)
    made = Trained("test", base, None)
    data = [labelled([5, 6, 3]), labelled([5, 6, 7, 8, 9, 10, 3])]
    grads = gradient(made, data)
    assert grads["lm_head.weight"][3].norm() > 0.1
    first = accumulate(made, data).loss_fn_outputs[0].logprobs.data[-1]
    for _ in range(20):
        made.optim_step(trainer.AdamParams(learning_rate=1e-2))
        output = accumulate(made, data)
    assert output.loss_fn_outputs[0].logprobs.data[-1] > first + 1


def test_the_dropout_of_an_adapted_head_is_the_same_in_both_passes(tiny64):
    """The head runs twice, and a second draw would give the gradient of another function."""
    spec = LoraRunSpec(rank=4, dropout=0.5, seed=1, train_unembed=True)
    made = trained(tiny64, spec)
    data = [labelled(list(range(20)))]
    name, parameter = next((n, p) for n, p in made.parameters.items() if "lm_head.lora_A" in n)
    state = made.generator.get_state()

    def loss() -> float:
        made.generator.set_state(state)
        total = accumulate(made, data).metrics["loss:sum"]
        made.drop_window()
        return total

    made.generator.set_state(state)
    slope = gradient(made, data)[name]
    direction, epsilon = slope / slope.norm(), 1e-4
    parameter.data += epsilon * direction
    above = loss()
    parameter.data -= 2 * epsilon * direction
    below = loss()
    assert_close((above - below) / (2 * epsilon), slope.norm(), rtol=1e-4)


def test_many_small_gradients_add_up_in_bfloat16(tiny):
    base = clone(tiny).bfloat16().requires_grad_(False)
    made = Trained("test", base, None)
    data = [labelled([1, 2, 3, 4])]
    once = gradient(made, data)
    for _ in range(40):
        accumulate(made, data)
    assert distance(made.window.grads, {k: 40 * g for k, g in once.items()}) < 1e-4


def test_the_base_is_never_written_to(tiny):
    before = {k: v.clone() for k, v in tiny.state_dict().items()}
    for spec in (SPEC, None):
        made = trained(tiny, spec)
        accumulate(made, supervised())
        made.optim_step(trainer.AdamParams(learning_rate=1e-1))
    assert all(torch.equal(before[k], v) for k, v in tiny.state_dict().items())
    assert not any(p.requires_grad for p in tiny.parameters())


def test_adapters_share_the_weights_of_the_base(tiny):
    made = Trained("test", tiny, SPEC)
    ours = {id(p) for p in made.model.parameters()}
    assert {id(p) for p in tiny.parameters()} <= ours
    assert all(p.requires_grad for p in made.parameters.values())
