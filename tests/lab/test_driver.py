"""Pause, step, stop, and Ctrl-C, while steps are taken."""

import signal
import threading
import time

import pytest

from tests.lab.support import (
    Gate,
    grpo,
    lab_in,
    numbers,
    resume,
    same,
    saved,
    share,
    tensors,
    texts,
    until,
)
from xorl_lab.engine.trainer import Trained
from xorl_lab.errors import ConfigError
from xorl_lab.lab import active
from xorl_lab.samplers.embedded import EmbeddedSampler

LONG = 100_000


def interrupt():
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def interrupt_until(seen):
    """Press Ctrl-C until it has been seen.

    A signal that comes just before the main thread begins to wait is acted upon by Python only when
    that wait ends.
    """
    end = time.monotonic() + 20
    while not seen():
        assert time.monotonic() < end, "no interrupt was seen"
        interrupt()
        pause = time.monotonic() + 0.5
        while not seen() and time.monotonic() < pause:
            time.sleep(0.005)


def slowed(monkeypatch, owner, name, reached, seconds=0.05, after=3):
    """Make a call take many ticks, each of ``seconds``, from its call number ``after`` on."""
    function = getattr(owner, name)
    calls = 0

    def call(self, *args, **kwargs):
        nonlocal calls
        calls += 1
        if calls >= after:
            reached.set()
            time.sleep(seconds)
        return function(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, call)


def endless_backward(monkeypatch, reached):
    """A backward pass of very many micro-batches."""
    function = Trained.forward_backward
    calls = 0

    def call(self, batch, loss_fn, params, tick, commit):
        nonlocal calls
        calls += 1
        if calls == 3:
            reached.set()
            for _ in range(2000):
                tick()
                time.sleep(0.01)
        return function(self, batch, loss_fn, params, tick, commit)

    monkeypatch.setattr(Trained, "forward_backward", call)


def ends_within(run, seconds):
    start = time.monotonic()
    run.stop()
    took = time.monotonic() - start
    assert not run.going
    assert run.status.state == "stopped"
    assert took < seconds


def test_stop_between_steps_lands_within_a_second_and_is_saved(lab, a_second):
    run = grpo(lab, steps=LONG, background=True, save_every=0)
    until(lambda: run.status.step >= 2)
    ends_within(run, a_second)
    assert saved(lab, run.name) == [f"step-{run.status.step}"]


def test_stop_inside_sampling_gives_the_step_up(lab, monkeypatch, a_second):
    reached = threading.Event()
    slowed(monkeypatch, EmbeddedSampler, "run_quantum", reached, seconds=0.2, after=12)
    run = grpo(lab, steps=LONG, background=True, max_tokens=400, save_every=0)
    assert reached.wait(30)
    ends_within(run, a_second)
    assert saved(lab, run.name) == ([f"step-{run.status.step}"] if run.status.step else [])


def test_stop_inside_a_backward_pass_gives_the_step_up_and_changes_nothing(
    lab, monkeypatch, a_second
):
    reached = threading.Event()
    endless_backward(monkeypatch, reached)
    run = grpo(lab, steps=LONG, background=True, save_every=0)
    assert reached.wait(30)
    ends_within(run, a_second)
    assert run.status.step == 2
    assert run.client.version == 2
    assert saved(lab, run.name) == ["step-2"]
    monkeypatch.undo()
    again = run.resume(steps=5, background=False)
    same(again, grpo(lab_in(lab.folder.parent / "whole"), steps=5))


def test_a_client_is_usable_after_a_stop(lab):
    run = grpo(lab, steps=LONG, background=True)
    until(lambda: run.status.step >= 1)
    run.stop()
    sampler = run.client.save_weights_and_get_sampling_client()
    assert sampler.sample("a").result().sequences[0].tokens


def test_a_step_that_changed_the_weights_is_finished_before_the_run_ends(lab, monkeypatch):
    reached, go = threading.Event(), threading.Event()
    snapshot = Trained.snapshot

    def held(self):
        if self.version == 2:
            reached.set()
            go.wait(20)
        return snapshot(self)

    monkeypatch.setattr(Trained, "snapshot", held)
    run = grpo(lab, steps=LONG, background=True, save_every=0)
    assert reached.wait(20)
    run.stop(wait=False)
    time.sleep(0.1)
    go.set()
    run.wait()
    assert run.status.step == 2
    assert saved(lab, run.name) == ["step-2"]


def test_ctrl_c_stops_a_blocking_run_and_returns_it(lab):
    def reward(completion, wanted):
        interrupt() if len(seen) == 20 else None
        seen.append(completion)
        return share(completion, wanted)

    seen = []
    start = time.monotonic()
    before = signal.getsignal(signal.SIGINT)
    run = grpo(lab, steps=LONG, reward=reward, background=False, save_every=0)
    assert time.monotonic() - start < 20
    assert run.status.state == "stopped"
    assert run.status.step == 2
    assert saved(lab, run.name) == ["step-2"]
    assert signal.getsignal(signal.SIGINT) is before
    again = resume(lab, run.name, steps=4)
    same(again, grpo(lab_in(lab.folder.parent / "whole"), steps=4))


