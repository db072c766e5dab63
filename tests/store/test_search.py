"""Words in texts: in any script, in either case, after a NUL."""

import sqlite3
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xorl_lab.store import search
from xorl_lab.types import Group, Rollout, StepRecord

ODD = st.sampled_from("aA\0%_ßẞſsSKkéÉΣσςдД漢😀İi\u0301")
TEXTS = [
    "Because of that",
    "no\0because after NUL",
    "ПОТОМУ что",
    "Straße",
    "100%",
    "a_b",
    "漢字",
    "",
]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("because", [0, 1]),
        ("BECAUSE", [0, 1]),
        ("after nul", [1]),
        ("\0", [1]),
        ("no\0b", [1]),
        ("потому", [2]),
        ("Потому ЧТО", [2]),
        ("straße", [3]),
        ("STRASSE", []),  # A to Z match themselves alone
        ("ẞ", [3]),
        ("100%", [4]),
        ("%", [4]),
        ("a_b", [5]),
        ("axb", []),
        ("字", [6]),
        ("", range(8)),
    ],
)
@pytest.mark.parametrize("column", ["text", "prompt", "error", "note"])
def test_words_are_found_in_either_case_in_any_script(store, writer, column, words, found):
    drawn = [Rollout([1], [], t, "stop", 0, None, error=t) for t in TEXTS]
    writer.step(StepRecord(1, {}, [Group(r.text, [1], [r]) for r in drawn]))
    writer.step(StepRecord(2, {}, [Group("", [1], [Rollout([1], [], "", "stop", 0, 1.0)])]))
    reader = store.run("run")
    *ids, last = reader.ids().tolist()
    for number, text in zip(ids, TEXTS, strict=True):
        reader.annotate(number, note=text)
    expected = [ids[i] for i in found]
    if words == "":  # everything that is there holds it; an empty note is none
        expected = {"text": [*ids, last], "prompt": [*ids, last], "error": ids, "note": ids[:-1]}[
            column
        ]
    assert reader.ids(where=[(column, "contains", words)]).tolist() == expected


@given(st.text(ODD, max_size=6), st.text(ODD, max_size=3))
def test_what_is_found_is_what_is_documented(text, words):
    with closing(sqlite3.connect(":memory:")) as connection:
        search.register(connection)
        test, value = search.condition("?", words)
        (found,) = connection.execute(f"SELECT {test}", (text, value)).fetchone()

    def lower(s):
        return "".join(c.lower() if c.isascii() else c for c in s)

    if any(not c.isascii() and c.lower() != c.upper() for c in words):
        assert found == (words.casefold() in text.casefold())
    else:
        assert found == (lower(words) in lower(text))
