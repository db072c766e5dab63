"""Tokens grouped into characters: nothing is lost, nothing is cut."""

import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xorl_lab.widgets.characters import LONGEST, text_of, units

FAMILY = "👨‍👩‍👧‍👦"
CLUSTERS = {
    "emoji": "😀",
    "family": FAMILY,
    "skin": "👍🏽",
    "heart": "❤️‍🔥",
    "flag": "🇩🇪",
    "subdivision flag": "🏴󠁧󠁢󠁷󠁬󠁳󠁿",
    "keycap": "1️⃣",
    "accent": "e\u0301",
    "two marks": "q\u0307\u0323",
    "CJK": "漢",
    "CJK beyond the BMP": "𠮷",
    "hangul": "각",
    "jamo": "\u1112\u1161\u11ab",
    "devanagari": "नि",
    "line end": "\r\n",
}
TEXTS = st.text(
    st.one_of(
        st.characters(exclude_categories=["Cs"]), st.sampled_from([*"".join(CLUSTERS.values())])
    )
)


def pieces_of(data, cuts):
    edges = [0, *sorted(c % (len(data) + 1) for c in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


def texts(pieces):
    """The text of each unit, by the tokens in it."""
    ends = [*units(pieces).starts.tolist()[1:], len(pieces)]
    starts = units(pieces).starts.tolist()
    return [text_of(pieces[a:b]) for a, b in zip(starts, ends, strict=True)]


def check(pieces):
    found = units(pieces)
    whole = text_of(pieces)
    # Each token is in exactly one unit: units begin at 0, one after the other, and none is empty.
    assert found.starts[0] == 0
    assert (np.diff(found.starts) > 0).all()
    assert found.starts[-1] < len(pieces)
    # Nothing is lost: the units' texts make the text, by tokens and by the browser's count.
    assert "".join(texts(pieces)) == whole
    wide = whole.encode("utf-16-le", "surrogatepass")
    edges = np.concatenate([[0], np.cumsum(found.chars)])
    cut = [wide[2 * a : 2 * b].decode("utf-16-le") for a, b in pairwise(edges)]
    assert cut == texts(pieces)


@given(st.lists(st.binary(max_size=5), min_size=1))
def test_any_bytes_cut_anywhere_lose_nothing(pieces):
    check(pieces)


@given(TEXTS, st.lists(st.integers(0, 10_000)))
def test_any_text_cut_anywhere_loses_nothing(text, cuts):
    pieces = pieces_of(text.encode(), cuts)
    check(pieces)
    assert text_of(pieces) == text


@given(TEXTS.map(str.encode), st.binary(min_size=1, max_size=3), st.lists(st.integers(0, 10_000)))
def test_text_with_broken_bytes_loses_nothing(data, broken, cuts):
    middle = len(data) // 2
    check(pieces_of(data[:middle] + broken + data[middle:], cuts))


@pytest.mark.parametrize("name", CLUSTERS)
@pytest.mark.parametrize("around", ["", "a"])
def test_a_character_is_never_cut(name, around):
    data = CLUSTERS[name].encode()
    bytewise = [around.encode(), *(data[i : i + 1] for i in range(len(data))), b"z"]
    assert texts(bytewise)[-2:] == [CLUSTERS[name], "z"]
    assert texts([around.encode(), *(c.encode() for c in CLUSTERS[name]), b"z"])[-2:] == [
        CLUSTERS[name],
        "z",
    ]


def test_characters_beside_each_other_stay_apart():
    flags = "🇩🇪🇫🇷🇯"
    pieces = [c.encode() for c in flags]
    assert texts(pieces) == ["🇩🇪", "🇫🇷", "🇯"]
    assert texts([b"\n", "\u0301".encode()]) == ["\n", "\u0301"]
    assert texts(["漢".encode(), "字".encode()]) == ["漢", "字"]
    assert texts([b"a", "\u200d".encode(), "漢".encode()]) == ["a\u200d", "漢"]


def test_an_incomplete_character_is_one_unit_of_its_own():
    assert texts([b"a", b"\xe2", b"\x82", b"b"]) == ["a", "\ufffd", "b"]
    assert texts([b"\x80", b"\x80"]) == ["\ufffd", "\ufffd"]


def test_tokens_without_bytes_are_kept():
    assert texts([b"", b"a", b"", b""]) == ["", "a", "", ""]
    assert texts([b"e", b"", "\u0301".encode()]) == ["e\u0301"]
    assert len(units([]).starts) == 0


@pytest.mark.parametrize("mark", ["\u0301", "\u200d😀", "🇩", "\r\n", "\u1100"])
def test_hostile_rows_of_marks_are_cut_and_take_no_time(mark):
    count = 100_000 // len(mark)
    pieces = [c.encode() for c in "e" + mark * count]
    start = time.process_time()
    found = units(pieces)
    assert time.process_time() - start < 2
    assert np.diff([*found.starts, len(pieces)]).max() <= LONGEST + 1
    assert "".join(texts(pieces)) == "e" + mark * count


def test_bytes_that_are_no_text_at_all():
    pieces = [b"\xff"] * 50_000
    assert text_of(pieces) == "\ufffd" * 50_000
    assert len(units(pieces).starts) == 50_000
