"""From the name of a model to a folder that SGLang reads, and what of it decides about memory."""

import hashlib
import json
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedModel

from xorl_lab.engine import models
from xorl_lab.engine.quiet import quiet
from xorl_lab.errors import ConfigError
from xorl_lab.home import home

SIZES = {"float32": 4, "bfloat16": 2}
"""Bytes of a number."""
DENSE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Layers that may have adapters."""
ATTENTION = DENSE[:4]
"""Those of a mixture of experts: adapters are not put on the experts."""


@dataclass(frozen=True, slots=True)
class Served:
    """A model's folder, and what of its configuration a server's limits follow from."""

    name: str
    """As it was asked for."""
    folder: Path
    """With config.json, a tokenizer and safetensors."""
    context_length: int
    """Longest sequence, in tokens."""
    weight_bytes: int
    """Of the files of weights."""
    token_numbers: int
    """Numbers in the cache of keys and values for one token, all layers together."""
    experts: bool
    """Whether it is a mixture of experts."""

    @property
    def targets(self) -> tuple[str, ...]:
        """The layers whose adapters a server has to hold."""
        return ATTENTION if self.experts else DENSE


def served(model: str | Path) -> Served:
    """Find the folder of a model, writing it first if the model is made in memory.

    Args:
        model: ``tiny``, ``tiny-moe``, ``SmolLM2-135M-Instruct``, a folder, or a Hugging Face id in
            the local cache.

    Raises:
        ConfigError: there is no such model, or the folder is not one of a model.
    """
    name = str(model)
    folder = (exported(name) if name in models.RANDOM else models.fetch(name)).absolute()
    if not (folder / "config.json").is_file():
        adapter = (folder / "adapter_config.json").is_file()
        what = "an adapter, which a server loads beside its model" if adapter else "no model"
        raise ConfigError(
            f"{folder} holds {what} (there is no config.json): pass a model's name, or a folder "
            "with config.json, a tokenizer and safetensors"
        )
    if not any(folder.glob("tokenizer*")):
        raise ConfigError(f"{folder} has no tokenizer: save the model's tokenizer beside it")
    with quiet():
        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Served(
        name=name,
        folder=folder,
        context_length=int(config.max_position_embeddings),
        weight_bytes=sum(path.stat().st_size for path in folder.glob("*.safetensors")),
        token_numbers=2 * config.num_hidden_layers * heads * width,
        experts=bool(getattr(config, "num_experts_per_tok", None)),
    )


def exported(name: str) -> Path:
    """The folder of a random model, in single precision; written once.

    Its name has a digest of what is in it, so another release's model has another folder.
    """
    loaded = models.load(name, device="cpu", dtype="float32")
    digest = hashlib.sha256(loaded.model.config.to_json_string().encode())
    for key, value in sorted(loaded.model.state_dict().items()):
        digest.update(key.encode() + value.to(torch.float32).contiguous().numpy().tobytes())
    target = home() / "models" / f"{name}-{digest.hexdigest()[:12]}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.parent / f".{target.name}-{secrets.token_hex(4)}"
    try:
        with quiet():
            loaded.model.save_pretrained(aside)
            loaded.tokenizer.save_pretrained(aside)
        if _name_experts(aside / "config.json"):
            _write_head(aside / "model.safetensors", loaded.model)
        aside.rename(target)
    except OSError:
        if not target.is_dir():  # another process may have been first
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return target


def _name_experts(path: Path) -> bool:
    """Write the number of experts under the older of its two names as well, if there are any."""
    config = json.loads(path.read_text(encoding="utf-8"))
    if "num_local_experts" not in config:
        return False
    config["num_experts"] = config["num_local_experts"]
    path.write_text(json.dumps(config, indent=2) + os.linesep, encoding="utf-8")
    return True


def _write_head(path: Path, model: PreTrainedModel) -> None:
    """Write a head that is tied to the embedding out: SGLang's mixtures of experts know no ties,
    and would leave theirs empty.
    """
    tensors = load_file(path)
    head: Any = model.get_output_embeddings()
    tensors.setdefault("lm_head.weight", head.weight.detach().clone())
    save_file(tensors, path, metadata={"format": "pt"})
