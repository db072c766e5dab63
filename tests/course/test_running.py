"""The course as it is run: whole, answered, again and again, and on a package that is broken."""

import shutil

import nbformat
import pytest

from tests.course.store import run as run_notebook
from tests.course.support import (
    COURSE,
    NAMES,
    ROOT,
    code,
    compared,
    environment,
    exercises,
    mutation,
    nbval,
    read,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.xdist_group("sglang")]
OTHER = {"PYTHONHASHSEED": "4711", "OMP_NUM_THREADS": "2"}


@pytest.mark.parametrize("time", ["first", "second", "third", "other threads and hashes"])
def test_the_course_passes(time):
    """Three times as ``make test`` does, then by one process that has both cores."""
    other = time.startswith("other")
    divided = () if other else ("-n", "2", "--dist", "loadfile")
    result = nbval(COURSE, environment(ROOT, **(OTHER if other else {})), "-q", *divided)
    assert result.returncode == 0, result.stdout[-8000:]


@pytest.mark.parametrize("path", COURSE, ids=NAMES)
def test_a_mutation_turns_it_red(path, tmp_path):
    shutil.copytree(ROOT / "xorl_lab", tmp_path / "xorl_lab")
    change = mutation(read(path))
    change.apply(tmp_path)
    result = nbval([path], environment(tmp_path), "-x", "-q")
    assert result.returncode == 1, f"{change.why}\n{result.stdout[-4000:]}"
    assert "1 failed" in result.stdout


@pytest.mark.parametrize("path", COURSE, ids=NAMES)
def test_its_solutions_are_right(path, monkeypatch):
    notebook = read(path)
    answered = exercises(notebook)
    for index, solution in answered:
        cell = notebook.cells[index]
        cell.source = cell.source.replace("answer = None", solution)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    run_notebook(notebook, path.parent)
    assert len(code(notebook)) == len(code(read(path)))
    for index, _ in answered:
        assert compared(notebook.cells[index]).startswith("exercise: right"), index
    nbformat.validate(notebook)
