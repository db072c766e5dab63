"""Export to parquet, for pandas, polars, DuckDB and the like."""

import importlib
import itertools
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xorl_lab.errors import StoreError
from xorl_lab.store.notes import Note
from xorl_lab.store.records import StoredRollout
from xorl_lab.store.rows import MEAN, PART, to_json

if TYPE_CHECKING:
    from xorl_lab.store.reader import Reader

FILES = ("metrics.parquet", "rollouts.parquet", "events.parquet")
"""What is written."""
_BATCH = 512
"""Rollouts in memory at a time."""
_FIELDS = {
    "id": "int64", "step": "int64", "group": "int64", "sample": "int64", "prompt": "string",
    "text": "string", "stop_reason": "string", "version": "int64", "reward": "float64",
    "advantage": "float64", "error": "string",
}  # fmt: skip


def write(reader: "Reader", folder: Path) -> list[Path]:
    """Write a run as three files.

    Args:
        reader: of the run.
        folder: made if it is missing.

    Raises:
        StoreError: pyarrow is not installed, or a file cannot be written.
    """
    try:
        arrow: Any = importlib.import_module("pyarrow")
        files: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise StoreError(
            "parquet needs pyarrow, which is not installed: pip install pyarrow, or use metrics() "
            "and rollouts(), which are pandas tables"
        ) from error
    paths = [folder / name for name in FILES]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        scalars = reader.scalars()
        metrics = {"step": scalars.steps, **scalars.columns}
        files.write_table(arrow.table(metrics), paths[0])
        _write_rollouts(reader, paths[1], arrow, files)
        events = [asdict(e) | {"data": to_json(e.data)} for e in reader.events()]
        files.write_table(arrow.Table.from_pylist(events, _events_schema(arrow)), paths[2])
    except OSError as error:
        raise StoreError(f"{folder} cannot be written ({error}): check space and rights") from error
    return paths


def _write_rollouts(reader: "Reader", path: Path, arrow: Any, files: Any) -> None:  # noqa: ANN401 (modules)
    names = reader.rollout_columns()
    parts = [n.removeprefix(PART) for n in names if n.startswith(PART)]
    own_streams = [n for n in names if n.startswith(MEAN) and n != f"{MEAN}logprobs"]
    streams = [n.removeprefix(MEAN) for n in own_streams]
    ids, floats = arrow.list_(arrow.int32()), arrow.list_(arrow.float32())
    schema = arrow.schema(
        [
            *[(name, getattr(arrow, kind)()) for name, kind in _FIELDS.items()],
            *[(PART + name, arrow.float64()) for name in parts],
            ("row", arrow.string()),
            ("tags", arrow.list_(arrow.string())),
            ("note", arrow.string()),
            ("prompt_tokens", ids),
            ("tokens", ids),
            ("logprobs", floats),
            *[(f"stream:{name}", floats) for name in streams],
        ]
    )
    with files.ParquetWriter(path, schema) as writer:
        walk, notes = reader.walk(), reader.notes()
        while some := list(itertools.islice(walk, _BATCH)):
            own = [notes.get(r.id, Note()) for r in some]
            columns = {
                **_columns(some, parts, streams),
                "tags": [note.tags for note in own],
                "note": [note.note for note in own],
            }
            writer.write_table(arrow.table(columns, schema=schema))


def _columns(
    rollouts: Sequence[StoredRollout], parts: Sequence[str], streams: Sequence[str]
) -> dict[str, list[Any]]:
    return {
        **{name: [getattr(r, name) for r in rollouts] for name in _FIELDS},
        **{PART + name: [r.reward_parts.get(name) for r in rollouts] for name in parts},
        "row": [to_json(r.row) for r in rollouts],
        **{n: [getattr(r, n) for r in rollouts] for n in ("prompt_tokens", "tokens", "logprobs")},
        **{f"stream:{name}": [r.streams.get(name) for r in rollouts] for name in streams},
    }


def _events_schema(arrow: Any) -> Any:  # noqa: ANN401 (a module, a schema)
    return arrow.schema(
        [
            ("id", arrow.int64()),
            ("time", arrow.float64()),
            ("step", arrow.int64()),
            ("kind", arrow.string()),
            ("text", arrow.string()),
            ("data", arrow.string()),
            ("superseded", arrow.bool_()),
        ]
    )
