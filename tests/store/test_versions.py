"""Files of version 1: brought up to date in place, or read as they are."""

import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest

from tests.store.support import record
from tests.store.test_damage import WITHOUT_CAPABILITIES
from xorl_lab.errors import StoreError
from xorl_lab.store import Note, Store, opening, schema
from xorl_lab.store.database import Database


def as_version_1(path):
    """What version 1 would have written."""
    with closing(sqlite3.connect(path)) as connection:
        for name in ("TABLE notes", "TABLE prompts", "TRIGGER note_of_rollout",
                     "TRIGGER prompt_of_group"):  # fmt: skip
            connection.execute(f"DROP {name}")
        connection.execute("PRAGMA user_version = 1")
        connection.commit()
        connection.executescript("PRAGMA incremental_vacuum")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def version(path):
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute("PRAGMA user_version").fetchone()[0]


def tables(path):
    with closing(sqlite3.connect(path)) as connection:
        return sorted(connection.execute("SELECT type, name, sql FROM sqlite_master").fetchall())


@pytest.fixture
def old(store):
    """A store of version 1 with a run of 5 steps."""
    with store.create(name="run", kind="grpo", model="tiny") as writer:
        for step in range(1, 6):
            writer.step(record(step))
    store.close()
    as_version_1(store.path)
    return store.path


def test_version_1_is_what_is_left(old, tmp_path):
    with closing(sqlite3.connect(tmp_path / "other")) as connection:
        for statement in schema.TABLES[: -len(schema.SINCE_2)]:
            connection.execute(statement)
    assert tables(tmp_path / "other") == tables(old)


def test_opening_brings_a_file_up_to_date_and_loses_nothing(old, tmp_path):
    reader = Store(old.parent).run("run")
    assert version(old) == schema.VERSION
    assert [reader.groups(s) for s in range(1, 6)] == [record(s).groups for s in range(1, 6)]
    number = int(reader.ids()[0])
    assert reader.annotate(number, tags=["a"]) == Note(("a",), "")
    with Store(old.parent).resume("run", after=5) as writer:
        writer.step(record(6))
    assert reader.notes() == {number: Note(("a",), "")}
    assert tables(old) == tables(Store(tmp_path / "new").path)
    with reader._database.read() as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


OPEN = """
import sys
from xorl_lab.store import Store
sys.stdin.readline()
reader = Store(sys.argv[1]).run("run")
reader.annotate(int(reader.ids()[int(sys.argv[2])]), note=sys.argv[2])
"""


def test_many_processes_may_bring_it_up_to_date_at_once(old, root):
    crowd = [
        subprocess.Popen(
            [sys.executable, "-c", OPEN, str(old.parent), str(i)], cwd=root, text=True,
            stdin=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for i in range(5)
    ]  # fmt: skip
    for one in crowd:
        one.stdin.write("\n")
        one.stdin.flush()
    for one in crowd:
        _, errors = one.communicate(timeout=120)
        assert one.returncode == 0, errors
    reader = Store(old.parent).run("run")
    assert [n.note for n in reader.notes().values()] == ["0", "1", "2", "3", "4"]


KILLED = """
import os, signal, sys
from xorl_lab.store import schema
from xorl_lab.store.database import connect
from pathlib import Path
connection = connect(Path(sys.argv[1]), "rw")
left = int(sys.argv[2])
def failpoint(statement):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
connection.set_trace_callback(failpoint)
schema.upgrade(connection)
"""


@pytest.mark.parametrize("point", range(12))
def test_a_kill_on_the_way_leaves_one_version_or_the_other(old, root, point):
    before = tables(old)
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(old), str(point)], cwd=root, check=False
    )
    last = 1 + 1 + 1 + len(schema.SINCE_2) + 1 + 1  # pragma, begin, pragma, pragma, commit
    assert done.returncode == (0 if point >= last else -9)
    assert version(old) == (2 if point >= last else 1)
    assert (tables(old) == before) == (point < last)
    assert Store(old.parent).run("run").count() == 30
    assert version(old) == 2


READ = """
import sys
from xorl_lab.errors import StoreError
from xorl_lab.store import Store
reader = Store(sys.argv[1]).run("run")
ids = reader.ids().tolist()
print(len(ids), reader.notes(), set(reader.table(ids)["tags"]), len(reader.same_prompt(ids[0])))
print(reader.count([("tags", "has", "a")]), len(reader.group_table()))
try:
    reader.annotate(ids[0], note="no")
except StoreError as error:
    print(error)
"""


def test_an_old_file_that_cannot_be_written_is_read_as_it_is(old, root):
    before = old.read_bytes()
    old.chmod(0o444)
    old.parent.chmod(0o555)
    try:
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_CAPABILITIES, READ, str(old.parent)], cwd=root,
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    finally:
        old.parent.chmod(0o755)
    first, second, third = done.stdout.splitlines()
    assert first == "30 {} {()} 15"
    assert second == "0 10"
    assert "cannot be opened or written" in third
    assert old.read_bytes() == before


def test_a_reader_of_an_old_file_sees_what_is_left_once_another_brought_it_up_to_date(
    old, monkeypatch
):
    monkeypatch.setattr(opening, "upgrade", lambda _: None)  # as if it could not be written then
    reader = Store(old.parent).run("run")
    assert reader.notes() == {}
    assert version(old) == 1
    number = int(reader.ids()[0])
    assert reader.annotate(number, note="now") == Note((), "now")
    assert version(old) == 2
    assert reader.notes() == {number: Note((), "now")}


def test_a_full_disk_does_not_keep_an_old_file_from_being_read(old, monkeypatch):
    def full(connection):
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages}")
        schema.upgrade(connection)

    monkeypatch.setattr(opening, "upgrade", full)
    assert Store(old.parent).run("run").count() == 30
    assert version(old) == 1


def test_another_error_on_the_way_is_reported(old, monkeypatch):
    def broken(_):
        raise sqlite3.OperationalError("the disk does odd things")

    monkeypatch.setattr(opening, "upgrade", broken)
    with pytest.raises(StoreError, match="the disk does odd things: check the disk"):
        Store(old.parent)


def test_a_writer_of_version_1_goes_on_in_a_file_that_was_brought_up_to_date(old):
    """Its statements are those of version 1, which knows neither hashes nor notes."""
    before = Database(old, writable=True)
    Store(old.parent)
    reader = Store(old.parent).run("run")
    with before.write() as connection:
        for table, key in (("groups", "id"), ("rollouts", "id"), ("texts", "rollout")):
            connection.execute(f"CREATE TEMP TABLE some AS SELECT * FROM {table} WHERE {key} <= 6")
            connection.execute(f"UPDATE some SET {key} = {key} + 1000")
            if table == "rollouts":
                connection.execute("UPDATE some SET group_id = group_id + 1000")
            connection.execute(f"INSERT INTO {table} SELECT * FROM some")
            connection.execute("DROP TABLE some")
    before.close()
    assert reader.count() == 36
    found = reader.same_prompt(1)
    assert found == reader.same_prompt(1001)
    assert len(found) == 15 + 3
    assert {1, 1001, 1002, 1003} <= set(found)
