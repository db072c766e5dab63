"""Rollouts as one HTML file that needs no network and no kernel."""

import base64
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from xorl_lab.errors import ConfigError
from xorl_lab.widgets.export import write_page
from xorl_lab.widgets.findings import Findings
from xorl_lab.widgets.tokens import Spelling, rollout_answer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xorl_lab.store import Reader
    from xorl_lab.types import InspectorCommands

IN_A_FILE = "This page is a copy: open the run in a notebook to draw, annotate or copy from it."


def export_rollouts(
    readers: "Sequence[Reader]",
    path: str | Path,
    commands: "InspectorCommands | None" = None,
    *,
    rollouts: int = 200,
) -> Path:
    """Write the newest rollouts of runs, with all their tokens, into one file.

    Args:
        readers: of the runs.
        path: of the file; what was there is replaced.
        commands: that know the tokenizer; without them tokens are ids.
        rollouts: the most of each run.

    Returns:
        The path.

    Raises:
        ConfigError: there is no run, or the front end is not built.
    """
    if not readers:
        raise ConfigError("there are no runs to export: pass at least one reader")
    spelling = Spelling(commands)
    runs: list[dict[str, str]] = []
    places: list[tuple[int, int]] = []
    for r, reader in enumerate(readers):
        info = reader.info
        ids = reader.ids(order_by="id", descending=True)
        kinds = f"{info.kind}, {min(rollouts, len(ids))} of {len(ids)} rollouts"
        runs.append({"name": info.name, "kind": kinds, "model": info.model})
        places += [(r, i) for i in ids[:rollouts].tolist()]
    columns = Findings(readers).rows(
        np.array([r for r, _ in places], np.int32), np.array([i for _, i in places], np.int64)
    )
    prompts: dict[tuple[int, bytes], int] = {}
    answers: list[dict[str, Any]] = []
    same: list[int] = []
    for r, i in places:
        buffers: list[bytes] = []
        answer = rollout_answer(readers[r], i, spelling, buffers) | {"run": r}
        key = (r, buffers[0])  # the ids of the prompt
        same.append(prompts.setdefault(key, len(prompts)))
        texts = [base64.b64encode(data).decode() for data in buffers]
        answers.append({"content": answer, "buffers": texts})
    snapshot = {
        "setup": {"runs": runs, "reason": IN_A_FILE},
        "scalars": list(dict.fromkeys(n for reader in readers for n in reader.rollout_columns())),
        "columns": columns | {"same": same},
        "rollouts": answers,
    }
    title = "Rollouts of " + ", ".join(run["name"] for run in runs)
    return write_page(Path(path), title, "inspector", {"inspector": snapshot})