@pytest.mark.parametrize("what", ["sampling", "backward"])
def test_ctrl_c_inside_a_step_of_a_blocking_run_lands_within_a_second(
    lab, monkeypatch, a_second, what
):
    reached = threading.Event()
    if what == "backward":
        endless_backward(monkeypatch, reached)
    else:
        slowed(monkeypatch, EmbeddedSampler, "run_quantum", reached, seconds=0.1, after=12)
    moment = []

    def press():
        reached.wait(30)
        time.sleep(0.1)
        moment.append(time.monotonic())
        interrupt()

    thread = threading.Thread(target=press)
    thread.start()
    tokens = 4 if what == "backward" else 400
    run = grpo(lab, steps=LONG, background=False, max_tokens=tokens, save_every=0)
    assert time.monotonic() - moment[0] < a_second
    thread.join()
    assert run.status.state == "stopped"
    assert run.client.version == run.status.step


def test_a_second_ctrl_c_raises_and_the_run_can_still_go_on(lab):
    def reward(completion, wanted):
        seen.append(completion)
        if len(seen) == 20:
            (run,) = active.others(lab._store.path)
            # Two signals that are sent before the first one is seen count as one.
            interrupt_until(lambda: run.live.control.stopping)
            interrupt()
        return share(completion, wanted)

    seen = []
    with pytest.raises(KeyboardInterrupt):
        grpo(lab, steps=LONG, reward=reward, background=False, save_every=0)
    run = lab.run("grpo-1")
    assert not run.going
    assert run.status.state == "stopped"
    assert run.status.message == "interrupted twice"
    assert saved(lab, "grpo-1") == ["step-2"]
    same(resume(lab, "grpo-1", steps=4), grpo(lab_in(lab.folder.parent / "whole"), steps=4))


def test_a_second_ctrl_c_with_an_update_in_the_queue_never_saves_half_a_step(lab, monkeypatch):
    """The update lands after the exception was raised: the weights are not those of a step."""
    backward, raising = Trained.forward_backward, signal.default_int_handler
    raised = threading.Event()
    calls = 0

    def call(self, *args):
        nonlocal calls
        calls += 1
        if calls == 3:
            (run,) = active.others(lab._store.path)
            # Two signals that are sent before the first one is seen count as one.
            interrupt_until(lambda: run.live.control.stopping)
            interrupt_until(raised.is_set)
            time.sleep(0.1)
        return backward(self, *args)

    def told(number, frame):
        raised.set()
        raising(number, frame)

    monkeypatch.setattr(signal, "default_int_handler", told)
    monkeypatch.setattr(Trained, "forward_backward", call)
    monkeypatch.setattr("xorl_lab.lab.control.Control._give_up", lambda self: None)
    with pytest.raises(KeyboardInterrupt):
        grpo(lab, steps=LONG, background=False, save_every=1)
    assert saved(lab, "grpo-1") == ["step-1", "step-2"]
    monkeypatch.undo()
    same(resume(lab, "grpo-1", steps=4), grpo(lab_in(lab.folder.parent / "whole"), steps=4))


def test_ctrl_c_while_waiting_for_a_run_in_the_background_stops_it(lab):
    run = grpo(lab, steps=LONG, background=True)
    until(lambda: run.status.step >= 1)
    threading.Timer(1.0, interrupt).start()
    assert run.wait() is run
    assert run.status.state == "stopped"


def test_ctrl_c_ends_a_pause(lab):
    def press(run):
        until(lambda: run.status.state == "paused")
        interrupt_until(lambda: run.live.control.stopping)

    def reward(completion, wanted):
        if not threads:
            (run,) = active.others(lab._store.path)
            run.pause()
            threads.append(threading.Thread(target=press, args=(run,)))
            threads[0].start()
        return share(completion, wanted)

    threads = []
    run = grpo(lab, steps=1000, reward=reward, background=False)
    threads[0].join()
    assert run.status.state == "stopped"
    assert run.status.step == 1


def test_pause_step_and_resume(lab, a_second):
    run = grpo(lab, steps=LONG, background=True, paused=True)
    until(lambda: run.status.state == "paused")
    assert run.status.step == 0
    run.step()
    until(lambda: run.status.step == 1 and run.status.state == "paused")
    run.step()
    run.step()
    until(lambda: run.status.step == 3 and run.status.state == "paused")
    time.sleep(0.1)
    assert run.status.step == 3
    assert run.resume() is run
    until(lambda: run.status.step > 5)
    run.pause()
    until(lambda: run.status.state == "paused")
    halted = run.status.step
    time.sleep(0.2)
    assert run.status.step == halted
    ends_within(run, a_second)
    assert saved(lab, run.name)[-1] == f"step-{halted}"
    assert len(texts(run, "pause")) >= 4
    assert len(texts(run, "resume")) >= 3


