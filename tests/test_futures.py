import asyncio
import threading
import time
import weakref
from collections.abc import Callable

import pytest

from xorl_lab.errors import CancelledError, EngineError
from xorl_lab.futures import APIFuture, awaited_by, forbid_waiting


def failed(error: BaseException) -> APIFuture[int]:
    future: APIFuture[int] = APIFuture()
    future.set_exception(error)
    return future


def test_result_waits_for_another_thread():
    future: APIFuture[int] = APIFuture()
    thread = threading.Thread(target=future.set_result, args=(3,))
    thread.start()
    assert future.result(10) == 3
    thread.join()


def test_result_raises_the_error_of_the_call():
    with pytest.raises(EngineError, match=r"^broken$"):
        failed(EngineError("broken")).result()


def test_exception_returns_the_error_of_the_call():
    error = EngineError("broken")
    assert failed(error).exception() is error
    assert APIFuture.completed(1).exception() is None


@pytest.mark.parametrize("wait", [APIFuture.result, APIFuture.exception])
def test_a_timeout_leaves_the_future_pending(wait):
    future: APIFuture[int] = APIFuture()
    with pytest.raises(TimeoutError):
        wait(future, 0)
    assert not future.done()
    assert not future.observed
    future.set_result(4)
    assert future.result() == 4


def test_only_the_first_answer_counts():
    future = APIFuture.completed(1)
    assert not future.set_result(2)
    assert not future.set_exception(EngineError("late"))
    assert future.result() == 1


def test_a_result_is_observed_when_it_was_taken():
    future = APIFuture.completed(1)
    assert not future.observed
    future.result()
    assert future.observed


def test_an_error_is_observed_when_result_raised_it():
    future = failed(EngineError("broken"))
    with pytest.raises(EngineError):
        future.result()
    assert future.observed


def test_an_error_is_observed_when_exception_returned_it():
    future = failed(EngineError("broken"))
    future.exception()
    assert future.observed


def test_an_error_that_is_a_timeout_error_is_observed_too():
    future = failed(TimeoutError("of the call itself"))
    with pytest.raises(TimeoutError, match="of the call itself"):
        future.result()
    assert future.observed


def test_done_and_repr_observe_nothing():
    future = failed(EngineError("broken"))
    assert future.done()
    assert repr(future) == "APIFuture(EngineError)"
    assert not future.observed


def test_repr_tells_how_it_stands():
    assert repr(APIFuture()) == "APIFuture(pending)"
    assert repr(APIFuture.completed(1)) == "APIFuture(done)"


def test_cancel_is_refused_without_a_worker_to_ask():
    assert APIFuture().cancel() is False


def test_cancel_is_refused_when_the_call_has_ended():
    future: APIFuture[int] = APIFuture(lambda: True)
    future.set_result(1)
    assert future.cancel() is False
    assert future.result() == 1


def test_cancel_asks_the_worker():
    answers = [False, True]
    future: APIFuture[int] = APIFuture(lambda: answers.pop(0))
    assert future.cancel() is False
    assert not future.observed
    assert future.cancel() is True
    assert future.observed


@pytest.mark.parametrize("end", [lambda f: f.set_result(1), lambda f: f.set_exception(OSError())])
def test_a_future_that_has_ended_does_not_keep_what_the_call_worked_on(end):
    class Work:
        def give_up(self) -> bool:
            return True

    work = Work()
    future: APIFuture[int] = APIFuture(work.give_up)
    seen = weakref.ref(work)
    end(future)
    del work
    assert seen() is None
    assert future.cancel() is False


def test_cancelled_is_told_from_failed():
    assert failed(CancelledError("gone")).cancelled()
    assert not failed(EngineError("broken")).cancelled()
    assert not APIFuture().cancelled()


def test_callbacks_run_on_the_thread_that_completes():
    future: APIFuture[int] = APIFuture()
    seen: list[tuple[object, str]] = []
    future.add_done_callback(lambda f: seen.append((f, threading.current_thread().name)))
    thread = threading.Thread(target=future.set_result, args=(3,), name="worker")
    thread.start()
    thread.join()
    assert seen == [(future, "worker")]


def test_result_on_a_worker_thread_raises_instead_of_waiting_for_ever():
    caught: list[BaseException | int] = []

    def work() -> None:
        forbid_waiting()
        for future in (APIFuture(), APIFuture.completed(1)):
            try:
                caught.append(future.result())
            except EngineError as error:
                caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert str(caught[0]) == (
        "result() was called on the worker thread, which would wait for itself for ever: "
        "wait in your own thread, or use add_done_callback"
    )
    assert caught[1] == 1


def test_await_gives_the_result():
    async def main() -> int:
        future: APIFuture[int] = APIFuture()
        threading.Thread(target=future.set_result, args=(3,)).start()
        value = await future
        assert future.observed
        return value

    assert asyncio.run(main()) == 3


def test_await_raises_the_error_and_observes_it():
    async def main() -> None:
        future = failed(EngineError("broken"))
        with pytest.raises(EngineError, match=r"^broken$"):
            await future
        assert future.observed

    asyncio.run(main())


def test_futures_can_be_gathered():
    async def main() -> list[int]:
        futures: list[APIFuture[int]] = [APIFuture() for _ in range(3)]
        for i, future in reversed(list(enumerate(futures))):
            threading.Thread(target=future.set_result, args=(i,)).start()
        return await asyncio.gather(*futures)

    assert asyncio.run(main()) == [0, 1, 2]


def test_cancelling_the_task_that_awaits_leaves_the_work_running():
    asked: list[bool] = []

    def refuse() -> bool:
        asked.append(True)
        return True

    async def main() -> int:
        future: APIFuture[int] = APIFuture(refuse)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.ensure_future(_waiting(future)), 0)
        assert not future.done()
        assert not future.observed
        future.set_result(7)
        return await future

    assert asyncio.run(main()) == 7
    assert asked == []


def test_a_loop_that_was_closed_meanwhile_does_not_disturb_the_worker():
    future: APIFuture[int] = APIFuture()

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.ensure_future(_waiting(future)), 0)

    asyncio.run(main())
    future.set_result(1)
    assert future.result() == 1


async def _waiting(future: APIFuture[int]) -> int:
    return await future


def in_a_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_what_a_thread_waits_for_can_be_found_and_cancelled():
    def cancel() -> bool:
        return future.set_exception(CancelledError("given up"))

    future: APIFuture[int] = APIFuture(cancel)
    ended: list[BaseException | None] = []

    def wait() -> None:
        try:
            future.result()
        except CancelledError as error:
            ended.append(error)

    thread = in_a_thread(wait)
    while awaited_by(thread.ident or 0) is None:
        time.sleep(0.001)
    assert awaited_by(thread.ident or 0) is future
    assert awaited_by(threading.get_ident()) is None
    assert future.cancel()
    thread.join(10)
    assert len(ended) == 1
    assert awaited_by(thread.ident or 0) is None


def test_a_thread_waits_for_nothing_behind_an_answer_or_a_timeout():
    here = threading.get_ident()
    assert awaited_by(here) is None
    assert APIFuture.completed(3).result() == 3
    assert awaited_by(here) is None
    pending: APIFuture[int] = APIFuture()
    with pytest.raises(TimeoutError):
        pending.result(0.01)
    assert awaited_by(here) is None


def test_a_future_that_was_waited_for_is_not_kept():
    future: APIFuture[int] = APIFuture.completed(3)
    future.result()
    gone = weakref.ref(future)
    del future
    assert gone() is None
