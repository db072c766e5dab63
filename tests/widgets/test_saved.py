"""What a notebook keeps of a run when it was executed and saved."""

import json

import nbclient
import nbformat
import pytest

CODE = """
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


@pytest.fixture(scope="module")
def saved(root, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    code = f"import sys; sys.path.insert(0, {str(root)!r})\n{CODE}"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    resources = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(notebook, timeout=120, resources=resources).execute()
    path = folder / "run.ipynb"
    nbformat.write(notebook, path)
    return path


def test_a_saved_run_of_200_steps_is_small(saved):
    assert saved.stat().st_size < 500_000


def test_it_shows_the_end_of_the_run_without_a_widget(saved):
    (output,) = [
        output
        for output in json.loads(saved.read_text())["cells"][0]["outputs"]
        if output["output_type"] != "stream"
    ]
    assert set(output["data"]) == {"text/html", "text/plain"}
    html = "".join(output["data"]["text/html"])
    assert "finished, step 200 of 200" in html
    assert "data:image/png;base64," in html
    assert "".join(output["data"]["text/plain"]) == "RunView(addition)"
