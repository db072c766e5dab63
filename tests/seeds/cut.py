"""Cut code out of the seed documents and change it by a table of old and new lines."""

import os
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
FOREIGN = ("localhost", "http", "requests", "base_url", "Qwen", "import xorl_client\n", "pytrio")
"""What none of the code that runs here may still mention."""

Table = list[tuple[str, str]]


def folder() -> Path:
    """The folder of the seed documents: $XORL_LAB_SEEDS, else ``../shared/seeds``.

    Without it the test is skipped, but fails where CI is set: there it must be.
    """
    named = os.environ.get("XORL_LAB_SEEDS")
    path = Path(named) if named else REPOSITORY.parent / "shared" / "seeds"
    if not path.is_dir():
        reason = f"the seed documents are not in {path}: set XORL_LAB_SEEDS to their folder"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return path


def cut(path: Path, heading: str, first: str, last: str) -> str:
    """The code of a section.

    Args:
        path: the document.
        heading: a line of its own, after which the section begins.
        first: how the first line of the code begins.
        last: the last line of the code.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines.count(heading) == 1, f"{path.name} has no one line {heading!r}"
    lines = lines[lines.index(heading) + 1 :]
    begin = next(i for i, line in enumerate(lines) if line.startswith(first))
    end = next(i for i, line in enumerate(lines[begin:], begin) if line == last)
    return "\n".join(lines[begin : end + 1]) + "\n"


def change(code: str, table: Table, title: str) -> str:
    """Apply a table and print it.

    Every old text must be there exactly once, and nothing that belongs to another place may be
    left when all have been replaced: so the table lists all that is different.
    """
    shown = [f"{title}: lines changed"]
    for old, new in table:
        assert code.count(old) == 1, f"{old!r} occurs {code.count(old)} times in {title}"
        code = code.replace(old, new)
        shown += [f"  - {line}" for line in old.splitlines()]
        shown += [f"  + {line}" for line in new.splitlines()]
    left = [word for word in FOREIGN if word in code]
    assert not left, f"{title} still mentions {left}"
    sys.stdout.write("\n".join(shown) + "\n")
    return code


def run(code: str, names: dict[str, object]) -> dict[str, object]:
    """Execute the code with definitions for the names that it leaves open."""
    exec(compile(code, "<seed>", "exec"), names)
    return names
