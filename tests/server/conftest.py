"""A server in this process, and one in a process of its own."""

import asyncio
import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading

import httpx
import pytest
from fastapi.testclient import TestClient

from tests.server.support import Api
from xorl_lab.server import ServerSettings, create_app
from xorl_lab.server.run import Listeners, listen

QUICK = {"poll_seconds": 2.0, "gap_seconds": 0.3, "drain_seconds": 5.0}


@pytest.fixture
def start(tmp_path):
    """Start a server in this process; settings by keyword."""
    with contextlib.ExitStack() as stack:

        def build(**settings) -> Api:
            given = {"model": "tiny", "home": tmp_path, **QUICK, **settings}
            app = create_app(ServerSettings(**given))
            client = TestClient(app, base_url="http://localhost", raise_server_exceptions=False)
            api = Api(stack.enter_context(client))
            api.lab = app.state.lab
            return api

        yield build


@pytest.fixture
def api(start) -> Api:
    """A server of LoRA adapters."""
    return start()


class Live:
    """A real server on real ports, in a thread of this process."""

    def __init__(self, settings: ServerSettings):
        self.sockets = listen(settings)
        self.ports = [taken.getsockname()[1] for taken in self.sockets]
        self.url = f"http://127.0.0.1:{self.ports[0]}"
        self.app = create_app(settings)
        self.lab = self.app.state.lab
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()
        assert self._ready.wait(30)

    async def _run(self):
        self._loop, self._asked = asyncio.get_running_loop(), asyncio.Event()
        self._ready.set()
        await Listeners(self.app, self.sockets).run(self._asked)

    def stop(self):
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._asked.set)
        self._thread.join(40)
        assert not self._thread.is_alive()
        for taken in self.sockets:
            taken.close()


@pytest.fixture
def live(tmp_path):
    """Start a real server in a thread; settings by keyword."""
    running = []

    def build(**settings) -> Live:
        given = {"model": "tiny", "home": tmp_path, "port": 0, "sampler_port": 0, **QUICK}
        running.append(Live(ServerSettings(**{**given, **settings})))
        return running[-1]

    yield build
    for server in running:
        server.stop()


class Process:
    """``xorl-lab serve`` in a process of its own."""

    def __init__(self, root, home, *options, environment=None):
        command = [sys.executable, "-m", "xorl_lab.cli", "serve", "--home", str(home), *options]
        variables = {k: v for k, v in os.environ.items() if k != "XORL_API_KEY"}
        self.process = subprocess.Popen(
            command,
            cwd=root,
            env={**variables, "PYTHONPATH": str(root), **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.errors: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, daemon=True),
            threading.Thread(target=lambda: self.errors.extend(self.process.stderr), daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        self.url = ""

    def _read(self):
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def wait_ready(self, seconds=60) -> str:
        """The line that says where it serves."""
        line = self.lines.get(timeout=seconds)
        assert line is not None, "".join(self.errors)
        self.url = line.split(" at ")[1].split(",")[0].split(";")[0].strip()
        return line

    def stop(self, number=signal.SIGTERM, seconds=30) -> int:
        """Send a signal; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        for reader in self._readers:
            reader.join(5)
        self.process.stdout.close()
        self.process.stderr.close()
        return code


@pytest.fixture
def spawn(root, tmp_path):
    """Start a server in a process of its own; options as on the command line."""
    running = []

    def build(*options, **keywords) -> Process:
        given = options if "--model" in options else ("--model", "tiny", *options)
        if "--port" not in given:
            given = (*given, "--port", "0", "--sampler-port", "0")
        process = Process(root, tmp_path, *given, **keywords)
        running.append(process)
        return process

    yield build
    for process in running:
        if not process.process.stdout.closed:
            process.stop(signal.SIGKILL)


@pytest.fixture
def http():
    """An HTTP client per base URL."""
    with contextlib.ExitStack() as stack:
        yield lambda url: stack.enter_context(
            httpx.Client(base_url=url, timeout=60.0, trust_env=False)
        )
