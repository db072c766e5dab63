"""Files that are damaged, foreign, newer, full or not to be written: a clear error, and no harm."""

import os
import re
import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest

from tests.store.support import record
from xorl_lab.errors import StoreError
from xorl_lab.store import Store, schema
from xorl_lab.store.store import FILE


@pytest.fixture
def filled(store):
    """A closed store with a run of 20 steps."""
    with store.create(name="run", kind="grpo", model="tiny") as writer:
        for step in range(1, 21):
            writer.step(record(step, length=50))
    store.close()
    with closing(sqlite3.connect(store.path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert [p.name for p in store.path.parent.iterdir()] == [FILE]
    return store


def refused(path, message):
    """Opening raises, and the file stays as it is."""
    before = path.read_bytes()
    with pytest.raises(StoreError) as error:
        Store(path.parent)
    assert re.search(message, str(error.value)), str(error.value)
    assert str(path) in str(error.value)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "content",
    [b"not a database", b"\0" * 100_000, os.urandom(8192), b"SQLite format 3\0" + b"\0" * 84],
    ids=["text", "zeros", "random", "header alone"],
)
def test_what_is_no_database_is_left_alone(tmp_path, content):
    path = tmp_path / FILE
    path.write_bytes(content)
    refused(path, "is damaged .* it was left as it is: move it aside")


def test_a_foreign_database_is_left_alone(tmp_path):
    path = tmp_path / FILE
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE mine (a)")
    refused(path, "is a database, but not a store of runs")


def test_a_newer_store_is_left_alone(filled):
    with closing(sqlite3.connect(filled.path)) as connection:
        connection.execute(f"PRAGMA user_version = {schema.VERSION + 1}")
    refused(filled.path, r"has schema 3 and this version of xorl_lab reads up to 2: update")


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.9])
def test_a_cut_off_store_is_an_error_where_it_matters_and_is_left_alone(filled, keep):
    size = filled.path.stat().st_size
    os.truncate(filled.path, int(size * keep))
    before = filled.path.read_bytes()
    with pytest.raises(StoreError, match=r"is damaged \(.*\); it was left as it is"):
        Store(filled.path.parent).run("run").rollouts()
    assert filled.path.read_bytes() == before


def test_an_empty_file_beside_a_full_log_is_an_error(tmp_path):
    (tmp_path / FILE).touch()
    (tmp_path / f"{FILE}-wal").write_bytes(b"log")
    with pytest.raises(StoreError, match=r"is empty but runs.sqlite-wal is not"):
        Store(tmp_path)
    assert (tmp_path / f"{FILE}-wal").read_bytes() == b"log"


@pytest.mark.parametrize("at", range(0, 100, 7))
def test_damaged_pages_never_give_wrong_values_silently_or_other_errors(filled, at):
    expected = [filled.run("run").groups(s) for s in range(1, 21)]
    filled.run("run").close()
    data = bytearray(filled.path.read_bytes())
    start = len(data) * at // 100
    data[start : start + 300] = os.urandom(300)
    filled.path.write_bytes(data)
    try:
        reader = Store(filled.path.parent).run("run")
        reader.status(), reader.events(), reader.scalars(), reader.rollouts()
        found = [reader.groups(s) for s in range(1, 21)]
    except StoreError:
        return
    assert len(found) == len(expected)


def test_a_half_made_store_is_made(tmp_path):
    path = tmp_path / FILE
    path.touch()
    Store(tmp_path)
    path.unlink()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")  # killed before the tables were made
    assert Store(tmp_path).runs() == []


HALF_WAY = """
import os, signal, sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("PRAGMA cache_size = 1")
connection.execute("BEGIN IMMEDIATE")
connection.execute("CREATE TABLE runs (a)")
for _ in range(100):
    connection.execute("INSERT INTO runs VALUES (zeroblob(5000))")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_was_half_made_before_the_first_commit_is_undone(tmp_path):
    subprocess.run([sys.executable, "-c", HALF_WAY, str(tmp_path / FILE)], check=False)
    assert (tmp_path / f"{FILE}-journal").exists()
    assert (tmp_path / FILE).stat().st_size > 0
    assert Store(tmp_path).runs() == []


def test_a_full_disk_is_an_error_and_costs_nothing(store, writer):
    writer.step(record(1))
    connection = writer._database._open()
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages + 5}")
    with pytest.raises(StoreError, match=r"the disk that holds .* is full: free some space"):
        writer.step(record(2, groups=8, length=500))
    assert store.run("run").scalars().steps.tolist() == [1]
    connection.execute("PRAGMA max_page_count = 1000000")
    writer.step(record(2, groups=8, length=500))
    assert store.run("run").groups(2) == record(2, groups=8, length=500).groups


LIMITED = """
import resource, sys
from tests.store.support import record
from xorl_lab.errors import StoreError
from xorl_lab.store import Store
store = Store(sys.argv[1])
writer = store.create(name="run", kind="grpo", model="tiny")
writer.step(record(1))
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))
try:
    for step in range(2, 100):
        writer.step(record(step, groups=4, length=200))
except StoreError as error:
    print(step, error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
writer.step(record(step, groups=4, length=200))
writer.close()
"""


def test_a_file_that_may_not_grow_is_an_error_and_costs_nothing(root, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)], cwd=root, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    step, _, message = done.stdout.partition(" ")
    assert str(tmp_path) in message
    assert "check the disk" in message or "is full" in message
    reader = Store(tmp_path).run("run")
    assert reader.scalars().steps.tolist() == list(range(1, int(step) + 1))
    assert reader.groups(int(step)) == record(int(step), groups=4, length=200).groups


WITHOUT_RIGHTS = """
import sys
from xorl_lab.errors import StoreError
from xorl_lab.store import Store
try:
    store = Store(sys.argv[1])
    reader = store.run("run")
    print(reader.status().step, reader.count(), len(store.frame()))
    store.create(name="another", kind="grpo", model="tiny")
except StoreError as error:
    print(error)
"""


# Lets the permissions of files hold for root too (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH).
WITHOUT_CAPABILITIES = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
for capability in (1, 2):
    libc.prctl(24, capability)
os.execv(sys.executable, [sys.executable, "-c", *sys.argv[1:]])
"""


def without_rights(root, folder):
    """Open a store in a folder that must not be written; what is printed."""
    folder.chmod(0o555)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_CAPABILITIES, WITHOUT_RIGHTS, str(folder)], cwd=root,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    folder.chmod(0o755)
    return done.stdout.splitlines()


def test_a_read_only_folder_can_be_read_and_says_so_when_written(filled, root):
    filled.path.chmod(0o444)
    first, second = without_rights(root, filled.path.parent)
    assert first == "20 120 1"
    assert re.search("cannot be opened or written .* you may write to it", second)


def test_a_store_cannot_be_made_in_a_read_only_folder(root, tmp_path):
    folder = tmp_path / "lab"
    folder.mkdir()
    (line,) = without_rights(root, folder)
    assert re.search("cannot be opened or written .* you may write to it", line)


def test_a_folder_that_is_a_file_is_an_error(tmp_path):
    (tmp_path / "lab").write_text("mine")
    with pytest.raises(StoreError, match=r"the folder .* cannot be made"):
        Store(tmp_path / "lab")
    assert (tmp_path / "lab").read_text() == "mine"
