"""A server in this process, and one in a process of its own."""

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
