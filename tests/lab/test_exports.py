"""Exports are what stock peft and stock transformers load, and compute what we do."""

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.closeness import assert_close
from tests.lab.support import EXAMPLES, PROMPTS, SUPERVISED, checkpoint, grpo, lab_in
from xorl_lab.engine import engine as engines
from xorl_lab.engine.quiet import quiet
from xorl_lab.engine.sharing import clone
from xorl_lab.errors import CheckpointError, ConfigError
from xorl_lab.lab import Lab, exports
from xorl_lab.types import Datum, ModelInput

TOKENS = [[1, 2, 3, 4, 5, 6, 7], [70, 80, 90, 100, 110], [65]]


def logits(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float()


def ours(lab, reference, tokens):
    """The trainer's logprobs of every next token, by one-token targets over the vocabulary."""
    client = lab.load(reference)
    trained = client._session.trained
    future = client._session.engine.scheduler.submit(
        lambda _: logits(trained.model, tokens), name="logits"
    )
    return future.result()


def loaded(folder):
    with quiet():
        return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")


def trained(lab, **settings):
    return lab.sft(EXAMPLES, steps=4, **{**SUPERVISED, "learning_rate": 3e-2, **settings})


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        ("tiny", {"rank": 4}),
        ("tiny", {"rank": 4, "alpha": 3.0, "train_mlp": False}),
        ("tiny", {"rank": 2, "train_unembed": True}),
        ("tiny", {"rank": None}),
        ("tiny-moe", {"rank": 2}),
        ("tiny-moe", {"rank": None}),
    ],
)
@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings.*:UserWarning")
def test_a_merged_export_computes_what_we_do(tmp_path, model, shape):
    lab = Lab(model, folder=tmp_path / "lab", device="cpu", dtype="float32", **shape)
    trained(lab)
    folder = lab.export("sft-1/step-4", tmp_path / "out", form="merged")
    assert folder == tmp_path / "out"
    theirs = loaded(folder)
    base = engines.get(model, "cpu", "float32").base
    moved = 0.0
    for tokens in TOKENS:
        mine = ours(lab, "sft-1/step-4", tokens)
        assert_close(logits(theirs, tokens), mine, rtol=0, atol=1e-4)
        moved = max(moved, float((mine - logits(base, tokens)).abs().max()))
    assert moved > 0.1
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode("héllo") == lab._bench.tokenizer.encode("héllo")


