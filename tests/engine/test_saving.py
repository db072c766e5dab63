"""Checkpoints are what stock peft and stock transformers load."""

import json

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.closeness import assert_close
from tests.engine.support import accumulate, exactly, labelled, plain_logprobs, same, supervised
from xorl_lab.engine import models, saving
from xorl_lab.engine.quiet import quiet
from xorl_lab.engine.sharing import clone
from xorl_lab.engine.trainer import Trained
from xorl_lab.errors import CheckpointError
from xorl_lab.types import AdamParams, LoraRunSpec

DATA = [labelled([1, 2, 3, 4, 5, 6])]
SPECS = {
    "all": LoraRunSpec(rank=4, alpha=16.0, seed=1),
    "attention": LoraRunSpec(rank=2, alpha=3.0, seed=1, train_mlp=False),
    "some": LoraRunSpec(rank=2, seed=1, target_modules=("layers.0.mlp.up_proj", "v_proj")),
    "head": LoraRunSpec(rank=2, seed=1, train_unembed=True),
}
pytestmark = pytest.mark.filterwarnings("ignore:.*tie_word_embeddings.*:UserWarning")


def trained(base, spec: LoraRunSpec | None) -> Trained:
    made = Trained("test", base, spec)
    for _ in range(3):
        accumulate(made, supervised())
        made.optim_step(AdamParams(learning_rate=1e-2))
    return made


def ours(made: Trained) -> np.ndarray:
    value = accumulate(made, DATA).loss_fn_outputs[0].logprobs.to_numpy()
    made.drop_window()
    return value


@pytest.mark.parametrize("name", SPECS)
def test_stock_peft_loads_an_adapter(tiny, tmp_path, name):
    made = trained(tiny, SPECS[name])
    saving.save(made, tmp_path / "a", {}, overwrite=False)
    with quiet():
        theirs = PeftModel.from_pretrained(clone(tiny), tmp_path / "a")
    assert_close(plain_logprobs(theirs, DATA)[0], ours(made), rtol=0, atol=1e-5)
    assert np.abs(ours(made) - plain_logprobs(tiny, DATA)[0].numpy()).max() > 0.1


def test_stock_transformers_loads_full_weights(tiny, tmp_path):
    made = trained(tiny, None)
    saving.save(made, tmp_path / "a", {}, overwrite=False)
    theirs, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "a", output_loading_info=True, attn_implementation="sdpa"
    )
    assert not any(report.values())
    assert theirs.dtype == torch.float32
    assert theirs.get_input_embeddings().weight is theirs.get_output_embeddings().weight
    assert_close(plain_logprobs(theirs, DATA)[0].detach(), ours(made), rtol=0, atol=1e-5)
    config = AutoConfig.from_pretrained(tmp_path / "a")
    assert config.architectures == ["LlamaForCausalLM"]


def test_tied_weights_are_saved_once(tiny, tmp_path):
    saving.save(Trained("test", tiny, None), tmp_path / "a", {}, overwrite=False)
    with safe_open(tmp_path / "a" / "model.safetensors", "pt") as file:
        names = list(file.keys())
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def test_untied_weights_are_both_saved_and_loaded(tmp_path):
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        base = LlamaForCausalLM(config).eval().requires_grad_(False)
    made = Trained("test", base, None)
    accumulate(made, DATA)
    made.optim_step(AdamParams(learning_rate=1e-2))
    saving.save(made, tmp_path / "a", {}, overwrite=False)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "a", attn_implementation="sdpa")
    assert_close(plain_logprobs(theirs, DATA)[0].detach(), ours(made), rtol=0, atol=1e-5)


def test_bfloat16_weights_stay_bfloat16(tmp_path):
    base = models.load("tiny", device="cpu", dtype="bfloat16").model
    made = trained(base, None)
    saving.save(made, tmp_path / "a", {}, overwrite=False)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "a", attn_implementation="sdpa")
    assert theirs.dtype == torch.bfloat16
    other = Trained("test", base, None)
    saving.load(other, tmp_path / "a", with_optimizer=True)
    assert same(other.weights(), made.weights())
    assert same(other.optimizer.state(), made.optimizer.state())
    for each in (made, other):
        accumulate(each, supervised())
        each.optim_step(AdamParams(learning_rate=1e-3))
    assert same(other.weights(), made.weights())


def test_a_checkpoint_holds_no_pickle(tiny, tmp_path):
    saving.save(trained(tiny, SPECS["all"]), tmp_path / "a", {}, overwrite=False)
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "optimizer.safetensors",
        "state.json",
    ]


def test_state_says_what_it_is(tiny, tmp_path):
    saving.save(trained(tiny, SPECS["all"]), tmp_path / "a", {"base_model": "t"}, overwrite=False)
    state = json.loads((tmp_path / "a" / "state.json").read_text())
    assert (state["base_model"], state["kind"], state["dtype"]) == ("t", "lora", "float32")
    assert (state["model_id"], state["steps"], state["version"]) == ("test", 3, 3)
    assert saving.lora_spec(state) == SPECS["all"]


@pytest.mark.parametrize("with_optimizer", [True, False])
def test_a_checkpoint_of_another_shape_is_refused_and_changes_nothing(
    tiny, tmp_path, with_optimizer
):
    saving.save(trained(tiny, SPECS["all"]), tmp_path / "a", {}, overwrite=False)
    other = trained(tiny, SPECS["attention"])
    before = {k: v.clone() for k, v in other.weights().items()}
    with pytest.raises(CheckpointError) as caught:
        saving.load(other, tmp_path / "a", with_optimizer=with_optimizer)
    assert caught.value.code == "checkpoint.tensor_mismatch"
    assert len(caught.value.details["tensors"]) == 28
    assert same(before, other.weights())
    assert (other.steps, other.version) == (3, 3)


def test_continuing_in_another_precision_is_refused(tiny, tmp_path):
    saving.save(trained(tiny, None), tmp_path / "a", {}, overwrite=False)
    base = clone(tiny).bfloat16().requires_grad_(False)
    other = Trained("test", base, None)
    with pytest.raises(
        CheckpointError,
        match=exactly(
            "checkpoint.dtype_mismatch: checkpoint 'a' was trained in float32, this model is in "
            "bfloat16, so the run would not continue exactly: pass dtype='float32' to "
            "ServiceClient, or load without the optimizer"
        ),
    ):
        saving.load(other, tmp_path / "a", with_optimizer=True)
    saving.load(other, tmp_path / "a", with_optimizer=False)
    assert other.version == 1
