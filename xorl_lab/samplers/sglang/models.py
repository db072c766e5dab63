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
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, PreTrainedModel

from xorl_lab.engine import models
from xorl_lab.engine.filenames import FUSED, in_files
from xorl_lab.engine.quiet import quiet
from xorl_lab.errors import ConfigError
from xorl_lab.home import home

SIZES = {"float32": 4, "bfloat16": 2}
"""Bytes of a number."""
DENSE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Layers that may have adapters."""
ATTENTION = DENSE[:4]
"""Those of a mixture of experts: adapters are not put on the experts."""

FORM = b"2"
"""In which folders are written: another one has another folder."""
ONE_BY_ONE = frozenset({"mixtral", "olmoe", "qwen2_moe", "qwen3_moe"})
"""Families whose files have each expert's weights apart."""


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
    if config.model_type in ONE_BY_ONE and _misnamed(folder):
        folder = exported(str(folder), str(config.dtype or "float32").removeprefix("torch."))
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


def exported(name: str, dtype: str = "float32") -> Path:
    """The folder of a model as SGLang reads it; written once.

    Its name has a digest of what is in it, so another release's model has another folder.

    Args:
        name: of a random model, or a folder whose experts have other names than SGLang's.
        dtype: in which it is written.
    """
    loaded = models.load(name, device="cpu", dtype=dtype)
    digest = hashlib.sha256(FORM + loaded.model.config.to_json_string().encode())
    for key, value in sorted(loaded.model.state_dict().items()):
        digest.update(key.encode() + value.to(torch.float32).contiguous().numpy().tobytes())
    target = home() / "models" / f"{Path(name).name}-{digest.hexdigest()[:12]}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.parent / f".{target.name}-{secrets.token_hex(4)}"
    try:
        with quiet():
            loaded.model.config.save_pretrained(aside)
            loaded.tokenizer.save_pretrained(aside)
            if loaded.model.generation_config is not None:
                loaded.model.generation_config.save_pretrained(aside)
        _describe(aside / "config.json", loaded.model)
        weights = in_files(loaded.model, dict(loaded.model.named_parameters()))
        save_file(weights, aside / "model.safetensors", metadata={"format": "pt"})
        aside.rename(target)
    except OSError:
        if not target.is_dir():  # another process may have been first
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return target


def _describe(path: Path, model: PreTrainedModel) -> None:
    """Name the architecture, and the number of experts by the older of its two names as well."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config["architectures"] = [type(model).__name__]
    if "num_local_experts" in config:
        config["num_experts"] = config["num_local_experts"]
    path.write_text(json.dumps(config, indent=2) + os.linesep, encoding="utf-8")


def _misnamed(folder: Path) -> bool:
    """True if the experts of a folder are named as they are in memory, as in checkpoints of ours:
    SGLang would leave them out in silence.
    """
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            if any(name.endswith(FUSED) for name in file.keys()):  # noqa: SIM118  (no mapping)
                return True
    return False
