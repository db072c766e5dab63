"""Keys and values of rows of unequal length, preallocated, without padding between them."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

GRAIN = 64
"""The cache grows by multiples of this many positions."""


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

    The model writes the next position of every row through :meth:`update`.
    """

    def __init__(self) -> None:
        self.lengths = torch.zeros(0, dtype=torch.int64)
        """(R,) positions filled in each row."""
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self._index = torch.zeros(0, dtype=torch.int64)
        self._rows = torch.zeros(0, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.lengths)

    def add(self, prompts: PromptCache, slots: Sequence[npt.NDArray[np.int64]]) -> None:
        """Append one row per entry of ``slots``: which nodes of the packed row it consists of."""
        lengths = torch.tensor([len(s) for s in slots])
        longest = int(lengths.max())
        table = torch.from_numpy(np.stack([np.pad(s, (0, longest - len(s))) for s in slots]))
        capacity = max(self._capacity(), _rounded(longest + 1))
        self._reserve(capacity)
        for layer, pair in enumerate(prompts.layers):
            for store, source in zip((self._keys, self._values), pair, strict=True):
                rows = source[:, table.to(source.device)].transpose(0, 1)
                fresh = rows.new_zeros(len(slots), rows.shape[1], capacity, rows.shape[3])
                fresh[:, :, :longest] = rows
                if layer < len(store):
                    store[layer] = torch.cat([store[layer], fresh])
                else:
                    store.append(fresh)
        self.lengths = torch.cat([self.lengths, lengths])

    def begin_step(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Make room for one more position per row.

        Returns:
            (R, 1) position ids of the new tokens, and the (R, 1, 1, S) mask of what they may see.
        """
        if int(self.lengths.max()) >= self._capacity():
            self._reserve(room_for(int(self.lengths.max())))
        self._index = self.lengths.to(device)
        self._rows = torch.arange(len(self), device=device)
        span = int(self.lengths.max()) + 1
        mask = torch.arange(span, device=device) <= self._index[:, None]
        return self._index[:, None], mask[:, None, None]

    def end_step(self) -> None:
        """Count the positions that the step has filled."""
        self.lengths = self.lengths + 1

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write (R, heads, 1, D) at each row's next position; return all that is filled."""
        rows = self._rows
        span = int(self.lengths.max()) + 1
        self._keys[layer][rows, :, self._index] = keys[:, :, 0]
        self._values[layer][rows, :, self._index] = values[:, :, 0]
        return self._keys[layer][:, :, :span], self._values[layer][:, :, :span]

    def flat(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All that is filled in a layer, rows and heads as one: (R * heads, S, D) each."""
        span = int(self.lengths.max()) + 1
        keys, values = self._keys[layer], self._values[layer]
        return keys.flatten(0, 1)[:, :span], values.flatten(0, 1)[:, :span]

    def get_seq_length(self, *_: object) -> int:
        """Longest row, for models that ask."""
        return int(self.lengths.max())

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these."""
        index = torch.tensor(rows, dtype=torch.int64)
        self.lengths = self.lengths[index]
        # Where the longest rows have left, their width goes with them.
        width = room_for(int(self.lengths.max())) if rows else 0
        for store in (self._keys, self._values):
            for layer, tensor in enumerate(store):
                store[layer] = tensor[:, :, :width][index.to(tensor.device)]

    def _capacity(self) -> int:
        return self._keys[0].shape[2] if self._keys else 0

    def _reserve(self, capacity: int) -> None:
        for store in (self._keys, self._values):
            for layer, tensor in enumerate(store):
                grown = torch.nn.functional.pad(tensor, (0, 0, 0, capacity - tensor.shape[2]))
                store[layer] = grown if capacity > tensor.shape[2] else tensor


def room_for(length: int) -> int:
    """Positions that a row takes at most once it has grown to this length."""
    return _rounded(length * 3 // 2 + 1)


def _rounded(length: int) -> int:
    return -(-length // GRAIN) * GRAIN
