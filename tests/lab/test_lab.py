"""The lab: runs begun, resumed, branched, listed, and what is said where something is wrong."""

import threading

import pandas as pd
import pytest

from tests.lab.support import (
    EXAMPLES,
    PROMPTS,
    SETTINGS,
    SUPERVISED,
    Gate,
    checkpoint,
    descriptors,
    drawn,
    grpo,
    lab_in,
    numbers,
    resume,
    same,
    saved,
    share,
    tensors,
    texts,
    threads,
    until,
)  # fmt: skip
from xorl_lab.engine import saving
from xorl_lab.errors import CheckpointError, ConfigError, DataError, StoreError
from xorl_lab.lab import Lab, Run
from xorl_lab.store import Writer
from xorl_lab.types import SamplingParams

LONG = 100_000


# Names, records, checkpoints.


def test_runs_are_numbered_and_listed(lab):
    for _ in range(2):
        grpo(lab, steps=1)
    lab.sft(EXAMPLES, steps=1, **SUPERVISED)
    grpo(lab, steps=1, name="mine")
    grpo(lab, steps=1, name="mine")
    assert lab.runs()["name"].tolist() == ["mine-2", "mine", "sft-1", "grpo-2", "grpo-1"]
    assert set(lab.runs()["state"]) == {"finished"}
    assert set(lab.checkpoints()["run"]) == set(lab.runs()["name"])
    assert lab.checkpoints("mine")["path"].tolist() == ["xorl://mine/weights/step-1"]
    assert lab.run("mine").info.kind == "grpo"


def test_a_name_whose_record_is_gone_but_not_its_checkpoints_is_not_used_again(lab):
    grpo(lab, steps=1)
    lab._store.delete("grpo-1")
    assert grpo(lab, steps=1).name == "grpo-2"


def test_checkpoints_every_so_many_steps_and_only_the_latest_are_kept(lab):
    run = grpo(lab, steps=7, save_every=2, keep=2)
    assert saved(lab, run.name) == ["step-6", "step-7"]
    again = run.resume(steps=10)
    assert saved(lab, run.name) == ["step-8", "step-10"] or saved(lab, run.name)[-2:] == [
        "step-8",
        "step-10",
    ]
    assert len(saved(lab, again.name)) == 2
    assert [e.step for e in again.reader.checkpoints()] == [2, 4, 6, 7, 8, 10]
    assert saved(lab, grpo(lab, steps=5, save_every=1, keep=0).name) == [
        f"step-{i}" for i in range(1, 6)
    ]


def test_prompts_of_any_form(lab):
    frame = pd.DataFrame(PROMPTS)
    runs = [grpo(lab, steps=1, prompts=p) for p in (frame, PROMPTS, iter(PROMPTS), tuple(PROMPTS))]
    for run in runs[1:]:
        same(run, runs[0])
    assert len({run.info.settings["data"] for run in runs}) == 1


def test_a_change_of_the_data_after_the_call_does_not_reach_the_run(lab):
    rows = [dict(row) for row in PROMPTS]
    run = grpo(lab, steps=2, prompts=rows)
    rows.clear()
    assert run.resume(steps=3).status.step == 3


# Resume and branch.


def test_a_run_in_two_parts_is_the_run_in_one(lab, tmp_path):
    grpo(lab, steps=2)
    parts = resume(lab, "grpo-1", steps=5)
    other = lab_in(tmp_path / "other")
    whole = grpo(other, steps=5)
    same(parts, whole)
    assert tensors(lab, "grpo-1", "step-5") == tensors(other, "grpo-1", "step-5")
    assert parts.info.id == lab.run("grpo-1").info.id


def test_what_was_changed_when_a_run_went_on_is_kept_when_it_goes_on_again(lab):
    grpo(lab, steps=2)
    resume(lab, "grpo-1", steps=6, learning_rate=1e-3)
    lab_again = lab_in(lab.folder)
    run = resume(lab_again, "grpo-1", steps=8)
    assert run.metrics["learning_rate"].tolist() == [5e-3] * 2 + [1e-3] * 6


