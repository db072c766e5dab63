"""What questions about 100,000 rollouts may cost.  Run with -s to see the numbers."""

import sqlite3
import time

import numpy as np
import pytest

from xorl_lab.store import Store
from xorl_lab.types import Group, Rollout, StepRecord


def timed(act):
    """Seconds of processor time, which other programs hardly disturb; the disk's is not in it."""
    start = time.process_time()
    act()
    return time.process_time() - start


def best_of_3(name, act, most):
    """Print and check the least of three times."""
    seconds = min(timed(act) for _ in range(3))
    print(f"\n{name}: {seconds * 1e3:.1f} ms", end="")  # noqa: T201
    assert seconds < most, name


@pytest.fixture(scope="module")
def talkative(tmp_path_factory):
    """A run of 12,500 groups of 8 on 625 prompts, with texts of 1 kB in four scripts."""
    store = Store(tmp_path_factory.mktemp("talkative"))
    rng = np.random.default_rng(0)
    words = "the a because token reward let us think answer is Sum".split()  # noqa: SIM905
    beginnings = ("", "äöü ", "Потому ", "漢字 ")
    texts = [s + " ".join(rng.choice(words, 190)) for s in beginnings for _ in range(50)]
    with store.create(name="run", kind="grpo", model="tiny") as writer:
        for step in range(1, 101):
            drawn = [
                Group(
                    f"{texts[i % 50]} {i}",
                    [1, 2, 3 + (125 * step + i) % 625],
                    [
                        Rollout(
                            [1, 2], [-1, -2], texts[(8 * i + j) % 200], "stop", 0, a, {"format": b},
                            streams={"entropies": [a, b]},
                        )
                        for j, (a, b) in enumerate(rng.random((8, 2)).tolist())
                    ],
                )
                for i in range(125)
            ]  # fmt: skip
            writer.step(StepRecord(step, {}, drawn))
    return store.run("run")


@pytest.mark.slow
def test_100_000_ids_are_filtered_and_sorted_in_200_ms(talkative):
    assert len(talkative.ids()) == 100_000
    where = [("reward", ">", 0.2), ("reward:part:format", "<", 0.9)]
    for name in talkative.rollout_columns():
        best_of_3(name, lambda n=name: talkative.ids(order_by=n, descending=True), 0.2)
        best_of_3("  some", lambda n=name: talkative.ids(where=where, order_by=n), 0.2)


@pytest.mark.slow
def test_a_page_of_100_rows_is_read_in_10_ms(talkative):
    ids = talkative.ids(order_by="reward")[50_000:50_100]
    best_of_3("100 rows", lambda: talkative.table(ids, 200), 0.010)
    best_of_3("100 rows with all of their texts", lambda: talkative.table(ids), 0.010)


@pytest.mark.slow
def test_1000_rollouts_of_as_many_groups_are_unpacked_in_2_s(talkative):
    ids = np.random.default_rng(0).permutation(talkative.ids()[::100])
    best_of_3("1000 rollouts", lambda: list(talkative.stored(ids)), 2)


@pytest.mark.slow
def test_12_500_groups_are_looked_over_in_300_ms(talkative):
    assert len(talkative.group_table()) == 12_500
    best_of_3("all groups", talkative.group_table, 0.3)
    best_of_3("prompts cut", lambda: talkative.group_table(order_by="spread", chars=100), 0.3)
    where = [("reward", ">", 0.9), ("spread", ">", 0.5)]
    best_of_3("some groups", lambda: talkative.group_table(where=where, chars=100), 0.3)


@pytest.mark.slow
def test_the_same_prompt_is_found_in_200_ms(talkative):
    number = int(talkative.ids()[-1])
    assert len(talkative.same_prompt(number)) == 160
    best_of_3("same prompt", lambda: talkative.same_prompt(number), 0.2)
    with sqlite3.connect(talkative.path) as connection:
        rows = connection.execute("SELECT * FROM prompts").fetchall()
        connection.execute("DELETE FROM prompts")
    older = Store(talkative.path.parent).run("run")
    first = timed(lambda: older.same_prompt(number))
    print(f"\nwritten by version 1, at first: {first * 1e3:.0f} ms", end="")  # noqa: T201
    best_of_3("written by version 1, then", lambda: older.same_prompt(number), 0.2)
    assert older.same_prompt(number) == talkative.same_prompt(number)
    with sqlite3.connect(talkative.path) as connection:
        connection.executemany("INSERT INTO prompts VALUES (?, ?)", rows)
    connection.close()


@pytest.mark.slow
def test_100_000_texts_of_1_kb_are_searched_in_a_second(talkative):
    for column, words, most in (
        ("text", "zebra", 1), ("text", "BECAUSE the", 1), ("text", "漢字", 1),
        ("text", "потому", 3), ("prompt", "zebra", 1), ("prompt", " 77", 1),
        ("note", "zebra", 0.2), ("tags", "zebra", 0.2),
    ):  # fmt: skip
        where = [(column, "contains", words)]
        best_of_3(f"{column} {words!r}", lambda w=where: talkative.ids(where=w), most)
    where = [("text", "contains", "because the"), ("reward", ">", 0.9)]
    best_of_3("text and reward", lambda: talkative.ids(where=where), 0.5)


@pytest.mark.slow
def test_10_000_notes_cost_little(talkative):
    ids = talkative.ids().tolist()
    best_of_3("annotate", lambda: talkative.annotate(ids[0], note=str(time.time())), 0.05)
    with sqlite3.connect(talkative.path) as connection:
        connection.executemany(
            "INSERT OR REPLACE INTO notes VALUES (?, 'hack look', 'a note', 0)",
            ([i] for i in ids[::10]),
        )
    connection.close()
    assert talkative.count([("tags", "has", "hack")]) == 10_000
    where = [("tags", "has", "hack")]
    best_of_3("tagged", lambda: talkative.ids(where=where, order_by="reward"), 0.2)
    best_of_3("100 rows", lambda: talkative.table(ids[:1000:10], 200), 0.010)
