"""Trained models to checkpoint folders and back, in PEFT's and Hugging Face's formats."""

import base64
import functools
import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from xorl_lab import checkpoints
from xorl_lab.checkpoints.folder import Writer
from xorl_lab.engine import adapters
from xorl_lab.engine.sharing import clone
from xorl_lab.engine.trainer import Trained
from xorl_lab.engine.versions import WeightsVersion
from xorl_lab.errors import CheckpointError
from xorl_lab.types import LoraRunSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
MODEL_FILE = "model.safetensors"
MODEL_CONFIG = "config.json"
OPTIMIZER_FILE = "optimizer.safetensors"


def save(trained: Trained, folder: Path, facts: Mapping[str, Any], *, overwrite: bool) -> int:
    """Write weights, optimizer state, random state and step count.

    Args:
        trained: the model.
        folder: where to.
        facts: what else goes into ``state.json``: base model, dtype, expiry, …
        overwrite: replace a checkpoint of this name.

    Returns:
        Bytes written.

    Raises:
        CheckpointError: the name is taken.
    """
    writers = weight_writers(trained)
    optimizer = _portable(trained.optimizer.state())
    writers[OPTIMIZER_FILE] = lambda path: save_file(optimizer, path)
    generator = base64.b64encode(trained.generator.get_state().numpy().tobytes()).decode()
    state = {**_state(trained, facts), "generator": generator}
    return checkpoints.write(folder, writers, state, overwrite=overwrite)


def save_for_sampler(
    trained: Trained, tokenizer: "PreTrainedTokenizerBase", folder: Path, facts: Mapping[str, Any]
) -> int:
    """Write the weights alone, in the form that PEFT, or transformers and SGLang, load.

    What had the name before is replaced.

    Args:
        trained: the model.
        tokenizer: goes beside full weights, so that the folder can be served as it is.
        folder: where to.
        facts: what else goes into ``state.json``.

    Returns:
        Bytes of the weights.
    """
    writers = weight_writers(trained)
    if trained.spec is None:
        with tempfile.TemporaryDirectory() as scratch:
            tokenizer.save_pretrained(scratch)
            for path in Path(scratch).iterdir():
                writers[path.name] = functools.partial(_write_bytes, content=path.read_bytes())
    checkpoints.write(folder, writers, _state(trained, facts), overwrite=True)
    file = MODEL_FILE if trained.spec is None else ADAPTER_FILE
    return (folder / file).stat().st_size


def load_version(base: PreTrainedModel, folder: Path, state: Mapping[str, Any]) -> WeightsVersion:
    """A checkpoint's weights as an immutable version.

    Args:
        base: the base model that the checkpoint is of.
        folder: the checkpoint, verified.
        state: its ``state.json``.

    Raises:
        CheckpointError: ``checkpoint.tensor_mismatch``.
    """
    spec = lora_spec(state)
    number, model_id = int(state["version"]), str(state["model_id"])
    if spec is None:
        model = clone(base)
        expected = dict(model.named_parameters())
        tensors = load_file(folder / MODEL_FILE)
        _compare(expected, tensors, folder.name)
        with torch.no_grad():
            for name, parameter in expected.items():
                parameter.copy_(tensors[name])
        return WeightsVersion(model_id, number, full=model)
    expected = adapters.parameters(adapters.inject(base, spec, torch.Generator()))
    placed = load_adapter(folder, expected)
    return WeightsVersion(model_id, number, placed, spec.alpha / spec.rank)


