"""Runs one command, and ends it with all that it has started when whoever asked for it ends.

A script of its own, started by path: ``python supervisor.py PARENT GRACE FOLDER COMMAND…``.  It
has one end of a pipe whose other end the parent has: the operating system closes that one with the
parent, however it ends.  A process that the parent forked may keep the pipe open, so the parent's
id is looked at too.  Nothing of xorl_lab is imported here: it starts at once and stays small.

Parent and command are in sessions of their own: an interrupt typed at the parent reaches neither
this process nor the command, and a command that kills its own group does not kill this process.
"""

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

LOOK = 0.2
"""Seconds between two looks at the command and the parent; the pipe wakes it at once."""
TIDY = 1.0
"""Seconds between the command's end and killing what it has left."""
INSIST = 10.0
"""Seconds for which what is left is killed again and again."""
SHARED = "/dev/shm/sgl"
"""How the names of SGLang's files in shared memory begin."""
_DEATH_SIGNAL, _ADOPT_ORPHANS = 1, 36
"""Of prctl: what a process gets when its parent dies; become the parent of orphans below."""


class Supervised:
    """A command under supervision.

    Args:
        command: program and arguments.
    """

    def __init__(self, command: list[str]) -> None:
        prctl(_ADOPT_ORPHANS, 1)
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=die_with_parent
        )

    @property
    def status(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        # Orphans of the command become children of this process, and are collected here as well.
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return self._process.returncode
            if pid == 0:
                return self._process.returncode
            if pid == self._process.pid:
                self._process.returncode = os.waitstatus_to_exitcode(status)

    def end(self, grace: float) -> int:
        """Ask the command to end, wait, then kill it and everything below this process.

        Args:
            grace: seconds to wait.

        Returns:
            Its exit status.
        """
        shared = shared_memory(below())
        if self.status is None:
            self._process.terminate()
        wait_while(lambda: self.status is None, grace)
        if self.status is None:
            self._process.kill()
        # Its workers are told by the system; one of them tidies up what it shared in memory.
        wait_while(lambda: self.status is None or bool(below()), TIDY)
        wait_while(self._kill_below, INSIST)
        for path in shared:
            path.unlink(missing_ok=True)
        status = self.status
        return -signal.SIGKILL if status is None else status

    def _kill_below(self) -> bool:
        """Kill everything below this process; False if there is nothing."""
        left = below()
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        return self.status is None or bool(left)


def wait_while(condition: Callable[[], bool], seconds: float) -> None:
    """Wait until a condition no longer holds, at most so long."""
    deadline = time.monotonic() + seconds
    while condition() and time.monotonic() < deadline:
        time.sleep(0.05)


def below() -> list[psutil.Process]:
    """Every process that descends from this one."""
    return psutil.Process().children(recursive=True)


def shared_memory(processes: list[psutil.Process]) -> set[Path]:
    """Files of SGLang's in shared memory that these processes have: it leaves them there."""
    found: set[str] = set()
    for process in processes:
        with suppress(psutil.Error):
            found |= {file.path for file in process.open_files()}
            found |= {mapped.path for mapped in process.memory_maps()}
    return {Path(path) for path in found if path.startswith(SHARED)}


def prctl(option: int, value: int) -> None:
    """Ask something of Linux; elsewhere it is left out."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def die_with_parent() -> None:
    """Called in the command's process before it becomes the command."""
    prctl(_DEATH_SIGNAL, signal.SIGKILL)


def told_to_stop(parent: int, seconds: float) -> bool:
    """Wait for a word from the parent; True if it wants an end, or is gone.

    Args:
        parent: its process id.
        seconds: how long to wait.
    """
    ready, _, _ = select.select([0], [], [], seconds)
    return bool(ready) or os.getppid() != parent


def main(arguments: list[str]) -> int:
    """Supervise until the command ends or has to.

    Args:
        arguments: id of the parent, seconds to wait after asking, a folder to remove in the end,
            and the command.

    Returns:
        The command's exit status as shells give it: 128 + n after signal n.
    """
    parent, grace, folder, *command = arguments
    os.environ.pop("PYTHONPATH", None)  # for this script alone, not for the command
    asked = [False]

    def ask(*_: object) -> None:
        asked[0] = True

    signal.signal(signal.SIGTERM, ask)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, lambda *_: None)  # SIG_IGN would be passed on to the command
    try:
        if told_to_stop(int(parent), 0):
            return 0
        supervised = Supervised(command)
        while supervised.status is None and not asked[0]:
            if told_to_stop(int(parent), LOOK):
                break
        status = supervised.end(float(grace))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
