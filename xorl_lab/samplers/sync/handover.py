"""A version of the weights as a server elsewhere takes it: an adapter's folder, or named tensors.

What is read here is read on the engine's thread: a version of the full weights may be the trained
model itself, for as long as that stands still.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from xorl_lab.engine import saving
from xorl_lab.engine.adapters import PREFIX, linear_layers
from xorl_lab.engine.engine import Engine
from xorl_lab.engine.filenames import in_files
from xorl_lab.engine.versions import WeightsVersion
from xorl_lab.errors import ConfigError
from xorl_lab.samplers.base import SampleRequest
from xorl_lab.samplers.embedded import EmbeddedSampler
from xorl_lab.samplers.sync.canary import TEXT, TOKENS
from xorl_lab.types import SamplingParams

GROUP_BYTES = 128 * 2**20
"""About so much is copied at a time: the engine's thread goes on with other work in between."""
Named = tuple[str, torch.Tensor]


class Handover:
    """The trainer's side of a weight sync.

    Args:
        engine: the base model and its thread.
        sampler: on the same thread; evaluates the canary's text.
    """

    def __init__(self, engine: Engine, sampler: EmbeddedSampler) -> None:
        self.engine = engine
        self._sampler = sampler
        loaded = engine.loaded
        encoded = loaded.tokenizer.encode(TEXT, add_special_tokens=False)
        self.text = tuple(encoded[: min(TOKENS, loaded.context_length - 1)])
        """Token ids of the canary's text."""

    @property
    def name(self) -> str:
        """Name of the base model."""
        return self.engine.loaded.name

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.engine.loaded.vocab_size

    @property
    def dtype(self) -> str:
        """In which the base model computes."""
        return self.engine.loaded.dtype

    @property
    def base(self) -> WeightsVersion:
        """The untrained weights."""
        return self.engine.base_version

    def score(self, version: WeightsVersion) -> list[float]:
        """The trainer's logprobs of the canary's text but for its first token, nats."""
        request = SampleRequest(
            self.text, SamplingParams(max_tokens=1), 1, 0, False, prompt_logprobs=True
        )
        response = self._sampler.submit(version, request).result()
        found = response.prompt_logprobs or []
        return [value for value in found[1:] if value is not None]

    def write_adapter(self, version: WeightsVersion, folder: Path) -> int:
        """Write an adapter in PEFT's form.

        Returns:
            Bytes of its tensors.

        Raises:
            ConfigError: it changes the head, which SGLang cannot.
        """
        tensors = version.adapter or {}
        layers = adapted(version)
        head = set(layers) & set(linear_layers(self.engine.base)["unembed"])
        if head:
            raise ConfigError(
                f"the adapter of {version.model_id!r} changes the head ({sorted(head)[0]}), which "
                "SGLang does not: train it without train_unembed, or sample with "
                "sampler='embedded'"
            )
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.engine.base.name_or_path,
            "r": rank_of(version),
            "lora_alpha": version.scale * (rank_of(version) or 0),
            "lora_dropout": 0.0,
            "target_modules": sorted({name.rsplit(".", 1)[-1] for name in layers}),
            "bias": "none",
            "inference_mode": True,
        }
        folder.mkdir(parents=True)
        plain = {name: t.detach().to("cpu", copy=True) for name, t in tensors.items()}
        save_file(plain, folder / saving.ADAPTER_FILE, metadata={"format": "pt"})
        text = json.dumps(config, indent=1, sort_keys=True)
        (folder / saving.ADAPTER_CONFIG).write_text(text, encoding="utf-8")
        return sum(t.nbytes for t in plain.values())

    def write_model(self, version: WeightsVersion, folder: Path) -> int:
        """Write all weights as a Hugging Face folder; an adapter is merged.

        Returns:
            Bytes of its tensors.
        """
        config = self.engine.base.config.to_dict()
        config |= {"architectures": [type(self.engine.base).__name__]}
        tensors = dict(self.tensors(version))
        folder.mkdir(parents=True)
        save_file(tensors, folder / saving.MODEL_FILE, metadata={"format": "pt"})
        text = json.dumps(config, indent=1, sort_keys=True, default=str)
        (folder / saving.MODEL_CONFIG).write_text(text, encoding="utf-8")
        return sum(t.nbytes for t in tensors.values())

    def tensors(self, version: WeightsVersion) -> Iterator[Named]:
        """All weights of a version under the names of Hugging Face's files, copied, on the CPU.

        An adapter is merged: W + alpha / r * B A, computed in float32 at least and rounded once.
        """
        group: list[str] = []
        size = 0
        for name, parameter in self.engine.base.named_parameters():
            if group and size + parameter.nbytes > GROUP_BYTES:
                yield from self._copied(version, group)
                group, size = [], 0
            group.append(name)
            size += parameter.nbytes
        yield from self._copied(version, group)

    def _copied(self, version: WeightsVersion, names: list[str]) -> list[Named]:
        def copy(_: Any) -> list[Named]:  # noqa: ANN401 (the scheduler's ticket)
            source = self.engine.base if version.full is None else version.full
            values = dict(source.named_parameters())
            with torch.no_grad():
                whole = {name: _merged(values[name], version, name) for name in names}
                return list(in_files(source, whole).items())

        return self.engine.scheduler.submit(copy, name="copy weights").result()


def adapted(version: WeightsVersion) -> list[str]:
    """Names of the layers that an adapter changes."""
    keys = (key.removeprefix(PREFIX) for key in version.adapter or {})
    return sorted({key.rsplit(".lora_", 1)[0] for key in keys})


def rank_of(version: WeightsVersion) -> int | None:
    """Rank of an adapter, None for other weights."""
    tensors = version.adapter or {}
    ranks = [int(t.shape[0]) for name, t in tensors.items() if name.endswith(".lora_A.weight")]
    return max(ranks) if ranks else None


def _merged(weight: torch.Tensor, version: WeightsVersion, name: str) -> torch.Tensor:
    layer = f"{PREFIX}{name.removesuffix('.weight')}"
    tensors = version.adapter or {}
    down, up = (tensors.get(f"{layer}.lora_{part}.weight") for part in "AB")
    if down is None or up is None:
        return weight.detach().to("cpu", copy=True)
    fine = torch.promote_types(down.dtype, torch.float32)
    whole = torch.addmm(weight.to(fine), up.to(fine), down.to(fine), alpha=version.scale)
    return whole.to(weight.dtype).cpu()
