"""The lean weights compute what transformers' modules do."""

from collections.abc import Callable, Iterable

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.closeness import assert_close
from xorl_lab.engine import attention, products
from xorl_lab.engine.adapters import PREFIX, MergedCopy, linear_layers
from xorl_lab.engine.packing import pack
from xorl_lab.engine.quiet import quiet
from xorl_lab.samplers import lean
from xorl_lab.samplers.cache import PromptCache, RowCache
from xorl_lab.samplers.heads import Halves, Pairs
from xorl_lab.samplers.lean import LeanWeights, supported
from xorl_lab.samplers.networks import LeanNetwork, PlainNetwork

V = 97
SIZES = {
    "vocab_size": V,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
YARN |= {"original_max_position_embeddings": 64}
CONFIGS = {
    "llama": lambda **k: LlamaConfig(**SIZES | k),
    "llama, biases": lambda **k: LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, **k),
    "llama, one head per key": lambda **k: LlamaConfig(**SIZES | {"num_key_value_heads": 4} | k),
    "llama, scaled positions": lambda **k: LlamaConfig(**SIZES, rope_parameters=LLAMA3, **k),
    "llama, yarn": lambda **k: LlamaConfig(**SIZES, rope_parameters=YARN, **k),
    "llama, gelu": lambda **k: LlamaConfig(**SIZES, hidden_act="gelu", **k),
    "mistral": lambda **k: MistralConfig(**SIZES, sliding_window=None, head_dim=10, **k),
    "qwen2": lambda **k: Qwen2Config(**SIZES, **k),
    "qwen3": lambda **k: Qwen3Config(**SIZES, head_dim=16, **k),
}
ADAPTERS = {
    "none": (),
    "all": None,
    "with head": ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "lm_head"),
    "head alone": ("lm_head",),
    "second of three": ("k_proj",),
    "outer of three": ("q_proj", "v_proj"),
    "second of two": ("up_proj",),
    "one layer": ("layers.1.self_attn.v_proj", "layers.1.mlp.down_proj"),
}
SCALE = 0.7


def random_model(name: str, dtype: torch.dtype = torch.float32, **changes) -> PreTrainedModel:
    """A model in which no weight, bias or norm is what it is at the start of training."""
    config = CONFIGS[name](**changes)
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(0)
        made = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
        for parameter in made.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=1.2 / parameter.shape[1] ** 0.5)
            else:
                torch.nn.init.normal_(parameter, mean=0.7, std=0.3)
    return made.to(dtype).requires_grad_(False)


def random_adapter(
    model: PreTrainedModel, ends: Iterable[str] | None, rank: int = 3
) -> dict[str, torch.Tensor]:
    """An adapter on the modules with these endings; on all but the head where there are none."""
    parts = linear_layers(model)
    names = [n for part in parts.values() for n in part]
    if ends is None:
        names = parts["attn"] + parts["mlp"]
    else:
        names = [n for n in names if n.endswith(tuple(ends))] if ends else []
        assert names or not ends
    draw = torch.Generator().manual_seed(3)
    result = {}
    for name in names:
        out, inputs = model.get_submodule(name).weight.shape
        a = torch.randn(rank, inputs, generator=draw) / inputs**0.5
        result[f"{PREFIX}{name}.lora_A.weight"] = a
        result[f"{PREFIX}{name}.lora_B.weight"] = torch.randn(out, rank, generator=draw) / 2
    return result


def merged(model: PreTrainedModel, adapter: dict[str, torch.Tensor]) -> PlainNetwork:
    copy = MergedCopy(model)
    copy.load(adapter, SCALE)
    return PlainNetwork(copy.model)


@pytest.fixture(params=[False, True], ids=["in place", "copied"])
def ready(request) -> Callable[[PreTrainedModel], PreTrainedModel]:
    """Let a model's weights be copied into other layouts, or not."""

    def make(model: PreTrainedModel) -> PreTrainedModel:
        if request.param:
            products.prepare(model)
        kind = Pairs if request.param else Halves
        assert all(type(own) is kind for own in LeanWeights(model)._heads)
        return model

    return make


def leaned(model: PreTrainedModel, adapter: dict[str, torch.Tensor]) -> LeanNetwork:
    weights = LeanWeights(model)
    return LeanNetwork(weights, weights.deltas(adapter, SCALE))


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, V, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def course(network, rows: int, steps: int = 4) -> list[torch.Tensor]:
    """States and logits of a prefill and of some steps, whose rows are of unequal length."""
    shared = tokens(9)
    prompts = [shared[: 3 + i % 5] + tokens(1 + i % 11, i) for i in range(rows)]
    (packed,) = pack(prompts)
    captured, cache = PromptCache(), RowCache()
    hidden = network.prefill(packed, captured)
    found = [hidden, network.logits(hidden)]
    slots = dict(zip(packed.members, packed.slots, strict=True))
    cache.add(captured, [slots[i] for i in range(rows)])
    for step in range(steps):
        hidden = network.step(torch.tensor(tokens(rows, 100 + step)), cache)
        found += [hidden, network.logits(hidden)]
        if step == 1 and rows > 2:
            cache.keep(list(range(1, rows)))
            rows -= 1
    return found


