"""Another reward over recorded rollouts: what it is given, and what is told of the difference."""

import math
import subprocess
import sys

import numpy as np
import pytest

from tests.closeness import assert_close
from tests.lab.support import PROMPTS, grpo, lab_in, share
from xorl_lab.errors import ConfigError, StoreError
from xorl_lab.lab import console
from xorl_lab.lab import rescore as module
from xorl_lab.lab.rescored import Rescored, Scored, rank_correlation
from xorl_lab.losses import group_normalized, leave_one_out, mean_centered
from xorl_lab.recipes.rewards import Score
from xorl_lab.types import Rollout

EVIL = "<script>alert(1)</script>&\"'"


def length(completion):
    return len(completion)


def parts(completion, wanted, stop_reason):
    return {"share": share(completion, wanted), "cut": -0.5 * (stop_reason == "length")}


@pytest.fixture
def run(lab):
    return grpo(lab, steps=3, max_tokens=6)


def test_the_same_function_says_the_same(run):
    found = run.rescore(share)
    frame = found.frame()
    recorded = run.rollouts()
    assert frame.index.equals(recorded.index)
    assert frame["new"].equals(recorded["reward"].rename("new"))
    assert_close(frame["new_advantage"], recorded["advantage"], rtol=1e-6, atol=1e-9)
    assert (frame["change"] == 0).all()
    assert not frame["sign_changed"].any()
    assert found.summary == {
        "rollouts": 24,
        "failed_old": 0,
        "failed_new": 0,
        "old": pytest.approx(recorded["reward"].mean()),
        "new": pytest.approx(recorded["reward"].mean()),
        "change": 0.0,
        "rank_correlation": pytest.approx(1.0),
        "groups": 6,
        "reordered": 0,
        "sign_changed": 0,
    }
    assert found.largest() == []
    assert "The largest" not in found._repr_html_()


def test_columns_of_the_frame(run):
    frame = run.rescore(parts).frame()
    assert frame.columns.tolist() == [
        "step", "group", "sample", "prompt", "text", "old", "new", "change", "old_advantage",
        "new_advantage", "sign_changed", "new:cut", "new:share", "error",
    ]  # fmt: skip
    assert_close(frame["new"], frame["new:cut"] + frame["new:share"], rtol=1e-12)
    assert_close(frame["change"], frame["new"] - frame["old"], rtol=1e-12)
    assert frame["error"].isna().all()


def test_parts_of_the_record_are_there_too(lab):
    run = grpo(lab, steps=1, reward=parts)
    frame = run.rescore(length).frame()
    assert {"old:share", "old:cut"} <= set(frame.columns)
    recorded = run.rollouts()
    assert_close(frame["old:share"], recorded["reward:part:share"], rtol=1e-12)


def test_it_gets_what_it_got_in_training(lab):
    chat = [{"role": "user", "content": "Hello"}]
    prompts = [
        {"prompt": chat, "pair": (1, 2), "odd": {"a": [1]}},
        {"prompt": "1+1=", "pair": (3, 4), "odd": {"a": [2]}},
    ]
    seen = []

    def everything(prompt, completion, tokens, stop_reason, pair, **others):
        seen.append((prompt, completion, tokens, stop_reason, pair, others))
        return float(len(seen) % 3)

    run = grpo(lab, steps=2, prompts=prompts, reward=everything)
    trained, seen = seen, []
    run.rescore(everything)
    assert seen == trained
    assert {type(call[4]) for call in seen} == {tuple}
    assert sorted(seen[0][5]) == ["odd"]
    # As far as a record goes, where nobody has the prompts.
    seen = []
    lab_in(lab.folder).run("grpo-1").rescore(everything)
    assert [call[1:4] for call in seen] == [call[1:4] for call in trained]
    assert {type(call[4]) for call in seen} == {list}
    seen = []
    lab_in(lab.folder).run("grpo-1").rescore(everything, prompts=prompts)
    assert seen == trained


def test_prompts_that_look_alike_are_told_apart_by_their_columns(lab):
    prompts = [{"prompt": "1+1=", "answer": a} for a in ("2", "3", {"two"})]
    seen = []

    def reward(completion, answer):
        seen.append(answer)
        return len(completion)

    run = grpo(lab, steps=2, prompts=prompts, reward=reward)
    trained, seen = seen, []
    run.rescore(reward)
    assert seen == trained


