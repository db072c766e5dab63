"""What a run found, as it is kept in JSON."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.channel import Sample


@dataclass(frozen=True, slots=True)
class Row:
    """One shape of one case, measured on two sides."""

    case: str
    """Name of the case."""
    shape: str
    """What exactly was run."""
    dtype: str
    """``float32``, or ``fastest`` and what that was on both sides."""
    ours: list[Sample]
    """Rounds of ours, without the warm-up."""
    peer: list[Sample]
    """Rounds of the peer, in the same order."""
    resident: tuple[int | None, int | None]
    """Bytes of both sides once the model was loaded."""
    note: str = ""
    """What else is to be known."""
    judged: tuple[tuple[str, str], ...] = ()
    """Keys of ``goals.SPEED`` that it is held against."""


@dataclass(frozen=True, slots=True)
class Line:
    """One number of ours alone."""

    case: str
    """Name of the case."""
    what: str
    """What was measured."""
    value: str
    """The number with its unit and spread."""
    verdict: str = ""
    """How it compares with the goals."""


@dataclass(slots=True)
class Results:
    """All that one or several runs found."""

    machine: dict[str, str]
    """Where and when."""
    settings: dict[str, str]
    """Model, threads, rounds, versions."""
    rows: list[Row] = field(default_factory=list)
    """Side by side."""
    lines: list[Line] = field(default_factory=list)
    """Ours alone."""

    def add(self, found: Row | Line) -> None:
        """Keep what a case found."""
        if isinstance(found, Row):
            self.rows.append(found)
        else:
            self.lines.append(found)

    def save(self, path: Path) -> None:
        """Write JSON."""
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> "Results":
        """Read JSON."""
        values: dict[str, Any] = json.loads(path.read_text())
        rows = [_row(row) for row in values["rows"]]
        lines = [Line(**line) for line in values["lines"]]
        return cls(values["machine"], values["settings"], rows, lines)

    @classmethod
    def merge(cls, parts: Iterable["Results"]) -> "Results":
        """Put runs together; of a case that was run twice the later one counts."""
        merged: Results | None = None
        for part in parts:
            if merged is None:
                merged = part
                continue
            again = {r.case for r in part.rows} | {n.case for n in part.lines}
            merged = cls(
                part.machine,
                part.settings,
                [r for r in merged.rows if r.case not in again] + part.rows,
                [n for n in merged.lines if n.case not in again] + part.lines,
            )
        if merged is None:
            raise ValueError("there is nothing to merge: pass at least one file of results")
        return merged


def _row(values: dict[str, Any]) -> Row:
    """A row from its JSON, which knows no tuples."""
    converted: dict[str, Any] = {
        "ours": [Sample(**s) for s in values["ours"]],
        "peer": [Sample(**s) for s in values["peer"]],
        "resident": tuple(values["resident"]),
        "judged": tuple(tuple(key) for key in values["judged"]),
    }
    return Row(**{**values, **converted})
