"""Attention block by block is attention."""

import itertools
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    JetMoeConfig,
    LlamaConfig,
    LlamaForCausalLM,
    NemotronConfig,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tests.closeness import assert_close
from xorl_lab.engine import attention, logprobs, models, saving
from xorl_lab.engine.attention import BLOCK, Block, attend, blocks
from xorl_lab.engine.packing import PackedRow, pack
from xorl_lab.engine.quiet import quiet
from xorl_lab.engine.sharing import clone, share
from xorl_lab.engine.trainer import Trained
from xorl_lab.types import LoraRunSpec

# Few different tokens, so that sequences share prefixes; long ones, so that there are many blocks.
SHORT = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=8)
LONG = st.builds(
    lambda prompt, tails: [[0] * prompt + [i + 1] * n for i, n in enumerate(tails)],
    st.integers(0, 3 * BLOCK),
    st.lists(st.integers(1, 3 * BLOCK), min_size=1, max_size=4),
)
TREES = st.tuples(SHORT | LONG, st.booleans())
Tensors = tuple[torch.Tensor, ...]


def row_of(sequences: list[list[int]], *, share: bool = True) -> PackedRow:
    (row,) = pack(sequences, max_row=10**6, share=share)
    return row


def seen(row: PackedRow) -> torch.Tensor:
    """(L, L) bool: what each node may look at, found by walking up the tree."""
    mask = np.zeros((len(row.tokens), len(row.tokens)), dtype=np.bool_)
    parents = row.parents.tolist()
    for node in range(len(mask)):
        path = [node]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        mask[node, path] = True
    return torch.from_numpy(mask)


def tensors(row: PackedRow, heads: int, kv: int, width: int = 3, *, seed: int = 0) -> Tensors:
    """Queries, keys, values and a gradient of the output, in double precision."""
    draw = torch.Generator().manual_seed(seed)
    length = len(row.tokens)
    shapes = [(heads, length, width), *[(kv, length, width)] * 2, (length, heads, width)]
    made = [torch.randn(s, generator=draw, dtype=torch.float64) for s in shapes]
    return (*(m.requires_grad_() for m in made[:3]), made[3])


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float):
    """Attention as it is defined."""
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    scores = (q @ k.transpose(1, 2) * scale).masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1)


def compare(row: PackedRow, layout: list[Block], heads: int, kv: int, scale: float = 0.7) -> None:
    q, k, v, grad = tensors(row, heads, kv)
    got, expected = attend(q, k, v, layout, scale), dense(q, k, v, seen(row), scale)
    assert_close(got, expected, rtol=1e-9, atol=1e-12)
    slopes = torch.autograd.grad(got, (q, k, v), grad)
    for slope, wanted in zip(slopes, torch.autograd.grad(expected, (q, k, v), grad), strict=True):
        assert_close(slope, wanted, rtol=1e-9, atol=1e-12)


