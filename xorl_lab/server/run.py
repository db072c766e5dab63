"""Run a server until it is told to stop."""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Generator

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
    sockets = [bind(settings.host, settings.port)]
    if settings.sampler_port:
        sockets.append(bind(settings.host, settings.sampler_port))
    app = create_app(settings)
    ports = [int(s.getsockname()[1]) for s in sockets]
    state: State = app.state.lab
    state.inference.ports = set(ports)
    try:
        asyncio.run(_serve(app, state, sockets, lambda: announce(_welcome(settings, ports))))
    finally:
        for listener in sockets:
            listener.close()
        engines.close_all()


def bind(host: str, port: int) -> socket.socket:
    """Take a port.

    Raises:
        ConfigError: it is taken, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
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


async def _serve(
    app: FastAPI, state: State, sockets: list[socket.socket], ready: Callable[[], object]
) -> None:
    listeners = [
        _Listener(
            uvicorn.Config(
                app,
                # One of them starts and ends the application.
                lifespan="on" if number == 0 else "off",
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=CLOSE_SECONDS,
                server_header=False,
            )
        )
        for number in range(len(sockets))
    ]
    asked = asyncio.Event()

    def on_signal() -> None:
        if asked.is_set():
            for listener in listeners:
                listener.force_exit = True
        asked.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    tasks = [
        asyncio.ensure_future(listener.serve(sockets=[taken]))
        for listener, taken in zip(listeners, sockets, strict=True)
    ]
    stopper = asyncio.ensure_future(asked.wait())
    ready()
    await asyncio.wait({*tasks, stopper}, return_when=asyncio.FIRST_COMPLETED)
    # Answers can still be fetched while what is queued is finished and saved.
    await stop(state)
    for listener in listeners:
        listener.should_exit = True
    await asyncio.gather(*tasks)
    stopper.cancel()


def _welcome(settings: ServerSettings, ports: list[int]) -> str:
    name = f"[{settings.host}]" if ":" in settings.host else settings.host
    urls = [f"http://{name}:{port}" for port in ports]
    also = f", its sampler at {urls[1]}" if len(urls) > 1 else ""
    mode = "full weights" if settings.full else "LoRA adapters"
    return f"serving {settings.model} at {urls[0]}{also}; trains {mode}"
