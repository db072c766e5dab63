"""A step to rows of the tables.  What does not fit is refused before anything is written."""

import json
import re
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from xorl_lab.errors import StoreError
from xorl_lab.store.schema import SPAN
from xorl_lab.store.tokens import LOGPROBS, pack_group
from xorl_lab.types import Group, Rollout, StepRecord

_LONE = re.compile("[\ud800-\udfff]")
PART = "reward:part:"
"""Begins the name of a part of the reward."""
MEAN = "mean:"
"""Begins the name of the mean of a stream."""


@dataclass(frozen=True, slots=True)
class GroupRow:
    """One group, ready to be written."""

    position: int
    """In the step, from 0."""
    prompt: str
    """The text."""
    row: str
    """JSON."""
    arrays: bytes
    """Tokens, log-probabilities and streams of prompt and completions."""
    rollouts: list["RolloutRow"] = field(default_factory=list)
    """Its rollouts, in order."""


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """One rollout, ready to be written."""

    values: tuple[object, ...]
    """Of the narrow row, from ``sample`` on."""
    text: str
    """The completion."""
    error: str | None
    """Why the reward failed."""
    measures: dict[str, float | None]
    """Parts of the reward and means of streams by name."""


def metric_bytes(metrics: Mapping[str, float], step: int) -> tuple[str, bytes]:
    """Metrics as JSON list of names and float64 values.

    Raises:
        StoreError: a value is not a number.
    """
    values = [number(value, f"metric {name!r} of step {step}") for name, value in metrics.items()]
    names = json.dumps(list(metrics), separators=(",", ":"))
    return names, np.array(values, "<f8").tobytes()


def group_rows(record: StepRecord) -> list[GroupRow]:
    """The groups of a step, ready to be written.

    Raises:
        StoreError: lengths disagree or a value is not a number.
    """
    return [_group_row(group, i, record.step) for i, group in enumerate(record.groups)]


def _group_row(group: Group, position: int, step: int) -> GroupRow:
    where = f"group {position} of step {step}"
    packed = pack_group(group, where)
    rows = [
        _rollout_row(rollout, means, (i, len(group.prompt_tokens)), f"rollout {i} of {where}")
        for i, (rollout, means) in enumerate(zip(group.rollouts, packed.means, strict=True))
    ]
    return GroupRow(position, clean(group.prompt), to_json(group.row), packed.data, rows)


def _rollout_row(
    rollout: Rollout, means: Mapping[str, float | None], place: tuple[int, int], where: str
) -> RolloutRow:
    sample, prompt_length = place
    reward = None if rollout.reward is None else number(rollout.reward, f"reward of {where}")
    advantage = number(rollout.advantage, f"advantage of {where}")
    values = (sample, reward is not None, reward, advantage, len(rollout.tokens), prompt_length,
              means.get(LOGPROBS), int(rollout.version), rollout.stop_reason)  # fmt: skip
    error = None if rollout.error is None else clean(rollout.error)
    measures: dict[str, float | None] = {
        PART + clean(name): number(value, f"reward part {name!r} of {where}")
        for name, value in rollout.reward_parts.items()
    }
    measures |= {MEAN + clean(name): mean for name, mean in means.items() if name != LOGPROBS}
    return RolloutRow(values, clean(rollout.text), error, measures)


def layout_id(connection: sqlite3.Connection, names: str) -> int:
    """Number of a list of names of metrics."""
    connection.execute("INSERT OR IGNORE INTO layouts (names) VALUES (?)", (names,))
    row = connection.execute("SELECT id FROM layouts WHERE names = ?", (names,)).fetchone()
    return int(row[0])


def insert_groups(
    connection: sqlite3.Connection, run: str, attempt: int, step: int, groups: Sequence[GroupRow]
) -> None:
    """Write the groups of a step with their rollouts."""
    rollouts = [(group, rollout) for group in groups for rollout in group.rollouts]
    group_id = _next_id(connection, "groups")
    first = _next_id(connection, "rollouts")
    connection.executemany(
        "INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?, ?)",
        ((group_id + g.position, attempt, step, g.position, g.prompt, g.row, g.arrays)
         for g in groups),
    )  # fmt: skip
    connection.executemany(
        "INSERT INTO rollouts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        ((first + i, attempt, step, group_id + group.position, group.position, *rollout.values)
         for i, (group, rollout) in enumerate(rollouts)),
    )  # fmt: skip
    connection.executemany(
        "INSERT INTO texts VALUES (?, ?, ?)",
        ((first + i, rollout.text, rollout.error) for i, (_, rollout) in enumerate(rollouts)),
    )
    numbers = _name_ids(connection, run, [r.measures for _, r in rollouts])
    connection.executemany(
        "INSERT INTO measures VALUES (?, ?)",
        sorted(
            (numbers[name] * SPAN + first + i, value)
            for i, (_, rollout) in enumerate(rollouts)
            for name, value in rollout.measures.items()
        ),
    )


def _name_ids(
    connection: sqlite3.Connection, run: str, measures: Sequence[Mapping[str, float | None]]
) -> dict[str, int]:
    names = list(dict.fromkeys(name for m in measures for name in m))
    connection.executemany(
        "INSERT OR IGNORE INTO names (run, name) VALUES (?, ?)", ((run, name) for name in names)
    )
    return dict(connection.execute("SELECT name, id FROM names WHERE run = ?", (run,)).fetchall())


def _next_id(connection: sqlite3.Connection, table: str) -> int:
    (last,) = connection.execute(f"SELECT max(id) FROM {table}").fetchone()
    return (last or 0) + 1


def to_json(value: object) -> str:
    """JSON in which NaN and infinity are allowed, and what JSON lacks becomes a number or text."""
    return json.dumps(_plain(value), separators=(",", ":"))


def _plain(value: Any) -> object:  # noqa: ANN401 (whatever a person put into settings or a row)
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, bytes | bytearray):
        return str(value)
    if isinstance(value, set | frozenset | Sequence):
        return [_plain(v) for v in value]
    if callable(getattr(value, "tolist", None)):  # numpy, torch, pandas
        return _plain(value.tolist())
    return str(value)


def clean(text: str) -> str:
    """Text that can be stored as UTF-8: halves of surrogate pairs become U+FFFD."""
    return text if text.isascii() else _LONE.sub("\ufffd", text)


def number(value: Any, what: str) -> float:  # noqa: ANN401 (numpy and torch numbers too)
    """A number as a float.

    Args:
        value: anything.
        what: names it in the message.

    Raises:
        StoreError: it is not a number.
    """
    if type(value) is float:
        return value
    if not isinstance(value, str):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            pass
    raise StoreError(f"{what} is {value!r}: pass a number")
