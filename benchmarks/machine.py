"""What was measured where: processor, memory, versions, date."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.channel import ROOT

FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def describe() -> dict[str, str]:
    """The machine, the date, and the state of the package."""
    flags = _cpu("flags").split()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": _cpu("model name") or platform.machine(),
        "cores": str(cores()),
        "features": ", ".join(f for f in FEATURES if f in flags)
        or "none of " + ", ".join(FEATURES),
        "memory": f"{memory / 2**30:.1f} GiB",
        "load at the start": f"{os.getloadavg()[0]:.1f}",
        "python": platform.python_version(),
        "xorl_lab": _git("describe", "--always", "--dirty", "--tags"),
    }


def cores() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def has_amx() -> bool:
    """True if the processor multiplies bfloat16 matrices in hardware tiles."""
    return "amx_bf16" in _cpu("flags").split()


def _cpu(name: str) -> str:
    """A line of /proc/cpuinfo; empty where there is none."""
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.exists() else []:
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"
