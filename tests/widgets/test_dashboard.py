import gc
import json
import threading
import time
import weakref

import numpy as np
import pytest
from ipywidgets.widgets import widget

from tests.widgets import runs
from xorl_lab.errors import ConfigError
from xorl_lab.types import StepRecord
from xorl_lab.widgets import Dashboard, RunView, view
from xorl_lab.widgets.controls import ENDED, NO_COMMANDS, Controls
from xorl_lab.widgets.sender import INTERVAL, SENDER


class Recorded(Dashboard):
    """A dashboard that keeps what it sends, and whose sender is the test."""

    def __init__(self, *arguments):
        self.sent = []
        super().__init__(*arguments)
        SENDER.discard(self)
        self.sent.clear()

    def send(self, content, buffers=None):
        json.dumps(content, allow_nan=False)
        self.sent.append((content, list(buffers or [])))

    def send_state(self, key=None):
        self.sent.append(({"kind": "state", "key": key}, []))
        super().send_state(key)


@pytest.fixture
def dashboard(reader, commands):
    made = Recorded([reader], commands)
    yield made
    made.close()


def test_the_state_is_the_whole_history(writer, dashboard):
    for step in range(1, 4):
        runs.record(writer, step)
    dashboard.update()
    (run,) = dashboard.get_state()["snapshot"]["runs"]
    assert np.frombuffer(run["data"][:12], "<i4").tolist() == [1, 2, 3]
    assert run["status"]["step"] == 3
    assert dashboard.get_state("snapshot").keys() == {"snapshot"}
    assert "snapshot" not in dashboard.get_state("group")


def test_deltas_carry_what_is_new_and_no_more(writer, dashboard):
    runs.record(writer, 1)
    assert dashboard.update()
    content, (data,) = dashboard.sent.pop()
    (run,) = content["runs"]
    assert (run["run"], run["after"], run["rows"]) == (0, 0, 1)
    assert len(data) == 4 + 4 * len(run["names"])
    assert content["panels"][0]["key"] == "reward"
    runs.record(writer, 2)
    dashboard.update()
    content, (data,) = dashboard.sent.pop()
    assert "panels" not in content
    assert "names" not in content["runs"][0]
    assert len(json.dumps(content)) + len(data) < 1000
    assert not dashboard.update()
    assert dashboard.sent == []


def test_a_new_metric_brings_its_panel(writer, dashboard):
    writer.step(StepRecord(1, {"reward": 1.0}))
    dashboard.update()
    writer.step(StepRecord(2, {"reward": 1.0, "mine": 2.0}))
    dashboard.update()
    content, _ = dashboard.sent[-1]
    assert content["runs"][0]["names"] == ["reward", "mine"]
    assert [panel["key"] for panel in content["panels"]] == ["reward", "more:mine"]


def test_a_resumed_run_is_sent_as_a_whole(store, writer, reader, dashboard):
    for step in range(1, 4):
        runs.record(writer, step)
    dashboard.update()
    writer.close()
    with store.resume(reader.info.id, after=1) as again:
        runs.record(again, 2)
        dashboard.update()
    assert dashboard.sent[-1][0] == {"kind": "state", "key": "snapshot"}


def test_knobs_are_sent_when_they_change(dashboard, commands):
    dashboard.update()
    commands.values["learning_rate"] = float("nan")
    assert dashboard.update()
    assert dashboard.sent[-1][0]["knobs"] == {"learning_rate": None}


def test_knobs_that_cannot_be_read_are_the_last_ones(dashboard, commands):
    commands.knobs = lambda: 1 / 0
    dashboard.update()
    assert dashboard.everything()["knobs"] == {"learning_rate": 1e-4}


def test_a_part_in_full(writer, dashboard):
    writer.event("log", "before")
    for step in range(1, 31):
        writer.step(StepRecord(step, {"reward": float(step)}))
    dashboard.update()
    head, data = dashboard.part(0, 10, 11)
    assert head == {"rows": 4, "names": ["reward"], "exact": 9}
    assert np.frombuffer(data[:16], "<i4").tolist() == [9, 10, 11, 12]
    assert dashboard.heads()[0][0] == 30


def test_the_end_of_all_runs_is_told_once(store, reader, writer, commands):
    with store.create(name="beside", kind="grpo", model="tiny") as other:
        made = Recorded([reader, store.run(other.info.id)])
        ends = []
        made.on_end = lambda: ends.append(len(made.sent))
        runs.record(writer, 1)
        writer.status("finished")
        made.update()
        assert (made.over, ends) == (False, [])
        runs.record(other, 1)
    made.update()
    made.update()
    assert made.over
    assert ends == [2]  # behind the message that says so
    made.close()


