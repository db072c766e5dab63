"""Requests to JSON: checked before they are sent."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from xorl_lab.errors import DataError


def encode(body: Mapping[str, Any]) -> str:
    """A request as JSON; scalars and arrays of numpy and torch become numbers and lists.

    Raises:
        DataError: something in it cannot be sent; says where it is.

    >>> encode({"a": (1, 2.5)})
    '{"a": [1, 2.5]}'
    """
    try:
        return json.dumps(body, allow_nan=False, default=_plain)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        # The first part of the path is the wire's own.
        found = re.sub(r"^\w+_input\.", "", _fault(body, "") or f"the request: {error}")
        raise DataError(f"{found}: pass finite numbers, strings and lists") from None


def numbered(content: str, number: int) -> str:
    """An encoded request with its sequence number.

    >>> numbered('{"model_id": "m"}', 3)
    '{"model_id": "m", "seq_id": 3}'
    """
    return f'{content[:-1]}, "seq_id": {number}}}'


def _plain(value: Any) -> Any:  # noqa: ANN401 (whatever a user passes)
    if callable(getattr(value, "item", None)) and getattr(value, "ndim", None) == 0:
        return value.item()
    if callable(getattr(value, "tolist", None)):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__}")


def _fault(value: Any, where: str) -> str | None:  # noqa: ANN401 (whatever a user passes)
    """What in a value JSON cannot hold, None if it is fine."""
    if value is None or isinstance(value, str | bool | int):
        return None
    if isinstance(value, float):
        return None if math.isfinite(value) else f"{where} is {value}"
    if isinstance(value, Mapping):
        keys = (f"{where} has the key {k!r}" for k in value if not isinstance(k, str | int | float))
        parts = (_fault(v, f"{where}.{k}" if where else str(k)) for k, v in value.items())
        return next(keys, None) or next((p for p in parts if p), None)
    if isinstance(value, list | tuple):
        return next((p for i, v in enumerate(value) if (p := _fault(v, f"{where}[{i}]"))), None)
    try:
        return _fault(_plain(value), where)
    except (TypeError, ValueError, RuntimeError):
        return f"{where} is a {type(value).__name__}"
