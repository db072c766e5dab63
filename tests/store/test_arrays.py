"""Numbers to bytes and back."""

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from xorl_lab.errors import StoreError
from xorl_lab.store.arrays import pack, unpack

ONE = hnp.arrays(np.float32, st.integers(0, 300)) | hnp.arrays(np.int32, st.integers(0, 300))


@given(st.dictionaries(st.text(), ONE, max_size=4))
def test_every_bit_comes_back(arrays):
    again = unpack(pack(arrays))

    assert list(again) == list(arrays)
    for name, array in arrays.items():
        assert again[name].dtype == array.dtype
        assert again[name].tobytes() == array.tobytes()


@pytest.mark.parametrize("length", [0, 1, 2, 63, 64, 65, 511, 512, 513, 5000])
@pytest.mark.parametrize("kind", [np.int32, np.float32])
def test_random_values_of_any_length_come_back(length, kind):
    values = np.random.default_rng(length).integers(0, 256, 4 * length, np.uint8).view(kind)

    assert unpack(pack({"a": values, "b": values[:1]}))["a"].tobytes() == values.tobytes()


def test_arrays_of_the_other_byte_order_and_with_gaps_come_back():
    big = np.arange(10, dtype=">i4")
    gaps = np.arange(20, dtype=np.float32)[::2]
    again = unpack(pack({"big": big, "gaps": gaps}))

    assert again["big"].tolist() == big.tolist()
    assert again["gaps"].tolist() == gaps.tolist()


@pytest.mark.parametrize(
    ("values", "share"),
    [
        (np.zeros(10_000, np.float32), 0.01),
        (np.full(10_000, 0.37, np.float32), 0.01),
        (np.tile(np.array([0, 1], np.float32), 5_000), 0.01),
        (np.random.default_rng(0).integers(0, 49152, 10_000, np.int32), 0.55),
        (-np.random.default_rng(0).exponential(1, 10_000).astype(np.float32), 0.85),
    ],
    ids=["zeros", "constant", "flags", "ids", "logprobs"],
)
def test_what_is_regular_gets_small(values, share):
    assert len(pack({"a": values})) <= share * values.nbytes


@given(st.integers(0, 10**6), st.integers(1, 255))
def test_damaged_bytes_are_an_error_or_cannot_be_told(at, change):
    data = bytearray(pack({"a": np.arange(200, dtype=np.int32), "b": np.ones(7, np.float32)}))
    data[at % len(data)] ^= change
    with suppress(StoreError):  # any other exception fails
        unpack(bytes(data))


@pytest.mark.parametrize("data", [b"", b"\x02abc", b"\x01", b"\x01abc"])
def test_what_is_no_packed_array_is_an_error(data):
    with pytest.raises(StoreError):
        unpack(data)