def test_a_record_that_holds_the_conversation_gives_it_back(lab):
    found, row = module._Prompts([]).find("text", {"prompt": [{"role": "user"}], "answer": 1})
    assert (found, row) == ([{"role": "user"}], {"answer": 1})
    assert module._Prompts([]).find("text", {"answer": 1}) == ("text", {"answer": 1})


@pytest.mark.parametrize(
    ("setting", "formula"),
    [("group", group_normalized), ("mean", mean_centered), ("leave_one_out", leave_one_out)],
)
def test_advantages_are_those_of_the_run_s_own_setting(lab, setting, formula):
    run = grpo(lab, steps=1, advantage=setting, max_tokens=6)
    frame = run.rescore(length).frame()
    for _, group in frame.groupby(["step", "group"]):
        assert_close(group["new_advantage"], formula(group["new"].tolist()), rtol=1e-12)
    assert frame["new_advantage"].abs().max() > 0
    signs = np.sign(frame["old_advantage"]) != np.sign(frame["new_advantage"])
    assert frame["sign_changed"].tolist() == signs.tolist()


def test_some_of_them_with_the_advantages_of_whole_groups(run):
    whole = run.rescore(length).frame()
    where = [("reward", ">", whole["old"].median())]
    some = run.rescore(length, where=where).frame()
    assert 0 < len(some) < len(whole)
    assert some.equals(whole.loc[some.index])
    assert some.index.equals(run.rollouts(where=where).index)
    with pytest.raises(StoreError, match="has none that fit of its rollouts recorded"):
        run.rescore(length, where=[("reward", ">", 1e9)])
    with pytest.raises(StoreError, match="there is no scalar 'nope'"):
        run.rescore(length, where=[("nope", "=", 1)])


def test_a_failure_is_data(run):
    def odd(completion):
        calls.append(completion)
        if len(calls) % 4 == 1:
            raise ValueError("no")
        return math.nan if len(calls) % 4 == 2 else float(len(calls))

    calls = []
    found = run.rescore(odd)
    frame = found.frame()
    assert frame["error"].notna().sum() == 12
    assert "ValueError: no (line " in frame["error"].iloc[0]
    assert "nan, which is not a finite number" in frame["error"].iloc[1]
    assert frame["new"].isna().sum() == frame["change"].isna().sum() == 12
    assert (frame["new_advantage"][frame["new"].isna()] == 0).all()
    assert found.summary["failed_new"] == 12
    assert found.summary["old"] == pytest.approx(frame["old"][frame["new"].notna()].mean())
    assert "the first failure: ValueError: no" in repr(found)

    def always(completion):
        raise ValueError("no")

    found = run.rescore(always)
    assert math.isnan(found.summary["new"])
    assert math.isnan(found.summary["rank_correlation"])
    assert "24 failed" in found._repr_html_()


def test_what_it_asks_for_and_is_not_there_is_told_before_anything_is_scored(run):
    with pytest.raises(ConfigError, match="asks for 'nope', which is not there"):
        run.rescore(lambda nope: 0.0)
    with pytest.raises(ConfigError, match="reward is a int"):
        run.rescore(3)


def test_a_run_without_rollouts(lab):
    from tests.lab.support import EXAMPLES, SUPERVISED

    run = lab.sft(EXAMPLES, steps=1, **SUPERVISED)
    with pytest.raises(StoreError, match="run 'sft-1' has none of its rollouts recorded"):
        run.rescore(length)


def test_steps_that_were_superseded_are_left_out(lab):
    run = grpo(lab, steps=4, save_every=2)
    lab.delete("grpo-1/step-4")
    again = run.resume(steps=5)
    found = again.rescore(length).frame()
    assert found["step"].value_counts().to_dict() == dict.fromkeys(range(1, 6), 8)
    assert found.index.equals(again.rollouts().index)


ELSEWHERE = """
import sys
from xorl_lab.lab import Run
from xorl_lab.store import Store
run = Run(Store(sys.argv[1]).run("grpo-1"))
print(run.rescore(lambda completion, wanted: len(completion) + len(wanted), quiet=True).summary)
"""


