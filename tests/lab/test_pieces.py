"""Tokens to bytes, held against what the tokenizers themselves decode."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, WordPiece
from transformers import PreTrainedTokenizerFast

from xorl_lab.engine.models import tokenizer as load
from xorl_lab.engine.tiny import byte_tokenizer
from xorl_lab.lab.pieces import Pieces

SMOL = "SmolLM2-135M-Instruct"
TINY = byte_tokenizer()
HARD = [
    "plain text\n\ttabs",
    "👩‍👩‍👧‍👦 🇩🇪 👍🏽 \U0001fae8",
    "漢字かな交じり文 한국어",
    "é ạ̈ ญี่ปุ่น Z͑ͫ̓",
    "\u202eabc\u202c \u200b\ufeff \x00\x1b[31m",
    "<|im_start|>user\n<|im_end|><|eos|>",
]


def sentencepiece() -> PreTrainedTokenizerFast:
    """As Llama's: a space is ▁, what has no piece is written byte by byte."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefgh", "ab", "cd", "abcd", "▁abcd"]
    merges = [("a", "b"), ("c", "d"), ("ab", "cd"), ("▁", "abcd")]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    raw = Tokenizer(
        BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    raw.normalizer = normalizers.Replace(" ", "▁")
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    special = [AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")]
    raw.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


LLAMA = sentencepiece()
OURS = {"tiny": TINY, "sentencepiece": LLAMA}


def decoded(tokenizer, tokens) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("name", OURS)
@given(data=st.data())
def test_joined_they_are_what_the_tokenizer_decodes(name, data):
    tokenizer = OURS[name]
    text = data.draw(st.one_of(st.text(), st.sampled_from(HARD)))
    tokens = tokenizer.encode(text, add_special_tokens=False)
    found = Pieces(tokenizer)(tokens)
    assert len(found) == len(tokens)
    assert b"".join(found).decode() == decoded(tokenizer, tokens) == text


@given(tokens=st.lists(st.integers(0, 258)))
def test_any_ids_at_all(tokens):
    assert Pieces(TINY).text(tokens) == decoded(TINY, tokens)


@given(tokens=st.lists(st.integers(0, 258)))
def test_texts_of_tokens_lose_nothing(tokens):
    pieces = Pieces(TINY)
    texts = pieces.texts(tokens)
    assert len(texts) == len(tokens)
    assert "".join(texts) == pieces.text(tokens)


def test_a_character_belongs_to_the_token_that_completes_it():
    tokens = TINY.encode("é👍x", add_special_tokens=False)
    assert Pieces(TINY).texts(tokens) == ["", "é", "", "", "", "👍", "x"]
    assert Pieces(TINY).texts(tokens[:4]) == ["", "é", "", "�"]
    assert Pieces(TINY).texts([]) == []


def test_special_tokens_are_known_and_written_out():
    pieces = Pieces(TINY)
    assert set(pieces.special) == {256, 257, 258}
    assert pieces([257, 65]) == [b"<|eos|>", b"A"]
    assert set(Pieces(LLAMA).special) == {0, 1, 2}


def test_an_added_token_may_have_characters_of_its_own():
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("日本"), AddedToken("é<")])
    pieces = Pieces(tokenizer)
    tokens = [259, 65, 260]
    assert pieces.text(tokens) == decoded(tokenizer, tokens)
    assert pieces([259]) == ["日本".encode()]
    assert not set(pieces.special) & {259, 260}


def test_ids_that_the_tokenizer_lacks_are_nothing():
    assert Pieces(TINY)([5000, 65]) == [b"", b"A"]


def test_spaces_and_bytes_of_sentencepiece():
    pieces = Pieces(LLAMA)
    tokens = LLAMA.encode("x abcd", add_special_tokens=False)
    assert pieces(tokens) == [b"x", b" abcd"]
    assert pieces([3 + 0xE2, 3 + 0x82]) == [b"\xe2", b"\x82"]


def test_any_other_tokenizer_is_asked_to_decode():
    raw = Tokenizer(WordPiece({"[UNK]": 0, "ab": 1, "##cd": 2}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.decoder = decoders.WordPiece()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="[UNK]")
    assert Pieces(tokenizer)([1, 0]) == [b"ab", b"[UNK]"]


@pytest.fixture(scope="module")
def smol():
    return load(SMOL)


@pytest.mark.slow
def test_of_a_real_model(smol):
    pieces = Pieces(smol)
    for text in HARD:
        tokens = smol.encode(text, add_special_tokens=False)
        assert b"".join(pieces(tokens)).decode() == decoded(smol, tokens) == text
    generator = np.random.default_rng(0)
    for _ in range(200):
        tokens = generator.integers(0, len(smol), 20).tolist()
        assert pieces.text(tokens) == decoded(smol, tokens)
    assert smol.eos_token_id in pieces.special


@pytest.mark.slow
def test_a_hundred_thousand_tokens_take_no_time(smol):
    tokens = np.random.default_rng(1).integers(0, len(smol), 100_000).astype(np.int32)
    pieces = Pieces(smol)
    began = time.process_time()
    found = pieces(tokens)
    assert time.process_time() - began < 0.3
    assert len(found) == len(tokens)
