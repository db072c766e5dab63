"""The notebooks as data, and as tests."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[2]
COURSE = sorted((ROOT / "notebooks").glob("*.ipynb"))
NAMES = [path.stem for path in COURSE]
UNCOMPARED = {"nbval-ignore-output", "nbval-skip"}
SOLUTION = re.compile(r"<details>.*?```python\n(.*?)```.*?</details>", re.DOTALL)


@dataclass(frozen=True)
class Mutation:
    """A change of the package that a notebook has to notice."""

    file: str
    old: str
    new: str
    why: str

    def apply(self, root: Path) -> None:
        """Change the file below a folder that holds a copy of the package."""
        path = root / self.file
        text = path.read_text()
        assert text.count(self.old) == 1, f"{self.file} has {self.old!r} not once"
        path.write_text(text.replace(self.old, self.new))


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def mutation(notebook: nbformat.NotebookNode) -> Mutation:
    return Mutation(**notebook.metadata["xorl_lab"]["mutation"])


def code(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def tags(cell: nbformat.NotebookNode) -> set[str]:
    return set(cell.metadata.get("tags", ()))


def compared(cell: nbformat.NotebookNode) -> str:
    """The text that nbval compares, empty if there is none."""
    if UNCOMPARED & tags(cell) or cell.execution_count is None:
        return ""
    found = []
    for output in cell.outputs:
        if output.output_type == "stream" and output.name == "stdout":
            found.append(output.text)
        elif output.output_type in ("execute_result", "display_data"):
            found.append(output.data.get("text/plain", ""))
    return "".join(found)


def computed(cell: nbformat.NotebookNode) -> bool:
    """Whether what is compared says something that does not stand in the cell itself.

    The name of a type or a figure's size is no value, nor is an exercise that nobody has answered.
    """
    text = re.sub(r"<[^>]*>|exercise: open.*|\w+View\(.*\)|Chart of a run", "", compared(cell))
    written = set(re.findall(r"\w+", cell.source))
    return any(word not in written for word in re.findall(r"\w+", text))


def exercises(notebook: nbformat.NotebookNode) -> list[tuple[int, str]]:
    """Index of each exercise's cell, and the code that answers it, from the cell behind it."""
    found = []
    for index, cell in enumerate(notebook.cells):
        if cell.cell_type == "code" and "exercise(" in cell.source and "import" not in cell.source:
            below = notebook.cells[index + 1].source
            match = SOLUTION.search(below)
            found.append((index, match.group(1).strip() if match else ""))
    return found


def environment(package: Path, **more: str) -> dict[str, str]:
    """Variables under which a kernel imports the package of this folder."""
    told = {"PYTHONPATH": str(package), "OMP_NUM_THREADS": "1", "COURSE": "whole"}
    return {**os.environ, **told, **more}


def nbval(paths: list[Path], env: dict[str, str], *options: str) -> subprocess.CompletedProcess:
    """Run notebooks as ``make test`` does."""
    settings = ["--nbval", "--nbval-sanitize-with", str(ROOT / "notebooks" / "sanitize.cfg")]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *settings, *options]
    return subprocess.run(
        [*command, *map(str, paths)], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
