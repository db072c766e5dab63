"""The experts of a mixture: noted, given, refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

import xorl_lab as xl
from tests.closeness import assert_close
from tests.engine import moe
from tests.engine.support import CONTEXT, VOCABULARY, accumulate, exactly, gradient, labelled
from xorl_lab import losses
from xorl_lab.engine import routing, trainer
from xorl_lab.engine.batches import align
from xorl_lab.engine.logprobs import run_packed
from xorl_lab.engine.packing import pack
from xorl_lab.engine.trainer import Trained
from xorl_lab.errors import ConfigError, DataError, ShapeError
from xorl_lab.types import LoraRunSpec

TOKENS = list(b"through which experts does it go")


@pytest.fixture(scope="module", params=sorted(moe.FAMILIES))
def family(request):
    """A model of each family."""
    return moe.FAMILIES[request.param]()


@pytest.fixture(scope="module")
def qwen():
    return moe.qwen()


def noted(model, row) -> routing.Choice:
    """The experts that a model chooses for a packed row."""
    found = list(routing.routers(model).values())
    with torch.no_grad(), routing.recorded(found) as seen:
        run_packed(model, row)
    return seen.choice()


def routed(tokens, experts, **inputs) -> xl.Datum:
    """A datum in the form of ``labels`` that names its experts."""
    datum = labelled(tokens, **inputs)
    return xl.Datum(datum.model_input, datum.loss_fn_inputs, experts)


def batch(model, data):
    return align(
        data,
        vocab_size=VOCABULARY,
        context_length=CONTEXT,
        experts=lambda: routing.experts_of(model),
    )


def forward(trained: Trained, data) -> list[np.ndarray]:
    """(T,) logprobs of each datum."""
    params = losses.check_params("cross_entropy", {})
    output = trained.forward(batch(trained.base, data), "cross_entropy", params, lambda: None)
    return [out.logprobs.to_numpy() for out in output.loss_fn_outputs]


# What a model chooses from, and what it chose.


def test_what_a_model_chooses_from_is_read_off_its_routers(family):
    experts = routing.experts_of(family)
    assert (experts.where, experts.depth, experts.count, experts.chosen) == ((0, 1, 2), 3, 6, 2)
    assert experts.layers == 3


def test_dense_layers_between_those_with_experts_are_left_out():
    model = moe.qwen(mlp_only_layers=[1])
    experts = routing.experts_of(model)
    assert (experts.where, experts.depth, experts.layers) == ((0, 2), 3, 2)
    assert noted(model, pack([TOKENS])[0]).shape == (len(TOKENS), 2, 2)


def test_what_is_noted_is_what_transformers_says_that_it_chose(family):
    choice = noted(family, pack([TOKENS])[0])
    assert choice.dtype == np.int16
    assert choice.tolist() == moe.choice_of(family, TOKENS).tolist()


def test_nothing_stays_on_the_model(family):
    before = [len(m._forward_hooks) for m in family.modules()]
    choice = noted(family, pack([TOKENS])[0])
    with pytest.raises(RuntimeError, match="stop"), routing.replayed(family, choice):
        raise RuntimeError("stop")
    assert [len(m._forward_hooks) for m in family.modules()] == before


def test_a_dense_model_has_no_experts(tiny):
    with pytest.raises(
        ConfigError, match=exactly("this model has no experts (LlamaForCausalLM is dense)")
    ):
        routing.experts_of(tiny)


def test_routers_of_another_kind_are_refused():
    config = DeepseekV3Config(
        **(moe.COMMON | {"num_hidden_layers": 1, "head_dim": 8}),
        n_routed_experts=4,
        first_k_dense_replace=0,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=16,
        intermediate_size=16,
    )
    model = DeepseekV3ForCausalLM(config)
    with pytest.raises(ConfigError, match="can be neither recorded nor replayed"):
        routing.experts_of(model)


def test_routers_that_weight_otherwise_are_refused(monkeypatch):
    """As those that score experts one by one do."""
    model = moe.qwen()
    kind = type(next(iter(routing.routers(model).values())))
    original = kind.forward

    def alone(self, hidden):
        logits, _, chosen = original(self, hidden)
        return logits, torch.sigmoid(logits).gather(-1, chosen), chosen

    monkeypatch.setattr(kind, "forward", alone)
    with pytest.raises(ConfigError, match="do not weight them by a softmax over all"):
        routing.experts_of(model)


# Replay: what is computed.


def test_replaying_a_models_own_choice_changes_nothing(family):
    sequences = [TOKENS, TOKENS[:9] + list(b"elsewhere"), TOKENS[:4]]
    free = pack(sequences)
    own = [moe.choice_of(family, s) for s in sequences]
    given = pack(sequences, experts=own)
    assert len(given[0].tokens) == len(free[0].tokens)
    with torch.no_grad():
        for a, b in zip(free, given, strict=True):
            assert_close(run_packed(family, b), run_packed(family, a), rtol=1e-6, atol=1e-6)


def test_each_token_goes_through_the_experts_given_weighted_by_its_own_router(family):
    other = moe.other_choice((len(TOKENS), 3))
    with torch.no_grad(), moe.blocks_seen(family) as seen:
        run_packed(family, pack([TOKENS], experts=[other])[0])
    assert len(seen) == 3
    for layer, (block, hidden, output) in enumerate(seen):
        wanted = moe.block_output(block, hidden, torch.from_numpy(other[:, layer].astype(int)))
        assert_close(output, wanted, rtol=1e-4, atol=1e-5)


def test_the_order_in_which_experts_are_named_does_not_matter(family):
    other = moe.other_choice((len(TOKENS), 3))
    rows = [pack([TOKENS], experts=[e])[0] for e in (other, other[..., ::-1].copy())]
    with torch.no_grad():
        first, second = (run_packed(family, row) for row in rows)
    assert_close(first, second, rtol=1e-5, atol=1e-5)


def test_a_token_without_experts_is_left_to_the_router(family):
    other = moe.other_choice((len(TOKENS), 3))
    row = pack([TOKENS], experts=[other])[0]
    half = other.copy()
    half[10:] = routing.FREE
    with torch.no_grad():
        mixed = run_packed(family, replace(row, experts=half))
        given = run_packed(family, row)
        with routing.recorded(list(routing.routers(family).values())) as seen:
            run_packed(family, replace(row, experts=half))
    assert_close(mixed[:10], given[:10], rtol=1e-5, atol=1e-5)
    # The routers' own wish is what is noted.
    assert seen.choice().shape == half.shape


# Replay: what is trained.


@pytest.mark.parametrize("share", [True, False])
def test_gate_weights_get_the_gradient_of_what_is_computed(family, share, monkeypatch):
    """Central differences along a random direction of all routers' weights."""
    if not share:
        original = pack
        monkeypatch.setattr(trainer, "pack", lambda *a, **k: original(*a, **(k | {"share": False})))
    trained = Trained("gates", family, None)
    data = [
        routed(tokens, moe.other_choice((len(tokens), 3), seed=i))
        for i, tokens in enumerate([TOKENS, TOKENS[:12]])
    ]
    params = losses.check_params("cross_entropy", {})
    trained.forward_backward(
        batch(family, data), "cross_entropy", params, lambda: None, lambda: None
    )
    gates = [name for name in trained.parameters if name.endswith("gate.weight")]
    assert len(gates) == 3
    generator = torch.Generator().manual_seed(1)
    ways = {n: torch.randn(trained.parameters[n].shape, generator=generator) for n in gates}
    slope = sum(float((trained.window.grads[n] * ways[n]).sum()) for n in gates)

    def loss(distance: float) -> float:
        with torch.no_grad():
            for name in gates:
                trained.parameters[name].add_(ways[name], alpha=distance)
            value = -sum(float(x.astype(np.float64).sum()) for x in forward(trained, data))
            for name in gates:
                trained.parameters[name].sub_(ways[name], alpha=distance)
        return value

    step = 3e-3
    measured = (loss(step) - loss(-step)) / (2 * step)
    assert abs(slope) > 0.1
    assert abs(measured - slope) < 0.01 * abs(slope) + 0.01


