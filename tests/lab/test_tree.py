"""The lineage of checkpoints as JSON values."""

import json
import math
import time

import pytest

from tests.lab.support import Gate, checkpoint, grpo, lab_in
from xorl_lab.checkpoints import catalog, folder
from xorl_lab.store import Store


def tree(lab):
    """As JSON gives it back: nothing else can go to a page."""
    found = lab._desk.tree()
    again = json.loads(json.dumps(found, allow_nan=False))
    assert again == found
    return again


def by_name(found, what="checkpoints"):
    return {facts["name"]: facts for facts in found[what]}


@pytest.fixture
def grown(lab):
    run = grpo(lab, steps=6, save_every=2)
    child = run.branch("step-4", name="child", steps=8, learning_rate=1e-3)
    child.branch("step-6", name="grandchild", steps=7)
    return lab


def test_each_hangs_on_the_one_before_it_and_a_branch_on_where_it_began(grown):
    found = tree(grown)
    assert {c["name"]: c["parent"] for c in found["checkpoints"]} == {
        "grpo-1/step-2": None,
        "grpo-1/step-4": "grpo-1/step-2",
        "grpo-1/step-6": "grpo-1/step-4",
        "child/step-6": "grpo-1/step-4",
        "child/step-8": "child/step-6",
        "grandchild/step-7": "child/step-6",
    }
    assert {r["name"]: (r["kind"], r["state"], r["parent"], r["model"]) for r in found["runs"]} == {
        "grpo-1": ("grpo", "finished", None, "tiny"),
        "child": ("grpo", "finished", "grpo-1/step-4", "tiny"),
        "grandchild": ("grpo", "finished", "child/step-6", "tiny"),
    }


def test_metrics_and_settings_are_those_of_the_moment(lab):
    gate = Gate()
    with gate.closed():
        run = grpo(lab, steps=4, reward=gate, background=True, save_every=1)
        assert gate.reached.wait(20)
        run.set("learning_rate", 1e-3)  # of the steps behind the first
    run.wait(20)
    found = by_name(tree(lab))
    metrics = run.metrics
    for step in (1, 2, 3, 4):
        facts = found[f"grpo-1/step-{step}"]
        row = {k: v for k, v in metrics.loc[step].items() if math.isfinite(v)}
        assert facts["metrics"] == pytest.approx(row)
        assert facts["settings"]["learning_rate"] == (5e-3 if step == 0 else 1e-3)
        assert facts["settings"]["rank"] == 4
        assert facts["settings"]["group_size"] == 4
        assert (facts["run"], facts["step"], facts["kind"]) == ("grpo-1", step, "lora")


def test_a_knob_that_was_turned_later_is_not_that_of_an_earlier_checkpoint(lab):
    run = grpo(lab, steps=2, save_every=1)
    run.resume(steps=4, learning_rate=1e-4)
    found = by_name(tree(lab))
    rates = [found[f"grpo-1/step-{i}"]["settings"]["learning_rate"] for i in (1, 2, 3, 4)]
    assert rates[0] == 5e-3
    assert rates[2:] == [1e-4, 1e-4]


def test_size_age_expiry_and_the_disk(grown):
    grown.expire("grpo-1/step-2", 60)
    found = tree(grown)
    facts = by_name(found)["grpo-1/step-2"]
    place = checkpoint(grown, "grpo-1", "step-2")
    size = sum(p.stat().st_size for p in place.iterdir() if p.name != "state.json")
    assert facts["megabytes"] == pytest.approx(size / 1e6, abs=1e-3)
    assert abs(facts["created"] - time.time()) < 120
    assert abs(facts["expires"] - time.time() - 60) < 60
    assert by_name(found)["grpo-1/step-4"]["expires"] is None
    assert found["disk"] == {
        "used": catalog.disk_use(grown.folder / "checkpoints"),
        "budget": None,
    }
    assert lab_in(grown.folder, disk_budget="5GB")._desk.tree()["disk"]["budget"] == 5 * 10**9


