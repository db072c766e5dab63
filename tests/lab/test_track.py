"""Loops of one's own."""

import os
import signal
import threading

import pytest

from tests.engine.support import supervised
from tests.lab.support import grpo, saved, texts, until
from xorl_lab.engine import saving
from xorl_lab.errors import ConfigError, StoreError
from xorl_lab.lab import Run
from xorl_lab.types import Group, SamplingParams

ADAM = {"learning_rate": 1e-2}


@pytest.fixture
def client(lab):
    return lab.service.create_lora_training_client("tiny", rank=4, seed=1, model_id="model")


def learn(client):
    output = client.forward_backward(supervised(2), "causallm_loss")
    client.optim_step(ADAM).result()
    return output.result().metrics


def test_a_loop_is_recorded_saved_and_listed(lab, client):
    with lab.track("mine", client, settings={"note": 1}, save_every=2) as run:
        for step in run.steps(5):
            run.log(learn(client), warnings=["careful"] if step == 2 else [])
    assert run.status.state == "finished"
    assert run.status.step == run.status.total == 5
    assert run.metrics.index.tolist() == [1, 2, 3, 4, 5]
    assert {"loss:mean", "seconds:step"} <= set(run.metrics.columns)
    assert run.warnings == ["careful"]
    assert run.info.settings == {"note": 1}
    assert saved(lab, "model") == ["mine-2", "mine-4", "mine-5"]
    assert lab.checkpoints("mine")["step"].tolist() == [2, 4, 5]
    assert set(lab.checkpoints()["run"]) == {"mine"}
    assert lab.compare(["mine", "mine/mine-2", "mine-4"], ["a"], max_tokens=2).answers
    with pytest.raises(ConfigError, match="was a loop of its caller's own"):
        lab.run("mine").resume()


def test_two_loops_on_clients_of_one_name_keep_their_checkpoints_apart(lab):
    for _ in range(2):
        client = lab.service.create_lora_training_client("tiny", rank=4)
        with lab.track("mine", client) as run:
            for _ in run.steps(1):
                run.log(learn(client))
    assert saved(lab, "default") == ["mine-1", "mine-2-1"]
    assert lab.checkpoints("mine")["name"].tolist() == ["mine-1"]
    assert lab.checkpoints("mine-2")["name"].tolist() == ["mine-2-1"]


def test_a_loop_that_asks_for_its_own_end_does_not_wait_for_it(lab, client):
    with lab.track("mine", client) as run:
        for step in run.steps(5):
            run.log(learn(client))
            if step == 2:
                assert run.stop() is run
        with pytest.raises(ConfigError, match="run 'mine' cannot wait for itself"):
            run.wait()
    assert run.stop().wait().status.state == "stopped"
    assert run.metrics.index.tolist() == [1, 2]


@pytest.mark.parametrize(("quiet", "shown"), [(False, ["mine"]), (True, [])])
def test_a_quiet_loop_shows_no_dashboard_in_a_notebook(lab, client, monkeypatch, quiet, shown):
    seen = []
    monkeypatch.setattr("xorl_lab.lab.console.in_live_notebook", lambda: True)
    monkeypatch.setattr(Run, "show", lambda self: seen.append(self.name))
    with lab.track("mine", client, quiet=quiet) as run:
        for _ in run.steps(1):
            run.log(learn(client))
    assert seen == shown


@pytest.mark.parametrize("quiet", [False, True])
def test_a_quiet_loop_writes_no_progress(lab, client, capsys, quiet):
    with lab.track("mine", client, quiet=quiet) as run:
        for _ in run.steps(1):
            run.log(learn(client))
    assert (capsys.readouterr().err == "") is quiet


def test_a_loop_under_way_is_found_by_name_and_left_alone_by_others(lab, client):
    with lab.track("mine", client) as run:
        for _ in run.steps(2):
            learn(client)
            run.log({})
            assert lab.run("mine") is run
            assert lab.run("mine").going
        now = lab.compare(["mine"], ["a"], max_tokens=1).answers["mine"][0].logprobs
        greedy = SamplingParams(max_tokens=1, temperature=0.0)
        present = client.save_weights_and_get_sampling_client()
        assert now == present.sample("a", sampling_params=greedy).result().logprobs
        grpo(lab, steps=1)
        assert run.going
    assert lab.run("mine") is not run


