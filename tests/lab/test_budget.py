"""Checkpoints that keep to a limit: what goes, what stays, what is said."""

import pytest

from tests.lab.support import Gate, checkpoint, grpo, lab_in, saved
from xorl_lab.checkpoints import catalog
from xorl_lab.errors import ConfigError, LabError
from xorl_lab.lab import budget as module
from xorl_lab.lab.budget import Budget, parse_bytes


@pytest.fixture(scope="module")
def size(tmp_path_factory):
    """Bytes of one checkpoint of these runs, on the disk."""
    lab = lab_in(tmp_path_factory.mktemp("size"))
    grpo(lab, steps=1)
    return catalog.disk_use(lab.folder / "checkpoints")


def limited(tmp_path, size, count):
    """A lab that may keep so many checkpoints."""
    return lab_in(tmp_path / "lab", disk_budget=int((count + 0.5) * size))


def used(lab):
    return catalog.disk_use(lab.folder / "checkpoints")


def test_sizes():
    known = {0: 0, 7: 7, "12": 12, "3 kb": 3000, "2MiB": 2 * 2**20, "5GB": 5 * 10**9, "1T": 10**12}
    assert {given: parse_bytes(given) for given in known} == known
    for wrong in (-1, 1.5, True, "", "GB", "5 XB", "-5GB", [1], float("nan")):
        with pytest.raises(ConfigError, match="pass bytes, or a size such as '5GB'"):
            parse_bytes(wrong)


def test_a_lab_says_what_its_budget_must_be(tmp_path):
    with pytest.raises(ConfigError, match="disk_budget is 'much'"):
        lab_in(tmp_path, disk_budget="much")


def test_without_a_budget_nothing_goes(lab):
    run = grpo(lab, steps=8, save_every=1, keep=0)
    assert saved(lab, run.name) == [f"step-{i}" for i in range(1, 9)]
    assert overs(run) == []


def overs(run):
    """What was recorded of the limit."""
    return [e for e in run.reader.events(kinds=["warning"]) if "deleted" in e.data]


def test_the_oldest_go_first_and_the_record_says_so(tmp_path, size):
    lab = limited(tmp_path, size, 3)
    run = grpo(lab, steps=5, save_every=1, keep=0)
    assert saved(lab, run.name) == ["step-3", "step-4", "step-5"]
    assert used(lab) <= lab._budget.limit
    deleted = overs(run)
    assert [e.data["deleted"] for e in deleted] == [
        ["xorl://grpo-1/weights/step-1"],
        ["xorl://grpo-1/weights/step-2"],
    ]
    assert [e.step for e in deleted] == [4, 5]
    assert deleted[0].data["before"] > lab._budget.limit >= deleted[0].data["after"]
    assert deleted[0].text.startswith("the checkpoints took ")
    assert deleted[0].text.endswith(": grpo-1/step-1 was deleted")
    assert ", over the budget of " in deleted[0].text
    assert deleted[0].text in run.warnings


def test_those_of_earlier_runs_go_before_those_of_this_one_but_never_a_run_s_last(tmp_path, size):
    lab = lab_in(tmp_path / "lab")
    grpo(lab, steps=3, save_every=1)
    grpo(lab, steps=2, save_every=1)
    lab = limited(tmp_path, size, 4)
    run = grpo(lab, steps=3, save_every=1)
    assert saved(lab, "grpo-1") == ["step-3"]
    assert saved(lab, "grpo-2") == ["step-2"]
    assert saved(lab, "grpo-3") == ["step-2", "step-3"]
    assert [e.data["deleted"] for e in overs(run)] == [
        ["xorl://grpo-1/weights/step-1", "xorl://grpo-1/weights/step-2"],
        ["xorl://grpo-2/weights/step-1"],
        ["xorl://grpo-3/weights/step-1"],
    ]


