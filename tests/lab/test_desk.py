"""Checkpoints in hand: load, branch, sample, compare, delete, expire."""

import math

import numpy as np
import pytest

from tests.closeness import assert_close
from tests.lab.support import (
    EXAMPLES,
    PROMPTS,
    SUPERVISED,
    Gate,
    checkpoint,
    drawn,
    grpo,
    lab_in,
    numbers,
    resume,
    saved,
    share,
    tensors,
)  # fmt: skip
from tests.lab.test_resample import trainer_logprobs
from xorl_lab.errors import CheckpointError, ConfigError, DataError, StoreError
from xorl_lab.lab import Lab
from xorl_lab.types import SamplingParams
from xorl_lab.types.commands import CheckpointCommands

LONG = 100_000
GREEDY = SamplingParams(max_tokens=5, temperature=0.0)


def desk(lab: Lab) -> CheckpointCommands:
    return lab._desk


@pytest.fixture
def run(lab):
    return grpo(lab, steps=4, save_every=2, learning_rate=5e-2)


# Loading.


def test_a_loaded_checkpoint_goes_on_exactly_and_leaves_its_run_alone(lab, run):
    before = tensors(lab, "grpo-1", "step-2")
    client = lab.load("grpo-1/step-2")
    assert client.model_id == "grpo-1-step-2-loaded"
    assert lab.load("grpo-1/step-2").model_id == "grpo-1-step-2-loaded-2"
    path = client.save_state("again").result().path
    assert tensors(lab, client.model_id, "again") == before
    assert run.client.version == 4
    assert path == "xorl://grpo-1-step-2-loaded/weights/again"
    assert lab.load("grpo-1-step-2-loaded/again").model_id == "grpo-1-step-2-loaded-again-loaded"


def test_the_base_model_and_weights_without_an_optimizer_can_be_loaded(lab, run):
    run.client.save_weights_for_sampler("light").result()
    for reference, like in (("base", "base"), ("grpo-1/light", "grpo-1/step-4")):
        client = lab.load(reference)
        theirs = lab.compare([like], ["abc"], max_tokens=5).answers[like][0]
        mine = client.save_weights_and_get_sampling_client().sample("abc", GREEDY).result()
        assert mine.tokens == theirs.tokens
    assert lab.sample("abc", checkpoint="grpo-1/sampler_weights/light", temperature=0, max_tokens=5)


def test_the_browser_is_told_how_to_use_what_it_loads(lab, run):
    assert lab.loaded is None
    assert desk(lab).load("grpo-1/step-2") == (
        "grpo-1/step-2 is loaded: client = lab.loaded trains it"
    )
    assert lab.loaded.version == 2
    with pytest.raises(CheckpointError, match="has no checkpoint 'step-3'"):
        desk(lab).load("grpo-1/step-3")
    assert lab.loaded.version == 2


# Branching.


def test_a_branch_begun_from_the_browser_is_that_of_the_run(lab, run):
    name = desk(lab).branch("grpo-1/step-2", {"name": "other"})
    assert name == "other"
    child = lab.run(name)
    child.wait(30)
    assert lab.run(name).info.parent.checkpoint == "step-2"
    assert numbers(lab.run(name)) == numbers(run)[2:]
    assert desk(lab).branch("grpo-1/step-2", {"learning_rate": 1e-3, "steps": 3}) == (
        "grpo-1-branch"
    )
    lab.run("grpo-1-branch").wait(30)
    assert lab.run("grpo-1-branch").metrics["learning_rate"].tolist() == [1e-3]


def test_a_run_that_this_lab_began_can_be_branched_and_resumed_by_name(lab, run):
    again = lab.run("grpo-1")
    assert again is not run
    assert again.branch("step-2", name="a").status.step == 4
    assert again.resume(steps=5).status.step == 5


def test_without_the_data_a_branch_says_what_to_call(lab, run):
    other = lab_in(lab.folder)
    message = r"of 'grpo-1' is not at hand in this kernel: call lab.grpo with the data to train on "
    with pytest.raises(ConfigError, match=message + r"and branch=\('grpo-1', 'step-2'\)"):
        desk(other).branch("grpo-1/step-2", {})
    client = lab.load("base")
    client.save_state("mine").result()
    with pytest.raises(ConfigError, match=r"load it with lab.load\('base-loaded/mine'\)"):
        desk(other).branch("base-loaded/mine", {})
    run.client.save_weights_for_sampler("light").result()
    with pytest.raises(CheckpointError, match="is for sampling alone"):
        desk(lab).branch("grpo-1/light", {})
    with pytest.raises(ConfigError, match="unknown setting 'learning_rat'"):
        desk(lab).branch("grpo-1/step-2", {"learning_rat": 1})


