"""Run a server until it is told to stop."""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Generator
from typing import Literal

import uvicorn
from fastapi import FastAPI

from xorl_lab.engine import engine as engines
from xorl_lab.errors import ConfigError
from xorl_lab.server.app import create_app, stop
from xorl_lab.server.settings import ServerSettings
from xorl_lab.server.state import State

CLOSE_SECONDS = 3
"""How long open connections may take once everything is saved."""
BACKLOG = 2048

logger = logging.getLogger(__name__)


class _Listener(uvicorn.Server):
    """One port.  Signals are looked after by :func:`serve`, for both ports together."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Leave signals alone."""
        yield


def serve(settings: ServerSettings, announce: Callable[[str], object]) -> None:
    """Serve until SIGINT or SIGTERM, then finish, save and return.  A second signal hurries.

    Args:
        settings: the server's.
        announce: called with a sentence when the server is ready.

    Raises:
        ConfigError: the model is unknown, or a port is taken.
    """
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(listener) for listener in listen(settings)]
        stack.callback(engines.close_all)
        app = create_app(settings)
        asyncio.run(_until_signal(app, sockets, lambda: announce(_welcome(settings, sockets))))


def listen(settings: ServerSettings) -> list[socket.socket]:
    """Take the port of the API and, if there is to be one, the sampler's.

    Raises:
        ConfigError: one of them is taken, or the address is not this machine's.
    """
    listeners = [bind(settings.host, settings.port)]
    if settings.sampler_port:
        try:
            listeners.append(bind(settings.host, settings.sampler_port))
        except ConfigError:
            listeners[0].close()
            raise
    return listeners


def bind(host: str, port: int) -> socket.socket:
    """Take a port.

    Raises:
        ConfigError: it is taken, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only where the protocol is named; without it each answer takes 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"{host}:{port} cannot be listened on ({error.strerror}): stop what uses it, or pass "
            "another --port or --sampler-port (0 = none)"
        ) from error
    return listener


class Listeners:
    """All ports of one application.

    Args:
        app: made by :func:`create_app`.
        sockets: already listening.
    """

    def __init__(self, app: FastAPI, sockets: list[socket.socket]) -> None:
        state = app.state.lab
        assert isinstance(state, State)
        self.state = state
        ports = {int(taken.getsockname()[1]) for taken in sockets}
        self.state.inference.endpoints.ports = ports
        self._sockets = sockets
        # One of them starts and ends the application.
        self._servers = [
            _Listener(_config(app, "on" if i == 0 else "off")) for i in range(len(sockets))
        ]

    async def run(self, asked: asyncio.Event) -> None:
        """Serve until asked to stop; then finish, save, and close the connections."""
        pairs = zip(self._servers, self._sockets, strict=True)
        tasks = [asyncio.ensure_future(server.serve(sockets=[taken])) for server, taken in pairs]
        waiter = asyncio.ensure_future(asked.wait())
        await asyncio.wait({*tasks, waiter}, return_when=asyncio.FIRST_COMPLETED)
        waiter.cancel()
        # Answers can still be fetched while what is queued is finished and saved.
        await stop(self.state)
        for server in self._servers:
            server.should_exit = True
        await asyncio.gather(*tasks)

    def hurry(self) -> None:
        """Do not wait for open connections."""
        for server in self._servers:
            server.force_exit = True


def _config(app: FastAPI, lifespan: Literal["on", "off"]) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        lifespan=lifespan,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=CLOSE_SECONDS,
    )


async def _until_signal(
    app: FastAPI, sockets: list[socket.socket], ready: Callable[[], object]
) -> None:
    listeners = Listeners(app, sockets)
    asked = asyncio.Event()

    def on_signal() -> None:
        if asked.is_set():
            listeners.hurry()
        asked.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    ready()
    await listeners.run(asked)


def _welcome(settings: ServerSettings, sockets: list[socket.socket]) -> str:
    ports = [int(taken.getsockname()[1]) for taken in sockets]
    name = f"[{settings.host}]" if ":" in settings.host else settings.host
    urls = [f"http://{name}:{port}" for port in ports]
    also = f", its sampler at {urls[1]}" if len(urls) > 1 else ""
    mode = "full weights" if settings.full else "LoRA adapters"
    return f"serving {settings.model} at {urls[0]}{also}; trains {mode}"
