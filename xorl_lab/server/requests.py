"""Requests that have been taken on: where their answers are fetched, and what makes one a repeat.

A request is known by the epoch of its model (one ``create_model`` to the next), its sequence
number and a hash of its body.  Sent again it is not carried out again: it gets the same request
id, and so the same answer.  The same number with another body is refused.
"""

import asyncio
import hashlib
import json
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from xorl_lab.futures import APIFuture
from xorl_lab.server.wire import error_json, to_json

UNREAD_BYTES = 2**30
"""Memory that answers may take, about, which nobody has fetched yet."""
UNREAD_SECONDS = 600.0
"""How long an answer that nobody has fetched is kept, however many there are."""

Encode = Callable[[Any], dict[str, Any]]


class Conflict(Exception):  # noqa: N818  (an answer to the client, not a failure of ours)
    """A sequence number was used before, for something else; HTTP 409."""


class Entry:
    """One request and, in time, its answer.

    Args:
        model_id: the model that it is about.
        encode: turns the result into the JSON object of the protocol.
    """

    def __init__(self, model_id: str, encode: Encode) -> None:
        self.request_id = f"req-{secrets.token_hex(12)}"
        self.model_id = model_id
        self.waiting_for: int | None = None
        """The sequence number that has to arrive first."""
        self.seen = False
        """True once the client has fetched how it ended."""
        self.ended = 0.0
        """``time.monotonic()`` when the answer was there."""
        self.weight = 4096
        """Bytes that the answer takes before it is encoded, about."""
        self.rejected: BaseException | None = None
        """Why it could not even be submitted."""
        self.future: APIFuture[Any] | None = None
        """The operation, once it was submitted; dropped when its answer is encoded."""
        self._encode = encode
        self._loop = asyncio.get_running_loop()
        self._done = asyncio.Event()
        self._lock = threading.Lock()
        self._cancelled = False
        self._body: bytes | None = None
        self._on_done: list[Callable[[Entry], object]] = []

    @property
    def done(self) -> bool:
        """True if the answer is there."""
        return self._done.is_set()

    def attach(self, future: APIFuture[Any]) -> None:
        """Take the answer from an operation.  Any thread.

        The result is not looked at before the client asks: an optimizer step is refused if a call
        before it failed whose failure its caller cannot have seen.
        """
        with self._lock:
            self.future = future
            unwanted = self._cancelled
        if unwanted:
            future.cancel()
        future.add_done_callback(lambda _: self._wake())

    def fail(self, error: BaseException) -> None:
        """Answer with an error.  Any thread."""
        failed: APIFuture[Any] = APIFuture()
        failed.set_exception(error)
        self.attach(failed)

    def cancel(self) -> None:
        """Give the operation up, if it has not taken effect."""
        with self._lock:
            self._cancelled = True
            future = self.future
        if future is not None:
            future.cancel()

    def reject(self, error: BaseException) -> None:
        """Answer with what is wrong with the request itself.  Any thread."""
        self.rejected = error
        self.fail(error)

    def when_done(self, callback: "Callable[[Entry], object]") -> None:
        """Call ``callback(self)`` on the event loop when the answer is there."""
        self._on_done.append(callback)

    async def wait(self, seconds: float, hurry: asyncio.Event) -> bool:
        """Wait for the answer.

        Args:
            seconds: how long.
            hurry: ends the wait early when set.

        Returns:
            True if it is there.
        """
        if not self.done:
            tasks = {asyncio.ensure_future(e.wait()) for e in (self._done, hurry)}
            try:
                await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
        return self.done

    def body(self) -> bytes:
        """The answer as JSON; encoded once.  Any thread, after :meth:`wait` has said True."""
        with self._lock:
            if self._body is None:
                self._body = self._encoded()
            self.seen = True
            return self._body

    @property
    def size(self) -> int:
        """Bytes that the answer takes, about."""
        return self.weight if self._body is None else len(self._body)

    def _encoded(self) -> bytes:
        future, self.future = self.future, None
        if future is None:
            return to_json(error_json(RuntimeError("no answer")))
        error = future.exception(0)
        try:
            return to_json(self._encode(future.result(0)) if error is None else error_json(error))
        except Exception as broken:  # noqa: BLE001  (whoever waits must get an answer)
            return to_json(error_json(broken))

    def _wake(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._finish)
        except RuntimeError:
            # The loop is gone: the server has stopped, and nobody waits any more.
            return

    def _finish(self) -> None:
        if not self._done.is_set():
            self.ended = time.monotonic()
            self._done.set()
            for callback in self._on_done:
                callback(self)


