"""Stands in for a SGLang server, in a process: ``python standin.py BEHAVIOUR PORT FILE``."""

import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

# A worker in a session of its own that will not end when asked, and one that it leaves behind.
WORKER = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.setsid()
if child := os.fork():
    os.waitpid(child, 0)
elif os.fork():
    sys.exit()
with open(sys.argv[1], "a") as file:
    file.write(f"{os.getpid()}\\n")
time.sleep(600)
"""


class Health(BaseHTTPRequestHandler):
    """Answers everything in the same way."""

    status = 200

    def do_GET(self):
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, *_):
        pass


def say(*lines: str) -> None:
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def main(behaviour: str, port: int, file: Path) -> None:
    say("Load weight begin.")
    if behaviour == "dies":
        say(*(f"line {n}" for n in range(100)), "torch.OutOfMemoryError: out of memory")
        sys.exit(3)
    if behaviour == "taken" and not file.exists():
        file.touch()
        say("[Errno 98] error while attempting to bind: Address already in use")
        sys.exit(1)
    if behaviour == "silent":
        time.sleep(600)
    if behaviour == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if behaviour == "family":
        subprocess.Popen([sys.executable, "-c", WORKER, str(file)])
        while not (file.exists() and file.read_text().count("\n") == 2):
            time.sleep(0.02)
    if behaviour == "unwell":
        Health.status = 503
    say(f"PYTHONPATH is {os.environ.get('PYTHONPATH')}", f"in {os.environ['TMPDIR']}")
    HTTPServer(("127.0.0.1", port), Health).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
