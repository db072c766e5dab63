"""HTTP to a training server: requests in order, answers by long polling, retries where safe."""

import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import httpx
import tenacity

from xorl_lab.errors import (
    CancelledError,
    CheckpointError,
    ConfigError,
    DataError,
    EngineError,
    LabError,
)
from xorl_lab.futures import APIFuture

T = TypeVar("T")
PREFIX = "/api/v1"
CONNECT_RETRIES = 3
"""A connection that was refused carried no request, so trying again cannot do anything twice."""
POLL_SECONDS = 60.0
"""Longer than the 45 s for which a server holds a poll."""
POLLERS = 32
"""Answers that are waited for at a time."""
ATTEMPTS = 5
"""Tries of a request that a server recognises when it comes again."""


class Transport:
    """One server.

    Args:
        base_url: e.g. ``http://localhost:6000``.
        api_key: sent as a bearer token.
        timeout: seconds that any one answer may take.
    """

    def __init__(self, base_url: str, api_key: str | None, timeout: float) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(f"base_url is {base_url!r}: pass one that starts with http://")
        self.base_url = base_url.rstrip("/")
        self.timeout = timeout
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(
            base_url=self.base_url,
            headers=headers,
            timeout=httpx.Timeout(timeout, connect=10.0),
            transport=httpx.HTTPTransport(retries=CONNECT_RETRIES),
            trust_env=False,
        )
        self._pollers = ThreadPoolExecutor(POLLERS, "xorl-lab poll")
        self._idempotent: bool | None = None

    def post(self, path: str, body: Mapping[str, Any], timeout: float | None = None) -> Any:  # noqa: ANN401 (JSON)
        """Send a request and return the JSON of its answer.

        Raises:
            EngineError: the server cannot be reached, or refused; says what it said.
        """
        return self._send("POST", path, body, timeout)

    def get(self, path: str) -> Any:  # noqa: ANN401 (JSON)
        """Ask for a document; raises as :meth:`post`."""
        return self._send("GET", path, None, None)

    def submit(self, path: str, body: Mapping[str, Any], parse: Callable[[Any], T]) -> APIFuture[T]:
        """Send the first phase of a request now and collect its answer in the background.

        The caller keeps the order: when this returns, the server has the request.

        Args:
            path: below ``/api/v1``.
            body: with ``model_id`` and ``seq_id``.
            parse: the answer's JSON to its type.
        """
        send = self.post
        if self.idempotent:
            # The same body again is the same request to this server, however often it arrives.
            send = tenacity.retry(
                stop=tenacity.stop_after_attempt(ATTEMPTS),
                wait=tenacity.wait_exponential(multiplier=0.2, max=5.0),
                retry=tenacity.retry_if_exception(_was_lost),
                reraise=True,
            )(self.post)
        ticket = send(f"{PREFIX}/{path}", body)
        future: APIFuture[T] = APIFuture()
        self._pollers.submit(self._collect, str(ticket["request_id"]), parse, future)
        return future

    @property
    def idempotent(self) -> bool:
        """True if the server is known to recognise a request that comes twice."""
        if self._idempotent is None:
            health = self.get("/health")
            self._idempotent = isinstance(health, dict) and "xorl_lab" in health
        return self._idempotent

    def close(self) -> None:
        """End the connections; what is still awaited fails."""
        self._pollers.shutdown(wait=False, cancel_futures=True)
        self._http.close()

    def _collect(self, request_id: str, parse: Callable[[Any], T], future: APIFuture[T]) -> None:
        try:
            future.set_result(parse(self._poll(request_id)))
        except BaseException as error:  # noqa: BLE001 (belongs to the caller, not to this thread)
            future.set_exception(error)

    def _poll(self, request_id: str) -> Any:  # noqa: ANN401 (JSON)
        poll = tenacity.retry(
            stop=tenacity.stop_after_delay(self.timeout),
            wait=tenacity.wait_exponential(multiplier=0.2, max=5.0),
            retry=tenacity.retry_if_exception(_was_lost),
            reraise=True,
        )(self.post)
        while True:
            answer = poll(f"{PREFIX}/retrieve_future", {"request_id": request_id}, POLL_SECONDS)
            if not isinstance(answer, dict) or answer.get("type") != "try_again":
                break
        if isinstance(answer, dict) and "error" in answer:
            raise error_of(answer)
        return answer

    def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout: float | None
    ) -> Any:  # noqa: ANN401 (JSON)
        url = f"{self.base_url}{path}"
        limit = httpx.USE_CLIENT_DEFAULT if timeout is None else timeout
        try:
            response = self._http.request(method, path, json=body, timeout=limit)
        except httpx.HTTPError as error:
            raise EngineError(
                f"{url} did not answer ({type(error).__name__}: {error}): check that the server "
                "runs there, and try again"
            ) from error
        except RuntimeError as error:
            raise CancelledError(f"{url} was not asked: the client is closed") from error
        if response.is_error:
            raise EngineError(f"{url} answered {response.status_code}: {_detail(response)}")
        try:
            return response.json()
        except ValueError:
            raise EngineError(
                f"{url} answered with something that is not JSON ({response.text[:80]!r}): check "
                "that base_url is that of a training server"
            ) from None


class Sequence:
    """Numbers the requests of one model, and sends them one after the other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 1

    def run(self, send: Callable[[int], T]) -> T:
        """Call ``send`` with the next number while nobody else sends."""
        with self._lock:
            number = self._next
            self._next += 1
            return send(number)


def error_of(answer: Mapping[str, Any]) -> LabError:
    """The error that a server's ``{error, category}`` stands for."""
    text = str(answer["error"])
    code = re.match(r"((?:validation|checkpoint)\.\w+): (.*)", text, re.DOTALL)
    if code is not None:
        return CheckpointError(code[1], code[2])
    return DataError(text) if answer.get("category") == "user" else EngineError(text)


def _was_lost(error: BaseException) -> bool:
    """True if the answer, or the way to the server, was lost: not if the server refused."""
    return isinstance(error, EngineError) and isinstance(error.__cause__, httpx.HTTPError)


def _detail(response: httpx.Response) -> str:
    try:
        body = response.json()
    except ValueError:
        return response.text[:200]
    return str(body.get("detail", body) if isinstance(body, dict) else body)[:500]
