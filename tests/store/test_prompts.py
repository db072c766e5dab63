"""Rollouts on the same prompt: by its tokens, in every step."""

import sqlite3
from contextlib import closing

import numpy as np
import pytest

from tests.store.support import rollout
from xorl_lab.errors import StoreError
from xorl_lab.store import prompts
from xorl_lab.types import Group, StepRecord

PROMPTS = [
    ("one", [1, 2, 3]),
    ("two", [1, 2, 4]),
    ("one", [3, 2, 1]),
    ("", []),
    ("three", [1, 2, 3]),
]


@pytest.fixture
def reader(store, writer):
    """Four steps: a step has the prompts in another order than the one before."""
    rng = np.random.default_rng(0)
    with store.create(name="other", kind="grpo", model="tiny") as other:
        for step in range(1, 5):
            order = [PROMPTS[(i + step) % 5] for i in range(5)]
            groups = [Group(t, ids, [rollout(rng, 4) for _ in range(2)]) for t, ids in order]
            writer.step(StepRecord(step, {}, groups))
            other.step(StepRecord(step, {}, groups))
    return store.run("run")


def by_hand(reader, number):
    wanted = reader.rollout(number).prompt_tokens.tolist()
    return [r.id for r in reader.walk() if r.prompt_tokens.tolist() == wanted]


def all_are_right(reader):
    for number in reader.ids().tolist():
        found = reader.same_prompt(number)
        assert found == by_hand(reader, number)
        assert number in found
        twice = reader.rollout(number).prompt_tokens.tolist() == [1, 2, 3]
        assert len(found) == (16 if twice else 8)


def test_tokens_decide_and_not_the_text(reader):
    all_are_right(reader)


def test_groups_that_version_1_wrote_are_found_too(store, reader):
    with closing(sqlite3.connect(store.path)) as connection:
        connection.execute("DELETE FROM prompts WHERE group_id % 3 != 0")
        connection.commit()
    all_are_right(reader)
    with closing(sqlite3.connect(store.path)) as connection:
        connection.execute("DELETE FROM prompts")
        connection.commit()
    all_are_right(store.run("run"))


def test_what_was_hashed_once_is_not_unpacked_again(store, reader, monkeypatch):
    with closing(sqlite3.connect(store.path)) as connection:
        connection.execute("DELETE FROM prompts")
        connection.commit()
    unpacked, own = [], prompts.unpack
    monkeypatch.setattr(prompts, "unpack", lambda data: unpacked.append(1) or own(data))
    first = reader.same_prompt(1)
    assert 0 < len(unpacked) <= 20
    unpacked.clear()
    assert reader.same_prompt(1) == first
    assert unpacked == []


def test_nothing_is_unpacked_where_all_was_hashed(reader, monkeypatch):
    monkeypatch.setattr(prompts, "unpack", lambda _: pytest.fail("unpacked"))
    assert len(reader.same_prompt(1)) == 8


def test_superseded_steps_are_left_out(store, reader, writer):
    last = int(reader.ids()[-1])
    writer.close()
    with store.resume("run", after=2):
        pass
    live = set(reader.ids().tolist())
    found = reader.same_prompt(last)
    assert found
    assert set(found) <= live
    assert found == by_hand(reader, last)


def test_a_rollout_of_another_run_has_no_prompt_here(store, reader):
    strange = int(store.run("other").ids()[0])
    with pytest.raises(StoreError, match=f"the run has no rollout {strange}: take an id from ids"):
        reader.same_prompt(strange)
