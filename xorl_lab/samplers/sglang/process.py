"""A process that serves HTTP on a port of this machine, and that ends with this one.

What runs is a supervisor (:mod:`xorl_lab.samplers.sglang.supervisor`) and below it the server.  The
supervisor has a pipe from this process, so the server ends with it even by ``kill -9``.
"""

import atexit
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import IO, Self

import psutil

from xorl_lab.errors import ConfigError, SamplerError
from xorl_lab.samplers.sglang import supervisor

GRACE = 3.0
"""Seconds between asking a server to end and killing it; SGLang itself looks every 5 s."""
LOOK = 0.3
"""Seconds between two looks at a server that starts."""
HEALTH_TIMEOUT = 30.0
"""Seconds for one answer of ``/health``, which draws a token."""
TAIL = 25
"""Lines of the log in an error."""
LINE = 300
"""Characters of a line of the log in an error."""
STAGES = (
    ("Load weight begin", "reading the weights"),
    ("Load weight end", "laying out memory"),
    ("Application startup complete", "drawing a first token"),
)
"""What SGLang writes into its log, and what is said of it."""
SHORT_OF_MEMORY = "memory is short: free some, or choose a smaller model"
CAUSES = (
    ("ModuleNotFoundError", "its environment is not complete: delete it and install it again"),
    ("out of memory", SHORT_OF_MEMORY),
    ("Not enough memory", SHORT_OF_MEMORY),
    ("leave no GPU memory", SHORT_OF_MEMORY),
    ("are not supported for now", "SGLang does not serve this kind of model"),
)
"""What a log may hold, and what it means."""
TAKEN = "address already in use"
"""In lower case: what a log says when a port was taken."""

Progress = Callable[[str], object]


