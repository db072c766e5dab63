"""What a page is told about rollouts: every value as it is in the store, every text inert."""

import json
import math
import re

import numpy as np
import pytest

from tests.widgets import rollouts
from tests.widgets.rollouts import END, TOKENIZER
from xorl_lab.errors import ConfigError
from xorl_lab.types import Datum, Group, StepRecord
from xorl_lab.widgets import RolloutInspector
from xorl_lab.widgets.inspector_export import export_rollouts


class Page:
    """Asks as a page does, and waits for what a thread answers."""

    def __init__(self, view):
        self.widget = view.rollouts
        self.widget.later = lambda content, work: self._took(work)

    def _took(self, work):
        self._late = work(self.buffers)

    def ask(self, **content):
        self.buffers, self._late = [], None
        answer = self.widget.answer(content, self.buffers)
        found = dict(self._late if answer is None else answer)
        assert json.loads(json.dumps(found, allow_nan=False)) == json.loads(json.dumps(found))
        return found

    def rows(self, **wish):
        head = self.ask(kind="query", **wish)
        return self.ask(kind="page", key=head["key"], start=0, count=500)["columns"]

    def arrays(self, heads, first=0):
        kinds = {"i4": np.int32, "f4": np.float32, "u1": np.uint8}
        return {
            name: np.frombuffer(self.buffers[first + i], kinds[kind])
            for i, (name, kind) in enumerate(heads)
        }


@pytest.fixture
def run(store):
    return rollouts.run(store, steps=12)


@pytest.fixture
def commands():
    return rollouts.Commands()


@pytest.fixture
def page(run, commands):
    view = RolloutInspector([run], commands)
    yield Page(view)
    view.close()


def test_values_are_those_of_the_store(page, run):
    for number in run.ids()[::17].tolist():
        answer = page.ask(kind="rollout", run=0, rollout=number)
        arrays, stored = page.arrays(answer["arrays"]), run.rollout(number)
        assert arrays["tokens"].tolist() == stored.tokens.tolist()
        assert arrays["prompt_tokens"].tolist() == stored.prompt_tokens.tolist()
        assert arrays["value:logprobs"].tobytes() == stored.logprobs.tobytes()
        assert {n for n in arrays if n.startswith("value:")} == {
            "value:logprobs",
            *(f"value:{n}" for n in stored.streams),
        }
        for name, values in stored.streams.items():
            assert arrays[f"value:{name}"].tobytes() == values.tobytes()
        assert arrays["top_ids"].tolist() == stored.top_ids.ravel().tolist()
        assert arrays["top_logprobs"].tobytes() == stored.top_logprobs.tobytes()
        assert answer["alternatives"] == stored.top_ids.shape[1] == 5
        pieces = TOKENIZER.pieces(stored.tokens.tolist())
        assert arrays["bytes"].tobytes() == b"".join(pieces)
        assert arrays["sizes"].tolist() == [len(p) for p in pieces]
        spelled = dict(zip(arrays["vocabulary_tokens"].tolist(), page_pieces(arrays), strict=True))
        assert all(spelled[i] == TOKENIZER.table[i] for i in set(stored.top_ids.ravel().tolist()))
        facts = answer["facts"]
        assert (facts["reward"], facts["advantage"]) == (stored.reward, stored.advantage)
        assert facts["reward_parts"] == stored.reward_parts
        assert facts["row"] == stored.row
        assert (END in answer["special"]) == (END in stored.tokens)


def page_pieces(arrays):
    ends = np.cumsum(arrays["vocabulary_sizes"])
    data = arrays["vocabulary_bytes"].tobytes()
    return [data[e - s : e] for s, e in zip(arrays["vocabulary_sizes"], ends, strict=True)]


def test_without_a_tokenizer_ids_and_text_are_shown(run):
    view = RolloutInspector([run])
    page = Page(view)
    answer = page.ask(kind="rollout", run=0, rollout=1)
    assert "bytes" not in page.arrays(answer["arrays"])
    assert answer["facts"]["text"] == run.rollout(1).text
    assert "tokenizer" in answer["unspelled"]
    refused = page.ask(kind="resample", rollout=1, position=0, weights="base", params={})
    assert "nothing can be drawn" in refused["error"]
    assert "nothing can be drawn" in view.rollouts.setup["reason"]
    view.close()


