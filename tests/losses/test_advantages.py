"""Group advantages: the numbers, and all that a group of rewards can have wrong with it."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.closeness import assert_close
from xorl_lab.errors import DataError
from xorl_lab.losses import group_normalized, leave_one_out, mean_centered

FUNCTIONS = (group_normalized, mean_centered, leave_one_out)
Advantages = Callable[[Any], list[float]]
every = pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)


def test_numbers_by_hand() -> None:
    rewards = [1.0, 2.0, 6.0]
    std = math.sqrt((4 + 1 + 9) / 3)
    assert_close(group_normalized(rewards), [-2 / std, -1 / std, 3 / std], rtol=1e-12)
    assert_close(mean_centered(rewards), [-2.0, -1.0, 3.0], rtol=1e-12)
    assert_close(leave_one_out(rewards), [-3.0, -1.5, 4.5], rtol=1e-12)


def test_standard_deviation_is_that_of_the_population() -> None:
    assert group_normalized([0.0, 1.0]) == [-1.0, 1.0]


@every
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -0.3, 1e-9, 1e6])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 8])
def test_equal_rewards_carry_no_signal(function: Advantages, value: float, size: int) -> None:
    assert function([value] * size) == [0.0] * size


@every
def test_rewards_that_differ_by_rounding_carry_no_signal(function: Advantages) -> None:
    assert function([0.1 + 0.2, 0.3]) == [0.0, 0.0]


@every
def test_small_but_real_differences_count(function: Advantages) -> None:
    assert function([1e-8, 2e-8])[1] > 0
    assert function([1000.0, 1000.0 + 1e-6])[1] > 0


def test_normalised_scale_does_not_depend_on_the_unit() -> None:
    for unit in (1e-200, 1e-9, 1.0, 1e9, 1e200):
        assert_close(group_normalized([0.0, unit]), [-1.0, 1.0], rtol=1e-12)


@every
def test_failed_rollouts_are_left_out(function: Advantages) -> None:
    assert function([None, 1.0, None, 0.0]) == [
        0.0,
        *function([1.0, 0.0])[:1],
        0.0,
        function([1.0, 0.0])[1],
    ]


@every
@pytest.mark.parametrize("rewards", [[], [None], [None, None], [5.0], [None, 5.0]])
def test_groups_with_fewer_than_two_rewards(function: Advantages, rewards: list[float]) -> None:
    assert function(rewards) == [0.0] * len(rewards)


@every
def test_other_kinds_of_numbers(function: Advantages) -> None:
    expected = function([1.0, 0.0, 1.0])
    assert function([True, False, True]) == expected
    assert function(np.array([1.0, 0.0, 1.0], dtype=np.float32)) == expected
    assert function([torch.tensor(1), torch.tensor(0.0), 1]) == expected
    assert all(type(value) is float for value in function([True, 0, np.float32(2)]))


@every
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, "1.0"])
def test_what_is_not_a_finite_number_is_an_error(function: Advantages, bad: object) -> None:
    with pytest.raises(DataError) as caught:
        function([0.0, bad])
    assert str(caught.value) == (
        f"reward 1 is {bad!r}: pass a finite number, or None for a failed rollout"
    )