def tell(line: str) -> None:
    """Write a line to standard error: a terminal and a notebook show it."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


RUNNING: "set[ServerProcess]" = set()
"""Servers of this process that have not been stopped."""


class ServerProcess:
    """A server that this process has started and that ends with it.

    It is a context manager that stops it.  A process that is forked from this one may use the URL,
    but cannot stop the server.

    Args:
        name: of what it serves, for messages.
        port: where it listens, on 127.0.0.1.
        command: program and arguments.
        environment: makes its variables, given a folder that is removed in the end.
        log: file that its output is added to.
        grace: seconds between asking it to end and killing it.
    """

    def __init__(
        self,
        name: str,
        port: int,
        command: Sequence[str],
        environment: Callable[[Path], Mapping[str, str]],
        log: Path,
        grace: float = GRACE,
    ) -> None:
        self.name, self.port, self.log = name, port, log
        self.url = f"http://127.0.0.1:{port}"
        self._owner, self._grace = os.getpid(), grace
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._written = log.stat().st_size if log.exists() else 0
        self._scratch = Path(tempfile.mkdtemp(prefix="xorl-sglang-"))
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as sink:
                self._process = self._supervise(command, environment(self._scratch), sink)
        except OSError as error:
            shutil.rmtree(self._scratch, ignore_errors=True)
            raise SamplerError(f"the server for {name} could not be started: {error}") from error
        RUNNING.add(self)

    def _supervise(
        self, command: Sequence[str], environment: Mapping[str, str], sink: IO[bytes]
    ) -> "subprocess.Popen[bytes]":
        script = [sys.executable, "-P", str(Path(supervisor.__file__))]
        modules = str(Path(psutil.__file__).parents[1])  # wherever this process has it from
        return subprocess.Popen(
            [*script, str(self._owner), str(self._grace), str(self._scratch), *command],
            stdin=subprocess.PIPE,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**environment, "PYTHONPATH": modules},
        )

    @property
    def owned(self) -> bool:
        """True in the process that started it, not in one that was forked from that."""
        return os.getpid() == self._owner

    @property
    def alive(self) -> bool:
        """True while it runs."""
        if not self.owned:
            return psutil.pid_exists(self._process.pid)
        return self._process.poll() is None

    def processes(self) -> list[psutil.Process]:
        """The supervisor and every process below it; empty when it has ended."""
        with suppress(psutil.NoSuchProcess):
            top = psutil.Process(self._process.pid)
            if self.alive:
                return [top, *top.children(recursive=True)]
        return []

    def wait_ready(self, timeout: float, say: Progress) -> None:
        """Wait until it answers.

        Args:
            timeout: seconds.
            say: called with a sentence whenever it is a stage further.

        Raises:
            SamplerError: it ended, or did not answer in time.
        """
        told = ""
        while True:
            waited = time.monotonic() - self._began
            if not self.alive:
                raise SamplerError(
                    f"the SGLang server for {self.name} ended with status "
                    f"{self._process.returncode} after {waited:.0f} s, before it answered"
                    f"{self._why()}"
                )
            if waited > timeout:
                raise SamplerError(
                    f"the SGLang server for {self.name} has not answered within "
                    f"{timeout:.0f} s: pass a longer timeout, or see why{self._why()}"
                )
            stage = self._stage()
            if stage != told:
                say(f"{stage} ({waited:.0f} s)")
                told = stage
            if answers_health(self.port, max(1.0, timeout - waited)) and self._listens():
                say(f"ready at {self.url} after {time.monotonic() - self._began:.0f} s")
                return
            time.sleep(LOOK)

    def stop(self) -> None:
        """End the server and all its processes; does nothing a second time, or in a fork."""
        if not self.owned:
            return
        with self._lock:
            self.tell()
            try:
                self._process.wait(self._grace + supervisor.TIDY + supervisor.INSIST + 5)
            except subprocess.TimeoutExpired:
                for process in self.processes():
                    with suppress(psutil.Error):
                        process.kill()
                self._process.wait()
            RUNNING.discard(self)

    def tell(self) -> None:
        """Tell the supervisor to end, without waiting."""
        pipe = self._process.stdin
        if pipe is not None and not pipe.closed:
            with suppress(OSError):
                os.write(pipe.fileno(), b"stop")  # a fork may keep the pipe open
            with suppress(OSError):
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = "running" if self.alive else f"ended with status {self._process.returncode}"
        return f"<{type(self).__name__} of {self.name} at {self.url}, {state}>"

    def tail(self, lines: int = TAIL) -> str:
        """The end of its log."""
        cut = (shorten(line) for line in self._text().rstrip().splitlines()[-lines:])
        return "\n".join(cut)

    def _text(self) -> str:
        with self.log.open("rb") as file:
            file.seek(self._written)  # what an earlier server wrote there is not this one's
            return file.read().decode(errors="replace")

    def _why(self) -> str:
        """What its log says of an end."""
        text = self._text()
        meaning = next((f": {meaning}" for sign, meaning in CAUSES if sign in text), "")
        return f"{meaning}. The end of its log {self.log}:\n{self.tail() or '(it is empty)'}"

    def _stage(self) -> str:
        text = self._text()
        reached = [what for sign, what in STAGES if sign in text]
        return reached[-1] if reached else "loading SGLang"

    def port_was_taken(self) -> bool:
        """Whether it ended since another process listened on its port."""
        return TAKEN in self._text().lower()

    def _listens(self) -> bool:
        """Whether a process of this server, and no other, listens on the port."""
        for process in self.processes():
            with suppress(psutil.Error):
                for taken in process.net_connections("tcp"):
                    if taken.status == psutil.CONN_LISTEN and taken.laddr.port == self.port:
                        return True
        return False


def shorten(line: str) -> str:
    """A line of at most LINE characters: SGLang writes all its 500 settings into one.

    >>> len(shorten("a" * 1000)), shorten("b")
    (300, 'b')
    """
    return line if len(line) <= LINE else line[: LINE - 1] + "…"


@atexit.register
def stop_all() -> None:
    """Stop every server of this process."""
    mine = [server for server in RUNNING if server.owned]
    for server in mine:
        server.tell()
    for server in mine:
        server.stop()


def answers_health(port: int, seconds: float) -> bool:
    """Whether ``/health`` answers 200.

    Args:
        port: on 127.0.0.1.
        seconds: how long to wait for it.
    """
    connection = HTTPConnection("127.0.0.1", port, timeout=min(seconds, HEALTH_TIMEOUT))
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def free_port(port: int | None) -> int:
    """A port of 127.0.0.1 on which nobody listens.

    Args:
        port: the one to look at; None = any.

    Raises:
        ConfigError: it is taken.
    """
    with socket.socket() as probe:
        # As servers do: a port whose last connections are closing is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port or 0))
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"port {port} of 127.0.0.1 cannot be listened on ({error}): stop what listens "
                "there, or leave the port out, which takes a free one"
            ) from error
        return int(probe.getsockname()[1])
