"""Exercises: what becomes of an answer."""

import numpy as np
import pytest
import torch

from xorl_lab.errors import ConfigError
from xorl_lab.recipes.exercise import exercise


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (0.2, 0.2),
        (1, 1.0),
        (100.05, 100.0),
        (" K3 ", "k3"),
        (True, True),
        (True, np.bool_(True)),
        (np.float32(0.2), 0.2),
        (0.2, torch.tensor(0.2)),
        ([True], [np.bool_(True)]),
        ([1, "a"], (1, "A")),
        (4, lambda value: value > 3),
        (max, lambda function: function(1, 2) == 2),
    ],
)
def test_right(answer, expected):
    assert exercise(answer, expected).state == "right"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (0.21, 0.2),
        (float("nan"), 1.0),
        (True, 1),
        (1, np.bool_(True)),
        ("1", 1),
        (1, True),
        ("k1", "k3"),
        ([1], [1, 2]),
        (1, [1]),
        ("two", lambda value: value > 3),
        (2, lambda value: value > 3),
        (object(), 1.0),
    ],
)
def test_not_yet(answer, expected):
    found = exercise(answer, expected, hint="Think again.")
    assert found.state == "not yet"


def test_the_tolerance_is_absolute_or_relative():
    assert exercise(0.0004, 0.0).state == "right"
    assert exercise(11, 10.0, within=0.1).state == "right"
    assert exercise(11, 10.0, within=0.05).state == "not yet"


def test_nothing_expected_or_a_tolerance_below_zero_are_errors():
    with pytest.raises(ConfigError, match="expected=None"):
        exercise(1, None)
    for within in (-1, float("nan")):
        with pytest.raises(ConfigError, match="within="):
            exercise(1, 1, within=within)


def test_what_a_reader_writes_is_escaped():
    page = exercise("<b>", "k3")._repr_html_()
    assert "<b>not yet</b>" in page
    assert "&lt;b&gt;" in page
    assert "✗" in page


def test_an_open_exercise_says_what_to_do():
    assert repr(exercise(None, 1)).startswith("exercise: open. Put your answer")
