"""Groups and rollouts as they were recorded."""

import json
import math
import sqlite3
from collections.abc import Sequence

from xorl_lab.errors import StoreError
from xorl_lab.store.records import StoredRollout
from xorl_lab.store.rows import PART
from xorl_lab.store.schema import SPAN
from xorl_lab.store.tokens import unpack_group
from xorl_lab.types import Group


def stored(connection: sqlite3.Connection, run: str, rollout: int) -> StoredRollout:
    """One rollout, those of superseded steps too.

    Raises:
        StoreError: the run has no such rollout.
    """
    row = connection.execute(
        "SELECT r.group_id, r.sample FROM rollouts r JOIN attempts a ON a.id = r.attempt "
        "WHERE r.id = ? AND a.run = ?",
        (rollout, run),
    ).fetchone()
    if row is None:
        raise StoreError(f"the run has no rollout {rollout}: take an id from rollouts()")
    group, sample = row
    return rollouts_of(connection, group)[sample]


def stored_many(connection: sqlite3.Connection, ids: Sequence[int]) -> list[StoredRollout]:
    """Rollouts in the order of their ids, each group unpacked once."""
    rows = connection.execute(
        "SELECT DISTINCT r.group_id FROM json_each(?) j JOIN rollouts r ON r.id = j.value",
        (json.dumps(ids),),
    ).fetchall()
    found = {r.id: r for (group,) in rows for r in rollouts_of(connection, group)}
    return [found[i] for i in ids]


def live(connection: sqlite3.Connection, run: str) -> list[int]:
    """Ids of all groups of a run, without those of superseded steps, in order."""
    rows = connection.execute(
        "SELECT g.id FROM attempts a JOIN groups g ON g.attempt = a.id AND g.step <= a.upto "
        "WHERE a.run = ? ORDER BY a.number, g.step, g.position",
        (run,),
    )
    return [group for (group,) in rows]


def groups_of(connection: sqlite3.Connection, run: str, step: int) -> list[Group]:
    """The groups of a step as they were recorded."""
    found = connection.execute(
        "SELECT g.id, g.prompt, g.row, g.arrays FROM attempts a JOIN groups g "
        "ON g.attempt = a.id AND g.step <= a.upto WHERE a.run = ? AND g.step = ? "
        "ORDER BY g.position",
        (run, step),
    ).fetchall()
    return [
        Group(
            prompt,
            unpack_group(arrays)[0].tolist(),
            [r.rollout() for r in rollouts_of(connection, group)],
            json.loads(row),
        )
        for group, prompt, row, arrays in found
    ]


def rollouts_of(connection: sqlite3.Connection, group: int) -> list[StoredRollout]:
    """The rollouts of a group, in order of sample index."""
    prompt, row, data = connection.execute(
        "SELECT prompt, row, arrays FROM groups WHERE id = ?", (group,)
    ).fetchone()
    prompt_tokens, values = unpack_group(data)
    parts = _parts(connection, group)
    rows = connection.execute(
        "SELECT r.id, r.step, r.position, r.sample, r.scored, r.reward, r.advantage, r.version, "
        "r.stop_reason, t.text, t.error FROM groups g JOIN rollouts r ON r.attempt = g.attempt "
        "AND r.step = g.step AND r.group_id = g.id JOIN texts t ON t.rollout = r.id "
        "WHERE g.id = ? ORDER BY r.sample",
        (group,),
    ).fetchall()
    return [
        StoredRollout(
            id=number,
            step=step,
            group=position,
            sample=sample,
            prompt=prompt,
            prompt_tokens=prompt_tokens,
            row=json.loads(row),
            tokens=own.tokens,
            logprobs=own.logprobs,
            streams=own.streams,
            top_ids=own.top_ids,
            top_logprobs=own.top_logprobs,
            text=text,
            stop_reason=stop_reason,
            version=version,
            reward=_float(reward) if scored else None,
            reward_parts=parts.get(number, {}),
            advantage=_float(advantage),
            error=error,
        )
        for (number, step, position, sample, scored, reward, advantage, version, stop_reason,
             text, error), own in zip(rows, values, strict=True)
    ]  # fmt: skip


def _parts(connection: sqlite3.Connection, group: int) -> dict[int, dict[str, float]]:
    """Parts of the rewards of a group, by rollout and name."""
    values = connection.execute(
        "SELECT r.id, n.name, m.value FROM groups g JOIN attempts a ON a.id = g.attempt "
        "JOIN names n ON n.run = a.run CROSS JOIN rollouts r ON r.attempt = g.attempt "
        "AND r.step = g.step AND r.group_id = g.id "
        f"JOIN measures m ON m.key = n.id * {SPAN} + r.id "
        "WHERE g.id = ? AND n.name LIKE ? ORDER BY n.id",
        (group, PART + "%"),
    )
    found: dict[int, dict[str, float]] = {}
    for rollout, name, value in values:
        found.setdefault(rollout, {})[name.removeprefix(PART)] = _float(value)
    return found


def _float(value: float | None) -> float:
    """A number of a table, in which NULL is NaN."""
    return math.nan if value is None else value
