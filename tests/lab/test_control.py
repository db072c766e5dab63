import threading
import time

import pytest

from xorl_lab import futures
from xorl_lab.errors import CancelledError, ConfigError
from xorl_lab.futures import APIFuture
from xorl_lab.lab.control import Change, Control
from xorl_lab.types import RunCommands


class Model:
    version = 0


@pytest.fixture
def changes():
    return []


@pytest.fixture
def make(changes):
    def made(knobs=None, **further):
        def check(name, value):
            if not isinstance(value, int | float):
                raise ConfigError(f"{name} is {value!r}")

        given = {"rate": 1.0} if knobs is None else knobs
        return Control(given, check, lambda: Model.version, changes.append, **further)

    return made


def test_it_is_what_a_widget_asks_for(make):
    commands: RunCommands = make()
    for name in ("pause", "resume", "step", "stop", "set", "knobs"):
        assert callable(getattr(commands, name))


def test_pause_step_resume(make):
    control = make()
    assert not control.paused
    control.pause()
    assert control.paused
    assert not control.wait(0.01)
    control.step()
    assert control.wait(0)
    assert control.enter(1)
    control.leave()
    assert control.paused
    control.step()
    control.step()
    for step in (2, 3):
        assert not control.paused
        control.enter(step)
        control.leave()
    assert control.paused
    control.resume()
    assert not control.paused


def test_a_pause_takes_back_steps_that_were_not_begun(make):
    control = make()
    control.step()
    control.pause()
    assert control.paused


def test_what_is_done_between_steps_uses_up_no_step(make):
    control = make(done=4)
    control.step()
    control.enter(4)
    control.leave()
    assert not control.paused


def test_a_wait_ends_as_soon_as_it_may(make):
    control = make()
    control.pause()
    threading.Timer(0.05, control.resume).start()
    start = time.monotonic()
    assert control.wait(10)
    assert time.monotonic() - start < 5


def test_a_stop_ends_a_pause_and_lets_no_step_begin(make):
    control = make()
    control.pause()
    control.stop()
    assert control.stopping
    assert not control.paused
    assert not control.enter(1)


def test_a_knob_counts_from_the_next_step_on(make, changes):
    control = make(done=2)
    control.enter(3)
    control.set("rate", 2)
    assert control.in_use == {"rate": 1.0}
    assert control.knobs() == {"rate": 2.0}
    control.leave()
    control.set("rate", 3)
    control.set("rate", 3.0)
    control.enter(4)
    assert control.in_use == {"rate": 3.0}
    assert changes == [Change(3, "rate", 1.0, 2.0), Change(3, "rate", 2.0, 3.0)]


def test_knobs_are_the_caller_s_own_copies(make):
    control = make()
    control.knobs()["rate"] = 5
    assert control.knobs() == {"rate": 1.0}


def test_planned_changes_come_at_their_steps_unless_the_knob_is_turned_before(make, changes):
    planned = [Change(1, "rate", 1.0, 2.0), Change(3, "rate", 2.0, 4.0), Change(2, "b", 0.0, 9.0)]
    control = make({"rate": 1.0, "b": 0.0}, planned=planned)
    rates = []
    for step in range(1, 5):
        control.enter(step)
        rates.append(dict(control.in_use))
        control.leave()
        if step == 2:
            control.set("b", 5.0)
    assert [r["rate"] for r in rates] == [1.0, 2.0, 2.0, 4.0]
    assert [r["b"] for r in rates] == [0.0, 0.0, 5.0, 5.0]
    assert changes == [planned[0], Change(2, "b", 0.0, 5.0), planned[1]]


def test_wrong_knobs(make):
    with pytest.raises(ConfigError, match=r"'rat' cannot be changed .* did you mean rate"):
        make().set("rat", 1)
    with pytest.raises(ConfigError, match="this run has no knobs"):
        make({}).set("rate", 1)
    with pytest.raises(ConfigError, match="rate is 'a'"):
        make().set("rate", "a")


def waiting(control, future):
    """A step on a thread of its own that waits for a future; a list of how that ended."""
    ended = []
    begun = threading.Event()

    def step():
        control.enter(1)
        begun.set()
        try:
            ended.append(future.result())
        except CancelledError as error:
            ended.append(error)
        finally:
            control.leave()

    thread = threading.Thread(target=step)
    thread.start()
    begun.wait(5)
    while futures.awaited_by(thread.ident) is None:
        time.sleep(0.001)
    return thread, ended


def cancellable():
    future = APIFuture(lambda: future.set_exception(CancelledError("given up")))
    return future


def test_a_stop_cancels_what_the_step_waits_for(make):
    control = make()
    thread, ended = waiting(control, cancellable())
    control.stop()
    thread.join(5)
    assert isinstance(ended[0], CancelledError)


def test_a_stop_leaves_a_step_alone_that_has_moved_the_weights(make, monkeypatch):
    control = make()
    future = cancellable()
    thread, ended = waiting(control, future)
    monkeypatch.setattr(Model, "version", 1)
    assert not control.untouched
    control.stop()
    time.sleep(0.1)
    assert not ended
    future.set_result(3)
    thread.join(5)
    assert ended == [3]


def test_a_stop_lets_an_optimizer_step_through(make):
    control = make()
    future = cancellable()
    future.name = "optim_step"
    thread, ended = waiting(control, future)
    control.stop()
    time.sleep(0.1)
    assert not ended
    future.set_result(3)
    thread.join(5)


def test_what_gives_up_a_step_ends_with_it(make):
    control = make()
    thread, _ = waiting(control, cancellable())
    control.stop()
    control.stop()
    thread.join(5)
    time.sleep(0.1)
    assert [t for t in threading.enumerate() if t.name == "xorl-stop"] == []


def test_here(make):
    control = make()
    assert not control.here
    control.enter(1)
    assert control.here
    control.leave()
    assert not control.here
