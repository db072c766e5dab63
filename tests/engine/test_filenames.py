"""Weights by the names of files."""

import pytest
import torch
from safetensors.torch import load_file

from tests.engine import moe
from xorl_lab.engine.filenames import in_files


@pytest.mark.parametrize("family", sorted(moe.FAMILIES))
def test_experts_have_names_one_by_one(family, tmp_path):
    """As transformers writes them, whose files everyone reads; and a head that is tied."""
    model = moe.FAMILIES[family]()
    tensors = dict(model.named_parameters())
    got = in_files(model, tensors)
    model.save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    assert set(got) == {*expected, "lm_head.weight"}
    for name, value in expected.items():
        assert torch.equal(got[name], value)
    assert torch.equal(got["lm_head.weight"], model.get_output_embeddings().weight)
    assert not any(name.endswith(("gate_up_proj", "experts.down_proj")) for name in got)


def test_a_part_of_the_weights_gives_a_part_of_the_files():
    model = moe.qwen()
    name = "model.layers.1.mlp.experts.gate_up_proj"
    whole = dict(model.named_parameters())[name]
    part = in_files(model, {name: whole})
    assert len(part) == 12
    low, high = whole[4].chunk(2)
    assert torch.equal(part["model.layers.1.mlp.experts.4.gate_proj.weight"], low)
    assert torch.equal(part["model.layers.1.mlp.experts.4.up_proj.weight"], high)


def test_a_model_keeps_what_it_was_loaded_from():
    model = moe.qwen()
    model._weight_conversions = []
    names = in_files(model, dict(model.named_parameters()))
    assert "model.layers.0.mlp.experts.0.up_proj.weight" in names
    assert model._weight_conversions == []


def test_a_dense_models_names_are_those_of_files(tiny):
    tensors = dict(tiny.named_parameters())
    assert in_files(tiny, tensors) == tensors
