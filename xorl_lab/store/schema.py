"""The tables, their version, and what a newer version adds to an older file."""

import sqlite3

VERSION = 2
"""Grows when the tables change; a newer file is refused."""
APPLICATION = 0x786F726C
"""``xorl``, in the header of the file."""
ENDLESS = 2**53
"""The last step of an attempt that nothing has superseded."""
SPAN = 2**40
"""Rollouts of a store, at most; see ``measures``."""

_FIRST = (
    # Updated in place: state, message, total, updated, revision, and attempts.upto, leases.
    # Everything else is only ever added.
    """CREATE TABLE runs (
        id TEXT PRIMARY KEY, name TEXT NOT NULL UNIQUE, kind TEXT NOT NULL, model TEXT NOT NULL,
        created REAL NOT NULL, settings TEXT NOT NULL, total INTEGER, parent TEXT,
        state TEXT NOT NULL, message TEXT NOT NULL DEFAULT '', updated REAL NOT NULL,
        revision INTEGER NOT NULL DEFAULT 0)""",
    # A run begins with attempt 1.  Resuming it after step s begins another one, and sets upto of
    # the earlier ones to s at most: their later steps stay, and are no longer a part of the run.
    f"""CREATE TABLE attempts (
        id INTEGER PRIMARY KEY, run TEXT NOT NULL, number INTEGER NOT NULL,
        after INTEGER NOT NULL, upto INTEGER NOT NULL DEFAULT {ENDLESS}, started REAL NOT NULL,
        UNIQUE (run, number))""",
    """CREATE TABLE leases (
        run TEXT PRIMARY KEY, token TEXT NOT NULL, pid INTEGER NOT NULL, host TEXT NOT NULL,
        place TEXT NOT NULL, started TEXT NOT NULL, renewed REAL NOT NULL)""",
    # Names of metrics in the order of the float64 values of a step.
    "CREATE TABLE layouts (id INTEGER PRIMARY KEY, names TEXT NOT NULL UNIQUE)",
    """CREATE TABLE steps (
        attempt INTEGER NOT NULL, step INTEGER NOT NULL, time REAL NOT NULL,
        layout INTEGER NOT NULL, data BLOB NOT NULL, PRIMARY KEY (attempt, step)) WITHOUT ROWID""",
    """CREATE TABLE groups (
        id INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, step INTEGER NOT NULL,
        position INTEGER NOT NULL, prompt TEXT NOT NULL, row TEXT NOT NULL,
        arrays BLOB NOT NULL)""",
    "CREATE INDEX groups_of_step ON groups (attempt, step, position)",
    # Narrow rows: filters and sorts read these alone.  NULL in a number is NaN; where scored = 0
    # the reward function failed.
    """CREATE TABLE rollouts (
        id INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, step INTEGER NOT NULL,
        group_id INTEGER NOT NULL, position INTEGER NOT NULL, sample INTEGER NOT NULL,
        scored INTEGER NOT NULL, reward REAL, advantage REAL, length INTEGER NOT NULL,
        prompt_length INTEGER NOT NULL, logprob REAL, version INTEGER NOT NULL,
        stop_reason TEXT NOT NULL)""",
    "CREATE INDEX rollouts_of_step ON rollouts (attempt, step)",
    "CREATE TABLE texts (rollout INTEGER PRIMARY KEY, text TEXT NOT NULL, error TEXT)",
    # Parts of rewards and means of streams.  The key is name * 2^40 + rollout: one number is found
    # several times as fast as a pair.
    """CREATE TABLE names (
        id INTEGER PRIMARY KEY, run TEXT NOT NULL, name TEXT NOT NULL, UNIQUE (run, name))""",
    "CREATE TABLE measures (key INTEGER PRIMARY KEY, value REAL)",
    """CREATE TABLE events (
        id INTEGER PRIMARY KEY, run TEXT NOT NULL, attempt INTEGER NOT NULL, time REAL NOT NULL,
        step INTEGER, kind TEXT NOT NULL, text TEXT NOT NULL, data TEXT NOT NULL)""",
    "CREATE INDEX events_of_run ON events (run, id)",
)
SINCE_2 = (
    # Tags, with a space between them, and a note that a person left on a rollout.
    """CREATE TABLE notes (
        rollout INTEGER PRIMARY KEY, tags TEXT NOT NULL, note TEXT NOT NULL,
        updated REAL NOT NULL)""",
    # Finds the groups on one prompt.  What was written by version 1 has no row.
    "CREATE TABLE prompts (group_id INTEGER PRIMARY KEY, hash INTEGER NOT NULL)",
    "CREATE INDEX prompts_by_hash ON prompts (hash)",
    # Ids are used again once a run was deleted.
    """CREATE TRIGGER note_of_rollout AFTER DELETE ON rollouts
        BEGIN DELETE FROM notes WHERE rollout = old.id; END""",
    """CREATE TRIGGER prompt_of_group AFTER DELETE ON groups
        BEGIN DELETE FROM prompts WHERE group_id = old.id; END""",
)
TABLES = (*_FIRST, *SINCE_2)


def version(connection: sqlite3.Connection) -> int:
    """The version of the tables of a file."""
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def upgrade(connection: sqlite3.Connection) -> None:
    """Add what an older file lacks, as a whole or not at all.

    A process of the older version may go on writing: nothing that it knows is changed.

    Args:
        connection: which may write, outside of a transaction.

    Raises:
        sqlite3.Error: the file cannot be written.
    """
    if version(connection) != 1:
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        if version(connection) == 1:  # else another process was quicker
            for statement in SINCE_2:
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        connection.rollback()
        raise


def supplement(connection: sqlite3.Connection) -> bool:
    """Let a connection that only reads see empty tables where an older file has none.

    Returns:
        Whether the file is older.
    """
    if version(connection) != 1:
        return False
    for statement in SINCE_2:
        if statement.startswith("CREATE TABLE"):
            connection.execute(statement.replace("CREATE TABLE", "CREATE TEMP TABLE", 1))
    return True
