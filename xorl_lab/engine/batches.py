"""From Datum to arrays: the one place where alignment and masking are decided.

* ``labels`` (length N): inputs are tokens[:-1], targets labels[1:]; a per-token input of length N
  drops its entry 0, one of length N - 1 is taken as it is.  T = N - 1.
* ``target_tokens`` (length N): already shifted, every input has length N.  T = N.
* ``weights``: 0 = not trained, other values scale the loss term.  A target of -100 is not trained.
* Without ``weights``, in a datum with ``advantages`` (the form of xorl's RL loop), the prompt is
  the leading run of targets in which ``logprobs`` and ``advantages`` are both 0.
* A datum in which nothing is trained carries no signal: it is left out of the computation and
  counted in ``rows_without_signal``.
* ``routed_experts`` belong to input tokens, one entry each: with ``labels`` the last of N, whose
  token is only a target, may be there or not.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from xorl_lab.engine.routing import Choice, Experts
from xorl_lab.errors import ConfigError, DataError, ShapeError
from xorl_lab.losses import KNOWN_INPUTS
from xorl_lab.types import Datum, TensorData

IGNORE_INDEX = -100
"""A target with this value is not trained (the convention of PyTorch's cross entropy)."""

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One datum, aligned.  T = number of targets."""

    datum: int
    """Its index in the list that was passed."""
    tokens: IntArray
    """(T,) input ids."""
    targets: IntArray
    """(T,) the id that follows each input."""
    weights: FloatArray
    """(T,) 0 = not trained."""
    extras: dict[str, FloatArray]
    """(T,) each: logprobs, advantages, …"""
    experts: Choice | None = None
    """(T, L, K) the experts that each input goes through; None leaves them to the model."""

    @property
    def trained(self) -> IntArray:
        """Positions with a nonzero weight, ascending."""
        return np.flatnonzero(self.weights)


@dataclass(frozen=True, slots=True)
class Batch:
    """All rows of one call."""

    rows: list[TokenRow]
    """Those with at least one trained token."""
    lengths: list[int]
    """T of every datum passed, the left-out ones included."""

    @property
    def rows_without_signal(self) -> int:
        """Number of datums in which nothing is trained."""
        return len(self.lengths) - len(self.rows)

    @property
    def valid_tokens(self) -> int:
        """Number of targets with a nonzero weight."""
        return sum(len(row.trained) for row in self.rows)


def align(
    data: Sequence[Datum],
    *,
    required: Sequence[str] = (),
    loss_fn: str = "the loss",
    vocab_size: int,
    context_length: int,
    experts: Callable[[], Experts] | None = None,
) -> Batch:
    """Validate a list of datums and align their inputs with the targets.

    Args:
        data: at least one datum.
        required: loss inputs that must be there, beside the targets.
        loss_fn: name of the loss, for messages.
        vocab_size: V; ids must lie in 0 … V - 1.
        context_length: longest sequence that the model can read.
        experts: asked what the model chooses from, if a datum has ``routed_experts``; raises a
            ConfigError if there is nothing to choose.

    Raises:
        DataError: the list is empty; a datum is empty, has an unknown or missing input, an id
            outside the vocabulary, more tokens than the context, a number that is not finite, or
            experts that cannot be replayed.
        ShapeError: an input has the wrong length, or experts the wrong shape.
    """
    if not isinstance(data, Sequence) or isinstance(data, str | bytes):
        raise DataError(f"data is a {type(data).__name__}: pass a list of Datum")
    if not data:
        raise DataError("data is an empty list: pass at least one Datum")
    rows: list[TokenRow] = []
    lengths: list[int] = []
    for index, datum in enumerate(data):
        if not isinstance(datum, Datum):
            raise DataError(f"data[{index}] is a {type(datum).__name__}: pass a list of Datum")
        row = _align_one(index, datum, required, loss_fn)
        _check_ids(index, "token", row.tokens, vocab_size)
        _check_ids(index, "target", row.targets[row.weights != 0], vocab_size)
        if len(row.tokens) > context_length:
            raise DataError(
                f"data[{index}] has {datum.model_input.length} tokens, but the model's context "
                f"holds {context_length}: shorten it"
            )
        if datum.routed_experts is not None:
            row = replace(row, experts=_experts(index, datum, len(row.tokens), experts))
        lengths.append(len(row.targets))
        if len(row.trained):
            rows.append(row)
    return Batch(rows, lengths)


def known_inputs(datum: Datum) -> Datum:
    """The datum without inputs that no built-in loss knows; for losses of the caller's own."""
    known = {"labels", "target_tokens", *KNOWN_INPUTS}
    inputs = {name: value for name, value in datum.loss_fn_inputs.items() if name in known}
    return Datum(datum.model_input, inputs, datum.routed_experts)


def _align_one(index: int, datum: Datum, required: Sequence[str], loss_fn: str) -> TokenRow:
    inputs = datum.loss_fn_inputs
    _check_names(index, inputs, required, loss_fn)
    tokens = _ids(index, "model_input", np.asarray(datum.model_input.tokens))
    shifted = "target_tokens" in inputs
    form = "target_tokens" if shifted else "labels"
    if len(tokens) < (1 if shifted else 2):
        raise DataError(
            f"data[{index}] has {len(tokens)} tokens, too few to predict one from another: "
            f"with {form!r} pass at least {1 if shifted else 2}"
        )
    targets = _ids(index, form, _vector(index, form, inputs[form]))
    if len(targets) != len(tokens):
        raise ShapeError(
            f"data[{index}]: {form} has {len(targets)} entries but there are {len(tokens)} "
            "input tokens: pass one per token"
        )
    if not shifted:
        tokens, targets = tokens[:-1], targets[1:]
    extras = {
        name: _extra(index, name, value, len(targets), shifted)
        for name, value in inputs.items()
        if name != form
    }
    weights = extras.pop("weights", None)
    if weights is None:
        weights = _default_weights(extras, len(targets))
    return TokenRow(index, tokens, targets, np.where(targets == IGNORE_INDEX, 0.0, weights), extras)


def _check_names(
    index: int, inputs: dict[str, TensorData], required: Sequence[str], loss_fn: str
) -> None:
    forms = {"labels", "target_tokens"}
    known = sorted(forms | set(KNOWN_INPUTS))
    unknown = sorted(set(inputs) - set(known))
    if unknown:
        raise DataError(f"data[{index}] has unknown loss inputs {unknown}: choose from {known}")
    given = forms & set(inputs)
    if len(given) != 1:
        got = "both" if given else "neither"
        raise DataError(
            f"data[{index}] has {got} of 'labels' and 'target_tokens': pass exactly one "
            "(labels = the token ids themselves, target_tokens = already shifted by one)"
        )
    missing = [name for name in required if name not in inputs]
    if missing:
        raise DataError(
            f"data[{index}] lacks {missing}, which {loss_fn} needs: add them to loss_fn_inputs"
        )


def _vector(index: int, name: str, value: TensorData) -> npt.NDArray[np.generic]:
    # xorl_client types token ids float32 too; the list holds them exactly, an array would not.
    array = np.asarray(value.data)
    if value.shape is not None and len(value.shape) != 1:
        raise ShapeError(
            f"data[{index}]: {name} has shape {value.shape}: pass one number per token"
        )
    if array.ndim != 1 or (array.dtype.kind not in "fiub" and len(array)):
        raise DataError(f"data[{index}]: {name} does not hold numbers: pass one per token")
    return array


def _ids(index: int, name: str, array: npt.NDArray[np.generic]) -> IntArray:
    """Token ids as int64, whatever they were typed."""
    with np.errstate(invalid="ignore"):
        ids = array.astype(np.int64) if array.dtype.kind in "fiub" else None
    if ids is None and len(array) == 0:
        return np.zeros(0, dtype=np.int64)
    if ids is None or not (ids == array).all():
        raise DataError(f"data[{index}]: {name} has entries that are not token ids: pass integers")
    return ids


def _extra(index: int, name: str, value: TensorData, length: int, shifted: bool) -> FloatArray:
    array = _vector(index, name, value).astype(np.float64)
    if not shifted and len(array) == length + 1:
        array = array[1:]
    if len(array) != length:
        also = "" if shifted else f" (or {length + 1}, one per token)"
        raise ShapeError(
            f"data[{index}]: {name} has {len(array)} entries but there are {length} targets: "
            f"pass {length}{also}"
        )
    finite = np.isfinite(array)
    if not finite.all():
        where = int(np.flatnonzero(~finite)[0])
        raise DataError(
            f"data[{index}]: {name} is {array[where]} at target {where}: pass finite numbers, and "
            "leave out a sample whose value is not known"
        )
    return array


def _default_weights(extras: dict[str, FloatArray], length: int) -> FloatArray:
    """Weights where none were given: all ones, less the prompt of an RL datum."""
    weights = np.ones(length)
    if "advantages" in extras:
        signal = (extras["advantages"] != 0) | (extras.get("logprobs", np.zeros(length)) != 0)
        first = int(np.argmax(signal)) if signal.any() else length
        weights[:first] = 0.0
    return weights


def _experts(
    index: int, datum: Datum, length: int, experts: Callable[[], Experts] | None
) -> Choice:
    """The experts of the T inputs of a datum, checked."""
    try:
        if experts is None:
            raise ConfigError("nothing is known of this model's experts")
        known = experts()
    except ConfigError as error:
        raise DataError(f"data[{index}] has routed_experts, but {error}: leave them out") from None
    given: Any = datum.routed_experts
    if hasattr(given, "__len__") and len(given) == datum.model_input.length:
        given = given[:length]
    return known.check(f"data[{index}].routed_experts", given, length)


def _check_ids(index: int, what: str, ids: IntArray, vocab_size: int) -> None:
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(outside):
        raise DataError(
            f"data[{index}] has {what} id {int(ids[outside[0]])}, but this model's ids are 0 to "
            f"{vocab_size - 1}: encode the text with this model's tokenizer"
        )
