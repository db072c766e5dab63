"""HTTP to servers: connections, what a refusal means, and addresses."""

import contextlib
import re
import socket
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any

import httpx

from xorl_lab.errors import CheckpointError, ConfigError, DataError, EngineError, LabError

CONNECT_RETRIES = 3
"""A connection that was refused carried no request, so trying again cannot do anything twice."""
CONNECT_SECONDS = 10.0
"""How long a connection may take."""
KEPT_SECONDS = 3.0
"""How long an unused connection is kept: less than the 5 s after which uvicorn closes it, or a
request could meet its end."""
UNCLEAR = (500, 502, 504)
"""HTTP statuses that leave open whether the request was taken."""


class HTTPError(EngineError):
    """A server could not be reached, or refused."""

    def __init__(self, message: str, status: int = 0, sent: bool = True) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status; 0 if there was no answer."""
        self.sent = sent
        """False if the request certainly did not arrive."""

    @property
    def unclear(self) -> bool:
        """True if the server may have taken the request."""
        return self.status in UNCLEAR or (self.status == 0 and self.sent)

    @property
    def passing(self) -> bool:
        """True if the answer, or the way to the server, was lost: not if the server refused."""
        return self.status in (0, 502, 504)


class Connections:
    """HTTP connections to one server: no proxies, a few at a time, patient while connecting.

    Args:
        base_url: without the slash at its end.
        api_key: sent as a bearer token.
        count: most connections.
    """

    def __init__(self, base_url: str, api_key: str | None, count: int) -> None:
        limits = httpx.Limits(
            max_connections=count, max_keepalive_connections=count, keepalive_expiry=KEPT_SECONDS
        )
        # The limits of a client whose transport is given are not looked at.
        self._lines = httpx.HTTPTransport(retries=CONNECT_RETRIES, limits=limits, trust_env=False)
        self._http = httpx.Client(
            base_url=base_url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            transport=self._lines,
            trust_env=False,
        )
        self._streams: weakref.WeakSet[Any] = weakref.WeakSet()
        self._closed = False
        self._lock = threading.Lock()

    def exchange(
        self, method: str, path: str, content: str | None, timeout: float
    ) -> httpx.Response:
        """Send JSON, or nothing, and return the answer whatever it says.

        Args:
            method: of HTTP.
            path: behind the base URL.
            content: JSON.
            timeout: seconds for the whole answer, however slowly it drips in.

        Raises:
            httpx.HTTPError: there was no answer, or not all of it in time.
            RuntimeError: the connections are closed.
        """
        headers = {} if content is None else {"Content-Type": "application/json"}
        limit = httpx.Timeout(timeout, connect=min(timeout, CONNECT_SECONDS))
        end = time.monotonic() + timeout
        try:
            with self._http.stream(
                method,
                path,
                content=content,
                headers=headers,
                timeout=limit,
                extensions={"trace": self._note},
            ) as response:
                return _read(response, end)
        finally:
            if self._http.is_closed:
                # It may have been opened while they were closed.
                self._lines.close()

    def close(self) -> None:
        """Close them; who waits for an answer gets none."""
        with self._lock:
            self._closed = True
            streams = list(self._streams)
        for stream in streams:
            # Closing alone would not wake a thread that reads.
            with contextlib.suppress(OSError):
                stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        self._http.close()

    def _note(self, event: str, info: Mapping[str, Any]) -> None:
        """Remember the connections that are made."""
        if event not in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            return
        stream = info["return_value"]
        with self._lock:
            closed = self._closed
            if not closed:
                self._streams.add(stream)
        if closed:
            # The pool has forgotten it already.
            stream.close()
            raise RuntimeError("the connections were closed while this one was made")


def _read(response: httpx.Response, end: float) -> httpx.Response:
    """The whole answer."""
    parts: list[bytes] = []
    # httpx's own limit is between two pieces.
    for part in response.iter_raw():
        parts.append(part)
        if time.monotonic() > end:
            raise httpx.ReadTimeout("the answer was not complete in time", request=response.request)
    return httpx.Response(
        response.status_code,
        headers=response.headers,
        content=b"".join(parts),
        request=response.request,
    )


def checked_url(base_url: str) -> str:
    """A base URL without the slash at its end.

    Raises:
        ConfigError: it is none.
    """
    if not base_url.startswith(("http://", "https://")):
        raise ConfigError(f"base_url is {base_url!r}: pass one that starts with http://")
    return base_url.rstrip("/")


def error_of(answer: Mapping[str, Any]) -> LabError:
    """The error that a server's ``{error, category}`` stands for."""
    text = str(answer["error"])
    return _coded(text) or (
        DataError(text) if answer.get("category") == "user" else EngineError(text)
    )


def refusal(url: str, response: httpx.Response) -> LabError:
    """The error that an HTTP status stands for."""
    text = _detail(response)
    status = response.status_code
    found_fault = status in (400, 413, 422)
    message = f"{url} answered {status}: {text}"
    return _coded(text) or (DataError(message) if found_fault else HTTPError(message, status))


def _coded(text: str) -> CheckpointError | None:
    code = re.match(r"((?:validation|checkpoint)\.\w+): (.*)", text, re.DOTALL)
    return None if code is None else CheckpointError(code[1], code[2])


def _detail(response: httpx.Response) -> str:
    """What a server says of its refusal: ours under ``detail``, SGLang under one of the others."""
    try:
        body = response.json()
    except ValueError:
        return response.text[:200]
    for name in ("detail", "error_message", "message", "error"):
        if isinstance(body, dict) and body.get(name):
            body = body[name]
    return str(body)[:500]
