"""The shape of what a lab trains."""

import inspect
from collections.abc import Mapping
from typing import Any

from xorl_lab.client import ServiceClient
from xorl_lab.errors import ConfigError
from xorl_lab.recipes.settings import suggest
from xorl_lab.types import LoraRunSpec

_TAKEN = ("self", "base_model", "rank", "model_id", "alpha", "seed")
_OWN = ("model", "rank", "alpha", "seed", "folder", "device", "dtype", "base_url")
"""Arguments of a lab that it names itself."""


def checked_shape(
    rank: int | None, shape: Mapping[str, Any], further: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments that make an adapter, checked; only ``rank`` is there, and None, for full weights.

    Raises:
        ConfigError: one is unknown or out of range.
    """
    known = inspect.signature(ServiceClient.create_lora_training_client).parameters
    names = [name for name in known if name not in _TAKEN]
    for name in further:
        if name not in names:
            raise ConfigError(f"Lab has no argument {name!r}{suggest(name, [*_OWN, *names])}")
    if rank is None:
        for name, value in {**shape, **further}.items():
            if name != "seed" and value is not None:
                raise ConfigError(
                    f"rank is None, which trains the full weights, and {name} is {value!r}, which "
                    "is for an adapter: leave one of them out"
                )
        return {"rank": None}
    given = {k: v for k, v in shape.items() if v is not None}
    if not isinstance(further.get("target_modules"), str):  # the service says what is wrong
        LoraRunSpec(rank=rank, **given, **further)
    return {"rank": rank, **shape, **further}
