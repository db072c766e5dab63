"""Who may ask, from where, and how much: checks that come before any route.

* With a token, every request but ``/health`` needs ``Authorization: Bearer TOKEN``.
* Without one the server is for this machine alone: the ``Host`` header must name a loopback
  address, and so must ``Origin`` where a browser sends one.  Otherwise any web page that is open
  here could drive it.
* A request with a body must say that it is JSON, and may not be larger than the limit; the bytes
  are counted while they arrive.
"""

import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from fastapi import HTTPException
from fastapi.responses import JSONResponse

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
OPEN_PATHS = frozenset({"/health"})


class Gate:
    """ASGI middleware with the checks above.

    Args:
        app: what is behind it.
        token: the token, or None.
        max_body_bytes: largest request body.
    """

    def __init__(self, app: ASGIApp, *, token: str | None, max_body_bytes: int) -> None:
        self.app = app
        self.token = None if token is None else token.encode()
        self.max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request pass, or answer it with what is wrong."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {key.lower(): value for key, value in scope["headers"]}
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            status, detail = refusal
            extra = {"WWW-Authenticate": "Bearer"} if status == 401 else None
            await JSONResponse({"detail": detail}, status, extra)(scope, receive, send)
            return
        await self.app(scope, self._counted(receive), send)

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> tuple[int, str] | None:
        if self.token is not None:
            if scope["path"] not in OPEN_PATHS and not self._authorized(headers):
                return 401, "this server needs a token: send 'Authorization: Bearer TOKEN'"
        elif not _is_local(headers.get(b"host", b"")):
            return 421, "this server answers to localhost only: start it with --token for more"
        elif b"origin" in headers and not _is_local(_host_of(headers[b"origin"])):
            return 403, "web pages of other sites may not use this server"
        return self._bad_body(headers)

    def _bad_body(self, headers: dict[bytes, bytes]) -> tuple[int, str] | None:
        length = headers.get(b"content-length", b"0")
        if not length.isdigit():
            return 400, "Content-Length is not a number"
        if int(length[:20]) > self.max_body_bytes:
            return 413, self._too_large()
        has_body = int(length) > 0 or b"transfer-encoding" in headers
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if has_body and kind != b"application/json":
            return 415, "send the body as JSON, with 'Content-Type: application/json'"
        return None

    def _authorized(self, headers: dict[bytes, bytes]) -> bool:
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        expected = self.token or b""
        return scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), expected)

    def _counted(self, receive: Receive) -> Receive:
        total = 0

        async def counted() -> Message:
            nonlocal total
            message = await receive()
            total += len(message.get("body", b""))
            if total > self.max_body_bytes:
                raise HTTPException(413, self._too_large())
            return message

        return counted

    def _too_large(self) -> str:
        return f"the body is larger than {self.max_body_bytes} bytes: send the data in parts"


def _is_local(host: bytes) -> bool:
    """True if a Host header names this machine by a loopback name or address."""
    text = host.decode("latin-1").strip().lower()
    name = text.partition("]")[0].lstrip("[") if text.startswith("[") else text.partition(":")[0]
    return name in LOOPBACK


def _host_of(origin: bytes) -> bytes:
    try:
        return (urlsplit(origin.decode("latin-1")).netloc or "").encode("latin-1")
    except ValueError:
        return b""