def test_experts_that_no_token_goes_through_get_no_gradient(qwen):
    choice = moe.other_choice((len(TOKENS), 3), count=3)
    trained = Trained("idle", qwen, None)
    data = [routed(TOKENS, choice)]
    params = losses.check_params("cross_entropy", {})
    trained.forward_backward(batch(qwen, data), "cross_entropy", params, lambda: None, lambda: None)
    grads = trained.window.grads
    for layer in range(3):
        grad = grads[f"model.layers.{layer}.mlp.experts.down_proj"]
        used = sorted(set(choice[: len(TOKENS) - 1, layer].ravel().tolist()))
        assert [i for i in range(6) if bool(grad[i].any())] == used


def test_prompt_positions_are_replayed_too(qwen):
    """The experts of tokens that are not trained reach the trained ones through attention."""
    trained = Trained("prompt", qwen, None)
    weights = [0.0] * (len(TOKENS) - 4) + [1.0] * 4
    own = moe.choice_of(qwen, TOKENS)
    moved = own.copy()
    moved[:5] = moe.other_choice((5, 3), seed=5)
    (same,), (other,), (free,) = (
        forward(trained, [datum])
        for datum in (
            routed(TOKENS, own, weights=weights),
            routed(TOKENS, moved, weights=weights),
            labelled(TOKENS, weights=weights),
        )
    )
    assert_close(same, free, rtol=0, atol=1e-6)
    assert np.abs(other - free).max() > 1e-3


