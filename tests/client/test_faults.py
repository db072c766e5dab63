"""A pipelined loop in which one operation fails, is cancelled or is interrupted, at every point.

All operations are submitted while the worker is held, so each fault meets a full queue.  What must
come out is what a loop gives that never submitted the operation and what the rules drop with it.
"""

import asyncio
import contextlib
import signal
import threading
from collections.abc import Generator
from typing import Any

import numpy as np
import pytest
import torch

import xorl_lab as xl
from tests.engine.support import (
    ADAM,
    Tensors,
    exactly,
    labelled,
    moments,
    on_call,
    same,
    supervised,
    weights,
    works,
)
from xorl_lab.engine import saving, trainer
from xorl_lab.engine.optimizer import Optimizer
from xorl_lab.errors import CancelledError, EngineError, SamplerError
from xorl_lab.futures import APIFuture
from xorl_lab.samplers.embedded import Lane

PLAN = ("backward", "backward", "optim", "save", "sample") * 2
"""Two steps.  The index of an operation is its place in this plan."""
STEP = 5
MAX_ROW = 8
MICRO_BATCHES = 3
EVERY_MICRO_BATCH = [0, pytest.param(1, marks=pytest.mark.slow), 2]
POINTS = range(len(PLAN))
BACKWARD = [k for k in POINTS if PLAN[k] == "backward"]
DROPPED = (
    "optim_step was not carried out, because a call before it failed ({}): the gradient "
    "accumulated since the last step was dropped, the weights are as they were; send the data again"
)
State = tuple[Tensors, Tensors, int]


@pytest.fixture(autouse=True)
def small_rows(monkeypatch) -> None:
    """Three micro-batches in each call."""
    monkeypatch.setattr(trainer, "MAX_ROW", MAX_ROW)


class Loop:
    """A client, a sampler of the base model, and the operations of the plan."""

    def __init__(
        self, service: xl.ServiceClient, dropout: float = 0.0, model_id: str = "default"
    ) -> None:
        self.client = service.create_lora_training_client(
            "tiny",
            rank=2,
            seed=1,
            dropout=dropout,
            target_modules=["q_proj", "down_proj"],
            model_id=model_id,
        )
        self.sampler = service.create_sampling_client(base_model="tiny")
        self.futures: dict[int, APIFuture[Any]] = {}

    def submit(self, without: frozenset[int] = frozenset()) -> None:
        for k in POINTS:
            if k not in without:
                self.futures[k] = self.operation(k)

    def operation(self, k: int) -> APIFuture[Any]:
        if PLAN[k] == "backward":
            draw = np.random.default_rng(k)
            lengths = [MAX_ROW + 1 + i for i in range(MICRO_BATCHES)]
            data = [labelled(draw.integers(0, 256, n).tolist()) for n in lengths]
            return self.client.forward_backward(data)
        if PLAN[k] == "optim":
            return self.client.optim_step(ADAM)
        if PLAN[k] == "save":
            return self.client.save_state(f"point-{k}", overwrite=True)
        params = xl.SamplingParams(max_tokens=3, seed=k)
        return self.sampler.sample(xl.ModelInput.from_ints([1, 2]), params)

    @contextlib.contextmanager
    def held(self) -> Generator[None]:
        """Keep the worker busy inside the block."""
        gate = threading.Event()
        scheduler = self.client._session.engine.scheduler
        busy = scheduler.submit(lambda _: gate.wait(60), name="hold")
        try:
            yield
        finally:
            gate.set()
        assert busy.result(60)

    def ends(self) -> dict[int, BaseException | None]:
        return {k: future.exception(60) for k, future in self.futures.items()}

    def state(self) -> State:
        return weights(self.client), moments(self.client), self.client._session.trained.steps


_known: dict[tuple[frozenset[int], float], State] = {}