def test_filter_sort_and_search(page, run):
    frame = run.rollouts()
    rows = page.rows(where=[["reward", ">", 0.4]], order_by="reward", descending=True)
    wanted = frame[frame.reward > 0.4].reward.sort_values(ascending=False)
    assert rows["reward"] == wanted.tolist()
    assert set(rows["id"]) == set(wanted.index)
    found = page.rows(search="digit")["id"] + page.rows(search="29 +")["id"]
    assert set(found) == set(frame[frame.prompt.str.contains("29 \\+")].index)
    both = page.rows(search="answer", where=[["step", "<=", 3]])
    texts = frame[(frame.step <= 3) & (frame.text + frame.prompt).str.contains("answer")]
    assert both["id"] == texts.index.tolist()
    failed = page.rows(where=[["failed", "=", 1]])
    assert set(failed["id"]) == set(frame[frame.failed].index)
    assert set(failed["reward"]) == {None}
    with pytest.raises(Exception, match="no scalar 'rewrad'"):
        page.rows(order_by="rewrad")


def test_a_search_that_is_met_by_text_and_by_prompt_finds_each_once(page):
    rows = page.rows(search="think", order_by="step")
    assert len(rows["id"]) == len(set(rows["id"])) == 12 * 3 * 4
    assert rows["step"] == sorted(rows["step"])


def test_groups(page, run):
    head = page.ask(kind="query", grouped=True, order_by="reward:mean", descending=True)
    answer = page.ask(kind="page", key=head["key"], start=0, count=100)
    groups, members = answer["columns"], answer["rollouts"]
    assert (head["count"], head["rollouts"]) == (36, 144)
    assert groups["reward:mean"] == sorted(groups["reward:mean"], reverse=True)
    for i, ids in enumerate(groups["ids"]):
        rewards = [run.rollout(n).reward for n in ids]
        own = [members["reward"][members["id"].index(n)] for n in ids]
        assert own == rewards
        worked = [r for r in rewards if r is not None]
        assert math.isclose(groups["reward:mean"][i], np.mean(worked), rel_tol=1e-12)
        assert groups["failed"][i] == len(rewards) - len(worked)


def test_several_runs_are_one_list(store, run, commands):
    other = rollouts.run(store, name="subtraction", steps=5)
    view = RolloutInspector([run, other], commands)
    page = Page(view)
    rows = page.rows(order_by="reward")
    worked = [r for r in rows["reward"] if r is not None]
    assert worked == sorted(worked)
    assert rows["reward"][len(worked) :] == [None] * (len(rows["reward"]) - len(worked))
    assert {*rows["run"]} == {0, 1}
    assert rows["run"].count(1) == 60
    steps = page.rows(order_by="id", descending=True)["step"]
    assert steps == sorted(steps, reverse=True)
    words = page.rows(order_by="stop_reason")["stop_reason"]
    assert words == sorted(words)
    groups = page.ask(kind="query", grouped=True)
    assert groups["count"] == 36 + 15
    view.close()
    assert repr(view) == "RolloutInspector(addition: 144 rollouts, subtraction: 60 rollouts)"


def test_new_rollouts_are_counted(store, commands):
    with store.create(name="live", kind="grpo", model="tiny") as writer:
        rollouts.record(writer, 1)
        view = RolloutInspector([store.run("live")], commands)
        page = Page(view)
        head = page.ask(kind="query", order_by="id")
        assert "count" not in page.ask(kind="changed", version=head["version"])
        rollouts.record(writer, 2)
        news = page.ask(kind="changed", version=head["version"])
        assert (head["rollouts"], news["count"]) == (12, 24)
        assert "count" not in page.ask(kind="changed", version=news["version"])
        view.close()


def test_a_list_that_is_no_longer_held_is_asked_for_again(page):
    first = page.ask(kind="query")
    for _ in range(20):
        page.ask(kind="query")
    with pytest.raises(Exception, match="ask again"):
        page.ask(kind="page", key=first["key"], start=0, count=10)


def test_the_same_prompt_across_steps(page, run):
    rows = page.ask(kind="same", run=0, rollout=5)["columns"]
    prompt = run.rollout(5).prompt
    frame = run.rollouts()
    assert rows["id"] == frame[frame.prompt == prompt].index.tolist()
    assert rows["step"] == sorted(rows["step"])


def test_tags_and_notes(page, run):
    said = page.ask(kind="annotate", run=0, rollout=7, tags=["hack", "odd"], note="<b>look</b>")
    assert said == {"tags": ["hack", "odd"], "note": "<b>look</b>"}
    facts = page.ask(kind="rollout", run=0, rollout=7)["facts"]
    assert (facts["tags"], facts["note"]) == (["hack", "odd"], "<b>look</b>")
    assert page.rows(where=[["tags", "has", "hack"]])["id"] == [7]


