"""How the two ends of a measurement speak: one JSON line each way per round.

The worker is a process with a loaded model.  Between rounds it blocks on its input, so that it
costs the other side nothing.  Its clock and its memory gauge are here, the same for both sides.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Self, TextIO

ROOT = Path(__file__).resolve().parent.parent
STATUS = Path("/proc/self/status")
PACKAGES = ("torch", "transformers", "peft", "trl")


class BenchError(RuntimeError):
    """A side could not be measured; says why."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker is started for."""

    case: str
    """Name of the case, as the worker's module knows it."""
    model: str
    """Folder of the model."""
    dtype: str
    """``float32`` or ``bfloat16``."""
    threads: int
    """Of torch."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What the case needs to know before its first round."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One round of one side."""

    seconds: float
    """Of the work itself."""
    busy: float
    """Seconds of processor time, over all threads: the truer number where others are at work."""
    tokens: int
    """Drawn, or trained on."""
    peak: int | None
    """Bytes: the most that was resident during the round; None where Linux does not tell."""
    extra: dict[str, Any]
    """What else the case reports."""


class Channel:
    """The worker's end.  Whatever libraries print goes to standard error.

    Args:
        arguments: of the command line: a Job as JSON.
    """

    def __init__(self, arguments: list[str]) -> None:
        self.job = Job(**json.loads(arguments[1]))
        self._out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        self._start = self._seconds = 0.0
        self._busy_start = self._busy = 0.0

    def ready(self, **facts: Any) -> None:  # noqa: ANN401 (JSON)
        """Say that the model is loaded."""
        versions = {name: _version(name) for name in PACKAGES}
        self._say({"resident": _status("VmRSS"), "versions": versions, **facts})

    def wait(self) -> dict[str, Any]:
        """Block until the next round; returns what it is to do.

        Raises:
            SystemExit: there is none.
        """
        line = sys.stdin.readline()
        if not line:
            raise SystemExit(0)
        return json.loads(line)

    def start(self) -> None:
        """Start the clock, and let the gauge of the memory forget earlier peaks."""
        with suppress(OSError):  # where it cannot forget, peaks are those since the start
            Path("/proc/self/clear_refs").write_text("5")
        self._busy_start = time.process_time()
        self._start = time.perf_counter()

    def stop(self) -> None:
        """Stop the clock."""
        self._seconds = time.perf_counter() - self._start
        self._busy = time.process_time() - self._busy_start

    def answer(self, tokens: int, **extra: Any) -> None:  # noqa: ANN401 (JSON)
        """Report the round."""
        peak = _status("VmHWM")
        self._say(asdict(Sample(self._seconds, self._busy, tokens, peak, extra)))

    def _say(self, values: Mapping[str, Any]) -> None:
        self._out.write(json.dumps(values) + "\n")
        self._out.flush()


def environment(threads: int) -> dict[str, str]:
    """Variables of every measured process, whichever side it is.

    OpenMP's threads wait awake for a short while only, as importing xorl_lab sets it.  By default
    they spin as long as a process has no more of them than there are processors, and a spinning
    thread that shares its processor with anything else costs its own side up to 60 times the time;
    the peers, which work in the main thread, were the ones to suffer.
    """
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "GOMP_SPINCOUNT": "20000",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "PYTHONPATH": str(ROOT),
    }


class Worker:
    """The orchestrator's end: starts a worker and waits until its model is loaded.

    Args:
        name: ``ours`` or ``peers``, the module in this folder.
        python: the interpreter of its environment.
        job: what it is for.

    Raises:
        BenchError: it did not come up; holds the end of what it wrote.
    """

    def __init__(self, name: str, python: Path, job: Job) -> None:
        self.name = name
        self._log: TextIO = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the worker)
        self._process = subprocess.Popen(
            [str(python), "-m", f"benchmarks.{name}", json.dumps(asdict(job))],
            cwd=ROOT,
            env=os.environ | environment(job.threads),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self.facts = self._hear()

    def round(self, command: Mapping[str, Any] | None = None) -> Sample:
        """Have one round done.

        Raises:
            BenchError: the worker died.
        """
        assert self._process.stdin
        try:
            self._process.stdin.write(json.dumps(command or {}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # said better by the answer that is missing
        return Sample(**self._hear())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        status = self._process.wait()
        self._log.seek(0)
        end = self._log.read()[-2000:]
        raise BenchError(f"the worker {self.name!r} ended with status {status}:\n{end}")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _status(field_name: str) -> int | None:
    """A line of /proc/self/status, in bytes."""
    if not STATUS.exists():
        return None
    for line in STATUS.read_text().splitlines():
        if line.startswith(field_name + ":"):
            return int(line.split()[1]) * 1024
    return None
