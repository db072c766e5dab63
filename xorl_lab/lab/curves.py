"""Losses as curves: value and gradient of one token at every ratio, by the losses themselves."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch

from xorl_lab import losses
from xorl_lab.errors import ConfigError
from xorl_lab.losses.base import is_number

Floats = np.ndarray[Any, np.dtype[np.float64]]

SPAN = math.log(8)
"""A curve goes from a ratio of 1/8 to 8, or as far as the ratio that is asked about."""
FAR = 20.0
"""Nats: no ratio lies beyond, as the losses bound it there."""
_POINTS = 241
_FINER = 16
"""Into so many parts a gap is cut in which something begins or ends, several times over."""
_FLAGS = ("clipped", "masked")


@dataclass(frozen=True, slots=True)
class Token:
    """What a loss is told of one token, beside its ratio."""

    advantage: float = 1.0
    """A, unitless."""
    old_logprob: float = -3.0
    """Of the policy that the ratio compares with, nats, <= 0."""
    rollout_gap: float = 0.0
    """Old minus rollout logprob, nats: how trainer and sampler differ; TIS weights by its exp."""
    ref_gap: float = 0.0
    """Old minus reference logprob, nats; the KL penalty is about this plus the log ratio."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not is_number(value):
                raise ConfigError(f"{name} is {value!r}: pass a number")
        if self.old_logprob > 0:
            raise ConfigError(f"old_logprob is {self.old_logprob!r}: pass a number <= 0, in nats")


def loss_curve(
    loss: str,
    ratios: Sequence[float],
    token: Token | Mapping[str, float] | None = None,
    **params: Any,  # noqa: ANN401 (parameters of any loss)
) -> pd.DataFrame:
    """What a loss makes of one token at some ratios, by the loss itself and autograd.

    Args:
        loss: its name, as of ``forward_backward``.
        ratios: the ratio r of the policy to the old policy; each > 0.
        token: ``advantage`` (default 1), ``old_logprob``, ``rollout_gap``, ``ref_gap``: see
            :class:`Token`.
        **params: of the loss.

    Returns:
        A row per ratio: ``ratio``, ``value`` (of the token, to be minimised), ``gradient`` (of
        the value by the token's logprob), ``clipped`` and ``masked``; where they apply
        ``tis_weight``, ``tis_clipped`` and ``kl``.

    Raises:
        ConfigError: the loss, a parameter, the token or a ratio is not valid.

    >>> loss_curve("ppo", [0.5, 1.5])[["value", "gradient", "clipped"]].round(2).to_dict("list")
    {'value': [-0.5, -1.2], 'gradient': [-0.5, 0.0], 'clipped': [False, True]}
    """
    logs = np.array([log_ratio(ratio) for ratio in ratios], dtype=np.float64)
    found = evaluated(loss, logs, token_of(token or {}), checked(loss, params))
    return pd.DataFrame({"ratio": np.asarray(list(ratios), dtype=np.float64), **found})


def evaluated(
    loss: str, log_ratios: Floats, token: Token, params: Mapping[str, Any]
) -> dict[str, np.ndarray[Any, Any]]:
    """Value, gradient and terms of a loss at (M,) log ratios, in float64.

    Args:
        loss: its name.
        log_ratios: (M,), nats.
        token: what else the loss is told.
        params: of :func:`checked`.
    """
    terms, gradient, _ = _run(loss, log_ratios, token, params)
    never = np.zeros(len(log_ratios), dtype=bool)
    found: dict[str, np.ndarray[Any, Any]] = {
        "value": terms["elementwise_loss"][0].numpy(),
        "gradient": gradient.numpy(),
        **dict.fromkeys(_FLAGS, never),
    }
    for name in (*_FLAGS, "tis_weight", "tis_clipped", "kl"):
        if name in terms:
            found[name] = terms[name][0].numpy()
    return found


