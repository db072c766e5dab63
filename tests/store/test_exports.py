"""Tables in and out, parquet, and one HTML file."""

import importlib.util
import math
import re
import sys
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest

from tests.store.support import record
from xorl_lab.errors import StoreError
from xorl_lab.store import Parent, page
from xorl_lab.types import Group, Rollout, StepRecord

EVIL = "</pre><script>alert(1)</script><img src=x onerror=alert(1)>\"'&\0`"

TAG = "<img/src=x>"


@pytest.fixture
def reader(store, writer):
    for step in range(1, 6):
        writer.step(record(step))
    writer.event("checkpoint", "saved", step=5, data={"a": [1, math.inf]})
    return store.run("run")


# Tables


def test_metrics_are_a_table(reader):
    frame = reader.metrics()
    assert frame.index.name == "step"
    assert list(frame.index) == [1, 2, 3, 4, 5]
    assert list(frame.columns) == ["reward", "loss:mean", "odd"]
    assert list(frame["reward"]) == [0.1, 0.2, 0.3, 0.4, 0.5]
    assert list(frame["odd"].isna()) == [True, False, True, False, True]


def test_a_table_of_metrics_becomes_a_finished_run(store, reader):
    frame = reader.metrics()
    frame["infinite"] = [math.inf, -math.inf, 0, 1, 2]
    again = store.import_frame(frame, name="run", model="elsewhere", settings={"source": "csv"})
    assert (again.info.name, again.info.kind, again.info.model) == (
        "run-2",
        "imported",
        "elsewhere",
    )
    assert again.info.settings == {"source": "csv"}
    status = again.status()
    assert (status.state, status.step, status.total) == ("finished", 5, 5)
    pd.testing.assert_frame_equal(again.metrics(), frame[again.metrics().columns])
    assert set(again.metrics().columns) == set(frame.columns)
    assert again.count() == 0
    assert store.run("run-2").info == again.info


@pytest.mark.parametrize(
    ("frame", "steps"),
    [
        (pd.DataFrame({"a": [1.0, 2.0]}), [1, 2]),
        (pd.DataFrame({"step": [10, 20], "a": [1, 2]}), [10, 20]),
        (pd.DataFrame({"a": [True, False]}, pd.Index([3.0, 7.0], name="step")), [3, 7]),
        (pd.DataFrame({"a": pd.array([1, None], "Int64")}), [1, 2]),
        (pd.DataFrame({"a": []}, dtype=float), []),
        (pd.DataFrame(), []),
    ],
)
def test_steps_are_those_of_the_table_or_counted(store, frame, steps):
    reader = store.import_frame(frame, name="a")
    assert reader.scalars().steps.tolist() == steps
    assert reader.status().step == (steps[-1] if steps else 0)


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (pd.DataFrame({"a": ["x"]}), "column 'a' holds .*: convert it to numbers, or drop it"),
        (pd.DataFrame({"step": [2, 1], "a": [1, 2]}), "step 2 is followed by 1: sort the rows"),
        (pd.DataFrame({"step": [1, 1], "a": [1, 2]}), "step 1 is followed by 1"),
        (pd.DataFrame({"step": [0.5], "a": [1]}), "not all whole numbers from 1"),
        (pd.DataFrame({"step": [math.nan], "a": [1]}), "not all whole numbers from 1"),
        (pd.DataFrame({"step": ["x"], "a": [1]}), "steps are not numbers"),
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), "two columns are named 'a'"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(store, frame, message):
    with pytest.raises(StoreError, match=message):
        store.import_frame(frame, name="a")
    assert store.runs() == []


# Parquet


@pytest.mark.skipif(not importlib.util.find_spec("pyarrow"), reason="pyarrow is not installed")
def test_parquet_holds_everything(store, writer, reader, tmp_path):
    odd = Rollout([1], [], "x", "stop", 1, None, error="bad", streams={"kl": [math.nan]})
    writer.step(StepRecord(9, {"reward": math.inf}, [Group("p", [], [odd])]))
    reader.annotate(int(reader.ids()[1]), tags=["hack", "look"], note="odd")
    paths = reader.to_parquet(tmp_path / "new" / "out")
    assert [p.name for p in paths] == ["metrics.parquet", "rollouts.parquet", "events.parquet"]
    metrics, rollouts, events = (pd.read_parquet(p) for p in paths)

    pd.testing.assert_frame_equal(metrics.set_index("step"), reader.metrics())
    assert len(rollouts) == 31
    for row in rollouts.to_dict("records"):
        one = reader.rollout(row["id"])
        assert row["tokens"].tolist() == one.tokens.tolist()
        assert row["logprobs"].tolist() == one.logprobs.tolist()
        assert row["prompt_tokens"].tolist() == one.prompt_tokens.tolist()
        for name, values in one.streams.items():
            np.testing.assert_array_equal(row[f"stream:{name}"], values)
        for name, value in one.reward_parts.items():
            assert row[f"reward:part:{name}"] == value
        assert (row["text"], row["prompt"], row["step"]) == (one.text, one.prompt, one.step)
    assert [list(t) for t in rollouts["tags"]] == [[], ["hack", "look"], *[[]] * 29]
    assert rollouts["note"].tolist() == ["", "odd", *[""] * 29]
    assert rollouts["reward"].isna().tolist() == [False] * 30 + [True]
    assert list(events["kind"]) == ["warning"] * 5 + ["checkpoint"]
    assert events["data"].iloc[-1] == '{"a":[1,Infinity]}'