def test_datums_that_share_a_prefix_share_it_only_with_the_same_experts(qwen):
    """However they are packed, each is computed as it is alone."""
    trained = Trained("prefix", qwen, LoraRunSpec(rank=2, seed=1))
    first, second = TOKENS, TOKENS[:20] + list(b"and there")
    own = moe.other_choice((len(first), 3), seed=1)
    same = np.concatenate([own[:20], moe.other_choice((9, 3), seed=2)])
    odd = same.copy()
    odd[3, 1] = (odd[3, 1] + 1) % 6
    data = [
        routed(first, own),
        routed(second, same),
        routed(second, odd),
        labelled(first),
        labelled(second),
        routed(first, own),
    ]
    together = forward(trained, data)
    for datum, values in zip(data, together, strict=True):
        (alone,) = forward(trained, [datum])
        assert_close(values, alone, rtol=0, atol=1e-5)
    packed = trainer._packed(batch(qwen, data), share=True)
    assert len(packed) == 1
    n, m = len(first) - 1, len(second) - 1
    # own + what `same` adds; `odd` from its third token on; both without experts, which share 20.
    assert len(packed[0].tokens) == (n + m - 20) + (m - 3) + (n + m - 20)


@pytest.mark.parametrize("longest", [1, 40, 1024])
@pytest.mark.parametrize("spec", [None, LoraRunSpec(rank=3, seed=2)])
def test_micro_batches_give_the_same_gradient(qwen, spec, longest, monkeypatch):
    trained = Trained("micro", qwen, spec)
    if spec is not None:  # B is zero at first, and with it the gradient of A
        with torch.no_grad():
            for name, parameter in trained.parameters.items():
                if "lora_B" in name:
                    parameter.normal_(0, 0.1, generator=torch.Generator().manual_seed(3))
    data = [
        routed(TOKENS, moe.other_choice((len(TOKENS), 3), seed=1)),
        labelled(TOKENS[:15]),
        routed(TOKENS[:20], moe.other_choice((20, 3), seed=2)),
    ]
    params = losses.check_params("cross_entropy", {})

    def grads():
        trained.drop_window()
        made = batch(qwen, data)
        trained.forward_backward(made, "cross_entropy", params, lambda: None, lambda: None)
        return trained.window.grads

    whole = grads()
    monkeypatch.setattr(trainer, "MAX_ROW", longest)
    parts = grads()
    assert whole.keys() == parts.keys()
    for name in whole:
        assert_close(parts[name], whole[name], rtol=1e-3, atol=1e-4)


def test_a_custom_loss_sees_replayed_logprobs(qwen):
    trained = Trained("custom", qwen, None)
    data = [routed(TOKENS, moe.other_choice((len(TOKENS), 3)))]
    (expected,) = forward(trained, data)
    got = []

    def loss(logprobs):
        got.append(logprobs[0].detach().numpy())
        return -logprobs[0].sum(), {}

    trained.forward_backward_custom(batch(qwen, data), loss, lambda: None, lambda: None)
    assert_close(got[0], expected, rtol=0, atol=1e-6)
    custom = trained.window.grads["model.layers.1.mlp.gate.weight"]
    trained.drop_window()
    params = losses.check_params("cross_entropy", {})
    trained.forward_backward(batch(qwen, data), "cross_entropy", params, lambda: None, lambda: None)
    assert_close(
        custom, trained.window.grads["model.layers.1.mlp.gate.weight"], rtol=1e-3, atol=1e-5
    )


# What is refused, before anything runs.

