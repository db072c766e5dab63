"""The environment that has SGLang: finding it, and making one.

SGLang pins torch and transformers to versions of its own, so it lives in an environment of its own
and is a process of its own.  Nothing of it is ever imported here.
"""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from xorl_lab.errors import ConfigError
from xorl_lab.home import home

VARIABLE = "XORL_LAB_SGLANG_PYTHON"
"""Environment variable that names the interpreter."""
VERSION = "0.5.23"
"""The version that the sampler is tried with."""
CPU_FOLDER = Path(__file__).parent / "cpu"
"""What makes SGLang run on a CPU."""
LAST = (f"sglang=={VERSION}", "torchvision==0.28.0")
"""Installed behind all else and without dependencies, which are for CUDA."""
TAKES = "2.3 GB of disk and about two minutes"
"""What an environment for the CPU takes."""
ROOM = 3e9
"""Bytes of disk that have to be free."""
HOW = "run `xorl-lab sglang --install`, or `make sglang` in the repository"

_KNOWN: dict[Path, str] = {}
_ASK = "import importlib.metadata as m; print(m.version('sglang'))"

Progress = Callable[[str], object]


def interpreter() -> Path | None:
    """The Python of an environment that has SGLang.

    Looked for in this order: ``$XORL_LAB_SGLANG_PYTHON``; ``.venv-sglang`` here and beside the
    package; the folder ``sglang`` in the home of xorl_lab; the environment of this process.

    Returns:
        Its path; None if there is none.

    Raises:
        ConfigError: the variable names an interpreter that has no SGLang.
    """
    named = os.environ.get(VARIABLE, "").strip()
    if named:
        path = Path(named).expanduser().absolute()
        if version(path) is None:
            raise ConfigError(
                f"{VARIABLE} is {named!r}, which is not a Python with SGLang: name the interpreter "
                f"of an environment that has it, or unset the variable and {HOW}"
            )
        return path
    return next((path for path in _places() if version(path) is not None), None)


def require(python: str | Path | None = None) -> Path:
    """The Python of an environment that has SGLang, or an error that says how to get one.

    Args:
        python: the one to use; None looks for it.

    Raises:
        ConfigError: there is none, or the one that was named has no SGLang.
    """
    if python is not None:
        path = Path(python).expanduser().absolute()
        if version(path) is None:
            raise ConfigError(f"python is {str(python)!r}, which has no SGLang: {HOW}")
        return path
    found = interpreter()
    if found is None:
        raise ConfigError(
            f"no environment with SGLang was found: {HOW} (it takes {TAKES}), or set {VARIABLE} "
            "to the interpreter of one"
        )
    return found


def version(python: Path) -> str | None:
    """Version of SGLang in an interpreter's environment; None if it has none or does not run."""
    if python not in _KNOWN and python.is_file():
        found = _ask(python)
        if found is not None:  # where there is none, one may be installed at any moment
            _KNOWN[python] = found
    return _KNOWN.get(python)


def _ask(python: Path) -> str | None:
    try:
        done = subprocess.run(
            [str(python), "-c", _ASK],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            env=clean_environment(),
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def clean_environment() -> dict[str, str]:
    """The variables of this process without those that lead another Python to our modules."""
    ours = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONSTARTUP")
    return {name: value for name, value in os.environ.items() if name not in ours}


def _places() -> Iterator[Path]:
    repository = Path(__file__).resolve().parents[3]
    for folder in (Path.cwd() / ".venv-sglang", repository / ".venv-sglang", home() / "sglang"):
        yield (folder / "bin" / "python").absolute()
    yield Path(sys.executable)


def install(folder: Path | None = None, *, gpu: bool = False, say: Progress | None = None) -> Path:
    """Make an environment with SGLang; does nothing to one that is complete.

    Args:
        folder: where; None = the folder ``sglang`` in the home of xorl_lab.
        gpu: with all that SGLang asks for, CUDA's kernels too, in place of what a CPU needs.
        say: called with a sentence at the start of each stage.

    Returns:
        Its interpreter.

    Raises:
        ConfigError: this system cannot run SGLang, the disk is full, or pip failed.
    """
    target = (folder or home() / "sglang").expanduser().absolute()
    python = target / "bin" / "python"
    if version(python) == VERSION:
        return python
    tell = say or (lambda _: None)
    if sys.platform != "linux":
        raise ConfigError(f"SGLang runs on Linux; this is {platform.system()}: use a server there")
    _check_room(target)
    tell(f"making an environment in {target}")
    if not python.is_file():
        _run([sys.executable, "-m", "venv", str(target)], "making the environment")
    for step in pip_arguments(gpu=gpu):
        tell(f"pip install {' '.join(step)}")
        pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
        _run([*pip, *step], "pip install")
    _KNOWN.pop(python, None)
    found = version(python)
    if found != VERSION:
        raise ConfigError(f"{target} has SGLang {found}, not {VERSION}: delete it and try again")
    tell(f"SGLang {found} is ready in {target}")
    return python


def pip_arguments(*, gpu: bool) -> list[list[str]]:
    """What pip is asked to install, call by call; SGLang itself comes last, so that it is there
    only when all else is.
    """
    if gpu:
        return [[LAST[0]]]
    return [["--requirement", str(CPU_FOLDER / "requirements.txt")], ["--no-deps", *LAST]]


def _check_room(target: Path) -> None:
    there = next(p for p in (target, *target.parents) if p.exists())
    free = shutil.disk_usage(there).free
    if free < ROOM:
        raise ConfigError(
            f"{there} has {free / 1e9:.1f} GB free, and SGLang takes {TAKES}: free some disk, "
            "or choose another folder with --folder"
        )


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=clean_environment()
    )
    if done.returncode != 0:
        said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-8:])
        raise ConfigError(f"{what} failed (`{' '.join(command)}`):\n{said}")