def test_a_branch_survives_its_parents_checkpoint_and_its_parents_record(lab, run, tmp_path):
    child = run.branch("step-2", name="child", steps=3)
    whole = run.branch("step-2", name="whole", steps=6)
    lab.delete("grpo-1/step-2")
    lab.delete("grpo-1/step-4")
    assert saved(lab, "grpo-1") == []
    lab._store.delete("grpo-1")
    found = desk(lab).tree()
    assert {c["parent"] for c in found["checkpoints"] if c["name"] == "child/step-3"} == {None}
    assert lab.sample("abc", checkpoint="child", max_tokens=3).texts
    assert desk(lab).sample("child/step-3", "abc", {"max_tokens": 3})
    # In a kernel of its own, as it were: nothing of the parent is left in memory either.
    fresh = lab_in(lab.folder)
    again = resume(fresh, "child", steps=6)
    assert numbers(again) == numbers(whole)
    assert drawn(again) == drawn(whole)
    assert tensors(lab, "child", "step-6") == tensors(lab, "whole", "step-6")
    assert child.info.parent.checkpoint == "step-2"


# Sampling and comparing.


def test_samples_of_a_checkpoint(lab, run):
    found = desk(lab).sample("grpo-1/step-2", "abc", {"n": 3, "max_tokens": 4, "seed": 2})
    theirs = lab.sample("abc", 3, checkpoint="grpo-1/step-2", max_tokens=4, seed=2)
    assert [s.tokens for s in found] == [s.tokens for s in theirs.sequences]
    assert all(len(s.entropies) == len(s.tokens) for s in found)
    with pytest.raises(ConfigError, match="unknown parameter 'temp'"):
        desk(lab).sample("base", "abc", {"temp": 2})
    with pytest.raises(DataError, match="is empty"):
        desk(lab).sample("base", "", {})


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
def test_a_comparison_judges_both_answers_by_both_weights(lab, run, temperature):
    prompts = ["abc", "1+2=", "hello"]
    params = {"max_tokens": 6, "temperature": temperature, "seed": 3}
    found = desk(lab).compare("base", "grpo-1/step-4", prompts, params)
    shown = lab.compare(["base", "grpo-1/step-4"], prompts, **params)
    clients = {"left": lab.load("base"), "right": lab.load("grpo-1/step-4")}
    names = {"left": "base", "right": "grpo-1/step-4"}
    tokenizer = run.client.get_tokenizer()
    assert [row["prompt"] for row in found] == prompts
    parted = 0
    for i, row in enumerate(found):
        for side, other in (("left", "right"), ("right", "left")):
            tokens = shown.answers[names[side]][i].tokens
            whole = [*tokenizer.encode(prompts[i], add_special_tokens=False), *tokens]
            mine = trainer_logprobs(clients[side], whole, len(tokens))
            theirs = trainer_logprobs(clients[other], whole, len(tokens))
            assert_close(row[side]["logprobs"], mine, rtol=0, atol=1e-4)
            assert_close(row[side]["other"], theirs, rtol=0, atol=1e-4)
            assert len(row[side]["pieces"]) == len(tokens)
            parted += int(np.abs(mine - theirs).max() > 1e-2)
        left, right = (shown.answers[n][i].tokens for n in names.values())
        at = row["divergence"]
        if at is None:
            assert left == right
        else:
            assert left[:at] == right[:at]
            assert left[at : at + 1] != right[at : at + 1]
    assert parted >= 4
    assert any(row["divergence"] is not None for row in found)


def test_a_checkpoint_beside_itself(lab, run):
    (row,) = desk(lab).compare("grpo-1/step-2", "grpo-1/step-2", ["abc"], {"n": 1})
    assert row["divergence"] is None
    assert row["left"] == row["right"]
    assert row["left"]["logprobs"] == row["left"]["other"]


def test_models_of_other_bases_are_not_judged_by_each_other(lab, run):
    moe = Lab("tiny-moe", folder=lab.folder, rank=2, device="cpu", dtype="float32")
    moe.load("base").save_state("x").result()
    (row,) = desk(lab).compare("grpo-1/step-2", "base-loaded/x", ["abc"], {"max_tokens": 3})
    for side in ("left", "right"):
        assert all(map(math.isnan, row[side]["other"]))
        assert len(row[side]["other"]) == len(row[side]["logprobs"]) == len(row[side]["pieces"])


# Deleting and expiring.


