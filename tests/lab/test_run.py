"""A run as a person holds it."""

import pytest

from tests.lab.support import Gate, grpo, lab_in, until
from xorl_lab.errors import ConfigError
from xorl_lab.lab.diagnosis.result import Diagnosis
from xorl_lab.lab.live import Live


def test_what_a_run_says_of_itself(lab):
    run = grpo(lab, steps=2)
    assert repr(run) == "Run('grpo-1': grpo of tiny, 2 steps)"
    assert run.name == run.info.name == "grpo-1"
    assert run.status.state == "finished"
    assert not run.going
    assert run.metrics.index.tolist() == [1, 2]
    assert len(run.rollouts()) == 16
    assert len(run.rollouts(limit=3, order_by="reward", descending=True)) == 3
    assert run.client.version == 2
    assert run.wait() is run
    assert run.stop() is run


def test_warnings_are_there_once_each(lab):
    run = grpo(lab, steps=3, max_tokens=1)
    recorded = [e.text for e in run.reader.events(kinds=["warning"])]
    assert len(recorded) > len(run.warnings)
    assert set(recorded) == set(run.warnings)


def test_the_same_run_from_elsewhere(lab):
    with Gate().closed() as gate:
        run = grpo(lab, steps=10_000, reward=gate, background=True)
        assert gate.reached.wait(20)
        assert lab.run("grpo-1") is run
        assert lab.run(run.info.id) is run
    run.stop()
    seen = lab_in(lab.folder).run("grpo-1")
    assert seen is not run
    assert seen.live is None
    assert seen.wait() is seen
    assert seen.metrics.equals(run.metrics)


class View:
    def __init__(self, broken=False):
        self.done, self.broken = [], broken

    def end(self):
        self.done.append("end")
        if self.broken:
            raise RuntimeError("the page is gone")


def test_views_are_finished_at_the_end_and_one_that_fails_harms_no_other(lab, caplog):
    with Gate().closed() as gate:
        run = grpo(lab, steps=1, reward=gate, background=True)
        assert gate.reached.wait(20)
        broken, well = View(broken=True), View()
        run.live.views += [broken, well]
    run.wait(20)
    until(lambda: well.done == ["end"])
    assert run.live.views == []
    assert "a view of the run could not be finished" in caplog.text


def test_a_view_that_comes_late_is_finished_at_once():
    live = Live(None, None)
    live.settle(None)
    late = View()
    live.views.append(late)
    live.settle(live.error)
    assert late.done == ["end"]


def test_the_dashboard_of_a_run(lab, tmp_path):
    pytest.importorskip("anywidget")
    run = grpo(lab, steps=2)
    view = run.view()
    view.close()
    other = grpo(lab, steps=2)
    assert run.figure("reward", beside=[other]).data
    page = run.export(tmp_path / "run.html").read_text()
    assert "grpo-1" in page
    with Gate().closed() as gate:
        live = grpo(lab, steps=1, reward=gate, background=True)
        assert gate.reached.wait(20)
        view = live.view()
        assert live.live.views == [view]
        for _ in range(3):
            live.view().close()
        assert live.live.views == [view]
    live.wait(20)
    until(lambda: live.live.views == [])


def test_what_is_drawn_beside_a_run_and_where_it_is_written(lab, tmp_path):
    run = grpo(lab, steps=1)
    assert run.figure("reward", beside=run).data
    for beside in (["grpo-1"], [run.reader]):
        with pytest.raises(ConfigError, match=r"beside has .*: pass runs"):
            run.figure("reward", beside=beside)
    assert run.export(tmp_path / "new" / "run.html").exists()
    with pytest.raises(ConfigError, match=r"'x.csv': end it in .html"):
        run.export("x.csv")
    with pytest.raises(ConfigError, match="client is 'x': pass the training client"):
        lab.track("mine", "x")
    assert lab.runs()["name"].tolist() == ["grpo-1"]


def test_a_run_is_diagnosed(lab, capsys):
    run = grpo(lab, steps=3, save_every=1)
    found = run.diagnose(rollouts=4)
    assert (found.cause, found.step, found.healthy) == ("healthy", 3, True)
    assert found.tokens == run.rollouts(where=[("step", "=", 3)])["length"].sum()
    assert found.mean < 1e-4
    assert capsys.readouterr().err == ""
    with pytest.raises(ConfigError, match="rollouts is 0: pass an integer >= 1"):
        run.diagnose(rollouts=0)


def test_a_diagnosis_says_how_far_it_is(lab, monkeypatch, capsys):
    def diagnose(reader, question, shelf, engine, *, client, progress):
        assert (question.rollouts, question.step, client) == (16, 2, None)
        assert sorted(shelf.behind()) == [0, 1, 2]
        assert engine().loaded.name == "tiny"
        progress(3, 28, "top-p")
        return Diagnosis("unexplained", "", 2, 1.0, 1.0, 4)

    run = grpo(lab, steps=2, save_every=1)
    monkeypatch.setattr("xorl_lab.lab.diagnosis.diagnose.diagnose", diagnose)
    monkeypatch.setattr("xorl_lab.lab.console.SOON", -1.0)
    monkeypatch.setattr("xorl_lab.lab.console.OFTEN", -1.0)
    assert run.diagnose(step=2, quiet=True).cause == "unexplained"
    assert capsys.readouterr().err == ""
    run.diagnose(step=2)
    assert "3 of 28 evaluations: top-p" in capsys.readouterr().err
