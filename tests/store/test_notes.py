"""Tags and notes: left by readers, whatever the writer does."""

import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.store.support import record
from xorl_lab.errors import StoreError
from xorl_lab.store import Note, Reader, Store, notes
from xorl_lab.store.rows import clean


@pytest.fixture
def reader(store, writer):
    for step in range(1, 4):
        writer.step(record(step))
    return store.run("run")


def test_what_is_left_is_read_again_from_anywhere(store, reader):
    first, second, *_ = reader.ids().tolist()
    assert reader.notes() == {}
    both = Note(("hack", "look"), "odd")
    assert reader.annotate(first, tags=["hack", "look"], note="odd") == both
    assert reader.annotate(second, note="fine") == Note((), "fine")
    for one in (reader, Store(store.path.parent).run("run")):
        assert one.notes() == {first: both, second: Note((), "fine")}
        page = one.table([second, first])
        assert page["tags"] == [(), ("hack", "look")]
        assert page["note"] == ["fine", "odd"]
        frame = one.rollouts()
        assert frame["tags"].loc[first] == ("hack", "look")
        assert frame["note"].loc[second] == "fine"
        assert list(frame["tags"].iloc[2:]) == [()] * 16
        assert list(frame["note"].iloc[2:]) == [""] * 16


def test_what_is_not_given_stays_and_what_is_empty_goes(reader):
    number = int(reader.ids()[5])
    reader.annotate(number, tags=["a", "b", "a"], note="n")
    assert reader.annotate(number) == Note(("a", "b"), "n")
    assert reader.annotate(number, note="m") == Note(("a", "b"), "m")
    assert reader.annotate(number, tags=("c",)) == Note(("c",), "m")
    assert reader.annotate(number, note="") == Note(("c",), "")
    assert reader.annotate(number, tags=[]) == Note()
    assert reader.notes() == {}