def test_a_run_without_a_checkpoint_goes_on_with_the_adapter_that_it_had(tmp_path, monkeypatch):
    lab = lab_in(tmp_path / "a", rank=8, seed=5)

    def fail(completion):
        raise ValueError("no")

    with pytest.raises(DataError):
        grpo(lab, steps=2, reward=fail)
    other = lab_in(tmp_path / "a", rank=2, seed=1)
    assert resume(other, "grpo-1").client.lora.rank == 8
    same(other.run("grpo-1"), grpo(lab_in(tmp_path / "b", rank=8, seed=5), steps=2))


def test_a_branch_with_the_same_settings_repeats_the_parent(lab):
    run = grpo(lab, steps=6, save_every=2)
    child = run.branch("step-2")
    assert child.name == "grpo-1-branch"
    assert child.info.parent.step == 2
    assert numbers(child) == numbers(run)[2:]
    assert drawn(child) == drawn(run)[2:]
    assert tensors(lab, child.name, "step-6") == tensors(lab, run.name, "step-6")
    assert run.branch("step-4", name="other", learning_rate=1e-3).name == "other"
    assert lab.run("other").metrics["learning_rate"].tolist() == [1e-3] * 2
    by_hand = lab.grpo(
        PROMPTS, share, branch=("grpo-1", "step-2"), preflight=False, quiet=True, name="hand"
    )
    same(by_hand, child)


def test_a_branch_has_the_knobs_of_its_checkpoint(lab):
    gate = Gate()
    with gate.closed():
        run = grpo(lab, steps=4, reward=gate, background=True, save_every=1)
        assert gate.reached.wait(20)
        run.set("learning_rate", 1e-3)
    run.wait()
    child = run.branch("step-2", background=False)
    assert numbers(child) == numbers(run)[2:]


def test_a_branch_that_has_no_checkpoint_yet_goes_on_from_its_parents(lab):
    run = grpo(lab, steps=4, save_every=2)

    def fail(completion):
        raise ValueError("no")

    with pytest.raises(DataError):
        lab.grpo(PROMPTS, fail, branch=("grpo-1", "step-2"), name="child", preflight=False)
    again = resume(lab, "child")
    assert numbers(again) == numbers(run)[2:]
    assert again.status.state == "finished"


def test_a_paused_beginning_is_not_repeated(lab):
    run = grpo(lab, steps=2, background=True, paused=True)
    run.resume()
    run.wait(20)
    again = run.resume(steps=3)
    again.wait(20)
    child = again.branch("step-2")
    child.wait(20)
    assert child.status.step == 3


def test_resume_while_under_way_with_changes_stops_and_goes_on(lab):
    run = grpo(lab, steps=LONG, background=True, save_every=0)
    until(lambda: run.status.step >= 2)
    again = run.resume(steps=run.status.step + 50)
    again.wait(30)
    assert not run.going
    assert again.status.state == "finished"


def spoil(lab, run, name):
    (checkpoint(lab, run, name) / "optimizer.safetensors").write_bytes(b"x")


def test_where_the_last_checkpoint_is_damaged_the_one_before_is_taken(lab, tmp_path):
    run = grpo(lab, steps=4, save_every=2)
    spoil(lab, run.name, "step-4")
    again = run.resume(steps=6)
    said = [text for text in again.warnings if "cannot be trusted" in text]
    assert said == [
        "checkpoint 'step-4' cannot be trusted: optimizer.safetensors: its SHA-256 is not the one "
        "recorded; use an earlier checkpoint: going on from step 2 instead"
    ]
    whole = grpo(lab_in(tmp_path / "other"), steps=6, save_every=2)
    same(again, whole)
    assert tensors(lab, run.name, "step-4") == tensors(
        lab_in(tmp_path / "other"), whole.name, "step-4"
    )