def test_parquet_without_pyarrow_says_what_to_do(reader, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(StoreError, match="pip install pyarrow, or use metrics"):
        reader.to_parquet(tmp_path)


# HTML


class Page(HTMLParser):
    """What is in a page: tags, what they refer to, and the text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.references, self.text = [], [], ""
        self.open, self.stray = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.references += [v for k, v in attributes if k in ("src", "href", "data", "action")]
        self.stray += [k for k, _ in attributes if k.startswith("on")]
        if tag not in ("meta", "path"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_page_of_a_run_needs_no_network_and_no_script(reader, tmp_path):
    text = reader.to_html(tmp_path / "new" / "run.html").read_text(encoding="utf-8")
    parsed = Page(text)
    assert parsed.open == []
    assert parsed.references == []
    assert not {"script", "link", "img", "iframe", "object"} & set(parsed.tags)
    assert not re.search(r"https?:|url\(|@import", text)
    assert "default-src 'none'" in text
    assert parsed.tags.count("details") == 30
    assert parsed.tags.count("svg") == 3
    for words in ("prompt 1 of step 5", "loss:mean", "saved", "warning of step 3"):
        assert words in parsed.text
    assert "30 rollouts." in parsed.text


def test_every_text_is_escaped(store, tmp_path):
    drawn = Rollout([1], [0.0], EVIL, "stop", 0, None, {EVIL: 1.0}, error=EVIL)
    with store.create(
        name=EVIL, kind=EVIL, model=EVIL, settings={EVIL: EVIL}, parent=Parent(None, EVIL, 1)
    ) as writer:
        for step in (1, 2):
            group = Group(EVIL, [1], [drawn], {EVIL: EVIL})
            writer.step(StepRecord(step, {EVIL: float(step)}, [group], [EVIL]))
        reader = store.run(EVIL)
        reader.annotate(int(reader.ids()[0]), tags=[TAG], note=f"note {EVIL}")
        writer.status("failed", EVIL)
    text = store.run(EVIL).to_html(tmp_path / "run.html").read_text(encoding="utf-8")
    parsed = Page(text)
    assert not {"script", "img"} & set(parsed.tags)
    assert parsed.stray == []
    assert parsed.text.count("<script>alert(1)</script>") > 10
    assert "\0" not in text
    assert f"tags: {TAG}" in parsed.text
    assert "note </pre><script>" in parsed.text


def test_what_is_left_out_is_stated(store, tmp_path, monkeypatch):
    monkeypatch.setattr(page, "ROWS", 2)
    monkeypatch.setattr(page, "LONGEST", 10)
    monkeypatch.setattr(page, "CHARTS", 1)
    with store.create(name="run", kind="grpo", model="m") as writer:
        for step in range(1, 5):
            writer.step(record(step, length=20))
    text = Page(store.run("run").to_html(tmp_path / "a.html", rollouts=5).read_text()).text
    assert "The last 5 of 24 rollouts." in text
    assert "The last 2 of 4 steps." in text
    assert "The last 2 of 4 events." in text
    assert "1 of 3 metrics are drawn." in text
    assert "more characters" in text


def test_charts_leave_gaps_where_values_are_missing(store):
    values = [1.0, 2.0, math.nan, 4.0, math.inf, 6.0, 7.0]
    with store.create(name="run", kind="grpo", model="m") as writer:
        for step, value in enumerate(values, 1):
            writer.step(
                StepRecord(step, {"a": value, "huge": 1e308 * (-1) ** step, "nan": math.nan})
            )
    text = page.render(store.run("run"), 10)
    (path,) = re.findall(r'aria-label="a: 1 to 7".*?<path d="(.*?)"', text)
    assert path.count("M") == 3
    assert "nan" not in path
    assert "inf" not in "".join(re.findall(r'<path d="(.*?)"', text))


def test_the_page_of_an_empty_run(store, writer, tmp_path):
    text = Page(store.run("run").to_html(tmp_path / "a.html").read_text()).text
    assert "running" in text
    assert "Rollouts" not in text


def test_a_page_that_cannot_be_written_is_an_error(reader, tmp_path):
    with pytest.raises(StoreError, match="cannot be written"):
        reader.to_html(tmp_path)
