"""What goes into a training call: token ids and the per-token inputs of a loss."""

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xorl_lab.errors import DataError, ShapeError

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

INTEGER_INPUTS = frozenset({"labels", "target_tokens"})
"""Loss inputs that hold token ids.  All others hold real numbers."""


@dataclass(frozen=True, slots=True)
class ModelInput:
    """A sequence of token ids.

    >>> ModelInput.from_ints([5, 6]).append_int(7).to_ints()
    [5, 6, 7]
    """

    tokens: tuple[int, ...]
    """Token ids, in order."""

    def __post_init__(self) -> None:
        try:
            tokens = tuple(operator.index(t) for t in self.tokens)
        except TypeError as error:
            raise DataError(
                f"token ids must be integers, but {error}: encode text with "
                "get_tokenizer().encode(text) first"
            ) from None
        object.__setattr__(self, "tokens", tokens)

    @classmethod
    def from_ints(cls, tokens: Iterable[int]) -> "ModelInput":
        """Make one from a list, tuple or array of integers.

        Raises:
            DataError: an entry is not an integer.
        """
        return cls(tokens)  # pyright: ignore[reportArgumentType]  (made a tuple by __post_init__)

    @classmethod
    def empty(cls) -> "ModelInput":
        """An input without tokens, to append to."""
        return cls(())

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.tokens)

    def to_ints(self) -> list[int]:
        """The token ids as a list."""
        return list(self.tokens)

    def append(self, other: "ModelInput | Iterable[int]") -> "ModelInput":
        """A new input with the tokens of ``other`` behind these."""
        more = other if isinstance(other, ModelInput) else ModelInput.from_ints(other)
        return ModelInput(self.tokens + more.tokens)

    def append_int(self, token: int) -> "ModelInput":
        """A new input with one more token."""
        return self.append([token])


