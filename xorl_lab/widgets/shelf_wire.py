"""Checkpoints on their way to the page and back: JSON values there, Python's own here."""

import ast
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, cast

from xorl_lab.errors import ConfigError
from xorl_lab.types.results import SampledSequence

MAIN = ("reward", "held_out:accuracy", "held_out:loss", "loss:mean", "loss", "kl_base", "kl")
"""Metrics that are shown first, where they were measured."""
SHOWN = 3
"""So many of them unless more are asked for."""
_WORDS = {"true": True, "false": False, "none": None, "null": None}
_WHOLE = {"n": 1, "max_tokens": 1, "seed": 0}
"""Parameters of sampling that are whole numbers, with the least that each may be."""


def plain(value: object) -> Any:  # noqa: ANN401 (JSON)
    r"""A value as strict JSON: no NaN, and no text that UTF-8 cannot carry.

    >>> plain({"a": float("nan"), "b": (1, 2.5), "c": "\ud800", "d": None})
    {'a': None, 'b': [1, 2.5], 'c': '\\ud800', 'd': None}
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        number = float(value)
        return number if math.isfinite(number) else None
    if isinstance(value, Mapping):
        pairs = cast("Mapping[object, object]", value)
        return {plain(str(name)): plain(item) for name, item in pairs.items()}
    if isinstance(value, Iterable):
        return [plain(item) for item in cast("Iterable[object]", value)]
    return plain(str(value))


def pack(tree: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The checkpoints as the page is told of them.

    Checkpoints of one run have the same settings, which are sent once.

    Args:
        tree: as of :meth:`~xorl_lab.types.CheckpointCommands.tree`.

    Returns:
        What tells it from any other tree, and the tree.
    """
    numbers: dict[str, int] = {}
    settings: list[Any] = []
    checkpoints: list[dict[str, Any]] = []
    for checkpoint in cast("list[dict[str, Any]]", plain(tree["checkpoints"])):
        key = json.dumps(checkpoint["settings"], sort_keys=True)
        if key not in numbers:
            numbers[key] = len(settings)
            settings.append(checkpoint["settings"])
        checkpoints.append({**checkpoint, "settings": numbers[key]})
    names = metrics(checkpoints)
    packed: dict[str, Any] = {
        "checkpoints": checkpoints,
        "settings": settings,
        "runs": plain(tree["runs"]),
        "disk": plain(tree["disk"]),
        "metrics": names,
        "main": main(names),
    }
    written = json.dumps(packed, allow_nan=False).encode()
    return hashlib.blake2b(written, digest_size=12).hexdigest(), packed


def metrics(checkpoints: Iterable[Mapping[str, Any]]) -> list[str]:
    """Names of all metrics that were measured, the main ones first."""
    found = {name for checkpoint in checkpoints for name in checkpoint["metrics"]}
    first = [name for name in MAIN if name in found]
    return [*first, *sorted(found.difference(first))]


def main(names: Sequence[str]) -> list[str]:
    """Those of some metrics that are shown unasked.

    >>> main(["grad_norm", "reward"])
    ['reward']
    """
    return [name for name in MAIN if name in names][:SHOWN] or list(names[:SHOWN])


def sequences(found: Iterable[SampledSequence]) -> list[dict[str, Any]]:
    """Completions as the page is told of them; ``logprob`` in nats, summed over the tokens."""
    return [
        {
            "text": plain(s.text or ""),
            "tokens": len(s.tokens),
            "stop": s.stop_reason,
            "logprob": None if s.logprobs is None else plain(float(sum(s.logprobs))),
        }
        for s in found
    ]


def parameters(given: Mapping[str, str]) -> dict[str, float]:
    """Parameters of sampling out of the fields of a form; an empty field is left out.

    >>> parameters({"n": "2", "temperature": "0.7", "seed": ""})
    {'n': 2, 'temperature': 0.7}

    Raises:
        ConfigError: a field holds no such number.
    """
    found: dict[str, float] = {}
    for name, text in given.items():
        written = text.strip()
        if not written:
            continue
        least = _WHOLE.get(name)
        try:
            value = float(written) if least is None else int(written)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < (least or 0):
            what = (
                "a number of 0 or more" if least is None else f"a whole number of {least} or more"
            )
            raise ConfigError(f"{name} is {text!r}: pass {what}")
        found[name] = value
    return found


def changes(fields: Mapping[str, str], lines: str) -> dict[str, Any]:
    r"""Changed settings out of a form; values are written as in Python, bare words are text.

    >>> changes({"learning_rate": "3e-5", "steps": ""}, "loss=cispo\nshuffle = False")
    {'learning_rate': 3e-05, 'loss': 'cispo', 'shuffle': False}

    Args:
        fields: by name of the setting; an empty one is left out.
        lines: one ``name=value`` each.

    Raises:
        ConfigError: a line is something else, or a setting is given twice.
    """
    pairs = [(name, text.strip()) for name, text in fields.items() if text.strip()]
    for line in lines.splitlines():
        if not line.strip():
            continue
        name, equals, text = (part.strip() for part in line.partition("="))
        if not (equals and name.isidentifier() and text):
            raise ConfigError(
                f"{line.strip()!r} is not name=value: write one change per line, "
                "such as temperature=0.8"
            )
        pairs.append((name, text))
    found: dict[str, Any] = {}
    for name, text in pairs:
        if name in found:
            raise ConfigError(f"{name} is given twice: write it once")
        found[name] = _value(text)
    return found


def _value(text: str) -> object:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
