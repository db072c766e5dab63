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
from contextlib import suppress

import psutil

LOOK = 0.2
"""Seconds between two looks at the command and the parent; the pipe wakes it at once."""
INSIST = 10.0
"""Seconds for which what is left is killed again and again."""
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
        if self.status is None:
            self._process.terminate()
        deadline = time.monotonic() + grace
        while (self.status is None or below()) and time.monotonic() < deadline:
            time.sleep(0.05)
        deadline = time.monotonic() + INSIST
        while (left := below()) and time.monotonic() < deadline:
            for process in left:
                with suppress(psutil.Error):
                    process.kill()
            time.sleep(0.05)
            self.status  # noqa: B018 (collects them)
        status = self.status
        return -signal.SIGKILL if status is None else status


def below() -> list[psutil.Process]:
    """Every process that descends from this one."""
    return psutil.Process().children(recursive=True)


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