@dataclass(frozen=True, slots=True, eq=False)
class TensorData:
    """Numbers with a dtype and a shape, as they go over the wire."""

    data: list[int] | list[float]
    """The numbers, flattened in row-major order."""
    dtype: str = "float32"
    """``float32`` or ``int64``."""
    shape: list[int] | None = None
    """Lengths of the axes; None means one axis."""

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "int64"):
            raise DataError(f"TensorData dtype is {self.dtype!r}: use 'float32' or 'int64'")
        if self.shape is not None and math.prod(self.shape) != len(self.data):
            raise ShapeError(
                f"TensorData has {len(self.data)} numbers but shape {self.shape}: "
                "make the product of the shape equal the count"
            )

    @classmethod
    def from_numpy(cls, array: "npt.NDArray[Any]") -> "TensorData":
        """Copy an array.  Integers and booleans become int64, real numbers float32."""
        if array.dtype.kind not in "fiub":
            raise DataError(
                f"an array of dtype {array.dtype} is not numeric: pass integers or floats"
            )
        dtype = "float32" if array.dtype.kind == "f" else "int64"
        return cls(array.reshape(-1).tolist(), dtype, list(array.shape))

    @classmethod
    def from_list(cls, data: Sequence[float], dtype: str = "float32") -> "TensorData":
        """Copy a flat list."""
        return cls(list(data), dtype, [len(data)])

    @classmethod
    def from_torch(cls, tensor: "torch.Tensor") -> "TensorData":
        """Copy a torch tensor from any device."""
        floating = tensor.detach().cpu()
        return cls.from_numpy(
            (floating.float() if floating.is_floating_point() else floating).numpy()
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "TensorData":
        """The inverse of :meth:`to_dict`."""
        return cls(values["data"], values.get("dtype", "float32"), values.get("shape"))

    def to_numpy(self) -> "npt.NDArray[Any]":
        """The numbers as an array of this dtype and shape."""
        import numpy as np  # noqa: PLC0415  (a third of the time that importing the package takes)

        array = np.asarray(self.data, dtype=self.dtype)
        return array if self.shape is None else array.reshape(self.shape)

    def to_torch(self) -> "torch.Tensor":
        """The numbers as a CPU tensor of this dtype and shape."""
        import torch  # noqa: PLC0415  (this module must not need torch)

        return torch.from_numpy(self.to_numpy().copy())

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {"data": self.data, "dtype": self.dtype, "shape": self.shape}

    def tolist(self) -> list[Any]:
        """The numbers as (nested) lists of this shape."""
        return self.to_numpy().tolist()

    def __len__(self) -> int:
        return len(self.data) if self.shape is None else self.shape[0]


class Datum:
    """One sequence to train on, with the per-token inputs of the loss.

    Two forms are understood (N = number of input tokens):

    * ``labels`` of length N: inputs are ``tokens[:-1]``, targets ``labels[1:]``; other inputs have
      length N (their first entry is dropped) or N - 1.
    * ``target_tokens`` of length N: already shifted; every other input has length N.

    Args:
        model_input: the token ids.
        loss_fn_inputs: name to list, tuple, numpy array, torch tensor or TensorData.
        routed_experts: (N, L, K) integers, the K experts that each input token goes through in
            each of the L layers that have experts (``SampledSequence.routed_experts``); None
            leaves the choice to the model.  Array, tensor or nested lists.

    Raises:
        DataError: an input is not numeric.

    Source: xorl_client 0.1.0, ``Datum``.
    """

    __slots__ = ("loss_fn_inputs", "model_input", "routed_experts")

    def __init__(
        self,
        model_input: ModelInput,
        loss_fn_inputs: Mapping[str, Any],
        routed_experts: "Sequence[Sequence[Sequence[int]]] | npt.NDArray[Any] | None" = None,
    ) -> None:
        if not isinstance(model_input, ModelInput):
            raise DataError(
                f"model_input is a {type(model_input).__name__}: pass "
                "ModelInput.from_ints(token_ids)"
            )
        if not isinstance(loss_fn_inputs, Mapping):
            raise DataError(
                f"loss_fn_inputs is a {type(loss_fn_inputs).__name__}: pass a dict from name to "
                "numbers"
            )
        self.model_input = model_input
        self.loss_fn_inputs = {k: _as_tensor_data(k, v) for k, v in loss_fn_inputs.items()}
        self.routed_experts = routed_experts

    def to_dict(self) -> dict[str, Any]:
        """The JSON form of the wire protocol (PROTOCOL: ``model_input.input_ids``)."""
        result: dict[str, Any] = {
            "model_input": {"input_ids": self.model_input.to_ints()},
            "loss_fn_inputs": {k: v.to_dict() for k, v in self.loss_fn_inputs.items()},
        }
        if self.routed_experts is not None:
            experts: Any = self.routed_experts
            result["routed_experts"] = experts.tolist() if hasattr(experts, "tolist") else experts
        return result

    def __repr__(self) -> str:
        inputs = ", ".join(f"{k}[{len(v)}]" for k, v in sorted(self.loss_fn_inputs.items()))
        return f"Datum({self.model_input.length} tokens; {inputs})"


def _as_tensor_data(name: str, value: Any) -> TensorData:  # noqa: ANN401 (whatever a user passes)
    """Convert one loss input; token ids stay integers whatever container they come in."""
    import numpy as np  # noqa: PLC0415  (as above)

    if isinstance(value, TensorData):
        return value
    if hasattr(value, "detach"):
        return TensorData.from_torch(value)
    try:
        array = np.asarray(value)
    except ValueError:
        raise DataError(f"loss input {name!r} is ragged: pass one number per token") from None
    if array.size == 0:
        array = array.astype(np.int64 if name in INTEGER_INPUTS else np.float32)
    if array.dtype.kind not in "fiub":
        raise DataError(
            f"loss input {name!r} has entries that are not numbers "
            f"(a {type(value).__name__} of dtype {array.dtype}): pass one number per token"
        )
    if name not in INTEGER_INPUTS:
        # What float32 cannot hold becomes inf, which is refused with its place in the data.
        with np.errstate(over="ignore"):
            return TensorData.from_numpy(array.astype(np.float32))
    if array.dtype.kind == "f" and not (array == np.trunc(array)).all():
        raise DataError(f"loss input {name!r} has entries that are not integers: pass token ids")
    return TensorData.from_numpy(array.astype(np.int64))
