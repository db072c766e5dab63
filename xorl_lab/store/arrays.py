"""Arrays of numbers to compressed bytes and back.

Bytes of equal significance are put side by side, in planes.  zlib then finds the regular ones, such
as exponents of float32 and high bytes of ids; planes that look random, as most mantissas do, would
not get smaller and are stored as they are.
"""

import json
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xorl_lab.errors import StoreError

_FORMAT = 1
_LEVEL = 1  # higher levels gain 1 % and take half as long again
_TYPES = frozenset({"<i4", "<f4"})
_SAMPLE = 256
_FEW = 64
_OFFSETS = np.array([[0], [256], [512]], np.intp)
_RANDOM = 1 / 128
"""Two bytes of a random plane are equal less often than this (1/256 if all are as likely)."""


def pack(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Compress named arrays of int32 or float32, with their types and lengths.

    Args:
        arrays: one-dimensional arrays by name.
    """
    header: list[tuple[str, str, int, list[int]]] = []
    regular: list[bytes] = []
    random: list[bytes] = []
    for name, array in arrays.items():
        little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        planes = np.ascontiguousarray(little.view(np.uint8).reshape(-1, 4).T)
        stored = _random_planes(planes)
        for i in range(4):
            (random if i in stored else regular).append(planes[i].tobytes())
        header.append((name, little.dtype.str, len(little), stored))
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


def _random_planes(planes: NDArray[np.uint8]) -> list[int]:
    """Which of the lower three planes look random: two of their bytes are rarely equal."""
    sample = planes[:3, :: planes.shape[1] // _SAMPLE + 1]
    count = sample.shape[1]
    if count < _FEW:
        return []
    seen = np.bincount((sample + _OFFSETS).ravel(), minlength=768).reshape(3, 256)
    equal = np.einsum("ij,ij->i", seen, seen) - count
    return [i for i, pairs in enumerate(equal.tolist()) if pairs < _RANDOM * count * (count - 1)]