def test_a_peft_export_computes_what_we_do(tmp_path):
    lab = lab_in(tmp_path / "lab")
    trained(lab)
    folder = lab.export("sft-1", tmp_path / "out")
    base = clone(engines.get("tiny", "cpu", "float32").base)
    with quiet():
        theirs = PeftModel.from_pretrained(base, folder)
    for tokens in TOKENS:
        assert_close(logits(theirs, tokens), ours(lab, "sft-1/step-4", tokens), rtol=0, atol=1e-5)
    names = {p.name for p in folder.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"} <= names
    assert not names & {"optimizer.safetensors", "state.json"}


def test_weights_to_sample_from_are_exported_too_and_the_base_stays_what_it_was(tmp_path):
    lab = lab_in(tmp_path / "lab")
    run = trained(lab)
    run.client.save_weights_for_sampler("light").result()
    before = {
        n: p.clone() for n, p in engines.get("tiny", "cpu", "float32").base.named_parameters()
    }
    lab.export("sft-1/light", tmp_path / "a", form="merged")
    lab.export("sft-1/step-4", tmp_path / "b", form="merged")
    for tokens in TOKENS:
        assert torch.equal(
            logits(loaded(tmp_path / "a"), tokens), logits(loaded(tmp_path / "b"), tokens)
        )
    for name, value in engines.get("tiny", "cpu", "float32").base.named_parameters():
        assert torch.equal(value, before[name])


def test_what_cannot_be_exported_is_told_and_leaves_nothing(tmp_path, monkeypatch):
    lab = lab_in(tmp_path / "lab", rank=None)
    trained(lab)
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="holds full weights and no adapter: pass form='merged'"):
        lab.export("sft-1", out)
    with pytest.raises(ConfigError, match="form is 'gguf': choose from peft, merged"):
        lab.export("sft-1", out, form="gguf")
    with pytest.raises(ConfigError, match="'base' names no checkpoint"):
        lab.export("base", out)
    assert not out.exists()

    def refuse(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(exports, "_merged", refuse)
        with pytest.raises(OSError, match="No space"):
            lab.export("sft-1", out, form="merged")
    assert [p.name for p in tmp_path.iterdir()] == ["lab"]
    out.mkdir()
    lab.export("sft-1", out, form="merged")  # an empty folder is as good as a new one
    with pytest.raises(ConfigError, match="holds something already: pass a new or an empty folder"):
        lab.export("sft-1", out, form="merged")
    (checkpoint(lab, "sft-1", "step-4") / "model.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="cannot be trusted"):
        lab.export("sft-1", tmp_path / "b", form="merged")


def test_the_browser_asks_for_the_same(tmp_path):
    lab = lab_in(tmp_path / "lab")
    trained(lab)
    path = lab._desk.export("sft-1/step-4", str(tmp_path / "deep" / "er"), "merged")
    assert path == str(tmp_path / "deep" / "er")
    assert (tmp_path / "deep" / "er" / "model.safetensors").is_file()


def len_of(completion):
    return len(completion)


SMOL = "SmolLM2-135M-Instruct"


@pytest.mark.slow
def test_a_real_model_is_exported_and_compared(tmp_path):
    lab = Lab(SMOL, folder=tmp_path / "lab", rank=8, device="cpu", dtype="float32")
    chat = [
        [{"role": "user", "content": f"{a}+{b}="}, {"role": "assistant", "content": "no 🙂 idea"}]
        for a in range(3)
        for b in range(3)
    ]
    lab.sft(chat, steps=4, learning_rate=2e-3, batch_size=4, quiet=True)
    theirs = loaded(lab.export("sft-1", tmp_path / "out", form="merged"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    tokens = tokenizer.encode("The capital of France is Paris, and 漢字 🙂 are hard.")
    mine = ours(lab, "sft-1", tokens)
    assert_close(logits(theirs, tokens), mine, rtol=0, atol=1e-4)
    base = engines.get(SMOL, "cpu", "float32").base
    assert (mine - logits(base, tokens)).abs().max() > 0.5

    prompts = [[{"role": "user", "content": p["prompt"]}] for p in PROMPTS[:3]]
    found = lab.compare(["base", "sft-1"], prompts, max_tokens=12)
    client = lab.load("sft-1")
    trainers = 0.0
    for i, prompt in enumerate(found.prompts):
        for author in ("base", "sft-1"):
            answer = found.answers[author][i].tokens
            whole = [*tokenizer.encode(prompt, add_special_tokens=False), *answer]
            datum = Datum(ModelInput.from_ints(whole[:-1]), {"target_tokens": whole[1:]})
            for judge, call in (("base", client.forward_base), ("sft-1", client.forward)):
                output = call([datum]).result().loss_fn_outputs[0].logprobs.data[-len(answer) :]
                judged = found.logprobs[judge][author][i]
                trainers = max(
                    trainers, max(abs(a - b) for a, b in zip(output, judged, strict=True))
                )
    assert trainers < 1e-3
    assert any(at is not None for at in found.divergence("base", "sft-1"))
    texts = [p["prompt"] for p in PROMPTS[:2]]
    grpo_run = grpo(lab, steps=1, prompts=texts, reward=len_of, learning_rate=1e-4)
    number = int(grpo_run.rollouts(limit=1).index[0])
    again = grpo_run.resample(number, 1, "sft-1", n=2, max_tokens=6)
    assert len(again.sequences) == 2
