"""Values per token of the rollouts of one group, to bytes and back.

Equal streams of all rollouts lie end to end in one array: few long arrays are packed in a third of
the time of many short ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xorl_lab.errors import StoreError
from xorl_lab.store.arrays import pack, unpack
from xorl_lab.types import Group

LOGPROBS = "logprobs"
_STREAM = "stream:"
_MEMBERS = "members:"
_LARGEST_ID = 2**31 - 1


@dataclass(frozen=True, slots=True)
class PackedGroup:
    """The values per token of a group."""

    data: bytes
    """For :func:`unpack_group`."""
    means: list[dict[str, float | None]]
    """Per rollout the mean of each stream over its tokens; None where no token has a value."""


@dataclass(frozen=True, slots=True)
class RolloutValues:
    """The values per token of one rollout, C tokens long."""

    tokens: NDArray[np.int32]
    """(C,) ids."""
    logprobs: NDArray[np.float32]
    """(C,) nats, or empty."""
    streams: dict[str, NDArray[np.float32]]
    """(C,) each."""


def pack_group(group: Group, where: str) -> PackedGroup:
    """Pack the tokens, log-probabilities and streams of a group.

    Args:
        group: with the ids of its prompt.
        where: names the group in messages.

    Raises:
        StoreError: lengths disagree, or something is not a number.
    """
    rollouts = group.rollouts
    lengths = [len(r.tokens) for r in rollouts]
    arrays: dict[str, NDArray[Any]] = {
        "prompt": _ids([group.prompt_tokens], where),
        "lengths": np.array(lengths, np.int32),
        "tokens": _ids([r.tokens for r in rollouts], where),
    }
    # The sampler may report no log-probabilities at all.
    columns: dict[str, dict[int, Sequence[float]]] = {}
    columns[LOGPROBS] = {i: r.logprobs for i, r in enumerate(rollouts) if len(r.logprobs)}
    for i, rollout in enumerate(rollouts):
        for name, values in rollout.streams.items():
            columns.setdefault(_STREAM + name, {})[i] = values
    means: list[dict[str, float | None]] = [{} for _ in rollouts]
    for name, column in columns.items():
        own = [lengths[i] for i in column]
        title = f"{name.removeprefix(_STREAM)!r} of {where}"
        arrays[name] = flat = _floats(column, own, title)
        if len(column) < len(rollouts):
            arrays[_MEMBERS + name] = np.array(list(column), np.int32)
        for i, mean in zip(column, _means(flat, own), strict=True):
            means[i][name.removeprefix(_STREAM)] = mean
    return PackedGroup(pack(arrays), means)


def unpack_group(data: bytes) -> tuple[NDArray[np.int32], list[RolloutValues]]:
    """The ids of the prompt, and the values of each rollout.

    Raises:
        StoreError: the bytes are damaged.
    """
    arrays = unpack(data)
    lengths = arrays["lengths"].tolist()
    nothing = np.zeros(0, np.float32)
    found = [RolloutValues(tokens, nothing, {}) for tokens in _split(arrays["tokens"], lengths)]
    for name, flat in arrays.items():
        if name != LOGPROBS and not name.startswith(_STREAM):
            continue
        members = arrays.get(_MEMBERS + name, np.arange(len(lengths))).tolist()
        for i, values in zip(members, _split(flat, [lengths[i] for i in members]), strict=True):
            if name == LOGPROBS:
                found[i] = RolloutValues(found[i].tokens, values, found[i].streams)
            else:
                found[i].streams[name.removeprefix(_STREAM)] = values
    return arrays["prompt"], found


def _split(flat: NDArray[Any], lengths: Sequence[int]) -> list[NDArray[Any]]:
    ends = np.cumsum(lengths, dtype=np.int64).tolist()
    return [flat[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def _floats(
    column: Mapping[int, Sequence[float]], lengths: Sequence[int], title: str
) -> NDArray[np.float32]:
    for (i, values), length in zip(column.items(), lengths, strict=True):
        if len(values) != length:
            raise StoreError(
                f"{title}, rollout {i}, has {len(values)} values but there are {length} tokens: "
                "pass one per token, NaN where a token has none"
            )
    try:
        with np.errstate(over="ignore"):  # beyond float32 is infinite
            return np.fromiter(chain.from_iterable(column.values()), np.float64).astype(np.float32)
    except (TypeError, ValueError) as error:
        raise StoreError(f"{title} is not all numbers ({error}): pass floats") from error


def _ids(lists: Sequence[Sequence[int]], where: str) -> NDArray[np.int32]:
    try:
        ids = np.fromiter(chain.from_iterable(lists), np.int64)
    except (TypeError, ValueError, OverflowError) as error:
        raise StoreError(f"tokens of {where} are not all ids ({error}): pass integers") from error
    if ids.size and not 0 <= ids.min() <= ids.max() <= _LARGEST_ID:
        raise StoreError(
            f"tokens of {where} reach from {ids.min()} to {ids.max()}: pass ids from 0 to "
            f"{_LARGEST_ID}"
        )
    return ids.astype(np.int32)


def _means(flat: NDArray[np.float32], lengths: Sequence[int]) -> list[float | None]:
    """The mean of each piece over what is not NaN; None if nothing is."""
    full = [i for i, length in enumerate(lengths) if length]
    means: list[float | None] = [None] * len(lengths)
    if not full:
        return means
    starts = list(accumulate(lengths, initial=0))
    first = np.array([starts[i] for i in full])
    counts = [lengths[i] for i in full]
    with np.errstate(invalid="ignore"):  # infinities of both signs have no mean
        sums = np.add.reduceat(flat, first, dtype=np.float64)
        if np.isnan(sums).any():
            there = ~np.isnan(flat)
            counts = np.add.reduceat(there, first, dtype=np.int64).tolist()
            known = np.where(there, flat, np.float32(0))
            sums = np.add.reduceat(known, first, dtype=np.float64)
    for i, total, count in zip(full, sums.tolist(), counts, strict=True):
        means[i] = total / count if count else None
    return means
