"""``xorl-lab serve``: the client API over HTTP."""

import logging
from pathlib import Path
from typing import Annotated

import typer

from xorl_lab.server.run import serve
from xorl_lab.server.settings import ServerSettings


def serve_command(  # noqa: PLR0913  (each is an option of the command)
    model: Annotated[str, typer.Option(help="Base model: a name or a folder.")],
    full: Annotated[bool, typer.Option("--full", help="Train full weights, not adapters.")] = False,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the API; 0 = any free one.")] = 6000,
    sampler_port: Annotated[
        int, typer.Option(help="Second port, where /generate is looked for; 0 = none.")
    ] = 30000,
    home: Annotated[Path | None, typer.Option(help="Folder of checkpoints.")] = None,
    token: Annotated[
        str | None,
        typer.Option(envvar="XORL_API_KEY", help="Demand it of every client.", show_envvar=True),
    ] = None,
    sampler_key: Annotated[
        str | None,
        typer.Option(
            envvar="XORL_SAMPLER_KEY",
            help="Sent to every SGLang server that a client registers.",
            show_envvar=True,
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    no_save: Annotated[
        bool, typer.Option("--no-save", help="Do not save unsaved steps when stopped.")
    ] = False,
) -> None:
    """Serve one base model to xorl_client, to this package's client, and SGLang's /generate."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    settings = ServerSettings(
        model=model,
        full=full,
        host=host,
        port=port,
        sampler_port=sampler_port,
        home=home,
        token=token or None,
        sampler_key=sampler_key or None,
        device=device,
        dtype=dtype,
        save_on_shutdown=not no_save,
    )
    serve(settings, lambda line: typer.echo(line))
