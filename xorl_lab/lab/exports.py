"""Checkpoints for others to load: an adapter for peft, or one model for transformers."""

import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from xorl_lab import checkpoints
from xorl_lab.checkpoints.names import Address
from xorl_lab.engine import engine as engines
from xorl_lab.engine import saving
from xorl_lab.engine.adapters import MergedCopy
from xorl_lab.engine.quiet import quiet
from xorl_lab.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from xorl_lab.engine.engine import Engine

FORMS = ("peft", "merged")
"""An adapter as peft loads it; all weights in one, as transformers loads them."""


def export(root: Path, address: Address, folder: Path, form: str, where: tuple[str, str]) -> Path:
    """Write a checkpoint where others find it; the folder is there once it is whole.

    Args:
        root: of the checkpoints.
        address: of the checkpoint, which is verified.
        folder: where to; it must not hold anything yet.
        form: one of :data:`FORMS`.
        where: device and dtype of the base model.

    Returns:
        The folder.

    Raises:
        ConfigError: the form is none, or does not fit full weights, or the folder is taken.
        CheckpointError: the checkpoint is missing or damaged.
        OSError: the disk refused.
    """
    if form not in FORMS:
        raise ConfigError(f"form is {form!r}: choose from {', '.join(FORMS)}")
    folder = folder.expanduser().absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} holds something already: pass a new or an empty folder")
    source = address.folder(root)
    state = checkpoints.read(source)
    if form == "peft" and saving.lora_spec(state) is None:
        raise ConfigError(f"{address.uri} holds full weights and no adapter: pass form='merged'")
    engine = engines.get(str(state["base_model"]), *where)

    def adapter(aside: Path) -> None:
        for name in (saving.ADAPTER_FILE, saving.ADAPTER_CONFIG):
            shutil.copyfile(source / name, aside / name)

    def merged(aside: Path) -> None:
        model = engine.scheduler.submit(
            lambda _: _merged(engine, source, state), name="merge weights"
        ).result()
        with quiet():
            model.save_pretrained(aside)

    _whole(folder, adapter if form == "peft" else merged, engine)
    return folder


def _whole(folder: Path, fill: Callable[[Path], None], engine: "Engine") -> None:
    """Fill a folder beside the one that is wanted, and put it there when it is complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = folder.with_name(f".{folder.name}-{secrets.token_hex(4)}")
    aside.mkdir()
    try:
        fill(aside)
        engine.loaded.tokenizer.save_pretrained(aside)
        aside.replace(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _merged(engine: "Engine", source: Path, state: dict[str, Any]) -> "PreTrainedModel":
    """The weights of a checkpoint as one model."""
    version = saving.load_version(engine.base, source, state)
    if version.full is not None:
        return version.full
    assert version.adapter is not None
    copy = MergedCopy(engine.base)
    copy.load(version.adapter, version.scale)
    model = copy.model
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if head is not None and embeddings is not None and head.weight is not embeddings.weight:
        # An adapter on the head of a model whose head is its embedding makes two of them.
        cast("Any", model.config).tie_word_embeddings = False
    return model
