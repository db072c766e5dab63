"""Rollouts made to break things: all of their text comes back, exactly as documented.

Halves of surrogate pairs become U+FFFD, as UTF-8 cannot carry them; nothing else changes.
"""

import importlib.util
import json

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xorl_lab.store import Note, Store
from xorl_lab.types import Group, Rollout, StepRecord

PIECES = (
    "\0", "\ud800", "\udfff", "\ud83d\ude00", "😀", "e\u0301", "\u202e", "\u2066", "\u200b",
    "\u200d", "\ufeff", "\x1b[31m", "\x1b]8;;http://x\x07", "\r\n", "\x85", "\u2028", "</script>",
    "<img src=x>", "$x_1$", "**b**", "`", "'", '"', ";--", "%", "_", "\\", "\\u0000", "{", "NaN",
    "漢字", "ﷺ", "\U0010ffff",
)  # fmt: skip
HOSTILE = st.text(st.characters()) | st.lists(st.sampled_from(PIECES)).map("".join)


def as_documented(text):
    return "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in text)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """One store for all examples."""
    return Store(tmp_path_factory.mktemp("lab"))


def recorded(lab, groups):
    with lab.create(name="run", kind="grpo", model="tiny") as writer:
        writer.step(StepRecord(1, {}, groups))
    return lab.run(writer.info.id)


@given(text=HOSTILE, prompt=HOSTILE, error=st.none() | HOSTILE, part=HOSTILE, cut=st.integers(0, 9))
@settings(deadline=None, max_examples=60)
def test_texts_survive_in_whatever_way_they_are_read(lab, text, prompt, error, part, cut):
    drawn = Rollout([1], [0.0], text, "stop", 0, None, {part: 1.0}, error=error)
    row = {"answer": text, prompt: error}
    reader = recorded(lab, [Group(prompt, [1], [drawn], row)])
    expected = [t if t is None else as_documented(t) for t in (text, prompt, error)]
    (number,) = reader.ids().tolist()
    (group,) = reader.groups(1)
    alone, *others = reader.rollout(number), *reader.stored([number]), *reader.newest(1)
    for one in (alone, *others, *reader.walk()):
        assert [one.text, one.prompt, one.error] == expected
        assert one.reward_parts == {as_documented(part): 1.0}
        assert one.row == json.loads(json.dumps(row))  # which joins two halves of one character
    assert [group.rollouts[0].text, group.prompt, group.rollouts[0].error] == expected
    names = ("text", "prompt", "error")
    page, start, frame = reader.table([number]), reader.table([number], cut), reader.rollouts()
    assert [page[n][0] for n in names] == expected == [frame[n].iloc[0] for n in names]
    assert [start[n][0] for n in names] == [e and e[:cut] for e in expected]
    assert page["reward:part:" + as_documented(part)] == [1.0]
    assert reader.group_table()["prompt"].tolist() == expected[1:2]
    for name, given_ in zip(names, (text, prompt, error), strict=True):
        if given_ is not None:
            for operator in ("=", "contains"):
                assert reader.count([(name, operator, given_)]) == 1
            assert reader.count([(name, "contains", given_ + "!")]) == 0
    reader.close()


@pytest.mark.skipif(not importlib.util.find_spec("pyarrow"), reason="pyarrow is not installed")
@given(text=HOSTILE, note=HOSTILE)
@settings(deadline=None, max_examples=20)
def test_exports_carry_them(lab, tmp_path_factory, text, note):
    reader = recorded(lab, [Group(text, [1], [Rollout([1], [0.0], text, "stop", 0, 1.0)])])
    (number,) = reader.ids().tolist()
    tags = [p for p in PIECES if not any(c.isspace() for c in p)]
    left = reader.annotate(number, tags=tags, note=note)
    assert left == Note(tuple(dict.fromkeys(map(as_documented, tags))), as_documented(note))
    folder = tmp_path_factory.mktemp("out")
    paths = reader.to_parquet(folder)
    (row,) = pd.read_parquet(paths[1]).to_dict("records")
    assert row["text"] == row["prompt"] == as_documented(text)
    assert (tuple(row["tags"]), row["note"]) == (left.tags, left.note)
    page = reader.to_html(folder / "run.html").read_text(encoding="utf-8")
    assert "<img" not in page
    assert "</script>" not in page
    reader.close()


def test_a_megabyte_of_text_and_100_000_tokens_lose_nothing(lab):
    length = 100_000
    text = ("\0😀漢<b>\u202e" * 200_000)[: 2**20]
    rng = np.random.default_rng(0)
    values = [float(x) for x in rng.normal(size=length).astype(np.float32)]
    tokens = rng.integers(0, 2**31 - 1, length).tolist()
    drawn = Rollout(tokens, values, text, "length", 0, 1.0, streams={"entropy": values})
    reader = recorded(lab, [Group(text, tokens, [drawn, drawn])])
    number = int(reader.ids()[1])
    one = reader.rollout(number)
    assert one.text == one.prompt == text
    assert one.tokens.tolist() == one.prompt_tokens.tolist() == tokens
    assert one.logprobs.tolist() == one.streams["entropy"].tolist() == values
    assert reader.table([number], 1000)["text"] == [text[:1000]]
    assert reader.table([number])["text"] == [text]
    assert reader.same_prompt(number) == reader.ids().tolist()
    assert reader.count([("text", "contains", "<B>\u202e\0😀")]) == 2
