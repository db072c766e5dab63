"""Arguments of the client API that come in more than one form."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from xorl_lab.errors import ConfigError
from xorl_lab.types import Datum


def one_of_two(
    params: Mapping[str, Any] | None, config: Mapping[str, Any] | None
) -> Mapping[str, Any] | None:
    """The parameters of a loss, under whichever of their two names they were given.

    Raises:
        ConfigError: under both.
    """
    if params is not None and config is not None:
        raise ConfigError(
            "loss_fn_params and loss_fn_config are two names of one thing: pass one of them"
        )
    return config if params is None else params


def shifted(data: Sequence[Datum], auto_shift: bool) -> Sequence[Datum]:
    """The data; pytrio's ``auto_shift`` is the form that xorl calls ``labels``."""
    if not auto_shift:
        return data
    return [_as_labels(datum) if isinstance(datum, Datum) else datum for datum in data]


def check_ttl(ttl_seconds: object) -> None:
    """Make sure that a life is a number of seconds.

    Raises:
        ConfigError: it is not.
    """
    number = isinstance(ttl_seconds, int | float) and not isinstance(ttl_seconds, bool)
    if ttl_seconds is not None and not (number and cast("float", ttl_seconds) > 0):
        raise ConfigError(f"ttl_seconds is {ttl_seconds!r}: pass a number > 0, or None to keep it")


def _as_labels(datum: Datum) -> Datum:
    inputs = {
        "labels" if name == "target_tokens" else name: value
        for name, value in datum.loss_fn_inputs.items()
    }
    return Datum(datum.model_input, inputs, datum.routed_experts)