def test_what_had_ended_when_it_was_made_is_not_told(reader, writer):
    writer.status("finished")
    made = Recorded([reader])
    made.on_end = lambda: pytest.fail("it had ended before")
    made.update()
    assert made.over
    made.close()


def test_its_repr_is_constant_and_says_something(dashboard):
    assert repr(dashboard) == "Dashboard(addition)"


def test_no_run_is_an_error():
    with pytest.raises(ConfigError, match="no runs to show"):
        Dashboard([])


def test_the_sender_sends_at_most_four_times_a_second(reader, writer, monkeypatch):
    times = []
    monkeypatch.setattr(Dashboard, "update", lambda self: bool(times.append(time.monotonic())))
    dashboard = Dashboard([reader])
    deadline = time.monotonic() + 10
    while len(times) < 4 and time.monotonic() < deadline:
        SENDER.wake()
        threading.Event().wait(0.01)
    dashboard.close()
    assert min(np.diff(times)) >= INTERVAL * 0.99


def test_the_sender_ends_when_nothing_is_open(reader, writer):
    dashboard = Dashboard([reader])
    (thread,) = [t for t in threading.enumerate() if t.name == "xorl-widgets"]
    dashboard.close()
    thread.join(10)
    assert not thread.is_alive()


class Spoken(Controls):
    def __init__(self, *arguments):
        self.sent = []
        super().__init__(*arguments)

    def send(self, content, buffers=None):
        self.sent.append((content, buffers))


@pytest.fixture
def controls(dashboard, commands):
    made = Spoken(dashboard, commands)
    yield made
    made.close()


def say(controls, **content):
    controls._handle_custom_msg({"id": "x-1", **content}, [])
    return controls.sent.pop()


def test_buttons_call_commands(controls, commands):
    assert not controls.answered.is_set()
    for kind in ("pause", "resume", "step", "stop"):
        assert say(controls, kind=kind)[0] == {"kind": "answer", "id": "x-1"}
    say(controls, kind="set", name="learning_rate", value=3e-5)
    assert commands.calls == ["pause", "resume", "step", "stop", ("learning_rate", 3e-5)]
    assert controls.answered.is_set()


def test_a_refused_value_is_an_answer(controls):
    answer, _ = say(controls, kind="set", name="learning_rate", value=-1)
    assert "pass a number > 0" in answer["error"]


def test_a_command_that_raises_is_an_answer(controls, commands):
    commands.pause = lambda: 1 / 0
    assert "ZeroDivisionError" in say(controls, kind="pause")[0]["error"]


def test_the_page_can_ask_for_more(controls, writer, dashboard):
    writer.step(StepRecord(1, {"reward": 0.5}))
    dashboard.update()
    answer, (data,) = say(controls, kind="part", run=0, low=0, high=5)
    assert answer["rows"] == 1
    assert len(data) == 8
    assert say(controls, kind="hello")[0]["heads"][0][0] == 1
    say(controls, kind="again")
    assert dashboard.sent[-1][0] == {"kind": "state", "key": "snapshot"}


def test_nothing_else_is_obeyed(controls, commands):
    assert "error" in say(controls, kind="knobs")[0]
    assert "error" in say(controls, kind="__init__")[0]
    assert commands.calls == []


def test_without_commands_the_reason_is_given(dashboard):
    controls = Spoken(dashboard, None)
    assert controls.reason == NO_COMMANDS
    assert say(controls, kind="stop")[0]["error"] == NO_COMMANDS
    controls.close()


def test_of_a_run_that_has_ended_another_reason_is_given(dashboard):
    dashboard.going = False
    controls = Spoken(dashboard, None)
    assert controls.reason == ENDED
    controls.close()


def test_what_the_page_says_stays_on_the_pages_own_thread(controls):
    controls.comm._reply_subshell_id = "main"
    say(controls, kind="hello")
    assert not hasattr(controls.comm, "_reply_subshell_id")


class Cell:
    """A notebook's cell, as far as a view knows it."""

    def __init__(self, monkeypatch):
        self.outputs, self.run = [], 0
        monkeypatch.setattr(view, "get_ipython", lambda: self)
        monkeypatch.setattr(view, "display", self.display)

    def get_parent(self):
        return {"metadata": {"cellId": "cell"}, "header": {"msg_id": str(self.run)}}

    def display(self, bundle, raw, display_id):
        outputs, place = self.outputs, len(self.outputs)
        outputs.append(bundle)

        class Handle:
            def update(self, bundle, raw):
                outputs[place] = bundle

        return Handle()


