"""The card of a lab: model, machine, memory, folder."""

import html
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from xorl_lab.checkpoints import catalog
from xorl_lab.lab.memory import Shape, amount, available, estimate
from xorl_lab.store import Store

if TYPE_CHECKING:
    from xorl_lab.engine.models import LoadedModel

TOKENS, ROWS, ROW_TOKENS = 1024, 64, 256
"""For which the memory is estimated: a packed row; completions drawn together, and their length."""


def facts(
    loaded: "LoadedModel | None",
    root: Path | None,
    store: Store,
    folder: Path,
    rank: int | None,
) -> dict[str, str]:
    """What the card says, in order.

    Args:
        loaded: the model; None if a server holds it.
        root: of the checkpoints; None if a server keeps them.
        store: the record.
        folder: of the lab.
        rank: of the adapter; None = full weights.
    """
    result: dict[str, str] = {}
    if loaded is not None:
        result["model"] = f"{loaded.name}{f' ({loaded.note})' if loaded.note else ''}"
        result["parameters"] = f"{loaded.parameters / 1e6:.1f} million"
        result["computes in"] = f"{loaded.dtype} on {loaded.device}"
        result["context"] = f"{loaded.context_length} tokens"
        parts = estimate(_shape(loaded, rank), tokens=TOKENS, rows=ROWS, row_tokens=ROW_TOKENS)
        free = available(loaded.device)
        result["memory to train"] = (
            f"about {amount(sum(parts.values()))} with {ROWS} completions of "
            f"{ROW_TOKENS} tokens; {amount(free)} are free"
        )
    result["trains"] = "the full weights" if rank is None else f"an adapter of rank {rank}"
    count = len(store.runs())
    saved = f", checkpoints {amount(catalog.disk_use(root))}" if root is not None else ""
    result["folder"] = str(folder)
    what = f"{count} run{'' if count == 1 else 's'}"
    result["on the disk"] = f"{what}, record {amount(store.disk_bytes())}{saved}"
    return result


def text(known: Mapping[str, str]) -> str:
    """The card for a terminal."""
    width = max(map(len, known))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in known.items())


def markup(known: Mapping[str, str]) -> str:
    """The card as HTML."""
    rows = "".join(
        f'<tr><th style="text-align:left">{html.escape(name)}</th>'
        f'<td style="text-align:left">{html.escape(value)}</td></tr>'
        for name, value in known.items()
    )
    return f"<table>{rows}</table>"


def _shape(loaded: "LoadedModel", rank: int | None) -> Shape:
    config = loaded.model.config.get_text_config()
    heads = int(config.num_attention_heads)
    head = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    keys = int(getattr(config, "num_key_value_heads", None) or heads) * head
    hidden, inner = int(config.hidden_size), int(config.intermediate_size)
    layers = int(config.num_hidden_layers)
    ends = 2 * (hidden + heads * head) + 2 * (hidden + keys) + 3 * (hidden + inner)
    return Shape(
        parameters=loaded.parameters,
        trained=loaded.parameters if rank is None else rank * layers * ends,
        layers=layers,
        hidden=hidden,
        intermediate=inner,
        heads=heads,
        kv_width=keys,
        vocabulary=loaded.vocab_size,
        bytes_per_weight=2 if loaded.dtype == "bfloat16" else 4,
    )
