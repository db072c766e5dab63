"""Many sequences in one row without padding, each distinct prefix computed once.

The sequences of a call are merged into a tree of tokens: sequences that begin alike share nodes, as
the completions of one prompt do, and prompts with the same few-shot header, and equal completions.
A tree is run through the model as one row of L tokens: a node has the position id of its depth and
attends to its ancestors and itself, which is what it would see in a row of its own.

Equal tokens that shall go through different experts are different nodes.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from xorl_lab.engine.routing import FREE, Choice

MAX_ROW = 1024
"""Nodes in one row at most (a longer sequence gets a row of its own).  Attention within a row costs
L**2, so longer rows waste more on pairs that the mask forbids than they save elsewhere."""


@dataclass(frozen=True, slots=True)
class PackedRow:
    """One tree of tokens, ready for the model."""

    tokens: npt.NDArray[np.int64]
    """(L,) token ids, parents before children."""
    positions: npt.NDArray[np.int64]
    """(L,) depth of each node = its position id."""
    parents: npt.NDArray[np.int64]
    """(L,) index of the parent node, -1 for a first token."""
    members: list[int]
    """Which of the sequences passed to :func:`pack` are in this row."""
    slots: list[npt.NDArray[np.int64]]
    """Per member, (length,): the node that holds each of its tokens."""
    experts: Choice | None = None
    """(L, layers, K) the experts that each node goes through; None leaves them to the model."""

    def attention_mask(self) -> npt.NDArray[np.bool_]:
        """(L, L) bool: node i may look at node j, that is, j is i or an ancestor of i."""
        mask = np.zeros((len(self.tokens), len(self.tokens)), dtype=np.bool_)
        for i, parent in enumerate(self.parents.tolist()):
            if parent >= 0:
                mask[i] = mask[parent]
            mask[i, i] = True
        return mask


def pack(
    sequences: Sequence[Sequence[int]],
    *,
    max_row: int = MAX_ROW,
    share: bool = True,
    experts: Sequence[Choice | None] | None = None,
) -> list[PackedRow]:
    """Merge sequences into rows of at most ``max_row`` nodes.

    Args:
        sequences: token ids, each of length >= 1.
        max_row: most nodes in a row; a single longer sequence is allowed.
        share: compute equal prefixes once.  Off, each sequence has nodes of its own (with dropout,
            where equal tokens must still get draws of their own).
        experts: per sequence (length, layers, K), or None where the model chooses.  Prefixes are
            equal if their experts are, too.

    Returns:
        Rows that together hold every sequence exactly once.  The order of the rows, and of the
        nodes in a row, depends on the set of sequences alone, not on the order in which they came.
    """
    routed = experts is not None and any(choice is not None for choice in experts)
    keys: Sequence[Sequence[Hashable]] = sequences
    if experts is not None and routed:
        keys = [_keys(s, choice) for s, choice in zip(sequences, experts, strict=True)]
    order = sorted(range(len(sequences)), key=lambda i: tuple(keys[i]))
    rows: list[PackedRow] = []
    builder = _Builder(share)
    for index in order:
        if builder.members and builder.size_with(keys[index]) > max_row:
            rows.append(builder.row())
            builder = _Builder(share)
        builder.add(index, sequences[index], keys[index])
    if builder.members:
        rows.append(builder.row())
    if experts is not None and routed:
        rows = [_routed(row, experts) for row in rows]
    return rows


def _keys(sequence: Sequence[int], choice: Choice | None) -> list[tuple[int, bytes]]:
    """What must be equal for two tokens to share a node: the token, and its experts."""
    marks = [b""] * len(sequence) if choice is None else [one.tobytes() for one in choice]
    return list(zip(sequence, marks, strict=True))


def _routed(row: PackedRow, experts: Sequence[Choice | None]) -> PackedRow:
    """A row with the experts of its nodes, if one of its members has any."""
    given = [(slots, experts[m]) for m, slots in zip(row.members, row.slots, strict=True)]
    shape = next((choice.shape[1:] for _, choice in given if choice is not None), None)
    if shape is None:
        return row
    nodes = np.full((len(row.tokens), *shape), FREE, dtype=np.int16)
    for slots, choice in given:
        if choice is not None:
            nodes[slots] = choice
    return replace(row, experts=nodes)


class _Builder:
    """The row that is being filled."""

    def __init__(self, share: bool) -> None:
        self.share = share
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.parents: list[int] = []
        self.members: list[int] = []
        self.slots: list[npt.NDArray[np.int64]] = []
        self._children: dict[tuple[int, Hashable], int] = {}

    def size_with(self, keys: Sequence[Hashable]) -> int:
        """Number of nodes if the sequence with these keys were added."""
        return len(self.tokens) + len(keys) - len(self._shared(keys))

    def add(self, index: int, sequence: Sequence[int], keys: Sequence[Hashable]) -> None:
        path = self._shared(keys)
        start = len(path)
        for token, key in zip(sequence[start:], keys[start:], strict=True):
            parent = path[-1] if path else -1
            node = len(self.tokens)
            self._children[parent, key] = node
            self.tokens.append(token)
            self.positions.append(len(path))
            self.parents.append(parent)
            path.append(node)
        self.members.append(index)
        self.slots.append(np.asarray(path, dtype=np.int64))

    def row(self) -> PackedRow:
        as_array = lambda values: np.asarray(values, dtype=np.int64)  # noqa: E731
        return PackedRow(
            as_array(self.tokens),
            as_array(self.positions),
            as_array(self.parents),
            self.members,
            self.slots,
        )

    def _shared(self, keys: Sequence[Hashable]) -> list[int]:
        """The nodes of the longest prefix that the tree already holds."""
        path: list[int] = []
        if not self.share:
            return path
        node = -1
        for key in keys:
            child = self._children.get((node, key))
            if child is None:
                break
            path.append(child)
            node = child
        return path
