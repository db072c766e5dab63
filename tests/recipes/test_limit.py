"""The time limit of a person's functions."""

import contextvars
import gc
import threading
import time

import pytest

from xorl_lab.errors import DataError
from xorl_lab.recipes import limit
from xorl_lab.recipes.limit import NAME, Limit, described

SHORT = 0.1
"""Seconds: what is to be cut off never ends by itself, so that a slow machine changes nothing."""
LONG = 60.0
"""Seconds: what is to end in time ends at once."""


def until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        gc.collect()
        time.sleep(0.005)


def working():
    """Threads of this test's calls."""
    return [t for t in threading.enumerate() if t.name == NAME and t not in _before]


_before: set = set()


@pytest.fixture(autouse=True)
def nothing_left():
    _before.clear()
    _before.update(threading.enumerate())
    yield
    until(lambda: not working())


def forever():
    while True:
        pass


def stubborn():
    while True:
        try:
            while True:
                pass
        except Exception:  # noqa: BLE001
            pass


def swallowing():
    try:
        while True:
            pass
    except:  # noqa: E722  (which people write)
        return 0.0


def test_a_call_that_catches_everything_leaves_no_thread_behind():
    call = Limit(SHORT)
    for _ in range(limit.STUCK + 1):
        assert call(swallowing).late.startswith("it took longer")
    until(lambda: not working())
    assert call(lambda: 4).value == 4


class Sleeper:
    """Waits for something that comes when the test is over."""

    def __init__(self):
        self.over = threading.Event()

    def __call__(self):
        self.over.wait()


@pytest.mark.parametrize("seconds", [LONG, None])
def test_values_and_exceptions_come_back(seconds):
    call = Limit(seconds)
    assert call(lambda: 4).value == 4

    def broken():
        raise ValueError("no")

    found = call(broken)
    assert found.value is None
    assert found.late is None
    said = described(found.error)
    assert said.startswith("ValueError: no (line ")
    assert said.endswith('of broken: raise ValueError("no"))')


@pytest.mark.parametrize("function", [forever, stubborn])
def test_a_loop_is_cut_off_and_its_thread_ends(function):
    call = Limit(SHORT)
    found = call(function)
    assert found.late.startswith("it took longer than reward_timeout=0.1 s and was cut off at line")
    assert f" of {function.__name__}" in found.late
    assert "left alone" not in found.late
    until(lambda: not working())
    assert call(lambda: 4).value == 4


def test_what_waits_is_left_alone_and_the_next_call_has_another_thread(monkeypatch):
    monkeypatch.setattr(limit, "GRACE", 0.01)
    sleeper = Sleeper()
    call = Limit(SHORT)
    found = call(sleeper)
    assert found.late.endswith("(its thread cannot be ended and is left alone)")
    assert call(lambda: threading.current_thread().name).value == NAME
    assert len(working()) == 2
    sleeper.over.set()


def test_too_many_of_them_are_an_error_and_when_they_ended_it_goes_on(monkeypatch):
    monkeypatch.setattr(limit, "GRACE", 0.01)
    monkeypatch.setattr(limit, "STUCK", 2)
    sleeper = Sleeper()
    call = Limit(SHORT)
    for _ in range(2):
        assert call(sleeper).late is not None
    with pytest.raises(DataError, match=r"2 calls took longer than reward_timeout=0.1 s and still"):
        call(lambda: 4)
    sleeper.over.set()
    until(lambda: not working())
    assert call(lambda: 4).value == 4


def test_one_thread_makes_all_calls_and_ends_with_the_limit():
    call = Limit(LONG)
    threads = {call(threading.get_ident).value for _ in range(20)}
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    del call
    until(lambda: not working())


def test_without_a_limit_it_is_the_thread_of_the_caller():
    assert Limit(None)(threading.get_ident).value == threading.get_ident()
    assert not working()


def test_context_variables_are_seen():
    who = contextvars.ContextVar("who", default="nobody")
    who.set("me")
    assert Limit(LONG)(who.get).value == "me"


@pytest.mark.parametrize("seconds", [LONG, None])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_what_ends_a_program_ends_it(kind, seconds):
    def leave():
        raise kind("now")

    with pytest.raises(kind):
        Limit(seconds)(leave)


def test_an_interrupt_while_waiting_gives_the_call_up(monkeypatch):
    call = Limit(LONG)
    monkeypatch.setattr(threading.Event, "wait", _interrupted)
    with pytest.raises(KeyboardInterrupt):
        call(forever)
    monkeypatch.undo()
    until(lambda: not working())
    assert call(lambda: 4).value == 4


def _interrupted(self, timeout=None):
    if timeout == LONG:
        raise KeyboardInterrupt
    while not self._flag:  # as started threads wait for
        time.sleep(0.001)
    return True


def test_it_works_in_a_thread_and_with_closures():
    found = []

    def work():
        seen = []
        call = Limit(SHORT)
        call(lambda: seen.append(1))
        found.append((seen, call(forever).late is not None))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(20)
    assert found == [([1], True)]