@settings(max_examples=40)
@given(TREES, st.sampled_from([(1, 1), (2, 2), (4, 2), (6, 2), (3, 1)]), st.floats(0.1, 2.0))
def test_attending_along_blocks_is_masked_softmax_attention(tree, heads, scale):
    row = row_of(tree[0], share=tree[1])
    layout = blocks(row, heads[0] // heads[1], torch.float64)
    compare(row, layout, *heads, scale)


@settings(max_examples=60)
@given(TREES, st.integers(1, 3))
def test_blocks_hold_every_query_once_and_the_keys_that_it_may_see(tree, sharing):
    row = row_of(tree[0], share=tree[1])
    allowed, end = seen(row), 0
    for block in blocks(row, sharing):
        start, stop = block.queries.start, block.queries.stop
        assert start == end < stop <= start + BLOCK
        end = stop
        keys = torch.cat([torch.arange(len(allowed))[run] for run in block.keys])
        assert keys.tolist() == torch.nonzero(allowed[start:stop].any(0))[:, 0].tolist()
        assert all(a.stop < b.start for a, b in itertools.pairwise(block.keys))
        bias = torch.zeros(stop - start, len(keys))
        bias[~allowed[start:stop][:, keys]] = -torch.inf
        assert torch.equal(block.bias, torch.cat([bias] * sharing))
    assert end == len(allowed)


def test_blocks_end_where_a_branch_does_unless_they_would_be_short():
    def cuts(*lengths: int, prompt: int = 10) -> list[int]:
        row = row_of([[0] * prompt + [i + 1] * n for i, n in enumerate(lengths)])
        return [b.queries.stop for b in blocks(row, 1)]

    half = BLOCK // 2
    assert cuts(half, half) == [10 + half, 10 + 2 * half]
    assert cuts(half - 11, half) == [half - 1 + half]
    assert cuts(half - 11, half + 1) == [2 * half]
    assert cuts(half - 11, half + 2) == [2 * half, 2 * half + 1]
    assert cuts(BLOCK, 5) == [BLOCK, BLOCK + 15]
    assert cuts(2 * BLOCK) == [BLOCK, 2 * BLOCK, 2 * BLOCK + 10]


def test_a_branch_does_not_look_at_its_siblings_keys():
    row = row_of([[0] * 40 + [i + 1] * BLOCK for i in range(3)])
    layout = blocks(row, 2, torch.float64)
    assert layout[-1].keys == [slice(0, 40), slice(40 + 2 * BLOCK, 40 + 3 * BLOCK)]
    compare(row, layout, 4, 2)


def test_sequences_side_by_side_do_not_see_one_another():
    row = row_of([[1] * 50, [1] * 50, [2] * 70], share=False)
    layout = blocks(row, 1, torch.float64)
    seen = [(0, 50), (50, 100), (100, 164), (100, 170)]
    assert [b.keys for b in layout] == [[slice(*ends)] for ends in seen]
    compare(row, layout, 2, 2)


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_gradient_arrives_where_it_is_asked_for_alone(wanted):
    row = row_of([[0, 1, 2], [0, 3]])
    *inputs, grad = tensors(row, 4, 2)
    inputs = [x.detach().requires_grad_(i == wanted) for i, x in enumerate(inputs)]
    got = attend(*inputs, blocks(row, 2, torch.float64), 0.5)
    (slope,) = torch.autograd.grad(got, inputs[wanted], grad)
    expected = dense(*inputs, seen(row), 0.5)
    assert_close(slope, *torch.autograd.grad(expected, inputs[wanted], grad), rtol=1e-9, atol=1e-12)


def test_views_are_read_as_what_they_are():
    # transformers hands over (L, heads, D) turned round, and a gradient may come expanded.
    row = row_of([[0] * 20 + [1] * 50, [0] * 20 + [2] * 60])
    contiguous = tensors(row, 4, 2)
    turned = [x.detach().transpose(0, 1).contiguous().transpose(0, 1) for x in contiguous[:3]]
    turned = [x.requires_grad_() for x in turned]
    assert not any(x.is_contiguous() for x in turned)
    layout = blocks(row, 2, torch.float64)
    got = attend(*turned, layout, 0.5)
    assert_close(got, attend(*contiguous[:3], layout, 0.5), rtol=1e-12, atol=1e-15)
    slopes = torch.autograd.grad(got.sum(), turned)
    expected = torch.autograd.grad(dense(*turned, seen(row), 0.5).sum(), turned)
    for slope, wanted in zip(slopes, expected, strict=True):
        assert_close(slope, wanted, rtol=1e-9, atol=1e-12)


def test_nothing_larger_than_the_inputs_is_kept_for_the_backward_pass():
    row = row_of([[i] * 100 for i in range(4)])
    q, k, v, _ = tensors(row, 4, 2)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.append(x.numel()) or x, lambda x: x
    ):
        attend(q, k, v, blocks(row, 2, torch.float64), 0.5)
    assert kept
    assert max(kept) <= q.numel()


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def test_bfloat16_in_bfloat16_out_and_float32_between():
    row = row_of([[0] * 30 + [1] * 100, [0] * 30 + [2] * 120])
    *inputs, grad = [x.detach().bfloat16() for x in tensors(row, 4, 2, 16)]
    coarse = [x.clone().requires_grad_() for x in inputs]
    fine = [x.float().requires_grad_() for x in inputs]
    layout = blocks(row, 2)
    got, wanted = attend(*coarse, layout, 0.25), attend(*fine, layout, 0.25)
    assert got.dtype == torch.bfloat16
    # Rounded once at the end: half a unit in the last of 8 bits.
    assert_close(got.float(), wanted, rtol=0, atol=2**-8 * float(wanted.detach().abs().max()))
    assert relative(got.detach(), wanted.detach()) < 2e-3
    slopes = torch.autograd.grad(got, coarse, grad)
    for slope, exact in zip(slopes, torch.autograd.grad(wanted, fine, grad.float()), strict=True):
        assert slope.dtype == torch.bfloat16
        assert relative(slope, exact) < 5e-3