def test_one_that_has_expired_is_not_gone_on_from(lab):
    run = grpo(lab, steps=4, save_every=2)
    lab.expire("grpo-1/step-4", 0)
    again = run.resume(steps=6)
    assert again.reader.events(kinds=("start",))[-1].step == 2
    assert "has expired" in again.warnings[-1]


def test_damaged_checkpoints_alone_are_told_before_anything_is_superseded(lab):
    run = grpo(lab, steps=4, save_every=2)
    for name in ("step-2", "step-4"):
        spoil(lab, run.name, name)
    with pytest.raises(CheckpointError, match="step-4"):
        run.resume(steps=6)
    assert run.status.step == 4
    assert run.status.state == "finished"


# Under way at the same time.


def test_a_second_run_stops_the_first_unless_told_otherwise(lab):
    first = grpo(lab, steps=LONG, background=True)
    until(lambda: first.status.step >= 1)
    second = grpo(lab, steps=LONG, background=True)
    assert not first.going
    assert first.status.state == "stopped"
    third = grpo(lab, steps=2, background=False, concurrent=True)
    assert third.status.state == "finished"
    assert second.going
    assert lab.run(second.name) is second
    second.stop()


def test_something_that_does_not_fit_leaves_the_run_under_way_alone(lab):
    first = grpo(lab, steps=LONG, background=True)
    with pytest.raises(ConfigError, match="over the context"):
        grpo(lab, prompts=["a" * 600])
    with pytest.raises(DataError, match="there are no prompts"):
        grpo(lab, prompts=[])
    with pytest.raises(ConfigError, match="asks for 'nope'"):
        grpo(lab, reward=lambda nope: 0.0)
    assert first.going
    assert lab.runs()["name"].tolist() == ["grpo-1"]
    first.stop()


def test_two_labs_on_one_folder(lab):
    other = lab_in(lab.folder)
    first = grpo(lab, steps=LONG, background=True)
    until(lambda: first.status.step >= 1)
    assert other.run("grpo-1") is first
    second = grpo(other, steps=2, concurrent=True)
    assert second.name == "grpo-2"
    with pytest.raises(StoreError, match="run 'grpo-1' is running elsewhere"):
        resume(other, "grpo-1", concurrent=True)
    assert first.going
    third = grpo(other, steps=1)
    assert third.name == "grpo-3"
    assert not first.going
    assert first.status.message == "run 'grpo-3' was begun"
    assert texts(first, "end") == ["stopped: run 'grpo-3' was begun"]
    told = "run 'grpo-1' was stopped for this one: concurrent=True lets both go on"
    assert texts(third, "log") == [told]


def test_thirty_runs_leave_no_threads_clients_or_files_open(lab):
    import gc

    grpo(lab, steps=1)
    gc.collect()
    before = descriptors(), len(threads())
    for i in range(30):
        run = grpo(lab, steps=1, background=bool(i % 2), save_every=0)
        run.wait()
    live = lab.service._service.live
    del run
    gc.collect()
    until(lambda: not threads())
    assert live() == {}
    assert len(threads()) == 0
    assert descriptors() <= before[0] + 2


def test_models_of_runs_that_ended_are_let_go_and_loaded_again_when_asked_for(lab):
    import gc

    from xorl_lab.engine.trainer import Trained

    def models():
        gc.collect()
        return sum(type(o) is Trained for o in gc.get_objects())

    before = models()
    kept = [grpo(lab, steps=1, seed=i) for i in range(3)]  # as IPython's Out keeps them
    last = [client_logprobs(run.client) for run in kept[-1:]]
    assert models() == before + 1
    kept.append(grpo(lab, steps=1, seed=3))
    assert models() == before + 1
    assert client_logprobs(kept[2].client) == last[0]
    assert kept[2].client is kept[2].client
    lab.service.create_rest_client(kept[0].name).delete_checkpoint("weights/step-1").result()
    with pytest.raises(CheckpointError, match="was let go when another run was begun"):
        _ = kept[0].client