class Requests:
    """All requests by id; the oldest finished ones are forgotten.

    Args:
        kept: finished requests to keep.
        kept_bytes: bytes that their encoded answers may take.
    """

    def __init__(self, kept: int, kept_bytes: int) -> None:
        self.total = 0
        self._kept = kept
        self._kept_bytes = kept_bytes
        self._pending: dict[str, Entry] = {}
        self._finished: OrderedDict[str, Entry] = OrderedDict()

    @property
    def active(self) -> int:
        """Requests without an answer yet."""
        return len(self._pending)

    def open(self, model_id: str, encode: Encode) -> Entry:
        """Take a request on."""
        entry = Entry(model_id, encode)
        self.total += 1
        self._pending[entry.request_id] = entry
        entry.when_done(self._close)
        return entry

    def get(self, request_id: str) -> Entry | None:
        """Look a request up."""
        return self._pending.get(request_id) or self._finished.get(request_id)

    def pending(self) -> list[Entry]:
        """Requests without an answer, oldest first."""
        return list(self._pending.values())

    async def idle(self, seconds: float) -> None:
        """Wait until every request has its answer, or the time is up."""
        never = asyncio.Event()
        await asyncio.gather(*(entry.wait(seconds, never) for entry in self.pending()))

    def trim(self) -> None:
        """Forget the oldest answers that are over the limits; the newest one stays.

        Answers that were fetched have a limit of their own: nobody is likely to want them again.
        Those that were not are kept for a while however many they are: a client may send a whole
        run before it fetches the first.
        """
        young = time.monotonic() - UNREAD_SECONDS
        for seen, limit in ((True, self._kept_bytes), (False, UNREAD_BYTES)):
            keys = [key for key, entry in self._finished.items() if entry.seen == seen]
            size = sum(self._finished[key].size for key in keys)
            for count, key in enumerate(keys[:-1]):
                few = len(keys) - count <= self._kept
                if size <= limit and (few or (not seen and self._finished[key].ended > young)):
                    break
                size -= self._finished.pop(key).size

    def _close(self, entry: Entry) -> None:
        self._pending.pop(entry.request_id, None)
        self._finished[entry.request_id] = entry
        self.trim()


@dataclass
class Ledger:
    """Which sequence numbers of one epoch have come, and with what."""

    kept: int = 4096
    """Numbers to remember."""
    next: int | None = None
    """The number whose turn it is; None before the first."""
    seen: OrderedDict[int, tuple[str, str]] = field(
        default_factory=OrderedDict[int, tuple[str, str]]
    )
    """Number to (hash of the body, request id)."""

    def repeat(self, seq_id: int, digest: str) -> str | None:
        """The request id of a request that has come before, None for a new one.

        Raises:
            Conflict: the number was used for another body, or so long ago that it is forgotten.
        """
        known = self.seen.get(seq_id)
        if known is not None:
            if known[0] != digest:
                raise Conflict(
                    f"seq_id {seq_id} was used before with another body: number requests anew "
                    "only after create_model"
                )
            return known[1]
        if self.next is not None and seq_id < self.next:
            raise Conflict(
                f"seq_id {seq_id} comes too late: {self.next} is next; send it under a new number"
            )
        return None

    def note(self, seq_id: int, digest: str, request_id: str) -> None:
        """Remember a request."""
        self.seen[seq_id] = (digest, request_id)
        while len(self.seen) > self.kept:
            self.seen.popitem(last=False)

    def in_turn(self, seq_id: int) -> bool:
        """True if nothing has to come first.  Numbers start at 1; 0 is tolerated."""
        return seq_id <= 1 if self.next is None else seq_id == self.next


def digest_of(path: str, body: dict[str, Any]) -> tuple[str, int]:
    """Hash and length of a request's canonical form: order of keys and blanks do not matter."""
    text = json.dumps([path, body], sort_keys=True, separators=(",", ":")).encode()
    return hashlib.blake2b(text, digest_size=16).hexdigest(), len(text)
