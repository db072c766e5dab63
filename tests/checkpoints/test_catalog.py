"""Which checkpoints there are: read once, never out of date, whatever is deleted meanwhile."""

import os
import threading
import time
from pathlib import Path

import pytest

from xorl_lab.checkpoints import Address, catalog, folder
from xorl_lab.errors import CheckpointError


def make(root: Path, name: str, *, model="m", kind="weights", size=10, **state) -> Address:
    address = Address(model, kind, name)
    writers: dict[str, folder.Writer] = {"a.bin": lambda path: path.write_bytes(b"x" * size)}
    folder.write(address.folder(root), writers, {"created": 1.0, **state}, overwrite=True)
    return address


def test_states_are_sorted_by_age_and_then_by_address(tmp_path):
    make(tmp_path, "b", created=2.0)
    make(tmp_path, "c", created=1.0)
    make(tmp_path, "a", created=1.0, model="n")
    make(tmp_path, "a", created=1.0, kind="sampler_weights")
    (tmp_path / "m" / "weights" / ".writing-1-2-x").mkdir()
    (tmp_path / "m" / "other").mkdir()
    (tmp_path / "file").write_text("")
    uris = [address.uri for address, _ in catalog.states(tmp_path)]
    assert uris == [
        "xorl://m/sampler_weights/a",
        "xorl://m/weights/c",
        "xorl://n/weights/a",
        "xorl://m/weights/b",
    ]
    assert [address.name for address, _ in catalog.states(tmp_path, "n")] == ["a"]
    assert catalog.states(tmp_path, "absent") == []
    assert [c.size_bytes for c in catalog.listing(tmp_path)] == [10] * 4


def test_what_did_not_change_is_read_once_and_what_did_is_read_again(tmp_path, monkeypatch):
    make(tmp_path, "a", mark=1)
    make(tmp_path, "b", mark=1)
    read: list[str] = []
    glance = catalog.glance

    def counted(path):
        read.append(path.name)
        return glance(path)

    monkeypatch.setattr(catalog, "glance", counted)
    for _ in range(3):
        assert [state["mark"] for _, state in catalog.states(tmp_path)] == [1, 1]
    assert sorted(read) == ["a", "b"]
    make(tmp_path, "a", mark=2)
    assert sorted(state["mark"] for _, state in catalog.states(tmp_path)) == [1, 2]
    catalog.expire(tmp_path, Address("m", "weights", "b"), 60)
    expiries = [state.get("expires_at") for _, state in catalog.states(tmp_path)]
    assert sum(e is not None for e in expiries) == 1
    assert sorted(read) == ["a", "a", "b", "b"]
    catalog.delete(tmp_path, Address("m", "weights", "a"))
    assert [address.name for address, _ in catalog.states(tmp_path)] == ["b"]


def test_one_whose_state_is_spoilt_is_left_out(tmp_path):
    make(tmp_path, "a")
    make(tmp_path, "b")
    (tmp_path / "m" / "weights" / "a" / "state.json").write_text("{")
    assert [address.name for address, _ in catalog.states(tmp_path)] == ["b"]


def test_an_expiry_is_set_and_taken_back(tmp_path):
    address = make(tmp_path, "a")
    catalog.expire(tmp_path, address, 3600)
    state = folder.read(address.folder(tmp_path))
    assert state["ttl_seconds"] == 3600
    assert abs(state["expires_at"] - time.time() - 3600) < 60
    assert catalog.sweep(tmp_path) == []
    catalog.expire(tmp_path, address, None)
    assert folder.read(address.folder(tmp_path))["expires_at"] is None
    assert catalog.sweep(tmp_path, now=1e12) == []
    catalog.expire(tmp_path, address, 0)
    with pytest.raises(CheckpointError, match="has expired"):
        folder.read(address.folder(tmp_path))
    assert catalog.sweep(tmp_path) == [address.uri]
    with pytest.raises(CheckpointError, match=r"^checkpoint\.not_found"):
        catalog.expire(tmp_path, address, 1)
    assert list((tmp_path / "m" / "weights").iterdir()) == []


def test_an_expiry_that_cannot_be_written_leaves_the_old_state(tmp_path, monkeypatch):
    address = make(tmp_path, "a")

    def refuse(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(OSError, match="No space"):
            catalog.expire(tmp_path, address, 5)
    assert "expires_at" not in folder.read(address.folder(tmp_path))
    assert [p.name for p in (tmp_path / "m" / "weights").iterdir()] == ["a"]


def test_the_disk_in_use_is_that_of_all_files(tmp_path):
    make(tmp_path, "a", size=1000)
    before = catalog.disk_use(tmp_path)
    make(tmp_path, "b", size=3000)
    one, other = (sum(p.stat().st_size for p in (tmp_path / "m" / "weights" / n).iterdir())
                  for n in "ab")  # fmt: skip
    assert (before, catalog.disk_use(tmp_path)) == (one, one + other)
    assert catalog.disk_use(tmp_path / "absent") == 0


def test_the_disk_in_use_while_checkpoints_come_and_go(tmp_path):
    """It raised FileNotFoundError, as a file was gone between being listed and being looked at."""
    kept = make(tmp_path, "kept", size=5000)
    fixed = sum(p.stat().st_size for p in kept.folder(tmp_path).iterdir())
    over = threading.Event()

    def churn():
        while not over.is_set():
            for name in "abcd":
                make(tmp_path, name, size=10)
            for name in "abcd":
                catalog.delete(tmp_path, Address("m", "weights", name))

    worker = threading.Thread(target=churn)
    worker.start()
    try:
        sizes = [catalog.disk_use(tmp_path) for _ in range(300)]
    finally:
        over.set()
        worker.join()
    assert min(sizes) >= fixed
    assert len(set(sizes)) > 1
    assert catalog.disk_use(tmp_path) == fixed


def test_a_file_that_vanishes_between_list_and_look_is_not_counted(tmp_path, monkeypatch):
    address = make(tmp_path, "a", size=1000)
    whole = catalog.disk_use(tmp_path)
    scandir = os.scandir

    class Late:
        """The folder's entries, of which one is gone when it is looked at."""

        def __init__(self, path):
            self.entries = list(scandir(path))

        def __enter__(self):
            for entry in self.entries:
                if entry.name == "a.bin":
                    os.unlink(entry.path)
            return self.entries

        def __exit__(self, *_):
            return False

    monkeypatch.setattr(os, "scandir", Late)
    assert catalog.disk_use(tmp_path) == whole - 1000
    assert not (address.folder(tmp_path) / "a.bin").exists()


def test_a_thousand_are_listed_quickly(tmp_path):
    for i in range(1000):
        place = tmp_path / f"run-{i % 20}" / "weights" / f"step-{i}"
        place.mkdir(parents=True)
        folder._write_state(place, {"created": float(i), "files": {"a": {"bytes": 1}}})
    began = time.process_time()
    first = catalog.states(tmp_path)
    middle = time.process_time()
    assert catalog.states(tmp_path) == first
    assert len(first) == 1000
    assert time.process_time() - middle < 0.15
    assert middle - began < 1.0