@pytest.fixture
def cell(monkeypatch):
    return Cell(monkeypatch)


def test_a_view_of_a_run_becomes_a_picture_when_the_run_ends(cell, reader, writer):
    shown = RunView([reader])
    shown.show()
    assert list(cell.outputs[0]) == [view.WIDGET_VIEW, "text/plain"]
    assert view.HOW_TO_STOP in cell.outputs[0]["text/plain"]
    runs.record(writer, 1)
    writer.status("finished")
    deadline = time.monotonic() + 20
    while not shown.closed and time.monotonic() < deadline:
        threading.Event().wait(0.02)
    (output,) = cell.outputs
    assert "finished, step 1 of 100" in output["text/html"]
    assert view.WIDGET_VIEW not in output
    assert len(SENDER) == 0


def test_a_view_that_nobody_displayed_stays_open(cell, reader, writer):
    made = RunView([reader])
    writer.status("finished")
    made.dashboard.update()
    assert not made.closed
    made.show()
    live, beneath = cell.outputs
    assert view.WIDGET_VIEW in live
    assert view.HOW_TO_STOP not in live["text/plain"]
    assert "<details>" in beneath["text/html"]
    made.close()


def test_a_view_of_an_ended_run_stays_and_has_the_picture_beneath(cell, reader, writer):
    runs.record(writer, 1)
    writer.status("finished")
    made = RunView([reader])
    made.show()
    made.dashboard.update()
    live, beneath = cell.outputs
    assert view.WIDGET_VIEW in live
    assert "finished, step 1 of 100" in beneath["text/html"]
    assert not made.closed
    made.finish()
    made.close()
    assert "finished, step 1 of 100" in cell.outputs[0]["text/html"]
    assert list(cell.outputs[1]) == ["text/plain"]


def test_views_of_a_cell_that_ran_again_are_freed(cell, reader, writer):
    alive = weakref.WeakSet()
    for cell.run in range(30):
        made = RunView([reader])
        made.show()
        alive.add(made)
    assert [v.closed for v in alive if v is not made] == [True] * (len(alive) - 1)
    made.close()
    del made
    deadline = time.monotonic() + 10
    while alive and time.monotonic() < deadline:
        gc.collect()
        threading.Event().wait(0.05)
    assert len(alive) == 0
    assert view._CELLS._shown == {}


def test_a_closed_view_is_held_by_nobody(reader, writer, commands):
    alive = weakref.WeakSet()
    gc.collect()
    gc.disable()  # it does not take a collection of cycles
    try:
        for _ in range(30):
            made = RunView([reader], commands)
            alive.add(made)
            assert not made.closed
            made.close()
            assert made.closed
        del made
        deadline = time.monotonic() + 10
        while alive and time.monotonic() < deadline:
            threading.Event().wait(0.05)
        assert len(alive) == 0
    finally:
        gc.enable()


def test_an_open_view_lives_on_with_its_widgets(reader, writer):
    made = weakref.ref(RunView([reader]))
    gc.collect()
    assert made() is not None
    made().close()
    gc.collect()


def test_closing_frees_everything(reader, writer):
    before = len(widget._instances)
    kept = []
    for _ in range(30):
        view = RunView([reader])
        kept += [weakref.ref(w) for w in (view, view.dashboard, view.controls, view._box)]
        view.close()
        view.close()
    del view
    deadline = time.monotonic() + 10
    while any(ref() is not None for ref in kept) and time.monotonic() < deadline:
        gc.collect()
        threading.Event().wait(0.05)
    assert [ref() for ref in kept if ref() is not None] == []
    assert len(widget._instances) == before


def test_a_view_says_how_to_stop_where_nothing_answers(reader, writer):
    view = RunView([reader])
    assert "interrupt the kernel" in view._live()["text/plain"]
    assert repr(view) == "RunView(addition)"
    assert not view.answered
    assert view.show() is None  # a script has no cell
    view.finish()
    view.close()
    assert "<table" in view.still()


def test_a_view_that_cannot_be_updated_is_left_alone(caplog):
    class Broken:
        def update(self):
            raise ValueError("no")

    broken, seen = Broken(), threading.Event()

    class Watched:
        def update(self):
            return bool(seen.set())

    watched = Watched()
    SENDER.add(broken)
    SENDER.add(watched)
    assert seen.wait(10)
    while len(SENDER) > 1:
        threading.Event().wait(0.01)
    assert "no longer kept up to date" in caplog.text
    SENDER.discard(watched)
