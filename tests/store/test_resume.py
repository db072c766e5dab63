"""Attempts: a resume supersedes later steps and deletes nothing."""

import sqlite3
from contextlib import closing

import pytest

from tests.store.support import record
from xorl_lab.errors import StoreError


@pytest.fixture
def ended(store):
    """A store with a run of 6 steps, whose writer is gone."""
    with store.create(name="run", kind="grpo", model="tiny", total=6) as writer:
        for step in range(1, 7):
            writer.step(record(step))
            writer.event("checkpoint", f"step-{step}", step=step)
    return store


def steps(store):
    return store.run("run").scalars().steps.tolist()


def test_later_steps_of_earlier_attempts_are_superseded(ended):
    reader = ended.run("run")
    assert reader.scalars().attempt == 1
    with ended.resume("run", after=4, total=9) as writer:
        assert writer.info.total == 9
        assert reader.scalars().attempt == 2
        assert steps(ended) == [1, 2, 3, 4]
        assert (reader.status().state, reader.status().step, reader.status().total) == (
            "running",
            4,
            9,
        )
        assert reader.count() == 4 * 6
        assert reader.groups(5) == []
        writer.step(again := record(5, groups=1))
    assert steps(ended) == [1, 2, 3, 4, 5]
    assert reader.groups(5) == again.groups
    assert reader.count() == 4 * 6 + 3
    assert sorted(set(reader.rollouts()["step"])) == [1, 2, 3, 4, 5]
    assert len(reader.rollouts(where=[("step", "=", 5)])) == 3
    assert [r.step for r in reader.walk()][-4:] == [4, 5, 5, 5]
    assert [r.step for r in reader.newest(4)] == [5, 5, 5, 4]


def test_a_second_resume_may_go_further_back(ended):
    with ended.resume("run", after=4) as writer:
        writer.step(record(5))
        writer.step(record(8))
    with ended.resume("run", after=2) as writer:
        assert steps(ended) == [1, 2]
        writer.step(record(3))
    with ended.resume("run", after=7) as writer:
        assert steps(ended) == [1, 2, 3]
        writer.step(record(8))
    assert steps(ended) == [1, 2, 3, 8]
    assert ended.run("run").scalars().attempt == 4
    assert ended.run("run").status().step == 8


def test_nothing_is_deleted(ended):
    first = ended.run("run").rollouts(where=[("step", "=", 6)]).index[0]
    with ended.resume("run", after=0) as writer:
        writer.step(record(1))
    with closing(sqlite3.connect(ended.path)) as connection:
        (count,) = connection.execute("SELECT count(*) FROM steps").fetchone()
    assert count == 7
    assert ended.run("run").rollout(first).step == 6
    assert ended.run("run").rollout(first).rollout() == record(6).groups[0].rollouts[0]


def test_events_of_superseded_steps_are_marked(ended):
    with ended.resume("run", after=4) as writer:
        writer.event("resume", "from step-4", step=4)
        writer.step(record(5))
        writer.event("checkpoint", "step-5 again", step=5)
    found = [(e.text, e.superseded) for e in ended.run("run").checkpoints()]
    assert found == [
        *((f"step-{i}", False) for i in range(1, 5)),
        ("step-5", True),
        ("step-6", True),
        ("step-5 again", False),
    ]


def test_steps_before_the_resume_cannot_be_recorded_again(ended):
    with (
        ended.resume("run", after=4) as writer,
        pytest.raises(StoreError, match="step 4 was recorded before"),
    ):
        writer.step(record(4))


def test_a_finished_run_runs_again(ended):
    assert ended.run("run").status().state == "finished"
    writer = ended.resume(ended.run("run").info.id, after=6)
    assert ended.run("run").status().state == "running"
    writer.close()
    assert ended.run("run").status().state == "stopped"


def test_what_cannot_be_resumed(ended):
    with pytest.raises(StoreError, match=r"there is no run 'walk' in .*: the newest are run"):
        ended.resume("walk", after=1)
    with pytest.raises(StoreError, match="after is -1"):
        ended.resume("run", after=-1)
