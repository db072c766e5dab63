"""HTTP to a training server: requests in order, answers by long polling, retries where safe."""

import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import httpx
import tenacity

from xorl_lab.client.encoding import encode
from xorl_lab.client.workers import Workers
from xorl_lab.errors import CancelledError, EngineError
from xorl_lab.futures import APIFuture
from xorl_lab.samplers.wire import Connections, HTTPError, checked_url, error_of, refusal

T = TypeVar("T")
PREFIX = "/api/v1"
POLL_SECONDS = 60.0
"""Longer than the 45 s for which a server holds a poll."""
AGAIN_SECONDS = 0.05
"""Pause between two polls: not every server holds them."""
GONE_SECONDS = 60.0
"""How long a server that was there may be away before it is given up."""
POLLERS = 32
"""Answers that are waited for at a time."""
CONNECTIONS = 2 * POLLERS
"""Connections at a time: the pollers', and those of whoever calls."""
ATTEMPTS = 5
"""Tries of a request that a server recognises when it comes again."""
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


class AnswerTimeoutError(EngineError, TimeoutError):
    """The answer did not come within the client's ``timeout``."""


class Transport:
    """One server.

    Args:
        base_url: e.g. ``http://localhost:6000``.
        api_key: sent as a bearer token.
        timeout: seconds that any one answer may take, from the call to its arrival.

    Raises:
        ConfigError: the URL is none.
    """

    def __init__(self, base_url: str, api_key: str | None, timeout: float) -> None:
        self.base_url = checked_url(base_url)
        self.timeout = timeout
        self._wire = Connections(self.base_url, api_key, CONNECTIONS)
        self._pollers = Workers(POLLERS, "xorl-lab poll")
        self._pending: set[APIFuture[Any]] = set()
        self._lock = threading.Lock()
        self._health: dict[str, Any] | None = None
        weakref.finalize(self, self._wire.close).atexit = False

    def post(self, path: str, body: Mapping[str, Any], timeout: float | None = None) -> Any:  # noqa: ANN401 (JSON)
        """Send a request and return the JSON of its answer.

        Raises:
            DataError: the body cannot be sent, or the server finds fault with it.
            CheckpointError: the server says so.
            EngineError: the server cannot be reached, or refused; says what it said.
        """
        return self._send("POST", path, encode(body), timeout)

    def get(self, path: str) -> Any:  # noqa: ANN401 (JSON)
        """Ask for a document; raises as :meth:`post`."""
        return self._send("GET", path, None, None)

    def submit(self, path: str, content: str, parse: Callable[[Any], T]) -> APIFuture[T]:
        """Send the first phase of a request now and collect its answer in the background.

        The caller keeps the order: when this returns, the server has the request.

        Args:
            path: below ``/api/v1``.
            content: JSON, made by :func:`encode`.
            parse: the answer's JSON to its type.

        Raises:
            EngineError: as for :meth:`post`.
        """
        end = time.monotonic() + self.timeout
        # The same body again is the same request to our server, however often it arrives.
        send = tenacity.retry(
            stop=tenacity.stop_after_attempt(ATTEMPTS if self.ours else 1)
            | tenacity.stop_after_delay(self.timeout),
            wait=tenacity.wait_exponential(multiplier=0.2, max=5.0),
            retry=tenacity.retry_if_exception(_is_passing),
            reraise=True,
        )(self._send)
        try:
            ticket = send("POST", f"{PREFIX}/{path}", content, None)
        except HTTPError as error:
            if self.ours or not error.unclear:
                raise
            raise HTTPError(
                f"{error}.  Whether the server has taken {path} is not known, and as it does not "
                "recognise a request that comes again, it was not sent again: create the client "
                "again and load a checkpoint, or the same data may be counted twice"
            ) from error
        future: APIFuture[T] = APIFuture()
        with self._lock:
            self._pending.add(future)
        request = str(ticket["request_id"])
        self._pollers.submit(lambda: self._collect(request, end, parse, future))
        return future

    @property
    def ours(self) -> bool:
        """True for ``xorl-lab serve``, which recognises a request that comes twice."""
        if self._health is None:
            self.health()
        return "xorl_lab" in (self._health or {})

    def health(self) -> dict[str, Any]:
        """What the server says of itself; nothing if it has no such page.

        Raises:
            EngineError: the server cannot be reached.
        """
        try:
            answer = self.get("/health")
        except HTTPError as error:
            if not error.status:
                raise
            answer = None
        self._health = dict(answer) if isinstance(answer, dict) else {}
        return self._health

    def close(self) -> None:
        """End the connections; what is still awaited is cancelled."""
        self._pollers.close()
        with self._lock:
            pending, self._pending = self._pending, set()
        for future in pending:
            future.set_exception(CancelledError("the client was closed before the answer came"))
        self._wire.close()

    def _collect(
        self, request: str, end: float, parse: Callable[[Any], T], future: APIFuture[T]
    ) -> None:
        try:
            future.set_result(parse(self._poll(request, end)))
        except BaseException as error:  # noqa: BLE001 (belongs to the caller, not to this thread)
            future.set_exception(error)
        with self._lock:
            self._pending.discard(future)

    def _poll(self, request: str, end: float) -> Any:  # noqa: ANN401 (JSON)
        content = encode({"request_id": request})
        pause, last_heard = 0.2, time.monotonic()
        while True:
            left = end - time.monotonic()
            if left <= 0:
                raise AnswerTimeoutError(
                    f"{self.base_url} did not answer within {self.timeout:g} s; the server may "
                    "still carry the call out: pass a larger timeout to ServiceClient"
                )
            try:
                path = f"{PREFIX}/retrieve_future"
                answer = self._send("POST", path, content, min(POLL_SECONDS, left))
            except HTTPError as error:
                if not error.passing or time.monotonic() - last_heard > GONE_SECONDS + POLL_SECONDS:
                    raise
                time.sleep(min(pause, left))
                pause = min(2 * pause, 5.0)
                continue
            pause, last_heard = 0.2, time.monotonic()
            if not isinstance(answer, dict) or answer.get("type") != "try_again":
                break
            time.sleep(AGAIN_SECONDS)
        if isinstance(answer, dict) and "error" in answer:
            raise error_of(answer)
        return answer

    def _send(self, method: str, path: str, content: str | None, timeout: float | None) -> Any:  # noqa: ANN401 (JSON)
        url = f"{self.base_url}{path}"
        try:
            response = self._wire.exchange(method, path, content, timeout or self.timeout)
        except httpx.HTTPError as error:
            raise HTTPError(
                f"{url} did not answer ({type(error).__name__}: {error}): check that the server "
                "runs there, and try again",
                sent=not isinstance(error, _NOT_SENT),
            ) from error
        except RuntimeError as error:
            raise CancelledError(f"{url} was not asked: the client is closed") from error
        if response.is_error:
            raise refusal(url, response)
        try:
            return response.json()
        except ValueError:
            raise HTTPError(
                f"{url} answered with something that is not JSON ({response.text[:80]!r}): check "
                "that base_url is that of a training server",
                response.status_code,
            ) from None


class Sequence:
    """Numbers the requests of one model, and sends them one after the other.

    A number counts as used when the server has taken a request under it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 1
        self._doubtful = False

    def run(self, send: Callable[[int], T], *, recognises: Callable[[], bool]) -> T:
        """Call ``send`` with the next number while nobody else sends.

        Args:
            send: raises an :class:`HTTPError` if the server did not take the request.
            recognises: asked after an answer was lost: does the server know a request that comes
                again?  Then the number is tried once more with the next request.  If it is the
                same one, it is not carried out twice; if the server has used the number, it says
                so.
        """
        with self._lock:
            try:
                result = self._attempt(send)
            except HTTPError as error:
                if error.unclear:
                    self._doubtful = recognises()
                    self._next += 0 if self._doubtful else 1
                raise
            self._doubtful = False
            self._next += 1
            return result

    def _attempt(self, send: Callable[[int], T]) -> T:
        try:
            return send(self._next)
        except HTTPError as error:
            if error.status != httpx.codes.CONFLICT or not self._doubtful:
                raise
            # The request whose answer was lost had arrived.
            self._next += 1
            self._doubtful = False
            return send(self._next)


def _is_passing(error: BaseException) -> bool:
    return isinstance(error, HTTPError) and error.passing
