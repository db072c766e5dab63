"""The one thread on which a model is touched.

Training operations run in the order in which they were submitted.  Between two of them, and between
the micro-batches of one, background work (sampling) advances by a quantum or looks at its clock.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch

from xorl_lab.errors import CancelledError, EngineError
from xorl_lab.futures import APIFuture, forbid_waiting

T = TypeVar("T")


class Background(Protocol):
    """Work that advances in small quanta beside the training operations."""

    def has_work(self) -> bool:
        """True if a quantum would do something."""
        ...

    def run_quantum(self) -> None:
        """Do a little work.  Must not raise: failures belong to the requests."""
        ...

    def sweep(self) -> None:
        """End what was cancelled or has timed out.  Cheap; called often."""
        ...

    def fail(self, error: Exception) -> None:
        """End what is under way with this error, and go on with what comes next."""
        ...

    def close(self, error: Exception) -> None:
        """End everything with this error."""
        ...


class Ticket:
    """An operation's link to the scheduler while it runs."""

    def __init__(self, job: "_Job[Any]", scheduler: "Scheduler") -> None:
        self._job = job
        self._scheduler = scheduler

    def tick(self) -> None:
        """Look up: to be called at every micro-batch.

        Raises:
            CancelledError: the operation was cancelled.
        """
        self._scheduler.sweep()
        if self._job.cancel_requested:
            raise CancelledError(f"{self._job.name} was cancelled before it had an effect")

    def commit(self) -> None:
        """The last moment at which a cancel counts: from here the operation takes effect.

        Raises:
            CancelledError: the operation was cancelled.
        """
        with self._job.lock:
            if self._job.cancel_requested:
                raise CancelledError(f"{self._job.name} was cancelled before it had an effect")
            self._job.committed = True

    def failed(self, error: BaseException) -> BaseException:
        """What a failed operation ends with: its error, unless a cancel was accepted before."""
        try:
            self.commit()
        except CancelledError as cancelled:
            return cancelled
        return error


class _Job(APIFuture[T]):
    """A submitted operation; it is its own future."""

    def __init__(
        self, run: Callable[[Ticket], T], name: str, guards: Sequence[APIFuture[Any]]
    ) -> None:
        super().__init__(self._request_cancel)
        self.run: Callable[[Ticket], T] | None = run
        self.name = name
        self.guards = guards
        self.lock = threading.Lock()
        self.cancel_requested = False
        self.committed = False
        self.withdraw: Callable[[_Job[Any]], bool] = lambda _: False

    def _request_cancel(self) -> bool:
        with self.lock:
            if self.committed or self.done():
                return False
            self.cancel_requested = True
        if self.withdraw(self):
            self.release()
            self.set_exception(CancelledError(f"{self.name} was cancelled before it started"))
        return True

    def release(self) -> None:
        """Let go of what the operation needed: who keeps its answer must not keep its model."""
        self.run = None
        self.guards = ()


class Scheduler:
    """Runs operations and background work on one daemon thread."""

    def __init__(self, name: str) -> None:
        self._threads = torch.get_num_threads()
        self._jobs: deque[_Job[Any]] = deque()
        self.backgrounds: list[Background] = []
        """What takes part beside the operations; see :meth:`attach`."""
        self._condition = threading.Condition()
        self._closing: Exception | None = None
        self._thread = threading.Thread(target=self._work, name=f"xorl-lab {name}", daemon=True)
        self._thread.start()

    def submit(
        self,
        run: Callable[[Ticket], T],
        *,
        name: str,
        guards: Sequence[APIFuture[Any]] = (),
        on_skip: Callable[[], object] = lambda: None,
    ) -> APIFuture[T]:
        """Queue an operation behind all that were submitted before.

        Args:
            run: the operation; called on the worker thread with its ticket.
            name: what to call it in messages.
            guards: if one of these has failed when its turn comes, the operation is not run.  The
                list is read at that moment, not before.
            on_skip: called on the worker thread instead of ``run`` in that case.

        Raises:
            EngineError: the scheduler is closed.
        """

        def guarded(ticket: Ticket) -> T:
            for guard in job.guards:
                error = guard.exception(0)
                if error is not None:
                    ticket.commit()
                    on_skip()
                    raise EngineError(
                        f"{name} was not carried out, because a call before it failed "
                        f"({type(error).__name__}: {error}): the gradient accumulated since the "
                        "last step was dropped, the weights are as they were; send the data again"
                    ) from error
            return run(ticket)

        job = _Job(guarded, name, guards)
        job.withdraw = self._withdraw
        with self._condition:
            if self._closing is not None:
                raise self._closing
            self._jobs.append(job)
            self._condition.notify_all()
        return job

    def attach(self, background: Background) -> None:
        """Let a piece of background work take part."""
        with self._condition:
            self.backgrounds.append(background)

    def wake(self) -> None:
        """Tell the thread that background work has arrived."""
        with self._condition:
            self._condition.notify_all()

    def sweep(self) -> None:
        """Let the background work look at its clock.  Worker thread only."""
        for background in self.backgrounds:
            _guard(background, lambda b: b.sweep())

    def close(self, timeout: float = 10.0) -> None:
        """Stop after the current operation or quantum; everything pending fails."""
        with self._condition:
            self._closing = EngineError("the engine was closed: create the client again")
            self._condition.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _withdraw(self, job: _Job[Any]) -> bool:
        with self._condition:
            if job in self._jobs:
                self._jobs.remove(job)
                return True
        return False

    def _work(self) -> None:
        forbid_waiting()
        # torch keeps these per thread, and a user's cell may have set others for its own.
        torch.set_grad_enabled(True)
        torch.set_num_threads(self._threads)
        while self._closing is None:
            # No name here for the job: it would live until the next one comes.
            self._run(self._next_job())
            self.sweep()
            for background in self.backgrounds:
                if self._closing is None:
                    _guard(background, _advance)
        for job in self._jobs:
            job.set_exception(self._closing)
        for background in self.backgrounds:
            background.close(self._closing)

    def _next_job(self) -> _Job[Any] | None:
        with self._condition:
            self._condition.wait_for(
                lambda: (
                    self._closing is not None
                    or bool(self._jobs)
                    or any(b.has_work() for b in self.backgrounds)
                )
            )
            return self._jobs.popleft() if self._jobs and self._closing is None else None

    def _run(self, job: _Job[Any] | None) -> None:
        if job is None or job.run is None:
            return
        ticket = Ticket(job, self)
        try:
            ticket.tick()
            result = job.run(ticket)
            if not job.committed:
                ticket.commit()
        except BaseException as error:  # noqa: BLE001  (belongs to the caller, not to this thread)
            job.release()
            job.set_exception(ticket.failed(error))
        else:
            job.release()
            job.set_result(result)


def _advance(background: Background) -> None:
    if background.has_work():
        background.run_quantum()


def _guard(background: Background, act: Callable[[Background], object]) -> None:
    """A fault of background work ends that work, never the thread that everybody waits for."""
    try:
        act(background)
    except Exception as error:  # noqa: BLE001  (belongs to whoever waits for that work)
        background.fail(error)
