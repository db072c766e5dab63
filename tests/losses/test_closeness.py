"""The numeric comparison that all tests rely on."""

import math

import numpy as np
import pytest
import torch

from tests.closeness import assert_close


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (1.0, 1.0 + 1e-7),
        ([1, 2.0], (1.0, 2)),
        (torch.tensor([1.0, 2.0], dtype=torch.bfloat16, requires_grad=True), np.array([1, 2])),
        ([[1.0]], torch.ones(1, 1)),
        ([True, False], [1.0, 0.0]),
        ([math.inf, -math.inf], [math.inf, -math.inf]),
        ([], []),
    ],
)
def test_equal_enough(actual: object, expected: object) -> None:
    assert_close(actual, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (1.0, 1.0 + 1e-5),
        (0.0, 1e-300),
        (math.nan, math.nan),
        (math.inf, 1.0),
        (1.0, math.inf),
        (math.inf, -math.inf),
        ([1.0], 1.0),
        ([1.0, 1.0], [1.0]),
        (0.8, -0.37),
    ],
)
def test_different(actual: object, expected: object) -> None:
    with pytest.raises(AssertionError):
        assert_close(actual, expected, rtol=1e-6)


def test_message_names_the_worst_element() -> None:
    with pytest.raises(AssertionError) as caught:
        assert_close([[1.0, 2.0], [3.0, 4.5]], [[1.0, 2.1], [3.0, 4.0]], rtol=0.0, atol=0.01)
    assert str(caught.value) == (
        "2 of 4 elements differ; worst at (1, 1): got 4.5, expected 4.0, off by 0.5, allowed 0.01"
    )


@pytest.mark.parametrize("rtol", [1.1e-3, 1.0, -1e-6, math.nan])
def test_loose_tolerances_are_refused(rtol: float) -> None:
    with pytest.raises(ValueError, match="rtol is"):
        assert_close(1.0, 1.0, rtol=rtol)


@pytest.mark.parametrize("atol", [-1.0, math.nan])
def test_atol_must_be_a_number(atol: float) -> None:
    with pytest.raises(ValueError, match="atol is"):
        assert_close(1.0, 1.0, rtol=0.0, atol=atol)