def test_a_pause_behind_the_last_step_does_not_keep_the_run_from_ending(lab):
    with Gate().closed() as gate:
        run = grpo(lab, steps=1, reward=gate, background=True)
        assert gate.reached.wait(20)
        run.pause()
    run.wait(20)
    assert run.status.state == "finished"


def test_a_stop_in_the_last_step_leaves_a_finished_run_if_the_step_was_done(lab, monkeypatch):
    from xorl_lab.lab.loop import Loop

    taken = Loop.taken

    def stopping(self, record):
        taken(self, record)
        if record.step == 2:
            self.control.stop()

    monkeypatch.setattr(Loop, "taken", stopping)
    run = grpo(lab, steps=2)
    assert run.status.state == "finished"


def test_a_knob_takes_effect_at_the_next_step_and_is_kept_over_a_stop(lab):
    with Gate().closed() as gate:
        run = grpo(lab, steps=LONG, reward=gate, background=True, save_every=0)
        assert gate.reached.wait(20)
        run.set("learning_rate", 1e-3)  # in step 1
        run.set("temperature", 0.5)
    until(lambda: run.status.step >= 3)
    run.stop()
    rates = run.metrics["learning_rate"].tolist()
    assert rates[0] == 5e-3
    assert set(rates[1:]) == {1e-3}
    events = run.reader.events(kinds=["knob"])
    assert [(e.step, e.text) for e in events] == [
        (1, "learning_rate: 0.005 → 0.001"),
        (1, "temperature: 1 → 0.5"),
    ]
    done = run.status.step
    again = run.resume(steps=done + 2, background=False)
    assert again.metrics["learning_rate"].tolist()[done:] == [1e-3, 1e-3]
    other = lab_in(lab.folder)
    last = resume(other, run.name, steps=done + 3)
    assert last.metrics["learning_rate"].tolist()[-1] == 1e-3
    assert last.live.control.knobs()["temperature"] == 0.5
    chosen = resume(other, run.name, steps=done + 4, learning_rate=2e-3)
    assert chosen.metrics["learning_rate"].tolist()[-1] == 2e-3
    kept = resume(other, run.name, steps=done + 5)
    assert kept.metrics["learning_rate"].tolist()[-1] == 2e-3


def test_a_knob_turned_in_a_step_that_is_given_up_counts_when_the_run_goes_on(lab):
    gate = Gate()

    def reward(completion, wanted):
        if len(seen) >= 16:  # in step 3
            gate(completion, wanted)
        seen.append(completion)
        return share(completion, wanted)

    seen = []
    with gate.closed():
        run = grpo(lab, steps=LONG, reward=reward, background=True, save_every=0)
        assert gate.reached.wait(20)
        run.set("learning_rate", 1e-3)
        run.stop(wait=False)
    run.wait()
    assert run.status.step == 2
    again = run.resume(steps=3, background=False)
    assert again.metrics["learning_rate"].tolist() == [5e-3, 5e-3, 1e-3]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("learning_rat", 1.0, "'learning_rat' cannot be changed .* did you mean learning_rate"),
        ("group_size", 2, "'group_size' cannot be changed while the run goes on: choose from"),
        ("learning_rate", -1.0, r"learning_rate is -1\.0: pass a number > 0"),
        ("learning_rate", "1", "learning_rate is '1': pass a number > 0"),
        ("learning_rate", float("nan"), "learning_rate is nan: pass a number > 0"),
        ("temperature", 0, "temperature is 0, so all completions"),
    ],
)
def test_a_wrong_knob_is_named_and_nothing_changes(lab, name, value, message):
    run = grpo(lab, steps=LONG, background=True, paused=True)
    before = run.live.control.knobs()
    with pytest.raises(ConfigError, match=message):
        run.set(name, value)
    assert run.live.control.knobs() == before
    assert texts(run, "knob") == []
    run.stop()
    with pytest.raises(ConfigError, match="is stopped and not driven from here"):
        run.set("learning_rate", 1e-3)


def test_a_reward_function_may_stop_its_own_run(lab):
    def reward(completion, wanted):
        (run,) = active.others(lab._store.path)
        with pytest.raises(ConfigError, match="cannot wait for itself"):
            run.wait()
        run.stop()
        return share(completion, wanted)

    run = grpo(lab, steps=LONG, reward=reward, background=True)
    run.wait(20)
    assert run.status.state == "stopped"


def test_a_run_behind_a_stop_is_the_run_without_it(lab):
    run = grpo(lab, steps=6, background=True, save_every=0)
    until(lambda: run.status.step >= 2)
    run.stop()
    again = run.resume(background=False)
    other = lab_in(lab.folder.parent / "whole")
    whole = grpo(other, steps=6, save_every=0)
    same(again, whole)
    assert tensors(lab, run.name, "step-6") == tensors(other, whole.name, "step-6")
    assert len(numbers(again)) == 6