def metrics(loss: str, log: float, token: Token, params: Mapping[str, Any]) -> dict[str, float]:
    """What ``forward_backward`` would report of a batch of this token alone."""
    terms, _, weights = _run(loss, np.array([log]), token, params)
    flat = {name: term[0] for name, term in terms.items()}
    return losses.summarize(loss, flat, weights[0], params)


def refined(loss: str, span: float, token: Token, params: Mapping[str, Any]) -> Floats:
    """Log ratios from -span to span, dense where a clip or mask begins or ends."""
    grid: Floats = np.linspace(-span, span, _POINTS)
    for _ in range(3):
        found = evaluated(loss, grid, token, params)
        changes = np.any([np.diff(found[flag]) for flag in _FLAGS], axis=0)
        starts = np.flatnonzero(changes)
        finer = [np.linspace(grid[i], grid[i + 1], _FINER + 1) for i in starts]
        grid = np.unique(np.concatenate([grid, *finer]))
    return grid


def regions(logs: Floats, found: Mapping[str, np.ndarray[Any, Any]]) -> list[dict[str, Any]]:
    """Where the token is clipped and where it is masked: intervals of the ratio."""
    intervals: list[dict[str, Any]] = []
    for kind in _FLAGS:
        padded = np.concatenate([[False], found[kind], [False]]).astype(np.int8)
        steps = np.diff(padded)
        begins, ends = np.flatnonzero(steps == 1), np.flatnonzero(steps == -1) - 1
        for begin, end in zip(begins, ends, strict=True):
            edges = {"low": math.exp(logs[begin]), "high": math.exp(logs[end])}
            intervals.append({"kind": kind, **edges})
    return intervals


def checked(loss: str, params: Mapping[str, Any] | None) -> dict[str, Any]:
    """The parameters of a loss, filled in.

    Raises:
        ConfigError: as of ``losses.check_params``; or one is for the engine, which no loss sees.
    """
    complete = losses.check_params(loss, params)
    common = sorted(set(params or ()) & set(losses.COMMON_PARAMS))
    if common:
        raise ConfigError(f"{common[0]} acts on the logprobs, and these are given here: leave it")
    return {name: complete[name] for name in losses.get(loss).params}


def token_of(given: Token | Mapping[str, Any]) -> Token:
    """A token out of what a person, or a page, says of it.

    Raises:
        ConfigError: a name is unknown, or a value out of its range.
    """
    if isinstance(given, Token):
        return given
    known = list(asdict(Token()))
    unknown = sorted(set(given) - set(known), key=str)
    if unknown:
        raise ConfigError(f"a token has no {unknown}: choose from {known}")
    return Token(**given)


def log_ratio(ratio: object) -> float:
    """The logarithm of a ratio, nats.

    Raises:
        ConfigError: it is no ratio, or one that the losses would bound.
    """
    if not is_number(ratio) or ratio <= 0 or abs(math.log(ratio)) > FAR:
        raise ConfigError(f"ratio is {ratio!r}: pass a number > 0, from exp(-20) to exp(20)")
    return math.log(ratio)


def _run(
    loss: str, log_ratios: Floats, token: Token, params: Mapping[str, Any]
) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Terms (1, M), gradient (M,) and weights (1, M)."""
    old = torch.full((1, len(log_ratios)), float(token.old_logprob), dtype=torch.float64)
    inputs = {
        "weights": torch.ones_like(old),
        "logprobs": old,
        "advantages": torch.full_like(old, float(token.advantage)),
        "rollout_logprobs": old - token.rollout_gap,
        "ref_logprobs": old - token.ref_gap,
    }
    with torch.inference_mode(mode=False), torch.enable_grad():
        logprobs = (old + torch.from_numpy(log_ratios)).requires_grad_()
        output = losses.evaluate(loss, logprobs, inputs, params)
        (gradient,) = torch.autograd.grad(output.loss, logprobs)
    return output.terms, gradient[0], inputs["weights"]