def client_logprobs(client):
    sampler = client.save_weights_and_get_sampling_client()
    params = SamplingParams(max_tokens=5, seed=1)
    return sampler.sample("abc", sampling_params=params).result().logprobs


def test_a_run_driven_elsewhere_is_not_stopped_from_here_but_waited_for(lab):
    with Gate().closed() as gate:
        run = grpo(lab, steps=1, reward=gate, background=True)
        assert gate.reached.wait(20)
        seen = Run(run.reader)
        with pytest.raises(ConfigError, match="is running and not driven from here"):
            seen.stop()
        with pytest.raises(TimeoutError, match=r"goes on after 0.1 seconds"):
            seen.wait(0.1)
    assert seen.wait(20).status.state == "finished"
    assert seen.stop() is seen


@pytest.mark.parametrize("concurrent", [False, True])
def test_a_change_that_is_none_leaves_the_run_under_way(lab, concurrent):
    run = grpo(lab, steps=LONG, background=True, concurrent=concurrent)
    until(lambda: run.status.step > 1)
    with pytest.raises(ConfigError, match="stepz"):
        run.resume(stepz=5)
    assert run.going
    with pytest.raises(ConfigError, match="steps behind it"):
        run.resume(steps=1)
    assert run.going
    onward = run.resume(learning_rate=1e-4)
    assert not run.going
    assert onward.name == run.name
    until(lambda: "learning_rate: 0.005 → 0.0001" in texts(onward, "start")[-1])
    onward.set("learning_rate", 50)
    assert "learning_rate is 50, and the model may break" in onward.warnings[-1]
    onward.stop()


# What fails on the way.


def test_a_reward_that_raises_now_and_then_is_data_and_always_is_an_error(lab):
    def sometimes(completion):
        seen.append(completion)
        if len(seen) % 3 == 0:
            raise ValueError("odd")
        return float(len(seen) % 2)

    seen = []
    run = grpo(lab, steps=2, reward=sometimes)
    assert run.status.state == "finished"
    assert "ValueError: odd" in run.warnings[0]

    def always(completion):
        raise ValueError("no")

    with pytest.raises(DataError, match="failed for all 8 completions"):
        grpo(lab, steps=2, reward=always)
    failed = lab.run("grpo-2")
    assert failed.status.state == "failed"
    assert "ValueError: no" in failed.status.message
    behind = grpo(lab, steps=2, reward=always, background=True)
    with pytest.raises(DataError, match="failed for all"):
        behind.wait()
    assert not behind.going


def test_a_reward_that_hangs_holds_the_run_until_it_returns(lab):
    with Gate().closed() as gate:
        run = grpo(lab, steps=LONG, reward=gate, background=True)
        assert gate.reached.wait(20)
        run.stop(wait=False)
        with pytest.raises(TimeoutError, match=r"goes on after 0.2 seconds"):
            run.wait(0.2)
    run.wait(20)
    assert run.status.state == "stopped"


def test_a_run_that_does_not_end_is_named(lab, monkeypatch):
    from xorl_lab.lab import active

    with Gate().closed() as gate:
        run = grpo(lab, steps=LONG, reward=gate, background=True)
        assert gate.reached.wait(20)
        with pytest.raises(ConfigError, match="'grpo-1' does not end, as its reward function"):
            active.end(active.others(lab._store.path), patience=0.2)
    run.wait(20)


