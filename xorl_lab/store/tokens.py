"""Values per token of the rollouts of one group, to bytes and back.

Equal streams of all rollouts lie end to end in one array: few long arrays are packed in a third of
the time of many short ones.
"""

import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xorl_lab.errors import StoreError
from xorl_lab.store.arrays import pack, unpack
from xorl_lab.store.records import WEIGHTS
from xorl_lab.types import Alternatives, Group

LOGPROBS = "logprobs"
_STREAM = "stream:"
_MEMBERS = "members:"
_TOP = "top:"
_TOP_IDS, _TOP_LOGPROBS, _TOP_WIDTHS = f"{_TOP}ids", f"{_TOP}logprobs", f"{_TOP}widths"
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
    top_ids: NDArray[np.int32]
    """(C, K) the most likely tokens, best first; (C, 0) if none were recorded."""
    top_logprobs: NDArray[np.float32]
    """(C, K) nats."""


def pack_group(group: Group, where: str) -> PackedGroup:
    """Pack the tokens, log-probabilities, streams and alternatives of a group.

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
        own = {} if rollout.weights is None else {WEIGHTS: rollout.weights}
        for name, values in (rollout.streams | own).items():
            columns.setdefault(_STREAM + name, {})[i] = values
    for name, column in columns.items():
        title = f"{name.removeprefix(_STREAM)!r} of {where}"
        arrays[name] = _floats(column, [lengths[i] for i in column], title)
        if len(column) < len(rollouts):
            arrays[_MEMBERS + name] = np.array(list(column), np.int32)
    means = _means(columns, arrays, lengths)
    tops = {i: r.top_logprobs for i, r in enumerate(rollouts) if r.top_logprobs is not None}
    if tops:
        arrays |= _alternatives(tops, [lengths[i] for i in tops], where)
        if len(tops) < len(rollouts):
            arrays[_MEMBERS + _TOP] = np.array(list(tops), np.int32)
    return PackedGroup(pack(arrays), means)


def unpack_group(data: bytes) -> tuple[NDArray[np.int32], list[RolloutValues]]:
    """The ids of the prompt, and the values of each rollout.

    Raises:
        StoreError: the bytes are damaged.
    """
    arrays = unpack(data)
    lengths = arrays["lengths"].tolist()
    nothing = np.zeros(0, np.float32)
    found = [
        RolloutValues(tokens, nothing, {}, *_no_alternatives(len(tokens)))
        for tokens in _split(arrays["tokens"], lengths)
    ]
    for name, flat in arrays.items():
        if name != LOGPROBS and not name.startswith(_STREAM):
            continue
        members = arrays.get(_MEMBERS + name, np.arange(len(lengths))).tolist()
        for i, values in zip(members, _split(flat, [lengths[i] for i in members]), strict=True):
            if name == LOGPROBS:
                found[i] = replace(found[i], logprobs=values)
            else:
                found[i].streams[name.removeprefix(_STREAM)] = values
    if _TOP_IDS in arrays:
        members = arrays.get(_MEMBERS + _TOP, np.arange(len(lengths))).tolist()
        shapes = [(lengths[i], w) for i, w in zip(members, arrays[_TOP_WIDTHS], strict=True)]
        sizes = [length * width for length, width in shapes]
        ids, logprobs = (_split(arrays[name], sizes) for name in (_TOP_IDS, _TOP_LOGPROBS))
        for i, shape, own, values in zip(members, shapes, ids, logprobs, strict=True):
            found[i] = replace(
                found[i], top_ids=own.reshape(shape), top_logprobs=values.reshape(shape)
            )
    return arrays["prompt"], found


def _no_alternatives(length: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    return np.zeros((length, 0), np.int32), np.zeros((length, 0), np.float32)


def _alternatives(
    tops: Mapping[int, Alternatives], lengths: Sequence[int], where: str
) -> dict[str, NDArray[Any]]:
    ids, logprobs, widths = [], [], []
    for (i, top), length in zip(tops.items(), lengths, strict=True):
        own, values = np.asarray(top.ids, np.int32), np.asarray(top.logprobs, np.float32)
        if own.ndim != 2 or own.shape != values.shape or len(own) != length:
            raise StoreError(
                f"top_logprobs of rollout {i} of {where} has ids {own.shape} and logprobs "
                f"{values.shape} but there are {length} tokens: pass (tokens, alternatives) each"
            )
        ids.append(own.ravel())
        logprobs.append(values.ravel())
        widths.append(own.shape[1])
    return {
        _TOP_WIDTHS: np.array(widths, np.int32),
        _TOP_IDS: np.concatenate(ids),
        _TOP_LOGPROBS: np.concatenate(logprobs),
    }


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
            return _numbers("d", list(column.values())).astype(np.float32)
    except (TypeError, ValueError, OverflowError, struct.error) as error:
        raise StoreError(f"{title} is not all numbers ({error}): pass floats") from error


def _ids(lists: Sequence[Sequence[int]], where: str) -> NDArray[np.int32]:
    try:
        ids = _numbers("q", lists)
    except (TypeError, ValueError, OverflowError, struct.error) as error:
        raise StoreError(f"tokens of {where} are not all ids ({error}): pass integers") from error
    if ids.size and not 0 <= ids.min() <= ids.max() <= _LARGEST_ID:
        raise StoreError(
            f"tokens of {where} reach from {ids.min()} to {ids.max()}: pass ids from 0 to "
            f"{_LARGEST_ID}"
        )
    return ids.astype(np.int32)


def _numbers(kind: str, lists: Sequence[Sequence[float]]) -> NDArray[Any]:
    """Lists end to end as float64 (``d``) or int64 (``q``), in half the time that numpy takes."""
    count = sum(map(len, lists))
    return np.frombuffer(struct.pack(f"{count}{kind}", *chain.from_iterable(lists)), kind)


def _means(
    columns: Mapping[str, Collection[int]],
    arrays: Mapping[str, NDArray[np.float32]],
    lengths: Sequence[int],
) -> list[dict[str, float | None]]:
    """Per rollout the mean of each column over what is not NaN; None if nothing is."""
    means: list[dict[str, float | None]] = [{} for _ in lengths]
    alike: dict[tuple[int, ...], list[str]] = {}
    for name, members in columns.items():
        alike.setdefault(tuple(members), []).append(name)
        for i in members:
            means[i][name.removeprefix(_STREAM)] = None
    for members, names in alike.items():
        full = [i for i in members if lengths[i]]
        if full:
            table = np.stack([arrays[name] for name in names])
            rows = _mean_of_pieces(table, [lengths[i] for i in full])
            for name, row in zip(names, rows, strict=True):
                for i, mean in zip(full, row, strict=True):
                    means[i][name.removeprefix(_STREAM)] = mean
    return means


def _mean_of_pieces(table: NDArray[np.float32], lengths: Sequence[int]) -> list[list[float | None]]:
    """(S, C) -> per row the mean of each piece, none of them empty."""
    first = np.array([0, *accumulate(lengths[:-1])])
    counts: NDArray[Any] = np.array(lengths)
    with np.errstate(invalid="ignore"):  # infinities of both signs have no mean
        sums = np.add.reduceat(table, first, axis=1, dtype=np.float64)
        if np.isnan(sums).any():
            there = ~np.isnan(table)
            counts = np.add.reduceat(there, first, axis=1, dtype=np.int64)
            known = np.where(there, table, np.float32(0))
            sums = np.add.reduceat(known, first, axis=1, dtype=np.float64)
        means: list[list[float | None]] = (sums / np.maximum(counts, 1)).tolist()
    for row, own in zip(means, np.broadcast_to(counts, sums.shape).tolist(), strict=True):
        row[:] = [mean if count else None for mean, count in zip(row, own, strict=True)]
    return means
