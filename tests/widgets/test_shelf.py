import json
import threading

import numpy as np
import pytest

from tests.closeness import assert_close
from tests.widgets import shelves
from xorl_lab.errors import CheckpointError, ConfigError
from xorl_lab.types.results import SampledSequence
from xorl_lab.widgets import CheckpointBrowser, shelf_still, shelf_wire


class Told:
    """A shelf whose answers are collected instead of sent."""

    def __init__(self, shelf):
        self.shelf = shelf
        self._answers = {}
        self._heard = threading.Condition()
        shelf.send = self._send

    def _send(self, content, _buffers=None):
        json.dumps(content, allow_nan=False).encode()
        json.dumps(content, ensure_ascii=False).encode()
        with self._heard:
            self._answers[content["id"]] = content
            self._heard.notify_all()

    def ask(self, kind, **content):
        """Ask as the page would, and wait for the answer."""
        name = f"{kind}-{len(self._answers)}"
        self.shelf._hear(None, {"kind": kind, "id": name, **content}, None)
        return self.wait(name)

    def wait(self, name):
        with self._heard:
            assert self._heard.wait_for(lambda: name in self._answers, 10)
            return self._answers[name]


@pytest.fixture
def commands():
    return shelves.Commands(shelves.tree())


@pytest.fixture
def browser(commands):
    made = CheckpointBrowser(commands)
    yield made
    made.close()


@pytest.fixture
def told(browser):
    return Told(browser.shelf)


def test_the_page_has_the_checkpoints_from_the_start(browser):
    first = browser.shelf.get_state()["first"]
    assert [c["name"] for c in first["tree"]["checkpoints"]][:2] == [
        "grpo-1/step-10",
        "grpo-1/step-20",
    ]
    assert first["tree"]["main"] == ["reward", "held_out:accuracy", "loss:mean"]
    assert first["tree"]["metrics"][3:] == ["kl_base", "entropy_sample", "grad_norm"]


def test_what_has_not_changed_is_not_sent_again(told, commands):
    mark = told.shelf.first["mark"]
    assert told.ask("tree", seen=mark).keys() == {"kind", "id", "mark"}
    commands.delete("grpo-1/step-10")
    answer = told.ask("tree", seen=mark)
    assert answer["mark"] != mark
    assert "grpo-1/step-10" not in {c["name"] for c in answer["tree"]["checkpoints"]}


def test_settings_are_sent_once_each():
    tree = shelves.large(1000)
    _, packed = shelf_wire.pack(tree)
    assert packed["settings"] == [shelves.SETTINGS]
    assert {c["settings"] for c in packed["checkpoints"]} == {0}
    assert len(json.dumps(packed)) < 500_000


def test_values_reach_the_page_as_they_are():
    tree = shelves.tree()
    _, packed = shelf_wire.pack(tree)
    for told, known in zip(packed["checkpoints"], tree["checkpoints"], strict=True):
        assert packed["settings"][told["settings"]] == known["settings"]
        names = sorted(known["metrics"])
        assert_close(
            [told["metrics"][n] for n in names], [known["metrics"][n] for n in names], rtol=0
        )


def test_what_is_no_json_becomes_json():
    value = {"a": np.float32(0.5), "b": np.int64(3), "c": float("inf"), 4: {1}, "d": shelves}
    assert shelf_wire.plain(value) == {"a": 0.5, "b": 3, "c": None, "4": [1], "d": str(shelves)}
    assert shelf_wire.plain("\udcff <b>") == "\\udcff <b>"


def test_hostile_names_come_back_as_what_they_are(commands, told):
    name = "\ud800<script>/step-1"
    commands.found["checkpoints"].append({**shelves.checkpoint("x", 1), "name": name})
    shown = told.ask("tree", seen="")["tree"]["checkpoints"][-1]["name"]
    assert shown == "\\ud800<script>/step-1"
    assert "error" not in told.ask("delete", checkpoint=shown)
    assert commands.calls == [("delete", name)]


def test_each_request_reaches_its_command(told, commands):
    assert told.ask("load", checkpoint="grpo-1/step-10")["said"].startswith("grpo-1/step-10 is")
    fields = {"learning_rate": "3e-5", "steps": ""}
    answer = told.ask("branch", checkpoint="grpo-1/step-10", fields=fields, lines="kl_coef=0.1")
    assert answer["run"] == "grpo-4"
    params = {"n": "2", "max_tokens": "3", "temperature": "", "seed": "7"}
    answer = told.ask("sample", checkpoint="base", prompt="Hi", params=params)
    assert [s["stop"] for s in answer["samples"]] == ["stop", "length"]
    assert_close([s["logprob"] for s in answer["samples"]], [-0.3, -0.3], rtol=1e-12)
    del params["n"]
    names = {"left": "base", "right": "grpo-1/step-10"}
    answer = told.ask("compare", **names, prompts=["a", "b"], params=params)
    assert [r["prompt"] for r in answer["results"]] == ["a", "b"]
    assert answer["results"][0]["left"].keys() == {"pieces", "logprobs", "other"}
    answer = told.ask("export", checkpoint="grpo-1/step-10", folder="/out", form="peft")
    assert answer["path"] == "/out/grpo-1-step-10-peft"
    told.ask("delete", checkpoint="grpo-1/step-10")
    assert commands.calls == [
        ("load", "grpo-1/step-10"),
        ("branch", "grpo-1/step-10", {"learning_rate": 3e-5, "kl_coef": 0.1}),
        ("sample", "base", "Hi", {"n": 2, "max_tokens": 3, "seed": 7}),
        ("compare", "base", "grpo-1/step-10", ["a", "b"], {"max_tokens": 3, "seed": 7}),
        ("export", "grpo-1/step-10", "/out", "peft"),
        ("delete", "grpo-1/step-10"),
    ]