def expected(service: xl.ServiceClient, without: frozenset[int], dropout: float = 0.0) -> State:
    """What a loop without these operations ends with."""
    if (without, dropout) not in _known:
        loop = Loop(service, dropout, "expected")
        loop.submit(without)
        assert set(loop.ends().values()) == {None}
        _known[without, dropout] = loop.state()
    return _known[without, dropout]


def assert_ended_as(loop: Loop, service, without: set[int], dropout: float = 0.0) -> None:
    wanted, got = expected(service, frozenset(without), dropout), loop.state()
    assert same(got[0], wanted[0])
    assert same(got[1], wanted[1])
    assert got[2] == wanted[2]
    assert loop.client._session.trained.window.calls == 0
    assert works(loop.client)


def window_of(k: int) -> set[int]:
    """The calls and the optimizer step of the step that k belongs to."""
    first = k // STEP * STEP
    return {first, first + 1, first + 2}


def assert_dropped(loop: Loop, ends: dict[int, BaseException | None], k: int) -> None:
    """The optimizer step behind the failed call k says why it did nothing; the rest succeeded."""
    cause, after = ends.pop(k), ends.pop(k // STEP * STEP + 2)
    assert isinstance(after, EngineError)
    assert str(after) == DROPPED.format(f"{type(cause).__name__}: {cause}")
    assert after.__cause__ is cause
    assert set(ends.values()) == {None}


def in_every_part_of(k: int, micro_batch: int) -> int:
    """Number of the micro-batch, counted over the whole loop."""
    return BACKWARD.index(k) * MICRO_BATCHES + micro_batch


def test_the_plain_loop_trains(service):
    first, last = Loop(service), expected(service, frozenset())
    assert not same(weights(first.client), last[0])
    assert last[2] == 2


def test_the_loop_is_the_same_whether_it_is_pipelined_or_waited_for(service):
    loop = Loop(service)
    for k in POINTS:
        loop.futures[k] = loop.operation(k)
        loop.futures[k].result(60)
    assert_ended_as(loop, service, set())


@pytest.mark.parametrize("micro_batch", EVERY_MICRO_BATCH)
@pytest.mark.parametrize("k", BACKWARD)
def test_a_micro_batch_that_raises(service, monkeypatch, k, micro_batch):
    expected(service, frozenset(window_of(k)))
    loop = Loop(service)

    def act(call: int) -> None:
        if call == in_every_part_of(k, micro_batch):
            raise MemoryError("planted")

    on_call(monkeypatch, trainer, "_evaluate", act)
    with loop.held():
        loop.submit()
    ends = loop.ends()
    monkeypatch.undo()
    monkeypatch.setattr(trainer, "MAX_ROW", MAX_ROW)
    assert isinstance(ends[k], MemoryError)
    assert_dropped(loop, ends, k)
    assert_ended_as(loop, service, window_of(k))


@pytest.mark.parametrize("k", BACKWARD)
def test_a_loss_that_is_not_finite(service, monkeypatch, k):
    loop = Loop(service)
    original = loop.operation
    bad = [labelled([5, 6, 7]), labelled([1, 2, 3], weights=[0, 3e38, 3e38])]
    monkeypatch.setattr(
        loop,
        "operation",
        lambda n: loop.client.forward_backward(bad) if n == k else original(n),
    )
    with loop.held():
        loop.submit()
    ends = loop.ends()
    assert str(ends[k]) == (
        "cross_entropy is inf, so its gradient was not accumulated: look for extreme ratios and "
        "advantages in this batch, or lower the learning rate"
    )
    assert_dropped(loop, ends, k)
    assert_ended_as(loop, service, window_of(k))


PLANTED = {
    "optim": (Optimizer, "step", EngineError, None),
    "save": (saving, "save", OSError, None),
    "sample": (Lane, "join", SamplerError, "sampling failed (OSError: planted)"),
}


@pytest.mark.parametrize("k", [k for k in POINTS if PLAN[k] != "backward"])
def test_another_operation_that_raises(service, monkeypatch, k):
    lost = window_of(k) if PLAN[k] == "optim" else set()
    expected(service, frozenset(lost))
    owner, name, kind, message = PLANTED[PLAN[k]]
    loop = Loop(service)

    def act(call: int) -> None:
        if call == k // STEP:
            raise EngineError("planted") if kind is EngineError else OSError("planted")

    on_call(monkeypatch, owner, name, act)
    # One by one: the sampler would otherwise take both prompts in at a time.
    for n in POINTS:
        loop.futures[n] = loop.operation(n)
        loop.futures[n].exception(60)
    ends = loop.ends()
    monkeypatch.undo()
    error = ends.pop(k)
    assert type(error) is kind
    assert str(error) == (message or "planted")
    assert set(ends.values()) == {None}
    assert_ended_as(loop, service, lost)


@pytest.mark.parametrize("k", POINTS)
def test_cancel_before_it_starts(service, k):
    loop = Loop(service)
    with loop.held():
        loop.submit()
        assert loop.futures[k].cancel() is True
    ends = loop.ends()
    assert isinstance(ends[k], CancelledError)
    if PLAN[k] == "backward":
        assert_dropped(loop, ends, k)
        assert_ended_as(loop, service, window_of(k))
        return
    del ends[k]
    assert set(ends.values()) == {None}
    # A step that was cancelled leaves what it was to apply to the next one.
    if k == 7:
        assert loop.client.optim_step(ADAM).result(60).metrics["step"] == 2
        assert_ended_as(loop, service, set())
    else:
        assert_ended_as(loop, service, {k} if PLAN[k] == "optim" else set())


@pytest.mark.parametrize("micro_batch", EVERY_MICRO_BATCH)
@pytest.mark.parametrize("k", BACKWARD)
def test_cancel_while_it_runs(service, monkeypatch, k, micro_batch):
    expected(service, frozenset(window_of(k)))
    loop = Loop(service)
    accepted: list[bool] = []

    def act(call: int) -> None:
        if call == in_every_part_of(k, micro_batch):
            accepted.append(loop.futures[k].cancel())

    on_call(monkeypatch, trainer, "_evaluate", act)
    with loop.held():
        loop.submit()
    ends = loop.ends()
    monkeypatch.undo()
    monkeypatch.setattr(trainer, "MAX_ROW", MAX_ROW)
    assert accepted == [True]
    assert type(ends[k]) is CancelledError
    assert_dropped(loop, ends, k)
    assert_ended_as(loop, service, window_of(k))


@pytest.mark.parametrize("k", [k for k in POINTS if PLAN[k] in PLANTED and PLAN[k] != "sample"])
def test_cancel_is_refused_once_it_takes_effect(service, monkeypatch, k):
    expected(service, frozenset())
    owner, name, _, _ = PLANTED[PLAN[k]]
    loop = Loop(service)
    accepted: list[bool] = []

    def act(call: int) -> None:
        if call == k // STEP:
            accepted.append(loop.futures[k].cancel())

    on_call(monkeypatch, owner, name, act)
    with loop.held():
        loop.submit()
    ends = loop.ends()
    monkeypatch.undo()
    assert accepted == [False]
    assert set(ends.values()) == {None}
    assert_ended_as(loop, service, set())


def test_cancel_wins_over_a_failure_that_comes_after_it(service, monkeypatch):
    loop = Loop(service)

    def act(call: int) -> None:
        assert loop.futures[0].cancel() is True
        raise MemoryError("planted")

    on_call(monkeypatch, trainer, "_evaluate", act)
    with loop.held():
        loop.futures[0] = loop.operation(0)
    with pytest.raises(CancelledError):
        loop.futures[0].result(60)


def wait_for(future: APIFuture[Any], waiting: threading.Event) -> None:
    waiting.set()
    future.result(60)
    # The signal may come a moment after the answer.
    threading.Event().wait(60)


@pytest.mark.parametrize("k", POINTS)
def test_ctrl_c_while_waiting(service, k):
    """The signal arrives while the main thread waits for operation k; the work goes on."""
    expected(service, frozenset())
    loop = Loop(service)
    waiting = threading.Event()
    main = threading.main_thread().ident
    assert main is not None

    def interrupt(_: object) -> None:
        assert waiting.wait(60)
        signal.pthread_kill(main, signal.SIGINT)

    scheduler = loop.client._session.engine.scheduler
    with loop.held():
        for n in POINTS:
            if n == k:
                scheduler.submit(interrupt, name="interrupt")
            loop.futures[n] = loop.operation(n)
    with pytest.raises(KeyboardInterrupt):
        wait_for(loop.futures[k], waiting)
    assert set(loop.ends().values()) == {None}
    assert_ended_as(loop, service, set())


@pytest.mark.parametrize("micro_batch", range(MICRO_BATCHES))
@pytest.mark.parametrize("how", ["raises", "is cancelled"])
def test_a_call_that_ends_half_way_adds_nothing(service, monkeypatch, how, micro_batch):
    """The failure is seen, so the step is taken: what was accumulated before is intact."""
    expected(service, frozenset({1}))
    loop = Loop(service)

    def act(call: int) -> None:
        if call == in_every_part_of(1, micro_batch):
            if how == "raises":
                raise MemoryError("planted")
            assert loop.futures[1].cancel()

    on_call(monkeypatch, trainer, "_evaluate", act)
    with loop.held():
        loop.futures |= {k: loop.operation(k) for k in (0, 1)}
    ended = loop.futures[1].exception(60)
    del loop.futures[1]
    assert isinstance(ended, MemoryError if how == "raises" else CancelledError)
    for k in POINTS[2:]:
        loop.futures[k] = loop.operation(k)
    assert set(loop.ends().values()) == {None}
    monkeypatch.undo()
    assert_ended_as(loop, service, {1})


def test_a_custom_loss_that_raises_obeys_the_same_rules(client):
    def broken(*_: object) -> tuple[torch.Tensor, dict[str, float]]:
        raise ZeroDivisionError("planted")

    before = weights(client)
    client.forward_backward_custom(supervised(), broken)
    with pytest.raises(EngineError, match=exactly(DROPPED.format("ZeroDivisionError: planted"))):
        client.optim_step(ADAM).result(60)
    assert same(before, weights(client))
    with pytest.raises(ZeroDivisionError):
        client.forward_backward_custom(supervised(), broken).result(60)
    assert works(client)


def test_a_custom_loss_that_is_cancelled_while_it_runs_adds_nothing(client):
    started, gate = threading.Event(), threading.Event()

    def slow(_: object, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        started.set()
        gate.wait(60)
        return -torch.cat(logprobs).sum(), {}

    future = client.forward_backward_custom(supervised(), slow)
    assert started.wait(60)
    assert future.cancel()
    gate.set()
    assert isinstance(future.exception(60), CancelledError)
    assert client._session.trained.window.calls == 0
    assert works(client)


def test_a_failure_that_was_seen_does_not_stop_the_step(service):
    loop = Loop(service)
    loop.futures[0] = loop.operation(0)
    bad = loop.client.forward_backward([labelled([1, 2, 3], weights=[0, 3e38, 3e38])])
    with pytest.raises(EngineError):
        bad.result(60)
    for k in POINTS[1:]:
        loop.futures[k] = loop.operation(k)
    assert set(loop.ends().values()) == {None}
    assert_ended_as(loop, service, set())


def test_a_failed_call_leaves_no_trace_in_the_draws_of_dropout(service):
    loop = Loop(service, dropout=0.5)
    loop.futures[0] = loop.operation(0)
    bad = [labelled(list(range(20))), labelled([1, 2, 3], weights=[0, 3e38, 3e38])]
    assert isinstance(loop.client.forward_backward(bad).exception(60), EngineError)
    for k in POINTS[1:]:
        loop.futures[k] = loop.operation(k)
    assert set(loop.ends().values()) == {None}
    assert_ended_as(loop, service, set(), dropout=0.5)


def test_a_cancel_that_was_accepted_counts_as_seen(service):
    loop = Loop(service)
    with loop.held():
        assert loop.client.forward_backward(supervised()).cancel()
        loop.submit()
    assert set(loop.ends().values()) == {None}
    assert_ended_as(loop, service, set())


def test_a_failure_nobody_looked_at_stops_a_later_step_too(client):
    client.forward_backward([labelled([1, 2, 3], weights=[0, 3e38, 3e38])])
    client.forward_backward(supervised()).result()
    with pytest.raises(EngineError, match=r"^optim_step was not carried out, because a call"):
        client.optim_step(ADAM).result()
    with pytest.raises(EngineError, match=r"^optim_step has nothing to apply"):
        client.optim_step(ADAM).result()
    assert works(client)


def test_the_guards_of_a_cancelled_step_pass_to_the_next(service):
    loop = Loop(service)
    client = loop.client
    before = weights(client)
    with loop.held():
        client.forward_backward([labelled([1, 2, 3], weights=[0, 3e38, 3e38])])
        step = client.optim_step(ADAM)
        client.forward_backward(supervised())
        later = client.optim_step(ADAM)
        assert step.cancel()
    with pytest.raises(EngineError, match=r"^optim_step was not carried out, because a call"):
        later.result(60)
    assert same(before, weights(client))
    assert works(client)


def test_a_failed_step_leaves_nothing_behind(client):
    before = weights(client)
    client.forward_backward(supervised()).result()
    name = next(iter(client._session.trained.window.grads))
    client._session.trained.window.grads[name].fill_(float("nan"))
    with pytest.raises(
        EngineError,
        match=exactly(
            "the gradient's norm is nan, so the step was refused and the weights are as they were: "
            "lower the learning rate, or look for extreme ratios and advantages"
        ),
    ):
        client.optim_step(ADAM).result()
    assert same(before, weights(client))
    assert client._session.trained.window.calls == 0
    assert works(client)


def test_a_timeout_leaves_the_work_running(service):
    loop = Loop(service)
    with loop.held():
        future = loop.client.forward_backward(supervised())
        with pytest.raises(TimeoutError):
            future.result(0.01)
    assert future.result(60).metrics["valid_tokens"] > 0
    loop.client.optim_step(ADAM).result(60)
    assert loop.client.version == 1


def test_waiting_on_the_worker_thread_raises(client):
    caught: list[BaseException] = []
    done = threading.Event()

    def ask(_: object) -> None:
        try:
            client.forward(supervised()).result()
        except EngineError as error:
            caught.append(error)
        done.set()

    client.forward(supervised()).add_done_callback(ask)
    assert done.wait(60)
    assert str(caught[0]).startswith("result() was called on the worker thread")
    assert works(client)


def test_calls_can_be_awaited_together(service):
    loop = Loop(service)

    async def main() -> list[Any]:
        return await asyncio.gather(*(loop.operation(k) for k in POINTS))

    results = asyncio.run(main())
    assert [results[2].metrics["step"], results[7].metrics["step"]] == [1, 2]
    assert_ended_as(loop, service, set())


def test_cancelling_the_task_that_awaits_a_call_leaves_the_work_running(service):
    loop = Loop(service)

    async def main() -> APIFuture[Any]:
        with loop.held():
            future = loop.operation(0)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await future
        return future

    assert asyncio.run(main()).result(60).metrics["valid_tokens"] > 0
    for k in POINTS[1:]:
        loop.futures[k] = loop.operation(k)
    assert set(loop.ends().values()) == {None}
    assert_ended_as(loop, service, set())
