"""Folders of mixtures of experts that SGLang reads: experts one by one, and a head of their own."""

import torch
from safetensors.torch import load_file, save_file

import xorl_lab as xl
from tests.samplers.support import update
from xorl_lab.engine import models
from xorl_lab.samplers.sglang import models as sglang_models


def weights(folder):
    return load_file(folder / "model.safetensors")


def test_a_random_mixture_has_its_experts_one_by_one_and_a_head(empty_home):
    folder = sglang_models.served("tiny-moe").folder
    got = weights(folder)
    assert sum(".experts." in name for name in got) == 4 * 8 * 3
    model = models.load("tiny-moe", "cpu", "float32").model
    assert torch.equal(got["lm_head.weight"], model.get_output_embeddings().weight)
    whole = dict(model.named_parameters())["model.layers.2.mlp.experts.down_proj"]
    assert torch.equal(got["model.layers.2.mlp.experts.5.down_proj.weight"], whole[5])
    assert "lm_head.weight" not in weights(sglang_models.served("tiny").folder)


def test_a_checkpoint_of_ours_is_written_anew_in_its_own_dtype(empty_home, tmp_path):
    service = xl.ServiceClient(home=tmp_path, device="cpu", dtype="float32")
    client = service.create_training_client("tiny-moe", model_id="whole")
    update(client)
    client.save_weights_for_sampler("one").result()
    (folder,) = tmp_path.rglob("one")
    named = weights(folder)
    assert "model.layers.0.mlp.experts.down_proj" in named
    served = sglang_models.served(folder)
    assert served.folder.parent == empty_home / "models"
    got = weights(served.folder)
    whole = named["model.layers.2.mlp.experts.down_proj"]
    assert torch.equal(got["model.layers.2.mlp.experts.5.down_proj.weight"], whole[5])
    assert got["lm_head.weight"].dtype == torch.float32
    # What is right already is served as it is.
    assert sglang_models.served(served.folder).folder == served.folder


def test_files_with_experts_one_by_one_are_left_alone(empty_home, tmp_path):
    folder = sglang_models.served("tiny-moe").folder
    copied = tmp_path / "copied"
    copied.mkdir()
    for path in folder.iterdir():
        (copied / path.name).write_bytes(path.read_bytes())
    save_file(weights(folder), copied / "model.safetensors", metadata={"format": "pt"})
    assert sglang_models.served(copied).folder == copied
