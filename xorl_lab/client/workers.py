"""Threads for waiting on other machines, which keep no script from ending."""

import threading
from collections import deque
from collections.abc import Callable

from xorl_lab.errors import CancelledError

IDLE_SECONDS = 5.0
"""How long a thread waits for more work before it ends."""


class Workers:
    """Carries work out on a few threads, in the order in which it was handed over.

    The threads are daemons: the interpreter ends without them.  They end by themselves when there
    is nothing to do, so that an unused pool costs nothing.

    Args:
        count: most threads.
        name: of the threads.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._queue: deque[Callable[[], object]] = deque()
        self._condition = threading.Condition()
        self._threads = 0
        self._idle = 0
        self._closed = False

    def submit(self, work: Callable[[], object]) -> None:
        """Hand work over.  It must not raise: nobody would see it.

        Raises:
            CancelledError: the pool is closed.
        """
        with self._condition:
            if self._closed:
                raise CancelledError("the client is closed: make a new one")
            self._queue.append(work)
            if self._idle < len(self._queue) and self._threads < self._count:
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
                self._threads += 1
            self._condition.notify()

    def close(self) -> None:
        """Drop what has not been started; what has goes on."""
        with self._condition:
            self._closed = True
            self._queue.clear()
            self._condition.notify_all()

    def _run(self) -> None:
        while (work := self._next()) is not None:
            work()
            del work  # or it, and its answer, would live until the next one comes

    def _next(self) -> Callable[[], object] | None:
        with self._condition:
            self._idle += 1
            self._condition.wait_for(lambda: self._queue or self._closed, IDLE_SECONDS)
            self._idle -= 1
            if self._queue:
                return self._queue.popleft()
            self._threads -= 1
            return None