def test_a_disk_that_refuses_a_checkpoint_is_a_warning_and_at_the_end_an_error(lab, monkeypatch):
    def refuse(*_, **__):
        raise OSError(28, "No space left on device")

    save_file = saving.save_file
    with monkeypatch.context() as patch:
        patch.setattr(saving, "save_file", refuse)
        with pytest.raises(OSError, match="No space"):
            grpo(lab, steps=3, save_every=2)
    run = lab.run("grpo-1")
    assert run.status.state == "failed"
    assert run.status.step == 3
    said = "the weights behind step 2 could not be saved: [Errno 28] No space left on device"
    assert said in run.warnings
    assert saved(lab, "grpo-1") == []
    assert saving.save_file is save_file
    assert resume(lab, "grpo-1").status.state == "finished"


@pytest.mark.parametrize("background", [False, True])
def test_a_store_that_refuses_a_step_fails_the_run_which_can_go_on(
    lab, monkeypatch, tmp_path, background
):
    step = Writer.step

    def refuse(self, record):
        if record.step == 3:
            raise StoreError("the disk is full")
        step(self, record)

    with monkeypatch.context() as patch:
        patch.setattr(Writer, "step", refuse)
        with pytest.raises(StoreError, match="the disk is full"):
            grpo(lab, steps=4, save_every=2, background=background).wait()
    run = lab.run("grpo-1")
    assert run.status.state == "failed"
    assert saved(lab, "grpo-1") == ["step-2"], "the weights moved on, but no step is behind them"
    same(resume(lab, "grpo-1"), grpo(lab_in(tmp_path / "o"), steps=4, save_every=2))


def test_a_store_that_refuses_everything_lets_the_run_end(lab, monkeypatch):
    run = grpo(lab, steps=LONG, background=True)
    until(lambda: run.status.step >= 1)

    def refuse(*_, **__):
        raise StoreError("the disk is full")

    with monkeypatch.context() as patch:
        for name in ("step", "event", "status", "close"):
            patch.setattr(Writer, name, refuse)
        with pytest.raises(StoreError, match="the disk is full"):
            run.wait(20)
    assert not run.going
    run.live = None


# Other ways to train.


def test_full_weights(tmp_path):
    lab = lab_in(tmp_path, rank=None)
    run = grpo(lab, steps=2, save_every=1)
    assert run.client.lora is None
    child = run.branch("step-1")
    assert numbers(child) == numbers(run)[1:]
    same(resume(lab, run.name, steps=4), grpo(lab_in(tmp_path / "o", rank=None), steps=4))
    assert lab.compare(["base", run.name], ["a"], max_tokens=2).answers


def test_supervised_runs(lab, tmp_path):
    run = lab.sft(EXAMPLES, held_out=EXAMPLES[:2], epochs=2, save_every=2, **SUPERVISED)
    assert run.status.step == 5
    assert "held_out:loss" in run.metrics.columns
    child = run.branch("step-2")
    assert numbers(child) == numbers(run)[2:]
    other = lab_in(tmp_path / "o")
    other.sft(EXAMPLES, held_out=EXAMPLES[:2], steps=2, **SUPERVISED)
    again = other.sft(EXAMPLES, held_out=EXAMPLES[:2], epochs=2, resume="sft-1", quiet=True)
    assert tensors(other, "sft-1", "step-5") == tensors(lab, "sft-1", "step-5")
    assert again.metrics["loss:mean"].tolist() == run.metrics["loss:mean"].tolist()
    assert run.resume(steps=6).status.step == 6, "a length in steps in place of one in epochs"