def test_a_checkpoint_is_deleted_and_what_is_loaded_stays(lab, run):
    client = lab.load("grpo-1/step-2")
    sampler = lab._weights.client("grpo-1/step-2")
    before = sampler.sample("abc", GREEDY).result()
    lab.delete("grpo-1/step-2")
    assert saved(lab, "grpo-1") == ["step-4"]
    assert sampler.sample("abc", GREEDY).result().tokens == before.tokens
    assert client.save_weights_and_get_sampling_client().sample("abc", GREEDY).result().tokens == (
        before.tokens
    )
    with pytest.raises(CheckpointError, match="'grpo-1' has no checkpoint 'step-2'"):
        lab.delete("grpo-1/step-2")
    lab.delete("step-4")
    assert saved(lab, "grpo-1") == []


def test_a_run_or_nothing_is_no_checkpoint(lab, run):
    for what, message in [
        ("grpo-1", "'grpo-1' is a run: name one of its checkpoints, such as 'grpo-1/step-4'"),
        ("base", "'base' names no checkpoint"),
        (None, "None names no checkpoint"),
        ("nope", "no run has a checkpoint 'nope'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            lab.delete(what)
    with pytest.raises(StoreError, match="nope"):
        lab.delete("nope/step-1")
    assert saved(lab, "grpo-1") == ["step-2", "step-4"]


def test_what_a_run_under_way_would_go_on_from_is_kept(lab):
    gate = Gate()

    def reward(completion, wanted):
        seen.append(1)
        return gate(completion, wanted) if len(seen) > 24 else share(completion, wanted)

    seen = []
    with gate.closed():
        run = grpo(lab, steps=5, reward=reward, background=True, save_every=1)
        assert gate.reached.wait(20)
        assert saved(lab, "grpo-1") == ["step-1", "step-2", "step-3"]
        other = lab_in(lab.folder)
        message = "grpo-1/step-3 cannot be deleted now: run 'grpo-1' is running and would go on"
        with pytest.raises(ConfigError, match=message):
            other.delete("grpo-1/step-3")
        other.delete("grpo-1/step-2")
        held = {c["name"]: c["held"] for c in desk(other).tree()["checkpoints"]}
        assert held["grpo-1/step-1"] == ""
        assert held["grpo-1/step-3"] == "run 'grpo-1' is running and would go on from it"
    run.wait(20)
    lab.delete("grpo-1/step-3")
    lab.delete("grpo-1/step-5")


def test_what_a_branch_without_a_checkpoint_of_its_own_needs_is_kept(lab, run):
    gate = Gate()
    with gate.closed():
        child = run.branch("step-2", background=True, name="child")
        child.wait(20)
        lab.delete("grpo-1/step-2")  # it has one of its own

        def reward(completion, wanted):
            return gate(completion, wanted)

        other = lab.grpo(
            PROMPTS, reward, branch=("grpo-1", "step-4"), steps=8, background=True, name="waits",
            preflight=False, quiet=True,
        )  # fmt: skip
        assert gate.reached.wait(20)
        with pytest.raises(ConfigError, match="run 'waits' was branched off it and has no check"):
            lab.delete("grpo-1/step-4")
        other.stop(wait=False)
    other.wait(20)
    lab.delete("grpo-1/step-4")


def test_a_checkpoint_expires(lab, run):
    lab.expire("grpo-1/step-2", 3600)
    (facts,) = (c for c in desk(lab).tree()["checkpoints"] if c["name"] == "grpo-1/step-2")
    assert facts["expires"] == pytest.approx(facts["created"] + 3600, abs=120)
    lab.expire("grpo-1/step-2", None)
    assert lab_in(lab.folder).checkpoints("grpo-1")["name"].tolist() == ["step-2", "step-4"]
    lab.expire("grpo-1/step-2", 0)
    with pytest.raises(CheckpointError, match="has expired"):
        lab.load("grpo-1/step-2")
    assert lab_in(lab.folder).checkpoints("grpo-1")["name"].tolist() == ["step-4"]
    for wrong in (-1, float("nan"), float("inf"), "soon", True):
        with pytest.raises(ConfigError, match="pass a number >= 0, or None for never"):
            lab.expire("grpo-1/step-4", wrong)
    with pytest.raises(ConfigError, match="'grpo-1' is a run"):
        lab.expire("grpo-1", 5)


def test_runs_of_other_kinds_and_spoilt_folders_are_no_trouble(lab, run):
    lab.sft(EXAMPLES, steps=1, **SUPERVISED)
    (checkpoint(lab, "grpo-1", "step-2") / "state.json").write_text("{")
    names = [c["name"] for c in desk(lab).tree()["checkpoints"]]
    assert names == ["grpo-1/step-4", "sft-1/step-1"]
    assert lab.checkpoints()["name"].tolist() == ["step-4", "step-1"]