def test_a_datum_is_the_one_that_is_trained_on(page, run):
    from xorl_lab.recipes.rollouts import Sample, datum

    stored = run.rollout(3)
    scope = {}
    exec(page.ask(kind="datum", run=0, rollout=3)["source"], scope)
    wanted = datum(Sample(stored.prompt_tokens.tolist(), stored.rollout()), {})
    found: Datum = scope["datum"]
    assert found.model_input == wanted.model_input
    for name, values in wanted.loss_fn_inputs.items():
        assert np.array_equal(
            np.float32(found.loss_fn_inputs[name].data), np.float32(values.data)
        ), name


def test_resample(page, commands):
    params = {"n": 2, "max_tokens": 6, "temperature": 0.7, "seed": 3, "other": 1}
    answer = page.ask(kind="resample", rollout=4, position=3, weights="base", params=params)
    assert commands.calls == [
        (4, 3, "base", {"n": 2, "max_tokens": 6, "temperature": 0.7, "seed": 3})
    ]
    drawn = rollouts.Commands().resample(4, 3, "base", params)
    for head, sequence in zip(answer["drawn"], drawn, strict=True):
        arrays = page.arrays(head["arrays"], head["first"])
        assert arrays["tokens"].tolist() == sequence.tokens
        assert np.array_equal(arrays["value:logprobs"], np.float32(sequence.logprobs))
        assert np.array_equal(arrays["value:entropies"], np.float32(sequence.entropies))
        assert head["alternatives"] == 5
    assert page.ask(kind="weights") == {"weights": commands.weights()}
    with pytest.raises(Exception, match="deleted"):
        page.ask(kind="resample", rollout=4, position=3, weights="addition/step-10", params=params)


def test_numbers_that_json_lacks(store, commands):
    odd = rollouts.rollout("a", 1, reward=math.inf, advantage=math.nan)
    nothing = rollouts.rollout("", 2, reward=math.nan, end=False)
    with store.create(name="odd", kind="grpo", model="tiny") as writer:
        writer.step(StepRecord(1, {}, [Group("p", [1], [odd, nothing], {"x": math.nan})]))
    view = RolloutInspector([store.run("odd")], commands)
    page = Page(view)
    assert page.rows()["reward"] == ["inf", None]
    assert page.ask(kind="rollout", run=0, rollout=1)["facts"]["row"] == {"x": None}
    empty = page.ask(kind="rollout", run=0, rollout=2)
    assert page.arrays(empty["arrays"])["tokens"].tolist() == []
    assert page.ask(kind="query", grouped=True)["count"] == 1
    assert "<td>inf</td>" in view.still()
    view.close()


def test_hostile_texts_are_whole_and_inert(store, commands):
    run = rollouts.hostile(store, long=False)
    view = RolloutInspector([run], commands)
    page = Page(view)
    for number in run.ids().tolist():
        answer = page.ask(kind="rollout", run=0, rollout=number)
        text = page.arrays(answer["arrays"])["bytes"].tobytes().decode()
        wanted = run.rollout(number).text
        assert text.removesuffix("<|im_end|>").replace("?", "\ufffd") == wanted.replace(
            "?", "\ufffd"
        )
    still = view.still()
    assert "<script" not in still
    assert "<img" not in still
    assert "<iframe" not in still
    assert re.findall(r"<(?!/?(?:b|code|div|p|table|tr|th|td|pre)>)", still) == []
    assert not re.search(
        "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u2028-\u202e\u2066-\u2069]", still
    )
    assert "⟨U+202E⟩" in still
    assert "\u202e" not in repr(view)
    view.close()


def test_still_of_a_run_without_rollouts(store, commands):
    with store.create(name="empty", kind="sft", model="tiny") as writer:
        view = RolloutInspector([store.run(writer.info.id)], commands)
        assert "0 rollouts" in view.still()
        assert Page(view).rows()["id"] == []
        view.close()


def test_a_run_is_needed():
    with pytest.raises(ConfigError, match="no runs"):
        RolloutInspector([])
    with pytest.raises(ConfigError, match="no runs"):
        export_rollouts([], "x.html")


def test_export_holds_the_newest(store, run, commands, tmp_path):
    evil = rollouts.hostile(store, name="</script><script>window.pwned = 1</script>", long=False)
    path = export_rollouts([run, evil], tmp_path / "rollouts.html", commands, rollouts=20)
    page = path.read_text()
    assert page.count("</script>") == 3
    assert re.findall(r'(?:src|href)="([^"]+)"', page) == []
    snapshot = json.loads(re.search(r'id="snapshot">(.*?)</script>', page, re.DOTALL)[1])
    found = snapshot["inspector"]
    assert found["columns"]["id"] == [
        *run.ids(descending=True)[:20].tolist(),
        *evil.ids(descending=True).tolist(),
    ]
    assert len(found["rollouts"]) == len(found["columns"]["same"]) == 31