# What is said where something is wrong.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learning_rat": 1}, "unknown setting 'learning_rat': did you mean learning_rate"),
        ({"save_evry": 1}, "unknown setting 'save_evry': did you mean save_every"),
        ({"resum": "a"}, "unknown setting 'resum': did you mean resume"),
        ({"name": "a b"}, "name is 'a b': use 1 to 128 letters, digits, '_' and '-'"),
        ({"name": ""}, "name is '': use 1 to 128"),
        ({"name": "../x"}, "name is '../x': use 1 to 128"),
        ({"save_every": -1}, "save_every is -1: pass an integer >= 0"),
        ({"keep": 1.5}, r"keep is 1\.5: pass an integer >= 0"),
        ({"background": "yes"}, "background is 'yes': pass True or False"),
        ({"paused": None}, "paused is None: pass True or False"),
        ({"resume": 3}, "resume is 3: pass the name of a run"),
        ({"branch": "grpo-1"}, "branch is 'grpo-1': pass the names of a run and of one"),
        ({"resume": "a", "branch": ("a", "b")}, "resume='a' and branch=.*: pass one of the two"),
        ({"resume": "a", "name": "b"}, "resume='a' and name='b': pass one of the two"),
        ({"steps": 0}, "steps is 0: pass an integer >= 1"),
        ({"temperature": 0}, "temperature is 0, so all completions"),
        ({"learning_rate": -1}, "learning_rate is -1: pass a number > 0"),
        ({"loss_fn": "nope"}, "loss_fn is 'nope': choose from"),
    ],
)
def test_a_wrong_setting_is_named(lab, settings, message):
    with pytest.raises(ConfigError, match=message):
        grpo(lab, **settings)
    assert lab.runs().empty


def test_a_missing_setting_is_named(lab):
    with pytest.raises(ConfigError, match="missing settings max_tokens, learning_rate"):
        lab.grpo(PROMPTS, share, steps=1)
    with pytest.raises(ConfigError, match="steps=None and epochs=None: pass one of the two"):
        lab.sft(EXAMPLES, learning_rate=1e-3)
    with pytest.raises(DataError, match="prompts is a str: pass a list"):
        grpo(lab, prompts="a")
    with pytest.raises(DataError, match="example 0 is 'a'"):
        lab.sft(["a"], steps=1, learning_rate=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 0}, "rank is 0: pass an integer >= 1"),
        ({"rank": "8"}, "rank is '8': pass an integer >= 1"),
        ({"alpha": -1}, "alpha is -1: pass a number > 0"),
        ({"seed": -1}, "seed is -1: pass an integer from 0"),
        ({"ranks": 3}, "Lab has no argument 'ranks': did you mean rank"),
        ({"droput": 0.1}, "Lab has no argument 'droput': did you mean dropout"),
        ({"dropout": 2}, r"dropout is 2: pass a number in \[0, 1\)"),
        ({"rank": None, "alpha": 3.0}, r"rank is None, .* and alpha is 3\.0"),
        ({"device": "tpu"}, "tpu"),
        ({"dtype": "int3"}, "int3"),
    ],
)
def test_a_wrong_argument_of_the_lab_is_named(tmp_path, arguments, message):
    given = {"rank": 4, "folder": tmp_path, "device": "cpu", **arguments}
    with pytest.raises(ConfigError, match=message):
        Lab("tiny", **given)


def test_an_unknown_model_is_named(tmp_path):
    with pytest.raises(ConfigError, match="nope"):
        Lab("nope", folder=tmp_path)


