"""``xorl-lab sglang``: is an environment with SGLang there, and making one."""

from pathlib import Path

from rich.console import Console

from xorl_lab.samplers.sglang import install as sglang_install


def show(console: Console) -> bool:
    """Say where SGLang is.

    Returns:
        True if there is one.
    """
    found = sglang_install.interpreter()
    if found is None:
        say = f"No environment with SGLang: {sglang_install.HOW}; it takes {sglang_install.TAKES}."
        console.print(say, markup=False, highlight=False, soft_wrap=True)
        return False
    say = f"SGLang {sglang_install.version(found)} by {found}"
    console.print(say, markup=False, highlight=False, soft_wrap=True)
    return True


def install(console: Console, folder: Path | None, *, gpu: bool) -> None:
    """Make an environment with SGLang, and say what is done.

    Args:
        console: where to print.
        folder: where to; None = in the home of xorl_lab.
        gpu: with CUDA's kernels.

    Raises:
        ConfigError: it could not be made.
    """
    sglang_install.install(
        folder,
        gpu=gpu,
        say=lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True),
    )
