"""Per-token inputs: which there are, whether they fit each other, and what padding may hold."""

from collections.abc import Iterable, Mapping

import torch

from xorl_lab.errors import DataError, ShapeError

KNOWN_INPUTS = ("logprobs", "rollout_logprobs", "ref_logprobs", "advantages", "weights")
"""Inputs that some loss understands, named as in a Datum: ``logprobs`` are the old policy's."""


def clean(
    name: str,
    logprobs: torch.Tensor,
    inputs: Mapping[str, torch.Tensor],
    needed: Iterable[str],
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Check the inputs of a loss and put 0 wherever no token is trained.

    Prompt and padding may hold anything, inf and NaN included.  Zero times NaN is NaN, in value and
    gradient, so such values are replaced before any arithmetic instead of multiplied away.

    Args:
        name: the loss, for messages.
        logprobs: (B, T) float, nats, of the policy being trained; carries the gradient.
        inputs: (B, T) each, by name; ``weights`` is always needed, 0 = not trained.
        needed: names of the other inputs that the loss will read.

    Returns:
        The logprobs, and the needed inputs with ``weights``, detached, in the same dtype.

    Raises:
        DataError: a needed input is missing, or one is unknown.
        ShapeError: the inputs disagree; names each with its shape.
    """
    wanted = [*needed, "weights"]
    _check_names(name, inputs, wanted)
    _check_shapes(name, logprobs, inputs)
    trained = inputs["weights"] != 0
    constants = {
        key: torch.where(trained, inputs[key].detach().to(logprobs.dtype), 0.0) for key in wanted
    }
    return torch.where(trained, logprobs, 0.0), constants


def _check_names(name: str, inputs: Mapping[str, torch.Tensor], wanted: list[str]) -> None:
    unknown = sorted(set(inputs) - set(KNOWN_INPUTS))
    if unknown:
        raise DataError(f"unknown loss inputs {unknown}: known are {sorted(KNOWN_INPUTS)}")
    missing = [key for key in wanted if key not in inputs]
    if missing:
        raise DataError(
            f"{name} with these parameters needs {wanted}, and {missing} are missing: "
            "pass one value per target token for each"
        )


def _check_shapes(name: str, logprobs: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> None:
    shapes = {"new logprobs": tuple(logprobs.shape)}
    shapes |= {key: tuple(value.shape) for key, value in inputs.items()}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{key} {shape}" for key, shape in shapes.items())
        raise ShapeError(f"{name} got shapes that differ: {listed}: give all the same shape")