def test_probabilities_do_not_overflow():
    row = row_of([[0, 1], [0, 2]])
    q, k, v, grad = (x.detach().float() for x in tensors(row, 2, 2))
    q.mul_(1e4).requires_grad_()
    k.mul_(1e4)
    got = attend(q, k, v, blocks(row, 1), 1.0)
    assert_close(got, dense(q.double(), k.double(), v.double(), seen(row), 1.0), rtol=1e-5)
    (slope,) = torch.autograd.grad(got, q, grad)
    assert torch.isfinite(slope).all()


class Module(torch.nn.Module):
    """What transformers' attention reads off the layer that calls it."""

    num_key_value_groups = 2
    is_causal = True


def test_scaling_is_one_over_the_root_of_the_width_unless_given():
    row = row_of([[0, 1, 2], [0, 3]])
    q, k, v, _ = (x.detach() for x in tensors(row, 4, 2, 9))
    layout = blocks(row, 2, torch.float64)
    for scaling, scale in ((None, 1 / 3), (0.9, 0.9)):
        out, weights = attention.forward(
            Module(), q[None], k[None], v[None], None, scaling=scaling, layout=layout, dropout=0.0
        )
        assert weights is None
        assert_close(out, dense(q, k, v, seen(row), scale)[None], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("masked", [False, True])
def test_without_a_layout_it_is_the_attention_of_transformers(masked):
    draw = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, h, 5, 8, generator=draw, dtype=torch.float64).requires_grad_()
        for h in (4, 2, 2)
    )
    mask = torch.rand(2, 1, 5, 5, generator=draw) > 0.5 if masked else None
    if mask is not None:
        mask |= torch.eye(5, dtype=torch.bool)
    values = []
    for function in (attention.forward, sdpa_attention_forward):
        out, weights = function(Module(), q, k, v, mask, scaling=0.3, dropout=0.0)
        values.append((out, *torch.autograd.grad(out.pow(2).sum(), (q, k, v))))
        assert weights is None
    assert all(torch.equal(a, b) for a, b in zip(*values, strict=True))
    full = (
        mask if mask is not None else torch.ones(5, 5, dtype=torch.bool).tril().expand(2, 1, 5, 5)
    )
    for got, *inputs, allowed in zip(values[0][0], q, k, v, full, strict=True):
        assert_close(got, dense(*inputs, allowed[0], 0.3), rtol=1e-9, atol=1e-12)


# Whole models.


@pytest.fixture(scope="module", params=["tiny", "tiny-moe"])
def model(request) -> PreTrainedModel:
    return models.load(request.param, device="cpu", dtype="float32").model


def with_sdpa(model: PreTrainedModel) -> PreTrainedModel:
    other = clone(model)
    other.set_attn_implementation("sdpa")
    assert not attention.used_by(other)
    return other


def random_row(seed: int = 0) -> PackedRow:
    draw = np.random.default_rng(seed)
    prompt = draw.integers(0, 256, 30).tolist()
    tails = [draw.integers(0, 256, n).tolist() for n in (1, 70, 90, 20)]
    return row_of([*(prompt + tail for tail in tails), draw.integers(0, 256, 80).tolist()])


def test_models_come_with_this_attention(model):
    assert attention.used_by(model)
    assert attention.heads_per_key(model) == 2