def test_what_is_gone_is_nobodys_parent_but_a_branch_remembers_it(grown):
    grown.delete("grpo-1/step-4")
    found = tree(grown)
    assert by_name(found)["grpo-1/step-6"]["parent"] == "grpo-1/step-2"
    assert by_name(found)["child/step-6"]["parent"] is None
    assert by_name(found, "runs")["child"]["parent"] == "grpo-1/step-4"
    grown._store.delete("grpo-1")
    found = tree(grown)
    assert by_name(found, "runs")["child"]["parent"] == "grpo-1/step-4"
    # Its checkpoints are still there, of a model that no run is known of.
    assert by_name(found)["grpo-1/step-6"]["run"] == "grpo-1"


def test_what_the_caller_saved_and_what_no_run_made(lab):
    run = grpo(lab, steps=2)
    run.client.save_state("mine").result()
    run.client.save_weights_for_sampler("light").result()
    client = lab.load("grpo-1/step-2")
    client.save_state("by-hand").result()
    found = by_name(tree(lab))
    assert found["grpo-1/mine"]["step"] is None
    assert found["grpo-1/mine"]["parent"] == "grpo-1/step-2"
    assert found["grpo-1/sampler_weights/light"]["kind"] == "lora (sampling alone)"
    assert found["grpo-1/sampler_weights/light"]["parent"] == "grpo-1/step-2"
    other = found["grpo-1-step-2-loaded/by-hand"]
    assert (other["run"], other["step"], other["parent"]) == ("grpo-1-step-2-loaded", None, None)
    assert other["settings"]["rank"] == 4
    for name in found:
        assert lab.sample("a", checkpoint=name, max_tokens=1).texts


def test_a_lab_without_anything(lab):
    assert tree(lab) == {"checkpoints": [], "runs": [], "disk": {"used": 0, "budget": None}}


def test_full_weights_and_loops_of_ones_own(tmp_path):
    lab = lab_in(tmp_path, rank=None)
    client = lab.load("base")
    with lab.track("mine", client, save_every=1) as run:
        for _ in run.steps(2):
            run.log({"x": 1.0})
    found = by_name(tree(lab))
    assert {n: (c["step"], c["kind"], c["parent"]) for n, c in found.items()} == {
        "mine/mine-1": (1, "full", None),
        "mine/mine-2": (2, "full", "mine/mine-1"),
    }
    assert found["mine/mine-2"]["metrics"]["x"] == 1.0


def test_a_thousand_checkpoints_take_no_time(lab):
    from xorl_lab.types import StepRecord

    root = lab.folder / "checkpoints"
    store = Store(lab.folder)
    metrics = {f"metric:{i}": float(i) for i in range(30)}
    state = {"kind": "lora", "base_model": "tiny", "lora": {"rank": 4}, "metrics": metrics}
    for number in range(20):
        settings = {"recipe": {"learning_rate": 1e-3}}
        with store.create(
            name=f"r{number}", kind="grpo", model="tiny", settings=settings
        ) as writer:
            for step in range(1, 51):
                writer.step(StepRecord(step, metrics))
                place = root / f"r{number}" / "weights" / f"step-{step}"
                place.mkdir(parents=True)
                folder._write_state(place, {**state, "created": step, "files": {"a": {"bytes": 9}}})
                path = f"xorl://r{number}/weights/step-{step}"
                writer.event("checkpoint", "saved", step=step, data={"path": path})
    assert len(lab._desk.tree()["checkpoints"]) == 1000
    took = []  # seconds of the processor, which others may be using too
    for _ in range(3):
        began = time.process_time()
        found = lab._desk.tree()
        took.append(time.process_time() - began)
    assert len(found["checkpoints"]) == 1000
    assert found["checkpoints"][0]["metrics"] == metrics
    assert min(took) < 0.3, took
