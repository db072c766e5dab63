"""What a notebook keeps of a run when it was executed and saved."""

import json

import nbclient
import nbformat
import pytest

HERE = """
from pathlib import Path
from tests.widgets import runs
from xorl_lab.store import Store
from xorl_lab.widgets import RunView
store = Store(Path("store"))
writer = store.create(name="addition", kind="grpo", model="tiny", total=200)
view = RunView([store.run(writer.info.id)])
view.show()
with writer:
    for step in range(1, 201):
        runs.record(writer, step, 200)
    writer.status("finished")
view.finish()
view.close()
"""
ELSEWHERE = """
import subprocess, sys, time
other = '''
import sys
from pathlib import Path
from tests.widgets import runs
from xorl_lab.store import Store
with Store(Path("store")).create(name="elsewhere", kind="grpo", model="tiny", total=3) as writer:
    runs.record(writer, 1)
    print("begun", flush=True)
    sys.stdin.readline()
    runs.record(writer, 2)
    runs.record(writer, 3)
'''
command = [sys.executable, "-c", other]
child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
child.stdout.readline()
watching = RunView([store.run("elsewhere")])
watching.show()
child.communicate("go on")
end = time.monotonic() + 60
while not watching.closed and time.monotonic() < end:
    time.sleep(0.05)
"""
ENDED = "RunView([store.run('addition')])"
TWICE = "twice = RunView([store.run('addition')]); twice.show(); twice.finish(); twice.close()"


def executed(root, folder, *cells):
    """A notebook of these cells, run in a folder and saved there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(root))
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
        resources = {"metadata": {"path": str(folder)}}
        nbclient.NotebookClient(notebook, timeout=120, resources=resources).execute()
    path = folder / "run.ipynb"
    nbformat.write(notebook, path)
    return path


@pytest.fixture(scope="module")
def saved(root, tmp_path_factory):
    return executed(root, tmp_path_factory.mktemp("saved"), HERE, ELSEWHERE, ENDED, TWICE)


def displayed(saved, cell):
    """What a cell shows: the text of each kind, per output."""
    outputs = json.loads(saved.read_text())["cells"][cell]["outputs"]
    return [
        {kind: "".join(text) for kind, text in output["data"].items()}
        for output in outputs
        if output["output_type"] != "stream"
    ]


def test_a_saved_run_of_200_steps_is_small(root, tmp_path):
    assert executed(root, tmp_path, HERE).stat().st_size < 500_000


def test_it_shows_the_end_of_the_run_without_a_widget(saved):
    (shown,) = displayed(saved, 0)
    assert set(shown) == {"text/html", "text/plain"}
    assert "finished, step 200 of 200" in shown["text/html"]
    assert "data:image/png;base64," in shown["text/html"]
    assert shown["text/plain"] == "RunView(addition)"


def test_the_end_of_a_run_of_another_process_is_shown_too(saved):
    (shown,) = displayed(saved, 1)
    assert set(shown) == {"text/html", "text/plain"}
    assert "finished, step 3 of 3" in shown["text/html"]
    assert "data:image/png;base64," in shown["text/html"]


def test_an_ended_run_is_there_to_be_explored_with_the_picture_beneath(saved):
    live, beneath = displayed(saved, 2)
    assert "application/vnd.jupyter.widget-view+json" in live
    assert live["text/plain"] == "RunView(addition)"
    assert beneath["text/html"].startswith("<details>")
    assert "finished, step 200 of 200" in beneath["text/html"]


def test_a_view_that_is_finished_says_everything_once(saved):
    shown = displayed(saved, 3)
    assert sum("finished, step 200" in one.get("text/html", "") for one in shown) == 1
    assert "details" in shown[0]["text/html"]
    assert not any("widget-view" in kind for one in shown for kind in one)