def test_a_model_computes_what_it_does_on_sdpa(model):
    row = random_row()
    got, wanted = (logprobs.run_packed(m, row) for m in (model, with_sdpa(model)))
    assert_close(got, wanted, rtol=0, atol=1e-5)


def test_a_model_gets_the_gradients_that_it_gets_on_sdpa(model):
    row = random_row()
    grads = []
    for each in (clone(model), with_sdpa(model)):
        each.requires_grad_(True)
        hidden = logprobs.run_packed(each, row)
        weights = torch.linspace(-1, 1, hidden.numel()).view_as(hidden)
        each.zero_grad()
        (hidden * weights).sum().backward()
        grads.append({n: p.grad for n, p in each.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    assert len(grads[0]) >= 20
    for name, grad in grads[0].items():
        assert relative(grad, grads[1][name]) < 1e-4, name


def test_a_row_is_what_its_sequences_are_alone(model):
    row = random_row(1)
    together = logprobs.run_packed(model, row)
    plain = with_sdpa(model)
    for slots in row.slots:
        ids = torch.from_numpy(row.tokens[slots])[None]
        alone = plain.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[0]
        assert_close(together[torch.from_numpy(slots)], alone, rtol=0, atol=1e-5)


def test_a_padded_batch_is_masked_as_on_sdpa(model):
    ids = torch.arange(12).view(2, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    got, wanted = (
        m(input_ids=ids, attention_mask=mask, position_ids=positions).logits[mask.bool()]
        for m in (model, with_sdpa(model))
    )
    assert_close(got, wanted, rtol=0, atol=1e-5)


def random_model(config) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(0)
        made = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
        for parameter in made.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.3)
    return made.requires_grad_(False)


SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
ODD = {
    "values narrower than keys": lambda: DeepseekV3Config(**SIZES, num_key_value_heads=4, **LATENT),
    "keys repeated before": lambda: JetMoeConfig(
        **SIZES, num_key_value_heads=2, num_local_experts=2, kv_channels=8
    ),
    "layers that pass nothing on": lambda: NemotronConfig(**SIZES, num_key_value_heads=2),
}


@pytest.mark.parametrize("kind", ODD)
def test_models_that_do_it_their_own_way_are_not_computed_wrong(kind):
    made = random_model(ODD[kind]())
    row = row_of([[1, 2, 3, 4, 5], [1, 2, 6, 7], [8, 9]])
    wanted = logprobs.run_packed(made, row)
    models.attend_by_blocks(made)
    assert_close(logprobs.run_packed(made, row), wanted, rtol=1e-3, atol=1e-5)


def test_only_models_that_can_choose_get_it(tiny):
    assert attention.used_by(tiny)
    stubborn = with_sdpa(tiny)
    stubborn._supports_attention_backend = False
    attention.use(stubborn)
    assert not attention.used_by(stubborn)


def test_heads_per_key_counts_heads_without_groups_once():
    config = LlamaConfig(**SIZES, num_key_value_heads=None)
    with torch.device("meta"):
        single = LlamaForCausalLM(config)
    assert attention.heads_per_key(single) == 1


@pytest.mark.parametrize("spec", [None, LoraRunSpec(rank=2)], ids=["full", "lora"])
def test_saved_files_do_not_name_it(model, tmp_path, spec):
    saving.save(Trained("test", model, spec), tmp_path / "a", {}, overwrite=False)
    for path in tmp_path.glob("a/*.json"):
        # The hashes of files are the only text in there that is not ours to choose.
        assert attention.NAME not in json.dumps(json.loads(path.read_text())), path.name
    if spec is None:
        config = AutoConfig.from_pretrained(tmp_path / "a")
        assert config._attn_implementation != attention.NAME


def test_a_copy_attends_alike_and_its_choice_is_its_own(model):
    for copied in (clone(model), share(model)):
        assert attention.used_by(copied)
        copied.set_attn_implementation("sdpa")
        assert attention.used_by(model)


def test_a_config_that_transformers_saves_does_not_name_it(model, tmp_path):
    clone(model).config.save_pretrained(tmp_path)
    assert attention.NAME not in (tmp_path / "config.json").read_text()
