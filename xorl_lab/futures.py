"""The one future type that every call of the client returns.

A call is submitted at once; the future is only the place where its answer arrives.  It can be
waited for in a script (``.result()``), in a running event loop (``await``), or in both.
"""

import asyncio
import threading
from collections.abc import Callable, Generator
from concurrent import futures as _futures
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from xorl_lab.errors import CancelledError, EngineError

T = TypeVar("T")
_thread = threading.local()


_awaited: "dict[int, APIFuture[Any]]" = {}


def awaited_by(thread: int) -> "APIFuture[Any] | None":
    """The future that a thread waits for at the moment, so that another may cancel it.

    Args:
        thread: ``threading.Thread.ident``.
    """
    return _awaited.get(thread)


@contextmanager
def _waiting(future: "APIFuture[Any]") -> Generator[None]:
    thread = threading.get_ident()
    _awaited[thread] = future
    try:
        yield
    finally:
        _awaited.pop(thread, None)


def forbid_waiting() -> None:
    """Mark the current thread as a worker: a future that it waits for would never be served."""
    _thread.is_worker = True


class APIFuture(Generic[T]):
    """The answer to a call that has been submitted.

    ``await future`` shields: cancelling the awaiting task leaves the work running.  Only
    :meth:`cancel` cancels the work.

    >>> future = APIFuture.completed(3)
    >>> future.done(), future.result()
    (True, 3)
    """

    def __init__(self, on_cancel: Callable[[], bool] | None = None) -> None:
        """Create a pending future.

        Args:
            on_cancel: asks the worker to give the work up.  Returns True if it will.
        """
        self._inner: _futures.Future[T] = _futures.Future()
        # Dropped at the end of the call, and with it what the call worked on.
        self._on_cancel = on_cancel
        self.observed = False
        """True once the caller has seen how the call ended: result, error or cancel."""

    @classmethod
    def completed(cls, value: T) -> "APIFuture[T]":
        """A future that already holds its result."""
        future: APIFuture[T] = cls()
        future.set_result(value)
        return future

    # The worker's side.

    def set_result(self, value: T) -> bool:
        """Complete with a value.  Returns False if the future was complete already."""
        try:
            self._inner.set_result(value)
        except _futures.InvalidStateError:
            return False
        self._on_cancel = None
        return True

    def set_exception(self, error: BaseException) -> bool:
        """Complete with an error.  Returns False if the future was complete already."""
        try:
            self._inner.set_exception(error)
        except _futures.InvalidStateError:
            return False
        self._on_cancel = None
        return True

    # The caller's side.

    def result(self, timeout: float | None = None) -> T:
        """Wait for the answer.

        Args:
            timeout: seconds to wait; None waits as long as it takes.

        Raises:
            TimeoutError: the time is up.  The work goes on and can be waited for again.
            EngineError: called on the worker thread, which would wait for itself.
            LabError: the call failed; see :mod:`xorl_lab.errors`.
        """
        self._check_thread()
        # Waits; what it raises itself (TimeoutError, Ctrl-C) says nothing about how the call ended.
        with _waiting(self):
            self._inner.exception(timeout)
        self.observed = True
        return self._inner.result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end of the call and return its error, or None if it succeeded.

        Raises:
            TimeoutError: the time is up.  The work goes on.
        """
        self._check_thread()
        error = self._inner.exception(timeout)
        self.observed = True
        return error

    def done(self) -> bool:
        """True if the answer, or the error, has arrived."""
        return self._inner.done()

    def cancel(self) -> bool:
        """Ask that the work be given up.

        Returns:
            True if it was or will be: waiting then raises :class:`~xorl_lab.errors.CancelledError`.
            False if the call has already ended.
        """
        on_cancel = self._on_cancel
        if self.done() or on_cancel is None:
            return False
        accepted = on_cancel()
        if accepted:
            self.observed = True
        return accepted

    def cancelled(self) -> bool:
        """True if the call ended because it was cancelled."""
        return self.done() and isinstance(self._inner.exception(), CancelledError)

    def add_done_callback(self, callback: Callable[["APIFuture[T]"], object]) -> None:
        """Call ``callback(self)`` at the end of the call, on the thread that completes it."""
        self._inner.add_done_callback(lambda _: callback(self))

    def __await__(self) -> Generator[object, None, T]:
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not waiter.done():
                waiter.set_result(None)

        def on_done(_: object) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(wake)

        self._inner.add_done_callback(on_done)
        yield from waiter.__await__()
        self.observed = True
        return self._inner.result()

    def __repr__(self) -> str:
        if not self.done():
            return "APIFuture(pending)"
        error = self._inner.exception()
        return f"APIFuture({'done' if error is None else type(error).__name__})"

    def _check_thread(self) -> None:
        if getattr(_thread, "is_worker", False) and not self.done():
            raise EngineError(
                "result() was called on the worker thread, which would wait for itself for ever: "
                "wait in your own thread, or use add_done_callback"
            )
