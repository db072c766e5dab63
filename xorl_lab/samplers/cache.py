"""Keys and values of rows of unequal length, preallocated, without padding between them."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

GRAIN = 64
"""The cache grows by multiples of this many positions."""
STRIDE = 8
"""What is seen of it grows by multiples of this many; divides GRAIN."""


class PromptCache:
    """Collects the keys and values of a packed row of prompts, as the model computes them."""

    def __init__(self) -> None:
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = []

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store (1, heads, L, D) keys and values of a layer and hand them back."""
        self.layers.append((keys[0], values[0]))
        return keys, values

    def get_seq_length(self, *_: object) -> int:
        """Positions before this row: none."""
        return 0


class RowCache:
    """One row per completion: keys and values at positions 0 … its length - 1.

    The model writes the next position of every row through :meth:`update` or :meth:`write`.
    """

    def __init__(self) -> None:
        self.lengths = torch.zeros(0, dtype=torch.int64)
        """(R,) positions filled in each row."""
        self._layers: list[torch.Tensor] = []
        """(R, heads, 2, S, D) each: keys and values in one tensor, so that one copy writes both."""
        self._widths: list[tuple[int, int]] = []
        """Of keys and values of each layer; D is the larger."""
        self._index = torch.zeros(0, dtype=torch.int64)
        self._place = torch.zeros(0, dtype=torch.int64)
        self._span = 0
        self._views: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        """Of each layer its positions one below the other, keys and values, as long as they last:
        making them takes longer than what is done with them."""

    def __len__(self) -> int:
        return len(self.lengths)

    def add(self, prompts: PromptCache, slots: Sequence[npt.NDArray[np.int64]]) -> None:
        """Append one row per entry of ``slots``: which nodes of the packed row it consists of."""
        lengths = torch.tensor([len(s) for s in slots])
        longest = int(lengths.max())
        table = torch.from_numpy(np.stack([np.pad(s, (0, longest - len(s))) for s in slots]))
        capacity = max(self._capacity(), _rounded(longest + 1))
        self._reserve(capacity)
        self._widths = [(keys.shape[-1], values.shape[-1]) for keys, values in prompts.layers]
        for layer, pair in enumerate(prompts.layers):
            widths, (heads, *_), at = self._widths[layer], pair[0].shape, table.to(pair[0].device)
            fresh = pair[0].new_zeros(len(slots), heads, 2, capacity, max(widths))
            for i, (source, width) in enumerate(zip(pair, widths, strict=True)):
                fresh[:, :, i, :longest, :width] = source[:, at].transpose(0, 1)
            if layer < len(self._layers):
                self._layers[layer] = torch.cat([self._layers[layer], fresh])
            else:
                self._layers.append(fresh)
        self.lengths = torch.cat([self.lengths, lengths])

    def begin_step(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Make room for one more position per row.

        Returns:
            (R, 1) position ids of the new tokens, and the (R, 1, 1, S) mask of what they may see.
        """
        longest = int(self.lengths.max())
        if longest >= self._capacity():
            self._reserve(room_for(longest))
        self._look(-(-(longest + 1) // STRIDE) * STRIDE)
        self._index = self.lengths.to(device)
        return self._aim()

    def end_step(self) -> None:
        """Count the positions that the step has filled."""
        self.lengths = self.lengths + 1

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write (R, heads, 1, D) at each row's next position.

        Returns:
            (R, heads, S, D) keys and values, of which the mask shows what is filled.
        """
        both = self._layers[layer]
        width = both.shape[-1]
        fit = [torch.nn.functional.pad(x, (0, width - x.shape[-1])) for x in (keys, values)]
        fresh = torch.cat(fit, 2).to(both.dtype).view(-1, width)
        both.view(-1, width).index_copy_(0, self._places(both), fresh)
        seen, (wide, high) = both[:, :, :, : self._span], self._widths[layer]
        return seen[:, :, 0, :, :wide], seen[:, :, 1, :, :high]

    def write(self, layer: int, both: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write (R, heads, D + D), a key and its value each, at each row's next position.

        Layers must have equal heads, and keys be as wide as values.

        Returns:
            (R * heads, D, S) keys and (R * heads, S, D) values, of which the mask shows what is
            filled.
        """
        if not self._views:
            self._views = [self._seen(each) for each in self._layers]
        flat, keys, values = self._views[layer]
        flat.index_copy_(0, self._place, both.view(-1, flat.shape[-1]))
        return keys, values

    def get_seq_length(self, *_: object) -> int:
        """Longest row, for models that ask."""
        return int(self.lengths.max())

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these."""
        index = torch.tensor(rows, dtype=torch.int64)
        self.lengths = self.lengths[index]
        # Where the longest rows have left, their width goes with them.
        width = room_for(int(self.lengths.max())) if rows else 0
        self._views.clear()  # they would hold what is replaced
        for layer, tensor in enumerate(self._layers):
            self._layers[layer] = tensor[:, :, :, :width][index.to(tensor.device)]

    def _capacity(self) -> int:
        return self._layers[0].shape[3] if self._layers else 0

    def _reserve(self, capacity: int) -> None:
        self._views.clear()
        for layer, tensor in enumerate(self._layers):
            if capacity > tensor.shape[3]:
                more = (0, 0, 0, capacity - tensor.shape[3])
                self._layers[layer] = torch.nn.functional.pad(tensor, more)

    def _move(self, layers: list[torch.Tensor]) -> None:
        """Go on in tensors that hold the same."""
        self._views.clear()
        self._layers = layers

    def _look(self, span: int) -> None:
        """Let rows be seen up to this position."""
        if span != self._span:
            self._span = span
            self._views.clear()

    def _aim(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Find where the next positions are written, and what their tokens may see."""
        self._place = self._places(self._layers[0])
        index = self._index[:, None]
        mask = torch.arange(self._span, device=index.device) <= index
        return index, mask[:, None, None]

    def _places(self, both: torch.Tensor) -> torch.Tensor:
        """Where the next positions are among all of a layer, one below the other."""
        rows, *two, capacity, _ = both.shape
        starts = torch.arange(0, rows * math.prod(two) * capacity, capacity, device=both.device)
        return (starts.view(rows, -1) + self._index[:, None]).flatten()

    def _seen(self, both: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        keys, values = both.flatten(0, 1)[:, :, : self._span].unbind(1)
        return both.view(-1, both.shape[-1]), keys.transpose(1, 2), values


def room_for(length: int) -> int:
    """Positions that a row takes at most once it has grown to this length."""
    return _rounded(length * 3 // 2 + 1)


def _rounded(length: int) -> int:
    return -(-length // GRAIN) * GRAIN
