"""Chosen experts as SGLang sends them: bytes in base64, without their shape.

``meta_info["routed_experts"]`` holds int32 numbers, row-major, (P + C - 1, all layers, K): prompt
included, the last drawn token not, and a layer without experts has a place that means nothing.
Our own server says the shape beside it, ``routed_experts_shape``, and leaves those layers out.

Source: SGLang 0.5.23, ``state_capturer/routed_experts.py``.
"""

import base64
import binascii
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from xorl_lab.engine.routing import Choice, Experts

BYTES = "routed_experts"
"""Under which name ``meta_info`` holds the experts."""
SHAPE = "routed_experts_shape"
"""Under which name our own server says what shape they have."""


def to_meta(choice: "Choice", start: int = 0) -> dict[str, Any]:
    """Chosen experts as entries of ``meta_info``.

    Args:
        choice: (N, L, K).
        start: first row that is wanted.
    """
    wanted = choice[start:]
    content = base64.b64encode(wanted.astype("<i4").tobytes()).decode()
    return {BYTES: content, SHAPE: list(wanted.shape)}


def from_meta(meta: Mapping[str, Any], tokens: int, known: Callable[[], "Experts"]) -> "Choice":
    """Chosen experts from ``meta_info``, checked.

    Args:
        meta: of one completion.
        tokens: N = P + C - 1.
        known: asked what the model chooses from, where the answer does not say it.

    Returns:
        (N, L, K).

    Raises:
        KeyError: there are none.
        ValueError: they are not base64, or too few or too many, or no experts of this model.
    """
    try:
        numbers = np.frombuffer(base64.b64decode(meta[BYTES], validate=True), "<i4")
    except binascii.Error as error:
        raise ValueError(f"{BYTES} is not base64 ({error})") from error
    if SHAPE in meta:
        return _shaped(numbers, meta[SHAPE], tokens)
    experts = known()
    shape = (tokens, experts.depth, experts.chosen)
    if len(numbers) != math.prod(shape):
        raise ValueError(
            f"{BYTES} has {len(numbers)} numbers, but {tokens} tokens, {experts.depth} layers and "
            f"{experts.chosen} experts per token make {math.prod(shape)}"
        )
    return experts.check(BYTES, numbers.reshape(shape)[:, list(experts.where)], tokens)


def _shaped(numbers: Any, shape: Sequence[Any], tokens: int) -> "Choice":  # noqa: ANN401  (an array)
    whole = [int(n) for n in shape]
    if len(whole) != 3 or whole[0] != tokens or math.prod(whole) != len(numbers):
        raise ValueError(
            f"{BYTES} has {len(numbers)} numbers and is said to have shape {whole}, but "
            f"{tokens} tokens were read"
        )
    choice = numbers.reshape(whole)
    if choice.size and (choice.min() < 0 or choice.max() > np.iinfo(np.int16).max):
        raise ValueError(f"{BYTES} has {choice.min()} to {choice.max()}: these are no experts")
    return choice.astype(np.int16)
