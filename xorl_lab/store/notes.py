"""Tags and notes that a person leaves on rollouts: the one thing that a reader writes."""

import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass

from xorl_lab.errors import StoreError
from xorl_lab.store.rows import clean

TAG = 50
"""The most characters of a tag."""
TAGS = 50
"""The most tags of a rollout."""
NOTE = 100_000
"""The most characters of a note."""


@dataclass(frozen=True, slots=True)
class Note:
    """What a person left on a rollout."""

    tags: tuple[str, ...] = ()
    """Each once, in the order in which they were given."""
    note: str = ""
    """Free text."""


def checked(
    tags: Sequence[str] | None, note: str | None
) -> tuple[tuple[str, ...] | None, str | None]:
    """Tags, each once, and a note as they can be stored; None stays None.

    Raises:
        StoreError: one is not text, too long, or a tag holds white space or a comma.
    """
    if note is not None and (not isinstance(note, str) or len(note) > NOTE):
        what = f"has {len(note):,} characters" if isinstance(note, str) else f"is {note!r}"
        raise StoreError(f"the note {what}: pass text of at most {NOTE:,} characters")
    if isinstance(tags, str):
        raise StoreError(f"tags is {tags!r}: pass a list, {[tags]!r}")
    once = None if tags is None else tuple(dict.fromkeys(map(one_tag, tags)))
    if once is not None and len(once) > TAGS:
        raise StoreError(f"there are {len(once)} tags: pass {TAGS} at most")
    return once, None if note is None else clean(note)


def put(
    connection: sqlite3.Connection,
    run: str,
    rollout: int,
    tags: tuple[str, ...] | None,
    note: str | None,
) -> Note:
    """Set what is not None of the tags and the note of a rollout; what it has then.

    Args:
        connection: in a transaction that writes.
        run: id of the run.
        rollout: its id.
        tags: as :func:`checked`.
        note: as :func:`checked`.

    Raises:
        StoreError: the run has no such rollout.
    """
    row = connection.execute(
        "SELECT n.tags, n.note FROM rollouts r JOIN attempts a ON a.id = r.attempt "
        "LEFT JOIN notes n ON n.rollout = r.id WHERE r.id = ? AND a.run = ?",
        (rollout, run),
    ).fetchone()
    if row is None:
        raise StoreError(f"the run has no rollout {rollout}: take an id from ids()")
    old = Note(split(row[0]), row[1] or "")
    new = Note(old.tags if tags is None else tags, old.note if note is None else note)
    if new == old:
        return new
    connection.execute("DELETE FROM notes WHERE rollout = ?", (rollout,))
    if new != Note():
        connection.execute(
            "INSERT INTO notes VALUES (?, ?, ?, ?)",
            (rollout, " ".join(new.tags), new.note, time.time()),
        )
    connection.execute("UPDATE runs SET revision = revision + 1 WHERE id = ?", (run,))
    return new


def of_run(connection: sqlite3.Connection, run: str) -> dict[int, Note]:
    """All that was left on the rollouts of a run, by id of the rollout."""
    rows = connection.execute(
        "SELECT n.rollout, n.tags, n.note FROM notes n JOIN rollouts r ON r.id = n.rollout "
        "JOIN attempts a ON a.id = r.attempt WHERE a.run = ? ORDER BY n.rollout",
        (run,),
    )
    return {rollout: Note(split(tags), note) for rollout, tags, note in rows}


def split(tags: str | None) -> tuple[str, ...]:
    """Tags of a row of the table, which a rollout need not have."""
    return tuple(tags.split(" ")) if tags else ()


def one_tag(tag: object) -> str:
    """A tag as it is stored.

    Raises:
        StoreError: it is not text, too long, or holds white space or a comma.
    """
    if not isinstance(tag, str):
        raise StoreError(f"a tag is {tag!r}: pass text")
    if not tag or any(c == "," or c.isspace() for c in tag):
        raise StoreError(f"a tag is {tag!r}: pass a word without white space and commas")
    if len(tag) > TAG:
        raise StoreError(f"a tag has {len(tag):,} characters: pass {TAG} at most, or a note")
    return clean(tag)
