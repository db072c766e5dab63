"""What holds of every notebook of the course, without running it."""

import re
import shutil

import pytest

from tests.course.support import (
    COURSE,
    NAMES,
    ROOT,
    code,
    compared,
    computed,
    exercises,
    mutation,
    tags,
)
from tests.course.support import read as read_notebook

MACHINE = re.compile(r"/(?:home|root|work|tmp|var|Users)/\w|C:\\\\|0x[0-9a-f]{8,}")
TIMING = re.compile(r"\b\d+(?:\.\d+)?\s?(?:ms|s|sec|seconds|minutes|it/s|tokens/s)\b")
COUNT = 15


@pytest.fixture(params=COURSE, ids=NAMES)
def notebook(request):
    return read_notebook(request.param)


def said(notebook) -> str:
    return "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")


def test_the_course_is_numbered():
    assert [name[:3] for name in NAMES] == [f"{n:02d}_" for n in range(1, COUNT + 1)]


def test_it_was_run_from_top_to_bottom(notebook):
    counts = [cell.execution_count for cell in code(notebook)]
    assert counts == list(range(1, len(counts) + 1))
    kinds = {output.output_type for cell in code(notebook) for output in cell.outputs}
    assert "error" not in kinds


def test_at_least_half_of_its_code_cells_are_compared(notebook):
    cells = code(notebook)
    assert sum(map(computed, cells)) >= len(cells) / 2


def test_what_is_compared_names_no_machine_and_no_time(notebook):
    for cell in code(notebook):
        assert not MACHINE.search(compared(cell)), cell.source
        assert not TIMING.search(compared(cell)), cell.source


@pytest.mark.parametrize("path", COURSE, ids=NAMES)
def test_it_is_small_and_free_of_paths(path):
    assert path.stat().st_size <= 300_000
    text = path.read_text()
    assert "widget-state" not in text
    assert not MACHINE.search(re.sub(r'"image/png": "[^"]*"', "", text))


def test_it_has_a_question_exercises_and_a_way_on(notebook):
    text = said(notebook)
    assert text.startswith("# ")
    assert "**The question.**" in text
    assert "## Where to go from here" in text
    assert len(exercises(notebook)) >= 2


def test_every_exercise_is_open_and_has_a_solution(notebook):
    for index, solution in exercises(notebook):
        cell = notebook.cells[index]
        assert cell.source.count("answer = None") == 1
        assert "answer" in solution
        assert compared(cell).startswith("exercise: open")


def test_its_mutation_can_be_applied(notebook, tmp_path):
    change = mutation(notebook)
    assert len(change.why) > 10
    place = tmp_path / change.file
    place.parent.mkdir(parents=True)
    shutil.copyfile(ROOT / change.file, place)
    change.apply(tmp_path)
    compile(place.read_text(), change.file, "exec")


def test_its_links_lead_somewhere(notebook):
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", said(notebook)):
        assert (ROOT / "notebooks" / target).exists(), target


def test_tags_are_known(notebook):
    known = {"nbval-ignore-output", "nbval-skip", "raises-exception"}
    assert {tag for cell in notebook.cells for tag in tags(cell)} <= known


def test_random_draws_are_pinned_to_float32(notebook):
    """Where a model is made, its dtype is said: another machine would choose another."""
    for cell in code(notebook):
        for made in re.findall(r"(?:Lab|ServiceClient)\((?:[^()]|\([^()]*\))*\)", cell.source):
            assert "dtype=" in made or "base_url=" in made, made
