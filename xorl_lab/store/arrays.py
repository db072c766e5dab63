"""Arrays of numbers to compressed bytes and back.

Bytes of equal significance are put side by side, in planes.  zlib then finds the regular ones, such
as exponents of float32 and high bytes of ids; planes that look random, as most mantissas do, would
not get smaller and are stored as they are.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xorl_lab.errors import StoreError

_FORMAT = 1
_LEVEL = 1  # higher levels gain 1 % and take half as long again
_TYPES = frozenset({"<i4", "<f4"})
_SAMPLE = 256
_FEW = 64
_RANDOM = 1 / 5
"""Two bytes of a random plane are equal less often than this.  The lower bytes of ids are, in spite
of some order: packing them takes most of the time of a step and saves a twentieth of its size."""


def pack(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Compress named arrays of int32 or float32, with their types and lengths.

    Args:
        arrays: one-dimensional arrays by name.
    """
    header: list[tuple[str, str, int, list[int]]] = []
    regular: list[memoryview] = []
    random: list[memoryview] = []
    little = [np.ascontiguousarray(a, a.dtype.newbyteorder("<")) for a in arrays.values()]
    lengths = [len(array) for array in little]
    # All arrays at once: a group has a dozen short ones.
    whole = np.concatenate([np.zeros(0, np.uint8), *(array.view(np.uint8) for array in little)])
    planes = np.ascontiguousarray(whole.reshape(-1, 4).T)
    at = 0
    for name, array, stored in zip(arrays, little, _random_planes(planes, lengths), strict=True):
        for i, plane in enumerate(planes[:, at : at + len(array)]):
            (random if i in stored else regular).append(plane.data)
        header.append((name, array.dtype.str, len(array), stored))
        at += len(array)
    rest = b"".join(random)
    # zlib checks what it packs; the rest has its checksum in the header.
    head = json.dumps([zlib.crc32(rest), header], separators=(",", ":")).encode()
    packed = zlib.compress(b"".join([len(head).to_bytes(4, "little"), head, *regular]), _LEVEL)
    return b"".join([bytes([_FORMAT]), packed, rest])


def unpack(data: bytes) -> dict[str, NDArray[Any]]:
    """The arrays that were packed.

    Raises:
        StoreError: the bytes are damaged, or of a newer version.
    """
    if data[:1] != bytes([_FORMAT]):
        raise StoreError(f"arrays begin with {data[:1]!r}: update xorl_lab, or use a backup")
    unpacker = zlib.decompressobj()
    try:
        regular = unpacker.decompress(memoryview(data)[1:])
        random = unpacker.unused_data
        at, stored_at = 4 + int.from_bytes(regular[:4], "little"), 0
        arrays: dict[str, NDArray[Any]] = {}
        checksum, header = json.loads(regular[4:at])
        if zlib.crc32(random) != checksum:
            raise ValueError("the checksum differs")
        for name, kind, length, stored in header:
            if kind not in _TYPES:
                raise StoreError(f"array {name!r} has type {kind!r}: update xorl_lab")
            planes = np.empty((length, 4), np.uint8)
            for i in range(4):
                if i in stored:
                    planes[:, i] = np.frombuffer(random, np.uint8, length, stored_at)
                    stored_at += length
                else:
                    planes[:, i] = np.frombuffer(regular, np.uint8, length, at)
                    at += length
            arrays[name] = planes.view(kind).reshape(length)
    except (zlib.error, ValueError) as error:
        raise StoreError(
            f"values per token are damaged ({error}): put a backup of the store in its place"
        ) from error
    return arrays


def _random_planes(planes: NDArray[np.uint8], lengths: Sequence[int]) -> list[list[int]]:
    """Which of the lower three planes of each array look random.

    Two of the bytes of such a plane are rarely equal.

    Args:
        planes: (4, N) of all arrays, end to end.
        lengths: of the arrays; they add up to N.
    """
    found: list[list[int]] = [[] for _ in lengths]
    starts = accumulate(lengths, initial=0)
    places = [
        (i, np.arange(start, start + length, length // _SAMPLE + 1))
        for i, (start, length) in enumerate(zip(starts, lengths, strict=False))
        if length >= _FEW
    ]
    if not places:
        return found
    counts = np.array([len(where) for _, where in places])
    sample = planes[:3, np.concatenate([where for _, where in places])]
    column = np.repeat(np.arange(len(places)) * 3, counts) + np.arange(3)[:, None]
    cells = (column * 256 + sample).ravel()
    seen = np.bincount(cells, minlength=len(places) * 768).reshape(-1, 3, 256)
    equal = np.einsum("apb,apb->ap", seen, seen) - counts[:, None]
    random = equal < (_RANDOM * counts * (counts - 1))[:, None]
    for (i, _), own in zip(places, random.tolist(), strict=True):
        found[i] = [plane for plane, looks in enumerate(own) if looks]
    return found
