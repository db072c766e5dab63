"""Run notebooks and store what they show: ``python -m tests.course.store notebooks/*.ipynb``.

What differs from one run to the next is left out: times of cells, the state of widgets, what was
written to standard error, which nbval does not compare.
"""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

TIMEOUT = 900
"""Seconds for one cell."""
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}


def run(notebook: nbformat.NotebookNode, folder: Path) -> None:
    """Run all cells in a new kernel that works in the folder; outputs are replaced."""
    client = NotebookClient(
        notebook,
        timeout=TIMEOUT,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        store_widget_state=False,
    )
    client.execute()


def tidy(notebook: nbformat.NotebookNode) -> None:
    """Leave out of a notebook what differs from run to run."""
    notebook.metadata = {
        "kernelspec": KERNEL,
        "language_info": {"name": "python"},
        **{k: v for k, v in notebook.metadata.items() if k == "xorl_lab"},
    }
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number:02d}"
        cell.metadata = {k: v for k, v in cell.metadata.items() if k == "tags"}
        if cell.cell_type == "code":
            cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr"]


def main(paths: list[str]) -> None:
    """Run notebooks in place."""
    for path in map(Path, paths):
        notebook = nbformat.read(path, as_version=4)
        run(notebook, path.parent)
        tidy(notebook)
        nbformat.write(notebook, path)
        sys.stdout.write(f"{path}: {path.stat().st_size / 1000:.0f} kB\n")


if __name__ == "__main__":
    main(sys.argv[1:])