def test_another_process_needs_no_model(run, root):
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(run.reader.path.parent)],
        cwd=root, capture_output=True, text=True, check=True,
    )  # fmt: skip
    mine = run.rescore(lambda completion, wanted: len(completion) + len(wanted), quiet=True)
    assert done.stdout.strip() == str(mine.summary)
    assert done.stderr == ""


def test_progress_is_shown_where_it_takes_a_while(run, monkeypatch, capsys):
    run.rescore(length)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(console, "SOON", -1.0)
    monkeypatch.setattr(console, "OFTEN", -1.0)
    run.rescore(length, quiet=True)
    assert capsys.readouterr().err == ""
    run.rescore(length)
    told = capsys.readouterr().err
    assert told.startswith("\r0 of 24 rollouts scored")
    assert "\r4 of 24 rollouts scored" in told
    assert told.rstrip().endswith("\r24 of 24 rollouts scored")


# What is told of it.


def scored(number, group, old, new, *, advantages=(0.0, 0.0), text="a"):
    kept = Rollout([], [], text, "stop", 0, old, advantage=advantages[0])
    error = None if new is not None else "no"
    return Scored(number, 1, group, number, "p", kept, Score(new, {}, error), advantages[1])


def test_groups_whose_order_changes():
    groups = {
        0: [(1.0, 10.0), (2.0, 20.0), (3.0, 21.0)],  # the same order
        1: [(1.0, 2.0), (2.0, 1.0)],  # reversed
        2: [(1.0, 1.0), (2.0, 1.0)],  # a tie that was none
        3: [(1.0, 1.0), (1.0, 2.0)],  # a tie no longer
        4: [(1.0, 5.0), (2.0, None), (None, 3.0)],  # only one was scored by both
    }
    rows = [scored(i, g, *pair) for g, pairs in groups.items() for i, pair in enumerate(pairs)]
    summary = Rescored("r", rows).summary
    assert (summary["groups"], summary["reordered"]) == (5, 3)
    assert (summary["failed_old"], summary["failed_new"]) == (1, 1)


def test_the_largest_changes_come_first():
    rows = [scored(i, 0, 0.0, new) for i, new in enumerate([1.0, -3.0, 0.0, 2.0, None, 3.0])]
    assert [s.id for s in Rescored("r", rows).largest(3)] == [1, 5, 3]
    assert [s.id for s in Rescored("r", rows).largest(9)] == [1, 5, 3, 0]


def test_ranks_of_ties_are_shared():
    one, other = np.array([1.0, 1, 2, 3]), np.array([5.0, 6, 6, 9])
    assert rank_correlation(one, other) == pytest.approx(
        7.5 / 9
    )  # of (1.5, 1.5, 3, 4), (1, 2.5, …)
    assert math.isnan(rank_correlation(np.ones(3), np.arange(3.0)))
    assert math.isnan(rank_correlation(np.zeros(0), np.zeros(0)))


def test_signs():
    rows = [
        scored(0, 0, 1.0, 1.0, advantages=(1.0, 2.0)),
        scored(1, 0, 1.0, 1.0, advantages=(1.0, -1.0)),
        scored(2, 0, 1.0, 1.0, advantages=(0.0, 1.0)),
    ]
    assert Rescored("r", rows).frame()["sign_changed"].tolist() == [False, True, True]
    assert Rescored("r", rows).summary["sign_changed"] == 2


def test_html_is_escaped_and_short():
    rows = [scored(0, 0, 0.0, 1.0, text=EVIL), scored(1, 0, 0.0, 2.0, text="x" * 10**6)]
    found = Rescored(EVIL, rows)
    html = found._repr_html_()
    assert "<script" not in html
    assert html.count("&lt;script&gt;alert(1)&lt;/script&gt;&amp;&quot;&#x27;") == 2
    assert len(html) < 3000
    assert "x …" in html
    assert len(repr(found)) < 500
    assert "mean reward 0 → 1.5" in repr(found)


def test_of_the_given_prompts_only_columns_that_all_have_are_passed(lab):
    prompts = [{**PROMPTS[0], "hint": 1}, PROMPTS[1]]
    seen = []

    def reward(completion, hint=None):
        seen.append(hint)
        return len(completion)

    run = grpo(lab, steps=1, prompts=prompts, reward=reward, prompts_per_step=2)
    trained, seen = seen, []
    run.rescore(reward)
    assert seen == trained == [None] * 8
