"""Stand-in servers, and whether processes are gone.  Imports no torch: it runs in processes too."""

import os
import sys
import time
from pathlib import Path

import psutil

from xorl_lab.samplers.sglang.process import ServerProcess, free_port

STANDIN = Path(__file__).parent / "standin.py"
PATIENCE = 60.0
"""Seconds after which a test gives up; it asserts nothing about how long a thing takes."""


def unready(behaviour: str, folder: Path, port: int | None = None) -> ServerProcess:
    """Start a stand-in, and do not wait for it."""
    where = port or free_port(None)
    command = [sys.executable, str(STANDIN), behaviour, str(where), str(folder / "workers")]
    log = folder / "server.log"
    return ServerProcess("a stand-in", where, command, variables, log, grace=0.3)


def variables(scratch: Path) -> dict[str, str]:
    return {**os.environ, "TMPDIR": str(scratch)}


def standin(behaviour: str, folder: Path) -> ServerProcess:
    """Start a stand-in that answers."""
    server = unready(behaviour, folder)
    server.wait_ready(PATIENCE, lambda _: None)
    return server


def lives(process: psutil.Process) -> bool:
    """Whether it runs; one that ended and was not collected by its parent does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def left(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that still run when patience is at an end."""
    deadline = time.monotonic() + PATIENCE
    while any(lives(p) for p in processes) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [p for p in processes if lives(p)]