def test_errors_are_answers_in_words(told, commands):
    answer = told.ask("delete", checkpoint="nothing")
    assert answer["error"] == "checkpoint.not_found: there is no 'nothing'"
    assert "no request" in told.ask("format the disk")["error"]
    answer = told.ask("sample", checkpoint="base", prompt="a", params={"n": "many"})
    assert answer["error"] == "n is 'many': pass a whole number of 1 or more"
    assert told.ask("load")["error"].startswith("KeyError")
    assert commands.calls == [("delete", "nothing")]


def test_a_slow_request_holds_up_no_other(told, commands):
    commands.go.clear()
    told.shelf._hear(None, {"kind": "load", "id": "slow", "checkpoint": "base"}, None)
    assert "mark" in told.ask("tree", seen="")
    commands.go.set()
    assert told.wait("slow")["said"].startswith("base is loaded")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seed": "-1"}, "seed is '-1': pass a whole number of 0 or more"),
        ({"max_tokens": "2.5"}, "max_tokens is '2.5': pass a whole number of 1 or more"),
        ({"temperature": "inf"}, "temperature is 'inf': pass a number of 0 or more"),
    ],
)
def test_parameters_that_are_none(given, message):
    with pytest.raises(ConfigError) as caught:
        shelf_wire.parameters(given)
    assert str(caught.value) == message


def test_changes_are_read_as_python_writes_them():
    lines = "loss = cispo\n\nepsilon=(0.2, 0.28)\nsave_every=None\nshuffle=true\nname='a=b'"
    assert shelf_wire.changes({"steps": " 80 "}, lines) == {
        "steps": 80,
        "loss": "cispo",
        "epsilon": (0.2, 0.28),
        "save_every": None,
        "shuffle": True,
        "name": "a=b",
    }


@pytest.mark.parametrize("lines", ["temperature", "=3", "a b=3", "temperature="])
def test_a_line_that_is_no_change(lines):
    with pytest.raises(ConfigError, match="is not name=value: write one change per line"):
        shelf_wire.changes({}, lines)


def test_a_setting_given_twice():
    with pytest.raises(ConfigError, match="steps is given twice"):
        shelf_wire.changes({"steps": "3"}, "steps=4")


def test_a_completion_without_logprobs():
    assert shelf_wire.sequences([SampledSequence([1], "abort")]) == [
        {"text": "", "tokens": 1, "stop": "abort", "logprob": None}
    ]


def test_a_saved_notebook_keeps_a_table(browser, commands):
    commands.found["checkpoints"][0]["name"] = "<img src=x onerror=alert(1)>/step-10"
    html = browser.still()
    assert "<img" not in html
    assert "&lt;img src=x onerror=alert(1)&gt;/step-10" in html
    assert "<p>11 checkpoints of 3 runs; 216 MB of 500 MB on the disk</p>" in html
    row = html.split("grpo-2/step-50</td>")[1].split("</tr>")[0]
    assert row == (
        "<td>50</td><td>grpo-1/step-40</td><td>0.6972</td><td>0.6333</td><td>0.025</td>"
        "<td>20 MB</td><td>2027-01-15 07:20 UTC</td><td>2027-01-15 08:40 UTC</td>"
    )
    for word in ("<script", "<style", "<svg", "style="):
        assert word not in html


def test_an_empty_shelf():
    commands = shelves.Commands(
        {"checkpoints": [], "runs": [], "disk": {"used": 0, "budget": None}}
    )
    made = CheckpointBrowser(commands)
    assert "There is no checkpoint yet." in made.still()
    assert repr(made) == "CheckpointBrowser(0 checkpoints of 0 runs)"
    made.close()


def test_a_moment_that_no_clock_knows(browser, commands):
    commands.found["checkpoints"][0]["created"] = 1e300
    assert "1e" not in browser.still()


def test_what_it_is_called(browser):
    assert repr(browser) == "CheckpointBrowser(11 checkpoints of 3 runs)"


def test_commands_that_fail_at_the_start_say_so():
    commands = shelves.Commands()
    commands.tree = lambda: (_ for _ in ()).throw(CheckpointError("checkpoint.gone", "no folder"))
    with pytest.raises(CheckpointError, match="no folder"):
        CheckpointBrowser(commands)


def test_sizes_in_words():
    assert [shelf_still.size(n) for n in (0, 999_400, 999_600, 9_960_000)] == [
        *("0 B", "999 kB", "1.0 MB", "10 MB"),
    ]