def test_what_cannot_be_resumed_or_branched_is_named(lab, tmp_path):
    with pytest.raises(StoreError, match=r"there is no run 'nope' .*: there are none yet"):
        resume(lab, "nope")
    run = grpo(lab, steps=3)
    with pytest.raises(StoreError, match=r"no run 'nope' .*: the newest are grpo-1"):
        resume(lab, "nope")
    with pytest.raises(ConfigError, match=r"'grpo-1' was begun on other data .9 examples."):
        lab.grpo(PROMPTS[:5], share, resume="grpo-1", steps=5)
    with pytest.raises(ConfigError, match=r"3 steps behind it, and 2 are asked for .* steps > 3"):
        resume(lab, "grpo-1", steps=2)
    with pytest.raises(ConfigError, match="3 steps behind it, and 3 are asked for"):
        run.resume()
    with pytest.raises(ConfigError, match=r"is of kind 'grpo', not 'sft': call lab.grpo"):
        lab.sft(EXAMPLES, resume="grpo-1", steps=3, learning_rate=1e-3)
    with pytest.raises(CheckpointError, match="has no checkpoint 'step-4': did you mean step-3"):
        run.branch("step-4")
    with pytest.raises(ConfigError, match="unknown setting 'learning_rat'"):
        run.branch("step-3", learning_rat=1)
    with pytest.raises(ConfigError, match="the checkpoint has 3 steps behind it, and 3"):
        run.branch("step-3")
    with pytest.raises(ConfigError, match=r"unknown setting 'setps'.*did you mean steps"):
        run.resume(setps=4)
    cold = lab_in(lab.folder).run("grpo-1")
    with pytest.raises(ConfigError, match=r"call lab.grpo with the same data and resume='grpo-1'"):
        cold.resume()
    with pytest.raises(ConfigError, match=r"and branch=\('grpo-1', 'step-3'\)"):
        cold.branch("step-3")
    with pytest.raises(ConfigError, match="is not in this process: resume the run"):
        cold.client  # noqa: B018
    with pytest.raises(ConfigError, match="is finished and not driven from here"):
        cold.pause()
    other = Lab("tiny-moe", rank=4, folder=lab.folder, device="cpu")
    with pytest.raises(ConfigError, match=r"trains 'tiny', and this lab is of 'tiny-moe'"):
        resume(other, "grpo-1", steps=5)
    assert [r["name"] for r in lab.runs().to_dict("records")] == ["grpo-1"]
    assert run.status.step == 3


def test_what_cannot_be_sampled_from_is_named(lab):
    grpo(lab, steps=1)
    grpo(lab, steps=1)
    for reference, error, message in (
        ("nope", ConfigError, "no run has a checkpoint 'nope': name one as RUN/CHECKPOINT"),
        ("step-1", ConfigError, "runs grpo-2, grpo-1 have a checkpoint 'step-1'"),
        ("grpo-1/step-9", CheckpointError, "'grpo-1' has no checkpoint 'step-9'"),
        ("nope/step-1", StoreError, "there is no run 'nope'"),
    ):
        with pytest.raises(error, match=message):
            lab.sample("a", checkpoint=reference)
    with pytest.raises(ConfigError, match=r"checkpoints is 'base': pass a list, \['base'\]"):
        lab.compare("base", ["a"])
    with pytest.raises(ConfigError, match="there is nothing to compare"):
        lab.compare([], ["a"])
    with pytest.raises(ConfigError, match="unknown parameter 'max_token': did you mean max_tokens"):
        lab.sample("a", max_token=3)
    with pytest.raises(DataError):
        lab.sample("")
    with pytest.raises(ConfigError, match="num_samples"):
        lab.sample("a", n=0)
    with pytest.raises(StoreError, match="there is no run 'nope'"):
        lab.checkpoints("nope")
    with pytest.raises(StoreError, match="there is no run 'nope'"):
        lab.run("nope")


def test_a_live_run_is_sampled_as_it_is_now(lab):
    with Gate().closed() as gate:
        run = grpo(lab, steps=LONG, reward=gate, background=True)
        assert gate.reached.wait(20)
        found = lab.compare(["base", run.name], ["a"], max_tokens=2)
        assert found.answers["base"][0].tokens == found.answers[run.name][0].tokens
        run.stop(wait=False)
    run.wait()


def test_runs_of_many_threads_at_once_do_not_disturb_each_other(lab, tmp_path):
    alone = grpo(lab_in(tmp_path / "alone"), steps=3)
    runs = []
    workers = [
        threading.Thread(
            target=lambda: runs.append(grpo(lab, concurrent=True, background=True, **SETTINGS))
        )
        for _ in range(3)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for run in runs:
        run.wait(60)
        same(run, alone)
    assert len({run.name for run in runs}) == 3
    assert texts(runs[0], "end") == ["finished"]
