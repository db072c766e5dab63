"""What a layer attends with: queries, keys and values, turned by their positions.

Rotary position embedding (Su et al. 2021) multiplies pairs of numbers of a head, taken as complex
numbers, by one of length 1 that depends on the position.  In transformers the two of a pair lie
half a head apart.  As scores are products of queries with keys, both may be held in another
order: next to each other, a pair is a complex number as it lies in memory, and is turned where it
is.  That takes weights whose rows are in that order, so it is done where those do not change and
can be copied.
"""

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch

from xorl_lab.engine import products
from xorl_lab.samplers.norm import Norm

Offsets = Sequence[torch.Tensor | None]
"""Per matrix (out, r) of an adapter, or None where there is none."""


class Heads(Protocol):
    """The way in of one layer's attention."""

    @property
    def matrices(self) -> Sequence[products.Matrix]:
        """Of x; an adapter is added to their products."""
        ...

    def arranged(self, b: Offsets) -> list[torch.Tensor | None]:
        """The matrices B of an adapter of queries, keys and values, as :attr:`matrices` are."""
        ...

    def turns(self, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        """What :meth:`turned` takes for N positions, of which (N, D) each are given."""
        ...

    def turned(
        self, out: Sequence[torch.Tensor], turn: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys at their positions.

        Args:
            out: products of :attr:`matrices`; may be overwritten.
            turn: of :meth:`turns`.

        Returns:
            (N, heads, D) queries, and (N, kv heads, D + D): each key with its value.
        """
        ...


class Halves:
    """Weights as they lie in the model, which may change in place.

    Args:
        attention: of transformers.
    """

    def __init__(self, attention: Any) -> None:  # noqa: ANN401
        self.matrices: Sequence[products.Matrix] = [
            products.Matrix(m.weight, m.bias) for m in _projections(attention)
        ]
        self._norms = [Norm(n) for n in _norms(attention)]
        self._width = int(attention.head_dim)

    def arranged(self, b: Offsets) -> list[torch.Tensor | None]:
        """See :class:`Heads`."""
        return list(b)

    def turned(
        self, out: Sequence[torch.Tensor], turn: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`Heads`."""
        query, key, value = (part.unflatten(-1, (-1, self._width)) for part in out)
        if self._norms:
            query, key = (n(x) for n, x in zip(self._norms, (query, key), strict=True))
        cosine, sine = turn.unbind()
        query, key = (self._turned(x, cosine, sine) for x in (query, key))
        return query, torch.cat((key, value), -1)

    @staticmethod
    def _turned(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        swapped = x.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
        return (x * cosine).addcmul_(swapped, sine)

    def turns(self, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        """(N, D) each -> (2, N, 1, D): cosines, and sines with the sign of what they add to."""
        half = sine.shape[-1] // 2
        signed = torch.cat((-sine[:, :half], sine[:, half:]), -1)
        return torch.stack((cosine, signed))[:, :, None]


class Pairs:
    """Copies of frozen weights, in the order of complex numbers, and keys beside their values.

    Args:
        attention: of transformers.
    """

    def __init__(self, attention: Any) -> None:  # noqa: ANN401
        self._width = int(attention.head_dim)
        query, key, value = _projections(attention)
        self.matrices: Sequence[products.Matrix] = [
            products.Matrix(self._paired(query.weight), self._paired(query.bias), copied=True),
            products.Matrix(
                self._beside(key.weight, value.weight),
                self._beside(key.bias, value.bias),
                copied=True,
            ),
        ]
        self._norms = [Norm(n, self._paired(n.weight)) for n in _norms(attention)]

    def arranged(self, b: Offsets) -> list[torch.Tensor | None]:
        """See :class:`Heads`."""
        query, key, value = b
        if key is None and value is None:
            return [self._paired(query), None]
        either = cast("torch.Tensor", value if key is None else key)
        ranks = [0 if m is None else m.shape[1] for m in (key, value)]
        both = either.new_zeros(2, len(either), sum(ranks))
        if key is not None:
            both[0, :, : ranks[0]] = key
        if value is not None:
            both[1, :, ranks[0] :] = value
        return [self._paired(query), self._beside(*both)]

    def turned(
        self, out: Sequence[torch.Tensor], turn: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`Heads`."""
        rows, width = len(out[0]), self._width
        query, both = out[0].view(rows, -1, width), out[1].view(rows, -1, 2 * width)
        key = both[..., :width]
        if self._norms:
            query = self._norms[0](query)
            key.copy_(self._norms[1](key))
        for x in (query, key):
            torch.view_as_complex(x.view(rows, -1, width // 2, 2)).mul_(turn)
        return query, both

    def turns(self, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        """(N, D) each -> (N, 1, D / 2) complex."""
        half = sine.shape[-1] // 2
        return torch.complex(cosine[:, None, :half], sine[:, None, :half])

    def _paired(self, x: Any) -> Any:  # noqa: ANN401 (None stays None)
        """(heads * D, …) with the two of each pair next to each other."""
        if x is None:
            return None
        return x.detach().unflatten(0, (-1, 2, self._width // 2)).transpose(1, 2).flatten(0, 2)

    def _beside(self, key: torch.Tensor | None, value: torch.Tensor | None) -> Any:  # noqa: ANN401
        if key is None or value is None:  # biases: both have one, or none has
            return None
        parts = (x.detach().unflatten(0, (-1, self._width)) for x in (self._paired(key), value))
        return torch.stack(tuple(parts), 1).flatten(0, 2)


def heads_of(attention: Any) -> Heads:  # noqa: ANN401
    """The way in of a layer's attention, as fast as its weights allow."""
    frozen = all(products.may_be_copied(m.weight) for m in _projections(attention))
    alike = (attention.k_proj.bias is None) == (attention.v_proj.bias is None)
    return Pairs(attention) if frozen and alike else Halves(attention)


def _projections(attention: Any) -> list[torch.nn.Linear]:  # noqa: ANN401
    return [attention.q_proj, attention.k_proj, attention.v_proj]


def _norms(attention: Any) -> list[Any]:  # noqa: ANN401
    return [attention.q_norm, attention.k_norm] if hasattr(attention, "q_norm") else []