def test_what_somebody_named_is_never_deleted(tmp_path, size):
    lab = limited(tmp_path, size, 2)
    run = grpo(lab, steps=1)
    run.client.save_state("best").result()
    run.client.save_weights_for_sampler("light").result()
    client = lab.load("grpo-1/step-1")
    client.save_state("step-7").result()  # of no run, whatever it is called
    again = run.resume(steps=4, save_every=1)
    assert set(saved_names(lab, "grpo-1")) == {"best", "step-4"}
    assert lab.sample("a", checkpoint="grpo-1/light", max_tokens=1)
    assert saved(lab, client.model_id) == ["step-7"]
    assert "or was named by somebody: delete some with lab.delete" in overs(again)[-1].text


def saved_names(lab, run):
    return [p.name for p in (lab.folder / "checkpoints" / run / "weights").iterdir()]


def test_that_nothing_can_be_deleted_is_said_once(tmp_path, size):
    lab = limited(tmp_path, size, 0)
    run = grpo(lab, steps=4, save_every=1, keep=1)
    assert saved(lab, run.name) == ["step-4"]
    (told,) = overs(run)
    assert "are left, of which each is the last of its run" in told.text
    assert told.data["deleted"] == []


def test_what_a_branch_began_from_may_go_and_the_branch_goes_on(tmp_path, size):
    lab = lab_in(tmp_path / "lab")
    run = grpo(lab, steps=2, save_every=1)
    run.branch("step-1", name="child", steps=3)
    lab = limited(tmp_path, size, 2)
    grpo(lab, steps=1, name="other")
    assert saved(lab, "grpo-1") == ["step-2"]
    assert saved(lab, "child") == ["step-3"]
    assert lab.sample("a", checkpoint="child", max_tokens=1).texts


def test_what_a_branch_still_needs_stays(tmp_path, size):
    lab = lab_in(tmp_path / "lab")
    grpo(lab, steps=2, save_every=1)
    gate = Gate()

    def reward(completion, wanted):
        return gate(completion, wanted)

    with gate.closed():
        waits = lab.grpo(
            [{"prompt": "1+1=", "wanted": "ab"}], reward, branch=("grpo-1", "step-1"), steps=3,
            background=True, preflight=False, quiet=True, prompts_per_step=1, name="waits",
        )  # fmt: skip
        assert gate.reached.wait(20)
        excess = Budget(size, lab._weights).keep_to()
        assert excess.deleted == []
        assert excess.after == excess.before == used(lab)
        assert saved(lab, "grpo-1") == ["step-1", "step-2"]
        waits.stop(wait=False)
    waits.wait(20)


def test_what_another_process_has_deleted_meanwhile_is_no_trouble(tmp_path, size, monkeypatch):
    lab = lab_in(tmp_path / "lab")
    grpo(lab, steps=4, save_every=1)
    delete = catalog.delete

    def late(root, address):
        if address.name == "step-1":
            delete(root, address)
        delete(root, address)

    monkeypatch.setattr(module.catalog, "delete", late)
    excess = Budget(int(2.5 * size), lab._weights).keep_to()
    assert excess.deleted == [f"xorl://grpo-1/weights/step-{i}" for i in (2, 3)]
    assert saved(lab, "grpo-1") == ["step-4"]


def test_trouble_with_the_disk_is_a_warning_and_the_run_goes_on(tmp_path, size, monkeypatch):
    lab = limited(tmp_path, size, 1)

    def refuse(*_):
        raise LabError("the record is locked")

    monkeypatch.setattr(Budget, "keep_to", refuse)
    run = grpo(lab, steps=2, save_every=1)
    assert run.status.state == "finished"
    assert "the disk in use could not be looked at: the record is locked" in run.warnings


def test_loops_of_ones_own_keep_to_it_too(tmp_path, size):
    lab = lab_in(tmp_path / "lab", disk_budget=int(1.2 * size))
    client = lab.service.create_lora_training_client("tiny", rank=4, model_id="mine")
    with lab.track("mine", client, save_every=1) as run:
        for _ in run.steps(4):
            run.log({})
    assert len(saved(lab, "mine")) < 4
    assert saved(lab, "mine")[-1] == "mine-4"
    assert used(lab) <= lab._budget.limit
    assert checkpoint(lab, "mine", "mine-4").is_dir()
