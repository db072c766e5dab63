"""How much memory training will take, before it is taken."""

import sys
from dataclasses import dataclass

import psutil

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model decides how much memory it takes."""

    parameters: int
    """Weights of the base model."""
    trained: int
    """Weights that are trained."""
    layers: int
    """L."""
    hidden: int
    """H, width of the residual stream."""
    intermediate: int
    """Width of the MLP."""
    heads: int
    """Attention heads."""
    kv_width: int
    """Keys of one token in one layer: heads * head size."""
    vocabulary: int
    """V."""
    bytes_per_weight: int
    """4 in float32, 2 in bfloat16."""


def estimate(shape: Shape, *, tokens: int, rows: int, row_tokens: int) -> dict[str, int]:
    """Bytes that training takes at its peak, by what they are for.

    An estimate from shapes, held against measurement to a factor of 1.5 by tests: what lies in
    one packed row is counted as autograd keeps it.

    Args:
        shape: of the model.
        tokens: in one packed row that is trained.
        rows: completions drawn at the same time.
        row_tokens: longest prompt and completion together.

    Returns:
        ``weights``, ``adapter`` (gradient and moments too), ``activations``, ``logits``, ``cache``.
    """
    wide = 12 * shape.hidden + 6 * shape.intermediate + 4 * shape.kv_width
    size = shape.bytes_per_weight
    copies = 2 if size == 4 and shape.parameters * size <= 2 * GIB else 1
    return {
        "weights": copies * shape.parameters * size,
        "adapter": 5 * shape.trained * 4,
        "activations": tokens * shape.layers * wide * size,
        "logits": 2 * 256 * shape.vocabulary * 4,
        "cache": 2 * rows * row_tokens * shape.layers * shape.kv_width * size,
    }


def available(device: str = "cpu") -> int:
    """Bytes of memory that are free now.

    Args:
        device: where a model is, such as ``cpu`` or ``cuda:0``.
    """
    torch = sys.modules.get("torch")
    if torch is not None and device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(device)[0])
    return psutil.virtual_memory().available


def in_use() -> dict[str, float]:
    """Metrics: ``memory:process``, resident bytes of this process; on a GPU ``memory:device``."""
    found = {"memory:process": float(psutil.Process().memory_info().rss)}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        found["memory:device"] = float(torch.cuda.memory_allocated())
    return found


def amount(size: float) -> str:
    """Bytes for people.

    >>> amount(1536 * 2**20), amount(3 * 2**20), amount(100)
    ('1.5 GiB', '3.0 MiB', '0.1 KiB')
    """
    for unit, scale in (("GiB", GIB), ("MiB", 2**20)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size / 1024:.1f} KiB"