GOOD = moe.other_choice((len(TOKENS), 3))


def changed(where, value) -> np.ndarray:
    array = GOOD.copy()
    array[where] = value
    return array


@pytest.mark.parametrize(
    ("experts", "kind", "message"),
    [
        (
            GOOD[:5],
            ShapeError,
            "data[0].routed_experts has shape (5, 3, 2), but 31 tokens, 3 layers with experts and "
            "2 experts per token make (31, 3, 2): pass what the sampler returned for this very "
            "sequence, prompt included",
        ),
        (GOOD[:, :2], ShapeError, "has shape (31, 2, 2)"),
        (GOOD[..., :1], ShapeError, "has shape (31, 3, 1)"),
        (GOOD[:, 0], ShapeError, "has shape (31, 2)"),
        (3, ShapeError, "has shape ()"),
        ([], ShapeError, "has shape (0,)"),
        ([[[0, 1], [0, 1], [0]]] * 31, ShapeError, "data[0].routed_experts is ragged"),
        (
            GOOD.astype(np.float32),
            DataError,
            "data[0].routed_experts is of dtype float32: pass integers, the ids of experts",
        ),
        (GOOD.astype(bool), DataError, "is of dtype bool"),
        (GOOD.astype(str), DataError, "is of dtype <U"),
        (
            changed((4, 2, 1), 6),
            DataError,
            "data[0].routed_experts has expert 6 at token 4, layer 2, but this model's experts are "
            "0 to 5: pass what a sampler of this model returned",
        ),
        (changed((0, 0, 0), -1), DataError, "has expert -1 at token 0, layer 0"),
        (changed((0, 0, 0), routing.FREE), DataError, "has expert -1 at token 0, layer 0"),
        (
            changed((7, 1), 3),
            DataError,
            "data[0].routed_experts has expert 3 twice at token 7, layer 1: a token goes through 2 "
            "different experts",
        ),
        (GOOD.astype(np.int64) + 2**40, DataError, "but this model's experts are 0 to 5"),
    ],
)
def test_experts_that_cannot_be_replayed_are_refused(qwen, experts, kind, message):
    with pytest.raises(kind) as caught:
        batch(qwen, [routed(TOKENS, experts)])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [GOOD, GOOD[:-1], GOOD.tolist(), torch.from_numpy(GOOD), GOOD.astype(np.uint8)],
    ids=["N", "N-1", "lists", "tensor", "uint8"],
)
def test_experts_come_in_many_forms(qwen, given):
    """With ``labels`` the last token is a target only: its experts may be there or not."""
    (row,) = batch(qwen, [routed(TOKENS, given)]).rows
    assert row.experts is not None
    assert row.experts.dtype == np.int16
    assert row.experts.tolist() == GOOD[:-1].tolist()


def test_with_target_tokens_every_input_has_experts(qwen):
    inputs = {"target_tokens": TOKENS[1:]}
    tokens = xl.ModelInput.from_ints(TOKENS[:-1])
    (row,) = batch(qwen, [xl.Datum(tokens, inputs, GOOD[:-1])]).rows
    assert row.experts.tolist() == GOOD[:-1].tolist()
    with pytest.raises(ShapeError, match="has shape"):
        batch(qwen, [xl.Datum(tokens, inputs, GOOD)])


def test_a_model_without_experts_refuses_them(tiny):
    with pytest.raises(
        DataError,
        match=exactly(
            "data[1] has routed_experts, but this model has no experts (LlamaForCausalLM is "
            "dense): leave them out"
        ),
    ):
        batch(tiny, [labelled(TOKENS), routed(TOKENS, GOOD)])


def test_data_without_experts_does_not_ask_for_them(tiny):
    def never():
        raise AssertionError("asked")

    made = align([labelled(TOKENS)], vocab_size=VOCABULARY, context_length=CONTEXT, experts=never)
    assert made.rows[0].experts is None


def test_without_experts_nothing_is_hooked(qwen, monkeypatch):
    """Dense models, and data without experts, do not pay."""
    monkeypatch.setattr(routing, "replayed", lambda *_: pytest.fail("replayed"))
    monkeypatch.setattr("xorl_lab.engine.logprobs.replayed", lambda *_: pytest.fail("replayed"))
    trained = Trained("free", qwen, LoraRunSpec(rank=2, seed=1))
    gradient(trained, [labelled(TOKENS)])
    accumulate(trained, [labelled(TOKENS)])
