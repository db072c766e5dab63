"""The bytes behind each token, so that what is split over several tokens can be put together."""

import codecs
import json
import re
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"
"""How sentencepiece writes a space."""


class Pieces:
    """Token ids to bytes, which joined are the UTF-8 text with special tokens written out.

    What a tokenizer does at the beginning of a text alone, as dropping its first space, is left
    out: a completion is the middle of one.

    Args:
        tokenizer: of the model; byte-level BPE, sentencepiece or anything that decodes.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self._convert = _converter(tokenizer)
        self._known: dict[int, bytes] = {}
        added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
        self.special: Collection[int] = frozenset(
            {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}
        )
        """Ids of the special tokens."""

    def __call__(self, tokens: Sequence[int]) -> list[bytes]:
        """The bytes of each token; none for an id that the tokenizer does not have."""
        ids: list[int] = tokens.tolist() if hasattr(tokens, "tolist") else list(tokens)  # pyright: ignore[reportAttributeAccessIssue]
        known = self._known
        fresh = [i for i in set(ids) if i not in known]
        known.update(zip(fresh, self._convert(fresh), strict=True))
        return [known[i] for i in ids]

    def text(self, tokens: Sequence[int]) -> str:
        """The tokens as text; what is no UTF-8 is replaced."""
        return b"".join(self(tokens)).decode(errors="replace")

    def texts(self, tokens: Sequence[int]) -> list[str]:
        """The text of each token: a character of several belongs to the one that completes it."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        found = [decoder.decode(piece) for piece in self(tokens)]
        if found:
            found[-1] += decoder.decode(b"", final=True)
        return found


def _converter(tokenizer: "PreTrainedTokenizerBase") -> Callable[[list[int]], list[bytes]]:
    """What turns ids into bytes, by how the tokenizer decodes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    kinds = _decoders(json.loads(backend.to_str())["decoder"]) if backend is not None else set()
    read: Callable[[str], bytes] | None = None
    if "ByteLevel" in kinds:
        read = _byte_level
    elif backend is None or kinds & {"ByteFallback", "Metaspace"}:
        read = _sentencepiece
    if read is None:
        return lambda ids: [str(tokenizer.decode([i])).encode() for i in ids]

    def convert(ids: list[int]) -> list[bytes]:
        pieces: list[str | None] = tokenizer.convert_ids_to_tokens(ids)  # pyright: ignore[reportAssignmentType]
        return [b"" if piece is None else read(piece) for piece in pieces]

    return convert


def _decoders(decoder: "dict[str, Any] | None") -> set[str]:
    """Names of all decoders in a tokenizer's description."""
    if decoder is None:
        return set()
    inner = [_decoders(d) for d in decoder.get("decoders", ())]
    return {str(decoder["type"])}.union(*inner)


def _alphabet() -> dict[str, int]:
    """GPT-2's map: printable bytes are themselves, the others the characters from 256 on."""
    printable = {*range(ord("!"), 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return {chr(byte if byte in printable else next(others)): byte for byte in range(256)}


_BYTES = _alphabet()


def _byte_level(piece: str) -> bytes:
    """A piece of byte-level BPE; one with other characters, as added tokens may be, is itself."""
    try:
        return bytes([_BYTES[character] for character in piece])
    except KeyError:
        return piece.encode()


def _sentencepiece(piece: str) -> bytes:
    match = _BYTE.fullmatch(piece)
    return bytes([int(match[1], 16)]) if match else piece.replace(_SPACE, " ").encode()
