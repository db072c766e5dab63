"""Finding words in texts.

SQLite's own LIKE ends at a NUL and knows upper and lower case of A to Z alone.
"""

import sqlite3

_BYTES, _LETTERS = "holds_bytes", "holds_letters"
"""Names of two functions in SQL, each of a text as a blob and what to find in it."""


def register(connection: sqlite3.Connection) -> None:
    """Let a connection understand what :func:`condition` returns."""
    connection.create_function(_BYTES, 2, _holds_bytes, deterministic=True)
    connection.create_function(_LETTERS, 2, _holds_letters, deterministic=True)


def condition(column: str, words: str) -> tuple[str, bytes | str]:
    """The condition that a column contains words, upper or lower case, and the value it is with.

    Letters A to Z match themselves in either case.  Where the words have other letters that know
    upper and lower case, all letters match as :meth:`str.casefold` has it, which takes some ten
    times as long on texts that are not ASCII.

    >>> condition("t.text", "Because")
    ('holds_bytes(CAST(t.text AS BLOB), ?)', b'because')

    Args:
        column: an expression of SQL.
        words: without halves of surrogate pairs.
    """
    if all(c.isascii() or c == c.casefold() == c.lower() == c.upper() for c in words):
        return f"{_BYTES}(CAST({column} AS BLOB), ?)", words.encode().lower()
    return f"{_LETTERS}(CAST({column} AS BLOB), ?)", words.casefold()


def _holds_bytes(text: bytes | None, words: bytes) -> bool:
    return text is not None and words in text.lower()


def _holds_letters(text: bytes | None, words: str) -> bool:
    return text is not None and words in text.decode().casefold()
