"""What an explorer of losses may ask, answered by the losses themselves."""

import inspect
import math
from collections.abc import Mapping
from dataclasses import asdict
from types import NoneType
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from xorl_lab import losses
from xorl_lab.errors import ConfigError
from xorl_lab.lab import curves
from xorl_lab.lab.curves import Token
from xorl_lab.losses.kl import ESTIMATORS

if TYPE_CHECKING:
    from xorl_lab.widgets import LossExplorer

_SLIDERS: dict[str, tuple[float, float, float]] = {
    "eps_clip": (0, 1, 0.01),
    "eps_clip_high": (0, 4, 0.01),
    "eps_clip_c": (1, 8, 0.05),
    "icepop_beta": (1, 8, 0.05),
    "tis_clip_low": (0, 2, 0.01),
    "tis_clip_high": (0, 5, 0.01),
    "kl_coef": (0, 1, 0.01),
    "clip_low": (0, 1, 0.01),
    "clip_high": (0, 4, 0.01),
    "clip_low_threshold": (0, 1, 0.01),
    "clip_high_threshold": (0, 8, 0.05),
    "beta": (0, 2, 0.01),
}
"""Lowest and highest place of a slider, and its step; what is valid, the loss itself says."""
_ON = {"eps_clip_c": 3.0, "icepop_beta": 2.0}
"""Values with which a parameter that may be None is switched on."""
_CHOICES = {"kl_type": sorted(ESTIMATORS)}


class Losses:
    """The policy losses; a :class:`~xorl_lab.types.LossCommands`."""

    def forms(self) -> list[dict[str, Any]]:
        """The losses and what each can be told."""
        return [_form(name) for name in policy_losses()]

    def curve(
        self, loss: str, params: Mapping[str, Any], token: Mapping[str, Any]
    ) -> dict[str, Any]:
        """One token under a loss, at every ratio and at one.

        Raises:
            ConfigError: something is unknown or out of its range.
        """
        name = losses.get(loss).name
        if name not in policy_losses():
            raise ConfigError(f"{name} has no ratio: choose from {policy_losses()}")
        if not isinstance(token, Mapping):
            raise ConfigError(f"the token is a {type(token).__name__}: pass a mapping")
        chosen = curves.checked(name, params)
        told = dict(token)
        ratio = told.pop("ratio", 1.0)
        log, one = curves.log_ratio(ratio), curves.token_of(told)
        logs = curves.refined(name, max(curves.SPAN, abs(log)), one, chosen)
        found = curves.evaluated(name, logs, one, chosen)
        (mark,) = curves.loss_curve(name, [ratio], one, **chosen).to_dict("records")
        return {
            "loss": name,
            "params": chosen,
            "token": {"ratio": ratio, **asdict(one)},
            "needs": list(losses.required_inputs(name, chosen)),
            "ratios": [math.exp(value) for value in logs],
            "values": found["value"].tolist(),
            "gradients": found["gradient"].tolist(),
            "regions": curves.regions(logs, found),
            "mark": {str(key): value for key, value in mark.items()},
            "metrics": curves.metrics(name, log, one, chosen),
        }


def explore_losses(
    loss: str = "policy_loss",
    *,
    ratio: float = 1.5,
    token: Token | Mapping[str, float] | None = None,
    **params: Any,  # noqa: ANN401 (parameters of any loss)
) -> "LossExplorer":
    """A loss to play with: sliders for the token and every parameter, curves, numbers at a mark.

    Everything is computed by ``losses.evaluate`` and autograd; the same numbers in a cell:
    :func:`~xorl_lab.lab.curves.loss_curve`.

    Args:
        loss: where to begin; the others can be chosen in the page.
        ratio: where the mark is at first, > 0.
        token: what the loss is told of the token at first: see
            :class:`~xorl_lab.lab.curves.Token`.
        **params: of the loss, at first.

    Raises:
        ConfigError: the loss, a parameter, the token or the ratio is not valid.
    """
    # Widgets take a while to import, and a script may do without them.
    from xorl_lab.widgets import LossExplorer  # noqa: PLC0415

    told = asdict(curves.token_of(token or {}))
    return LossExplorer(Losses(), loss, params, {"ratio": ratio, **told})


def policy_losses() -> list[str]:
    """Names of the losses that compare a policy with an older one, sorted."""
    return [name for name in losses.names() if "advantages" in losses.get(name).required]


def _form(name: str) -> dict[str, Any]:
    spec = losses.get(name)
    about, _, rest = inspect.cleandoc(spec.function.__doc__ or "").partition("\n\n")
    hints = get_type_hints(spec.settings)
    return {
        "name": name,
        "about": about,
        "formula": rest.partition("\n\n")[0],
        "params": [_field(key, value, hints[key]) for key, value in spec.params.items()],
    }


def _field(name: str, default: object, hint: object) -> dict[str, Any]:
    if isinstance(default, bool):
        return {"name": name, "kind": "flag", "default": default}
    if isinstance(default, str):
        choices = _CHOICES.get(name, [default])
        return {"name": name, "kind": "choice", "default": default, "choices": choices}
    number = float(default) if isinstance(default, int | float) else 1.0
    low, high, step = _SLIDERS.get(name, (0, 2 * max(1.0, number), 0.01))
    on = _ON.get(name, number) if NoneType in get_args(hint) else None
    slider = {"low": low, "high": high, "step": step, "on": on}
    return {"name": name, "kind": "number", "default": default, **slider}
