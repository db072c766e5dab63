"""Which tokens make up a character together.

A tokenizer cuts bytes, not characters: an emoji may be spread over four tokens, and a letter and
its accent over two.  Shown one by one such tokens are broken boxes.
"""

import codecs
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

LONGEST = 32
"""Tokens that whole characters may tie together; beyond it, hostile text is cut between them."""
_MARKED = "xorl_lab.marked"
_MARK = 0xDC00
_CR, _LF, _ZWJ = 0x0D, 0x0A, 0x200D


@dataclass(frozen=True, slots=True)
class Units:
    """N tokens, grouped so that no character is cut: U units, each token in exactly one."""

    starts: NDArray[np.int32]
    """(U,) index of the first token of each."""
    chars: NDArray[np.int32]
    """(U,) length of its text in UTF-16 code units, as a browser counts."""


def text_of(pieces: Sequence[bytes]) -> str:
    r"""The text of tokens; bytes that are no UTF-8 become U+FFFD.

    >>> text_of([b"\xf0\x9f", b"\x98\x80", b"!"])
    '😀!'
    """
    return b"".join(pieces).decode("utf-8", "replace")


def units(pieces: Sequence[bytes]) -> Units:
    r"""Group tokens into whole characters, as a reader sees them.

    What makes a character is that of Unicode's UAX 29 (letters with their marks, emoji sequences,
    flags, Hangul), a little wider for emoji.

    Args:
        pieces: the bytes of N tokens.

    >>> units([b"\xf0\x9f", b"\x98\x80", b"!"]).starts.tolist()
    [0, 2]
    """
    if not pieces:
        return Units(np.zeros(0, np.int32), np.zeros(0, np.int32))
    marked = b"".join(pieces).decode("utf-8", _MARKED)
    codes = np.frombuffer(marked.encode("utf-32-le", "surrogatepass"), "<u4").astype(np.int64)
    broken = (codes >= _MARK) & (codes < 0xE000)
    size = 1 + (codes >= 0x80).astype(np.int64) + (codes >= 0x800) + (codes >= 0x10000)
    offsets = _edges(np.where(broken, codes - _MARK, size))
    ends = np.cumsum([len(piece) for piece in pieces])
    at = np.searchsorted(offsets, ends)
    whole = offsets[at] == ends
    cut = whole.copy()
    joins = _Joins(codes)
    for i in np.flatnonzero(whole & joins.possible(at)):
        cut[i] = not joins.at(int(at[i]))
    cut[-1] = True
    _limit(cut, whole)
    last = np.flatnonzero(cut)
    edges = _edges(1 + (codes >= 0x10000).astype(np.int64))[at[last]]
    return Units(
        np.concatenate([[0], last[:-1] + 1]).astype(np.int32),
        np.diff(edges, prepend=0).astype(np.int32),
    )


def _edges(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])


def _limit(cut: NDArray[np.bool_], whole: NDArray[np.bool_]) -> None:
    """Cut long units, though never inside an encoded character."""
    last = np.flatnonzero(cut)
    lengths = np.diff(last, prepend=-1)
    for end, length in zip(last[lengths > LONGEST], lengths[lengths > LONGEST], strict=True):
        size = 0
        for i in range(end - length + 1, end):
            size += 1
            if size >= LONGEST and whole[i]:
                cut[i], size = True, 0


class _Joins:
    """Whether two neighbouring code points are parts of one character."""

    def __init__(self, codes: NDArray[np.int64]) -> None:
        self._codes = codes
        flags = (codes >= 0x1F1E6) & (codes <= 0x1F1FF)
        place = np.arange(len(codes))
        others = np.where(flags, -1, place)
        # 1, 2, 3, … along a row of regional indicators: every second one ends a flag.
        self._flag = place - np.maximum.accumulate(others) if len(codes) else place

    def possible(self, at: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Positions that need a closer look."""
        inner = np.clip(at, 0, max(0, len(self._codes) - 1))
        here = self._codes[inner] if len(self._codes) else inner
        plain = (here < 0x300) | ((here >= 0x3400) & (here <= 0x9FFF))
        return (at > 0) & (at < len(self._codes)) & (~plain | (here == _LF) | (here == 0xA9))

    def at(self, k: int) -> bool:
        """True if code points k - 1 and k belong together."""
        before, here = int(self._codes[k - 1]), int(self._codes[k])
        if here == _LF:
            return before == _CR
        left, right = _kind(before), _kind(here)
        if "control" in (left, right):
            return False
        if right == "extend" or (left, right) in _HANGUL:
            return True
        if right == "flag":
            return left == "flag" and int(self._flag[k]) % 2 == 0
        return right == "picture" and before == _ZWJ and self._picture_before(k - 1)

    def _picture_before(self, k: int) -> bool:
        """True if a picture with its modifiers ends before code point k."""
        for j in range(k - 1, max(-1, k - 1 - LONGEST), -1):
            kind = _kind(int(self._codes[j]))
            if kind != "extend":
                return kind == "picture"
        return False


_HANGUL = frozenset(
    {("L", "L"), ("L", "V"), ("L", "LV"), ("L", "LVT"), ("LV", "V"), ("LV", "T"), ("V", "V"),
     ("V", "T"), ("LVT", "T"), ("T", "T")}
)  # fmt: skip
_JAMO = ((0x1100, 0x115F, "L"), (0x1160, 0x11A7, "V"), (0x11A8, 0x11FF, "T"))
_EXTENDING = ((0x200C, 0x200D), (0x1F3FB, 0x1F3FF), (0xE0020, 0xE007F), (0xFF9E, 0xFF9F))
_PICTURES = ((0x1F000, 0x1FAFF), (0x2190, 0x2BFF), (0x3030, 0x303D), (0xA9, 0xAE))


@lru_cache(4096)
def _kind(code: int) -> str:
    """What a code point is to its neighbours."""
    if any(low <= code <= high for low, high in _EXTENDING):
        return "extend"
    if 0x1F1E6 <= code <= 0x1F1FF:
        return "flag"
    if 0xAC00 <= code <= 0xD7A3:
        return "LV" if (code - 0xAC00) % 28 == 0 else "LVT"
    for low, high, name in _JAMO:
        if low <= code <= high:
            return name
    category = unicodedata.category(chr(code))
    if category in ("Mn", "Me", "Mc"):
        return "extend"
    if category in ("Cc", "Cf", "Zl", "Zp"):
        return "control"
    pictured = category == "So" or any(low <= code <= high for low, high in _PICTURES)
    return "picture" if pictured else "other"


def _mark(error: UnicodeError) -> tuple[str, int]:
    """Stand for bytes that are no UTF-8, saying how many: valid UTF-8 has no such code points."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return chr(_MARK + error.end - error.start), error.end


codecs.register_error(_MARKED, _mark)