def test_checkpoints_of_another_loop_on_the_same_model_are_not_claimed(lab):
    client = lab.service.create_lora_training_client("tiny", rank=4, model_id="mine")
    for _ in range(2):
        with lab.track("mine", client) as run:
            for _ in run.steps(1):
                run.log(learn(client))
    client.save_state("by-hand").result()
    assert lab.checkpoints("mine")["name"].tolist() == ["mine-1", "by-hand"]
    assert lab.checkpoints("mine-2")["name"].tolist() == ["mine-2-1"]
    assert lab.compare(["mine-2-1"], ["a"], max_tokens=1).answers


@pytest.mark.parametrize("touched", [False, True])
def test_a_step_that_fails_before_it_changes_the_weights_loses_nothing(lab, client, touched):
    def loop(run):
        for step in run.steps(9):
            if step == 4:
                if touched:
                    learn(client)
                raise KeyError("odd")
            run.log(learn(client))

    with pytest.raises(KeyError), lab.track("mine", client, save_every=0) as run:
        loop(run)
    assert saved(lab, "model") == ([] if touched else ["mine-3"])


def test_the_optimizer_s_count_is_not_taken_for_the_number_of_the_step(lab, client):
    with lab.track("mine", client) as run:
        for _ in run.steps(2):
            client.forward_backward(supervised(2), "causallm_loss")
            run.log(client.optim_step(ADAM).result().metrics)
    frame = run.metrics.reset_index()
    assert frame["step"].tolist() == frame["updates"].tolist() == [1, 2]
    assert (frame["memory:process"] > 2**20).all()


def test_a_loop_is_paused_stepped_and_stopped(lab, client):
    steps = []

    def steer(run):
        run.pause()
        until(lambda: run.status.state == "paused")
        before = len(steps)
        run.step()
        until(lambda: len(steps) == before + 1 and run.status.state == "paused")
        run.resume()
        until(lambda: len(steps) > before + 3)
        run.stop(wait=False)

    with lab.track("mine", client, knobs={"rate": 0.5}) as run:
        thread = threading.Thread(target=steer, args=(run,))
        thread.start()
        for step in run.steps(100_000):
            run.log({"rate": run.knobs["rate"]})
            steps.append(step)
    thread.join()
    assert run.status.state == "stopped"
    assert run.status.step == steps[-1] == len(steps)
    assert saved(lab, "model")[-1] == f"mine-{steps[-1]}"


def test_knobs_of_a_loop(lab, client):
    with lab.track("mine", client, knobs={"rate": 0.5}) as run:
        for step in run.steps(3):
            run.log({"rate": run.knobs["rate"]})
            if step == 2:
                run.set("rate", 0.25)
        with pytest.raises(ConfigError, match="did you mean rate"):
            run.set("rat", 1)
        with pytest.raises(ConfigError, match="rate is 'x': pass a number"):
            run.set("rate", "x")
    assert run.metrics["rate"].tolist() == [0.5, 0.5, 0.25]
    assert [(e.step, e.text) for e in run.reader.events(kinds=["knob"])] == [
        (2, "rate: 0.5 → 0.25")
    ]


def test_ctrl_c_ends_a_loop_behind_the_step_and_a_second_one_raises(lab, client):
    with lab.track("mine", client) as run:
        for step in run.steps(10):
            run.log(learn(client))
            if step == 3:
                os.kill(os.getpid(), signal.SIGINT)
    assert run.status.state == "stopped"
    assert saved(lab, "model") == ["mine-3"]
    with pytest.raises(KeyboardInterrupt), lab.track("other", client) as run:  # noqa: PT012
        for step in run.steps(10):
            if step == 2:
                learn(client)
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)
            run.log(learn(client))
    assert run.status.state == "stopped"
    assert run.status.step == 1
    assert saved(lab, "model") == ["mine-3"], "step 2 was half done"
    assert not run.going