def apart(got: torch.Tensor, wanted: torch.Tensor) -> float:
    assert got.shape == wanted.shape
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_is_computed_as_by_transformers(name, tied, ready):
    model = ready(random_model(name, tie_word_embeddings=tied))
    assert supported(model)
    for mine, theirs in zip(
        course(leaned(model, {}), 5), course(PlainNetwork(model), 5), strict=True
    ):
        assert apart(mine, theirs) < 1e-5


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("which", ADAPTERS)
def test_an_adapter_is_added_as_if_it_were_merged(name, which, ready):
    model = ready(random_model(name, tie_word_embeddings=True))
    adapter = random_adapter(model, ADAPTERS[which])
    got = course(leaned(model, adapter), 5)
    base = course(PlainNetwork(model), 5)
    for mine, theirs in zip(got, course(merged(model, adapter), 5), strict=True):
        assert apart(mine, theirs) < 2e-5
    assert (apart(got[-1], base[-1]) > 1e-2) == bool(adapter)


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 17, 64])
def test_the_number_of_tokens_does_not_matter(rows, adapted, ready):
    model = ready(random_model("qwen2"))
    adapter = random_adapter(model, None) if adapted else {}
    for mine, theirs in zip(
        course(leaned(model, adapter), rows), course(merged(model, adapter), rows), strict=True
    ):
        assert apart(mine, theirs) < 2e-5


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("which", ["none", "with head"])
def test_in_bfloat16_it_is_no_further_from_the_exact_numbers_than_transformers(name, which):
    # Two orders of the same bfloat16 operations: neither is right, so both are held against
    # float32 on the same rounded weights.
    model = random_model(name, torch.bfloat16)
    adapter = random_adapter(model, ADAPTERS[which])
    exact = random_model(name, torch.bfloat16).float()
    for mine, theirs, right in zip(
        course(leaned(model, adapter), 13),
        course(merged(model, adapter), 13),
        course(merged(exact, adapter), 13),
        strict=True,
    ):
        assert mine.dtype == torch.bfloat16
        assert apart(mine, right) < 0.03
        assert apart(mine, right) < 1.5 * apart(theirs, right)


def test_a_bias_of_the_head_is_added():
    model = random_model("llama")
    model.lm_head.bias = torch.nn.Parameter(torch.linspace(-3, 3, V), requires_grad=False)
    states = torch.randn(5, 48, generator=torch.Generator().manual_seed(0))
    assert_close(LeanWeights(model).logits(states, {}), model.lm_head(states), rtol=1e-5, atol=1e-5)


def test_weights_are_read_in_place_at_each_use():
    model = random_model("qwen2")
    network = leaned(model, {})
    before = course(network, 3)
    for parameter in model.parameters():
        parameter.mul_(1.1)
    after = course(network, 3)
    assert apart(after[-1], before[-1]) > 1e-2
    for mine, theirs in zip(after, course(PlainNetwork(model), 3), strict=True):
        assert apart(mine, theirs) < 1e-5


def test_an_adapter_s_tensors_are_copied_and_the_base_is_not_written(ready):
    model = ready(random_model("llama"))
    before = {n: p.clone() for n, p in model.named_parameters()}
    adapter = random_adapter(model, ADAPTERS["with head"])
    network = leaned(model, adapter)
    first = course(network, 3)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert all(torch.equal(a, b) for a, b in zip(course(network, 3), first, strict=True))


def test_products_in_float64_are_exact():
    draw = torch.Generator().manual_seed(0)
    layers = [
        torch.nn.Linear(6, out, bias=bias, dtype=torch.float64)
        for out, bias in ((5, True), (3, False), (4, True))
    ]
    a, b = (
        [torch.randn(r, 6, generator=draw, dtype=torch.float64) for r in (2, 3)],
        [torch.randn(o, r, generator=draw, dtype=torch.float64) for o, r in ((5, 2), (4, 3))],
    )
    delta = lean.Delta(torch.cat(a), [b[0], None, b[1]])
    for count in (1, 20):
        x = torch.randn(count, 6, generator=draw, dtype=torch.float64)
        with torch.no_grad():
            got = lean._products([products.Matrix(m.weight, m.bias) for m in layers], x, delta)
            wanted = [layer(x) for layer in layers]
        wanted[0] = wanted[0] + x @ a[0].T @ b[0].T
        wanted[2] = wanted[2] + x @ a[1].T @ b[1].T
        for mine, theirs in zip(got, wanted, strict=True):
            assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


def test_other_architectures_are_not_supported():
    sizes = SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    with torch.device("meta"), quiet():
        assert not supported(AutoModelForCausalLM.from_config(Qwen3MoeConfig(**sizes)))
    model = random_model("llama")
    for family in ("gemma", "phi3", "olmo2", ""):
        model.config.model_type = family
        assert not supported(model)


def test_on_this_attention_too():
    model = random_model("qwen3")
    attention.use(model)
    assert attention.used_by(model)
    for mine, theirs in zip(
        course(leaned(model, {}), 5), course(PlainNetwork(model), 5), strict=True
    ):
        assert apart(mine, theirs) < 1e-5
