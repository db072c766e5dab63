"""Which groups are on the same prompt: by a hash of its tokens."""

import hashlib
import json
import sqlite3
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from xorl_lab.errors import StoreError
from xorl_lab.store.arrays import unpack

_LIVE = "FROM attempts a CROSS JOIN rollouts r ON r.attempt = a.id AND r.step <= a.upto"


def insert(
    connection: sqlite3.Connection, attempt: int, step: int, prompts: Sequence[Sequence[int]]
) -> None:
    """Enter the prompts of the groups of a step, in order of position, after the groups."""
    connection.executemany(
        "INSERT INTO prompts SELECT id, ? FROM groups WHERE attempt = ? AND step = ? "
        "AND position = ?",
        ((_hash(np.asarray(tokens, "<i4")), attempt, step, i) for i, tokens in enumerate(prompts)),
    )


class Prompts:
    """The groups of a run by prompt.

    Groups that version 1 wrote were not hashed.  Those as long as a prompt that is looked for are
    hashed when it is, once in the life of this object.

    Args:
        run: id of the run.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._found: dict[int, int] = {}
        """Hashes of groups that have no row."""

    def same(self, connection: sqlite3.Connection, rollout: int) -> list[int]:
        """Ids of all rollouts on the prompt of a rollout, by step, without superseded steps.

        Raises:
            StoreError: the run has no such rollout.
        """
        row = connection.execute(
            "SELECT r.group_id, r.prompt_length, p.hash FROM rollouts r JOIN attempts a "
            "ON a.id = r.attempt LEFT JOIN prompts p ON p.group_id = r.group_id "
            "WHERE r.id = ? AND a.run = ?",
            (rollout, self._run),
        ).fetchone()
        if row is None:
            raise StoreError(f"the run has no rollout {rollout}: take an id from ids()")
        group, length, wanted = row
        if wanted is None:
            wanted = self._hash_of(connection, group)
        older = [g for g in self._older(connection, length)
                 if self._hash_of(connection, g) == wanted]  # fmt: skip
        rows = connection.execute(
            f"SELECT r.id {_LIVE} WHERE a.run = ? AND r.group_id IN (SELECT group_id FROM prompts "
            "WHERE hash = ? UNION ALL SELECT value FROM json_each(?)) "
            "ORDER BY r.step, r.position, r.sample",
            (self._run, wanted, json.dumps(older)),
        )
        return [number for (number,) in rows]

    def _older(self, connection: sqlite3.Connection, length: int) -> list[int]:
        """Groups without a row whose prompt has a length."""
        rows = connection.execute(
            f"SELECT DISTINCT r.group_id {_LIVE} WHERE a.run = ? AND r.prompt_length = ? "
            "AND r.group_id NOT IN (SELECT group_id FROM prompts)",
            (self._run, length),
        )
        return [group for (group,) in rows]

    def _hash_of(self, connection: sqlite3.Connection, group: int) -> int:
        if group not in self._found:
            (data,) = connection.execute(
                "SELECT arrays FROM groups WHERE id = ?", (group,)
            ).fetchone()
            self._found[group] = _hash(unpack(data)["prompt"])
        return self._found[group]


def _hash(tokens: NDArray[np.int32]) -> int:
    """64 bits of the ids: two prompts of a run share them by chance once in 10^10 runs."""
    data = tokens.astype("<i4").tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)