def test_an_exception_marks_the_run_failed_and_is_raised(lab, client):
    with pytest.raises(ZeroDivisionError), lab.track("mine", client) as run:  # noqa: PT012
        for step in run.steps(5):
            run.log(learn(client))
            if step == 2:
                raise ZeroDivisionError("mine")
    assert run.status.state == "failed"
    assert run.status.message == "ZeroDivisionError: mine"
    assert texts(run, "error") == ["ZeroDivisionError: mine"]
    assert saved(lab, "model") == ["mine-2"]


def test_steps_that_are_not_logged_are_saved_all_the_same(lab, client):
    with lab.track("mine", client, save_every=2) as run:
        for step in run.steps(5):
            metrics = learn(client)
            if step == 3:
                run.log(metrics)
    assert run.metrics.index.tolist() == [3]
    assert saved(lab, "model") == ["mine-2", "mine-4", "mine-5"]


def test_a_break_and_further_steps(lab, client):
    before = signal.getsignal(signal.SIGINT)
    with lab.track("mine", client) as run:
        for step in run.steps(5):
            run.log({"a": step})
            if step == 2:
                break
        assert signal.getsignal(signal.SIGINT) is before
        assert list(run.steps(2)) == [3, 4]
    assert run.status.state == "finished"


def test_wrong_use_of_log_and_steps(lab, client):
    run = lab.track("mine", client)
    with pytest.raises(ConfigError, match=r"take its steps in `with lab.track\('mine', client\)"):
        run.steps(2)
    with run:
        with pytest.raises(ConfigError, match="no step was begun: call log once"):
            run.log({})
        with pytest.raises(ConfigError, match="count is 0: pass an integer >= 1"):
            run.steps(0)
        for _ in run.steps(1):
            for metrics, message in (
                ([1], "metrics is a list: pass a dict"),
                ({"a": "x"}, "metric 'a' is 'x': pass a number"),
            ):
                with pytest.raises(ConfigError, match=message):
                    run.log(metrics)
            with pytest.raises(ConfigError, match=r"pass a list of xorl_lab.types.Group"):
                run.log({}, rollouts=["a"])
            with pytest.raises(ConfigError, match="pass a list of sentences"):
                run.log({}, warnings="a")
            run.log({"a": 1}, rollouts=[Group("p", [1], [])])
            with pytest.raises(ConfigError, match="step 1 is recorded: call log once"):
                run.log({"a": 1})
    with pytest.raises(ConfigError, match="is not under way"):
        run.steps(2)
    with pytest.raises(ConfigError, match="was begun before: make another"), run:
        pass
    with pytest.raises(ConfigError, match="name is 'a b': use 1 to 128 letters"):
        lab.track("a b", client)
    with pytest.raises(ConfigError, match="knob 'a' is 'x': pass a number"):
        lab.track("b", client, knobs={"a": "x"})
    with pytest.raises(ConfigError, match="save_every is -1: pass an integer >= 0"):
        lab.track("b", client, save_every=-1)


def test_a_disk_that_refuses_the_last_checkpoint_is_raised_and_recorded(lab, client, monkeypatch):
    def refuse(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving, "save_file", refuse)
    with pytest.raises(OSError, match="No space"), lab.track("mine", client, save_every=1) as run:  # noqa: PT012
        for _ in run.steps(2):
            run.log({"a": 1})
    assert run.status.state == "failed"
    assert "No space left" in run.status.message
    assert len(run.warnings) == 2
    assert not run.going


def test_a_store_that_refuses_fails_the_loop_and_lets_go(lab, client, monkeypatch):
    from xorl_lab.store import Writer

    def refuse(*_, **__):
        raise StoreError("the disk is full")

    with pytest.raises(StoreError, match="the disk is full"), lab.track("mine", client) as run:  # noqa: PT012
        for _ in run.steps(2):
            monkeypatch.setattr(Writer, "step", refuse)
            run.log({"a": 1})
    assert run.status.state == "failed"
    assert not run.going


def test_a_loop_is_a_run(lab, client):
    with lab.track("mine", client) as run:
        assert isinstance(run, Run)
        assert run.client is client
        assert repr(run) == "Run('mine': custom of tiny)"