def test_conditions_on_tags_and_notes(reader):
    ids = reader.ids().tolist()
    reader.annotate(ids[3], tags=["hack", "long"])
    reader.annotate(ids[4], tags=["hacked"], note="Looks HACKED")
    reader.annotate(ids[7], tags=["Hack"], note="fine")

    def found(*where):
        return reader.ids(where=where).tolist()

    assert found(("tags", "has", "hack")) == [ids[3]]
    assert found(("tags", "has", "long")) == [ids[3]]
    assert found(("tags", "has", "hack"), ("tags", "has", "long")) == [ids[3]]
    assert found(("tags", "has", "hac")) == found(("tags", "has", "%")) == []
    assert found(("tags", "contains", "HACK")) == [ids[3], ids[4], ids[7]]
    assert found(("tags", "!=", None)) == [ids[3], ids[4], ids[7]]
    assert found(("tags", "=", None)) == [i for i in ids if i not in (ids[3], ids[4], ids[7])]
    assert found(("note", "contains", "hacked")) == [ids[4]]
    assert found(("note", "!=", None)) == [ids[4], ids[7]]
    assert found(("note", "=", None), ("tags", "!=", None)) == [ids[3]]
    assert reader.count([("tags", "has", "hack"), ("note", "=", "")]) == 0
    for no_tag in ("hack long", "", 1):
        with pytest.raises(StoreError, match="a tag is"):
            found(("tags", "has", no_tag))
    assert list(reader.group_table(where=[("tags", "has", "hack")])["ids"]) == [ids[3:6]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tags": "hack"}, r"tags is 'hack': pass a list, \['hack'\]"),
        ({"tags": ["a b"]}, "a tag is 'a b': pass a word without white space and commas"),
        ({"tags": ["a,b"]}, "a tag is 'a,b': pass a word without"),
        ({"tags": ["a\u3000b"]}, "pass a word without"),
        ({"tags": ["ok", ""]}, "a tag is '': pass a word"),
        ({"tags": [1]}, "a tag is 1: pass text"),
        ({"tags": ["x" * 51]}, "a tag has 51 characters: pass 50 at most, or a note"),
        ({"tags": map(str, range(51))}, "there are 51 tags: pass 50 at most"),
        ({"note": "x" * 100_001}, "the note has 100,001 characters: pass text of at most 100,000"),
        ({"note": 1}, "the note is 1: pass text"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(reader, given, message):
    number = int(reader.ids()[0])
    reader.annotate(number, tags=["before"], note="before")
    with pytest.raises(StoreError, match=message):
        reader.annotate(number, **given)
    assert reader.notes() == {number: Note(("before",), "before")}


def test_the_longest_note_and_most_tags_fit(reader):
    number = int(reader.ids()[0])
    tags = tuple(f"{i:050}" for i in range(50))
    assert reader.annotate(number, tags=tags, note="漢" * 100_000) == Note(tags, "漢" * 100_000)
    assert reader.notes() == {number: Note(tags, "漢" * 100_000)}


def test_a_rollout_of_another_run_cannot_be_annotated(store, reader):
    with store.create(name="other", kind="grpo", model="tiny") as other:
        other.step(record(1))
    strange = int(store.run("other").ids()[0])
    for number in (strange, 10**9):
        with pytest.raises(StoreError, match=f"the run has no rollout {number}: take an id from"):
            reader.annotate(number, tags=["a"])
    assert store.run("other").notes() == {}


@given(
    st.lists(st.text(st.characters(), max_size=8), max_size=6),
    st.text(st.characters(), max_size=50),
)
@settings(deadline=None)
def test_any_text_is_refused_or_comes_back_as_documented(tmp_path_factory, tags, note):
    reader = _a_run(tmp_path_factory)
    number = int(reader.ids()[0])
    fits = all(t and "," not in t and not any(c.isspace() for c in t) for t in tags)
    if not fits:
        with pytest.raises(StoreError, match="pass a word"):
            reader.annotate(number, tags=tags, note=note)
        tags = []
    expected = Note(tuple(dict.fromkeys(map(clean, tags))), clean(note))
    assert reader.annotate(number, tags=tags, note=note) == expected
    assert reader.notes().get(number, Note()) == expected
    page = reader.table([number])
    assert (page["tags"], page["note"]) == ([expected.tags], [expected.note])
    for tag in tags:
        assert reader.ids(where=[("tags", "has", tag)]).tolist() == [number]
    if note:
        assert reader.ids(where=[("note", "=", note)]).tolist() == [number]
        assert reader.ids(where=[("note", "contains", note)]).tolist() == [number]


_made = {}


def _a_run(tmp_path_factory):
    """One run for all examples."""
    if "run" not in _made:
        store = Store(tmp_path_factory.mktemp("lab"))
        with store.create(name="run", kind="grpo", model="tiny") as writer:
            writer.step(record(1))
        _made["run"] = store.run("run")
    return _made["run"]


# Beside the writer


def test_a_run_under_way_is_annotated_and_its_writer_goes_on(store, writer, reader):
    number = int(reader.ids()[0])
    with store._database.read() as connection:
        before = connection.execute("SELECT token FROM leases").fetchall()
    reader.annotate(number, tags=["a"])
    writer.step(record(4))
    with store._database.read() as connection:
        assert connection.execute("SELECT token FROM leases").fetchall() == before
    assert reader.status().state == "running"
    assert reader.status().step == 4


def test_other_viewers_learn_that_something_was_left(reader):
    _, seen = reader.changed(None)
    number, before = int(reader.ids()[0]), reader.status()
    reader.annotate(number, note="a")
    changed, seen = reader.changed(seen)
    assert changed
    assert reader.status() == before  # it is not the run that did something
    reader.annotate(number, note="a")
    assert reader.changed(seen) == (False, seen)


def test_superseded_rollouts_keep_what_was_left(store, reader, writer):
    number = int(reader.ids()[-1])
    reader.annotate(number, tags=["gone"])
    writer.close()
    with store.resume("run", after=1) as again:
        again.step(record(2))
    assert number not in reader.ids()
    assert reader.notes() == {number: Note(("gone",), "")}
    assert reader.annotate(number, note="still") == Note(("gone",), "still")


def test_a_deleted_run_takes_its_notes_along(store, reader, writer):
    with store.create(name="other", kind="grpo", model="tiny") as other:
        other.step(record(1))
    mine, kept = int(reader.ids()[-1]), store.run("other")
    number = int(kept.ids()[0])
    kept.annotate(number, note="kept")
    reader.annotate(mine, note="gone")
    writer.close()
    store.delete("run")
    with pytest.raises(StoreError, match="was deleted"):
        reader.notes()
    with pytest.raises(StoreError, match=f"has no rollout {mine}"):
        reader.annotate(mine, note="too late")
    assert kept.notes() == {number: Note((), "kept")}
    store.delete("other")
    with store.create(name="next", kind="grpo", model="tiny") as again:
        for step in range(1, 5):
            again.step(record(step))
    after = store.run("next")
    assert {mine, number} <= set(after.ids().tolist())  # ids are used again
    assert after.notes() == {}
    with closing(sqlite3.connect(store.path)) as connection:
        assert connection.execute("SELECT count(*) FROM notes").fetchone() == (0,)


ANNOTATE = """
import sys
from xorl_lab.store import Store
reader = Store(sys.argv[1]).run("run")
who, ids = sys.argv[2], reader.ids().tolist()
print("ready", flush=True)
sys.stdin.readline()
for turn in range(100):
    reader.annotate(ids[turn % 3], tags=[who, str(turn)], note=who * (turn + 1))
    reader.annotate(ids[3], **({"tags": [str(turn)]} if who == "a" else {"note": str(turn)}))
"""


def test_processes_annotate_one_run_at_once_and_the_last_one_wins(root, store, writer, reader):
    crowd = [
        subprocess.Popen(
            [sys.executable, "-c", ANNOTATE, str(store.path.parent), who], cwd=root, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for who in "ab"
    ]  # fmt: skip
    for one in crowd:
        assert one.stdout.readline() == "ready\n", one.stderr.read()
    for one in crowd:
        one.stdin.write("\n")
        one.stdin.flush()
    step, slowest = 3, 0.0
    while any(one.poll() is None for one in crowd):
        began, step = time.perf_counter(), step + 1
        writer.step(record(step))
        slowest = max(slowest, time.perf_counter() - began)
    for one in crowd:
        _, errors = one.communicate(timeout=60)
        assert one.returncode == 0, errors
    assert reader.status().step == step > 10
    assert slowest < 5
    ids = reader.ids().tolist()
    left = reader.notes()
    for number, turn in zip(ids, (99, 97, 98), strict=False):
        (who, last), note = left[number].tags, left[number].note
        assert (last, note) == (str(turn), who * (turn + 1))  # of one of them, as a whole
    assert left[ids[3]] == Note(("99",), "99")


def test_a_writer_in_the_middle_of_a_transaction_is_waited_for(store, writer, reader):
    number, done = int(reader.ids()[0]), []
    with writer._database.write():
        thread = threading.Thread(
            target=lambda: done.append(reader.annotate(number, note="patient"))
        )
        thread.start()
        time.sleep(0.2)
        assert not done
        assert reader.notes() == {}  # readers do not wait
    thread.join(timeout=30)
    assert done == [Note((), "patient")]


def test_a_kill_in_the_middle_leaves_the_note_before(root, store, reader):
    number = int(reader.ids()[0])
    reader.annotate(number, note="before")
    code = f"""
import os, signal
from xorl_lab.store import Store, notes
reader = Store({str(store.path.parent)!r}).run("run")
own = notes.put
def put(*args):
    own(*args)
    os.kill(os.getpid(), signal.SIGKILL)
notes.put = put
reader.annotate({number}, note="after")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=root, check=False)
    assert done.returncode == -9
    assert reader.notes() == {number: Note((), "before")}


def test_limits_are_those_that_the_documentation_names():
    text = " ".join(Reader.annotate.__doc__.split())
    assert f"at most {notes.TAGS} of at most {notes.TAG} characters" in text
    assert f"at most {notes.NOTE:,} characters" in text
