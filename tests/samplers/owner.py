"""A process that starts a stand-in server and then ends in one of many ways.

``python -m tests.samplers.owner END FOLDER``: it prints the ids of the server's processes as JSON,
and reads a line before it ends.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.samplers.standin import say
from tests.samplers.support_processes import standin


def interrupted(server) -> None:
    """A notebook's cell: the interrupt ends the cell, and nothing else."""
    try:
        say("ready")
        time.sleep(600)
    except KeyboardInterrupt:
        say(json.dumps([server.alive, [p.pid for p in server.processes()]]))


def main(end: str, folder: Path) -> None:
    server = standin("family", folder)
    if end == "outlived":  # by a fork, which has the pipe too, and by a program, which has not
        if os.fork() == 0:
            os.setsid()
            time.sleep(600)
        subprocess.Popen(["sleep", "600"], start_new_session=True)
    if end == "forked" and os.fork() == 0:
        server.stop()
        sys.exit(0)  # goes through what was registered with atexit
    if end == "forked":
        os.wait()
    say(json.dumps([server.alive, [p.pid for p in server.processes()]]))
    if end == "interrupted":
        interrupted(server)
    sys.stdin.readline()
    if end in ("killed", "outlived"):
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "terminated":
        os.kill(os.getpid(), signal.SIGTERM)
    if end == "raised":
        raise RuntimeError("as in a notebook")
    if end == "at once":
        os._exit(0)
    sys.exit(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