def load_adapter(folder: Path, expected: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A checkpoint's adapter, on the device of the tensors that it is to fit.

    Raises:
        CheckpointError: ``checkpoint.tensor_mismatch``.
    """
    tensors = load_file(folder / ADAPTER_FILE)
    _compare(expected, tensors, folder.name)
    return {name: t.to(expected[name].device) for name, t in tensors.items()}


def weight_writers(trained: Trained) -> dict[str, Writer]:
    """Functions that write the weights' files: PEFT's for an adapter, Hugging Face's otherwise."""
    tensors = _portable(trained.weights())
    if trained.spec is None:
        architecture = {"architectures": [type(trained.model).__name__]}
        values = trained.model.config.to_dict() | architecture
        config = json.dumps(values, indent=1, sort_keys=True, default=str)
        return {
            MODEL_FILE: lambda path: save_file(tensors, path, metadata={"format": "pt"}),
            MODEL_CONFIG: lambda path: path.write_text(config, encoding="utf-8"),
        }
    document = json.dumps(_adapter_config(trained, trained.spec), indent=1, sort_keys=True)
    return {
        ADAPTER_FILE: lambda path: save_file(tensors, path, metadata={"format": "pt"}),
        ADAPTER_CONFIG: lambda path: path.write_text(document, encoding="utf-8"),
    }


def load(trained: Trained, folder: Path, *, with_optimizer: bool) -> None:
    """Put a checkpoint's weights into a model.

    Args:
        trained: a model of the same base and shape.
        folder: the checkpoint; it is verified first.
        with_optimizer: restore the moments, the step count and the random state too, which
            continues the run exactly; otherwise the optimizer starts afresh.

    Raises:
        CheckpointError: the checkpoint is missing, damaged, or does not fit; the model is as it
            was.
    """
    state = checkpoints.read(folder)
    if with_optimizer and OPTIMIZER_FILE not in state["files"]:
        raise CheckpointError(
            "checkpoint.no_optimizer",
            f"checkpoint {folder.name!r} holds weights alone: load it without the optimizer, or "
            "use one that save_state made",
            {"name": folder.name},
        )
    dtype = str(trained.base.dtype).removeprefix("torch.")
    if with_optimizer and state["dtype"] != dtype:
        raise CheckpointError(
            "checkpoint.dtype_mismatch",
            f"checkpoint {folder.name!r} was trained in {state['dtype']}, this model is in "
            f"{dtype}, so the run would not continue exactly: "
            f"pass dtype={state['dtype']!r} to ServiceClient, or load without the optimizer",
            {"saved": state["dtype"]},
        )
    tensors = load_file(folder / (MODEL_FILE if trained.spec is None else ADAPTER_FILE))
    check_fit(trained, tensors, folder.name)
    optimizer = load_file(folder / OPTIMIZER_FILE) if with_optimizer else {}
    trained.optimizer.check_state(optimizer)
    trained.load_weights(tensors)
    if with_optimizer:
        trained.optimizer.load_state(optimizer)
        trained.steps = int(state["steps"])
        # Never back: a number that was given out once must not come to mean other weights.
        trained.version = max(trained.version, int(state["version"]))
        raw = bytearray(base64.b64decode(state["generator"]))
        trained.generator.set_state(torch.frombuffer(raw, dtype=torch.uint8))


def check_fit(trained: Trained, tensors: Mapping[str, torch.Tensor], name: str) -> None:
    """Compare the names and shapes of a checkpoint's tensors with the model's.

    Raises:
        CheckpointError: ``checkpoint.tensor_mismatch`` with every tensor that is missing, extra or
            of another shape.
    """
    _compare(trained.weights(), tensors, name)


def _compare(
    model: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor], name: str
) -> None:
    expected = {key: tuple(value.shape) for key, value in model.items()}
    found = {key: tuple(value.shape) for key, value in tensors.items()}
    odd = sorted(
        key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key)
    )
    if odd:
        raise CheckpointError(
            "checkpoint.tensor_mismatch",
            f"checkpoint {name!r} does not fit the model: {len(odd)} tensors are missing, extra or "
            f"of another shape, e.g. {odd[0]}: {found.get(odd[0])} where the model has "
            f"{expected.get(odd[0])}; create the client with the checkpoint's own settings",
            {"tensors": odd},
        )


def check_base(state: Mapping[str, Any], base_model: str) -> None:
    """Compare a checkpoint's base model with the one that is there.

    Raises:
        CheckpointError: ``validation.checkpoint_config_mismatch``.
    """
    if state["base_model"] != base_model:
        raise _mismatch({"base_model": (state["base_model"], base_model)})


def check_shape(folder: Path, base_model: str, spec: LoraRunSpec | None) -> None:
    """Compare a checkpoint's base model and adapter with the ones that are there; not the seed.

    Raises:
        CheckpointError: ``validation.checkpoint_config_mismatch`` with all differences; or it is
            missing.
    """
    state = checkpoints.glance(folder)
    saved = lora_spec(state)
    pairs: dict[str, tuple[object, object]] = {"base_model": (state["base_model"], base_model)}
    if saved is None or spec is None:
        pairs["kind"] = ("lora" if saved else "full", "lora" if spec else "full")
    else:
        names = ("rank", "alpha", "train_mlp", "train_attn", "train_unembed", "target_modules")
        pairs |= {name: (getattr(saved, name), getattr(spec, name)) for name in names}
    differing = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    if differing:
        raise _mismatch(differing)


def _mismatch(differing: Mapping[str, tuple[object, object]]) -> CheckpointError:
    listed = ", ".join(
        f"{n}: {saved!r} there, {here!r} here" for n, (saved, here) in differing.items()
    )
    return CheckpointError(
        "validation.checkpoint_config_mismatch",
        f"the checkpoint was saved from a model of another shape ({listed}): create the client "
        "with the checkpoint's own settings",
        {name: {"checkpoint": saved, "client": here} for name, (saved, here) in differing.items()},
    )


def lora_spec(state: Mapping[str, Any]) -> LoraRunSpec | None:
    """The adapter's shape as recorded in ``state.json``; None for full weights."""
    values = state["lora"]
    if values is None:
        return None
    targets = values["target_modules"]
    fields: dict[str, Any] = {**values, "target_modules": targets and tuple(targets)}
    return LoraRunSpec(**fields)


def _state(trained: Trained, facts: Mapping[str, Any]) -> dict[str, Any]:
    """What ``state.json`` says of any checkpoint."""
    return {
        **facts,
        "dtype": str(trained.base.dtype).removeprefix("torch."),
        "kind": "full" if trained.spec is None else "lora",
        "model_id": trained.model_id,
        "lora": None if trained.spec is None else asdict(trained.spec),
        "steps": trained.steps,
        "version": trained.version,
        "created": time.time(),
    }


def _adapter_config(trained: Trained, spec: LoraRunSpec) -> dict[str, Any]:
    """What PEFT needs to load the adapter; short names where they mean the same layers."""
    layers = sorted(adapters.lora_layers(trained.model))
    leaves = sorted({name.rsplit(".", 1)[-1] for name in layers})
    parts = adapters.linear_layers(trained.base).values()
    same = [n for part in parts for n in part if n.rsplit(".", 1)[-1] in leaves]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": trained.base.name_or_path,
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "lora_dropout": spec.dropout,
        "target_modules": leaves if sorted(same) == layers else layers,
        "bias": "none",
        "inference_mode": True,
    }


def _write_bytes(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _portable(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous CPU copies, which the file and nobody else owns."""
    return {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}
