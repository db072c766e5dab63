"""The canary's verdicts: what is always caught, what is never blamed, and what cannot be told."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.closeness import assert_close
from xorl_lab.errors import DataError, SamplerError, ShapeError
from xorl_lab.samplers.sync.canary import FLOOR, SHARE, TELLING, distance, judge, measured_noise

LOGPROB = st.floats(-20, 0)
LENGTH = 8


def vectors(count):
    return st.tuples(*[st.lists(LOGPROB, min_size=LENGTH, max_size=LENGTH)] * count)


def moved(values, steps, size):
    """The values, each moved by ``size`` at most."""
    return [v + size * s for v, s in zip(values, steps, strict=True)]


STEPS = st.lists(st.floats(-1, 1), min_size=LENGTH, max_size=LENGTH)
NOISE = st.floats(1e-7, 0.5)


@given(vectors(2), STEPS, NOISE)
def test_a_sampler_that_kept_the_previous_weights_never_agrees(pair, steps, noise):
    new, previous = pair
    kept = moved(previous, steps, noise)
    assert judge(kept, new, previous, noise).verdict in ("disagrees", "inconclusive")
    if distance(new, previous) >= TELLING * max(noise, FLOOR):
        assert judge(kept, new, previous, noise).verdict == "disagrees"


@given(vectors(2), STEPS, NOISE)
def test_a_sampler_with_the_new_weights_is_never_blamed(pair, steps, noise):
    new, previous = pair
    arrived = moved(new, steps, noise * 0.999)
    assert judge(arrived, new, previous, noise).verdict != "disagrees"


@given(vectors(2), STEPS, NOISE, st.floats(0.5, 1))
def test_half_an_update_is_caught_where_the_noise_is_small(pair, steps, noise, missing):
    new, previous = pair
    part = [n + missing * (p - n) for n, p in zip(new, previous, strict=True)]
    if distance(new, previous) >= 10 * max(noise, FLOOR):
        found = judge(moved(part, steps, noise), new, previous, noise)
        assert found.verdict == "disagrees"


@given(vectors(3), NOISE)
def test_below_three_times_the_noise_only_other_weights_can_be_told(three, noise):
    sampler, new, previous = three
    found = judge(sampler, new, previous, noise)
    room = TELLING * max(noise, FLOOR)
    near = found.gap <= found.change + room
    assert (found.verdict == "inconclusive") == (found.change < room and near)


def test_a_sampler_on_the_base_weights_is_caught_however_small_the_last_update():
    assert judge([-4.0, -4.0], [-1.0, -2.0], [-1.0, -2.0], 0.05).verdict == "disagrees"
    assert judge([-1.1, -2.1], [-1.0, -2.0], [-1.0, -2.0], 0.05).verdict == "inconclusive"


@given(vectors(3), NOISE)
def test_the_figures_are_the_means(three, noise):
    sampler, new, previous = three
    found = judge(sampler, new, previous, noise)
    gap = sum(abs(a - b) for a, b in zip(sampler, new, strict=True)) / LENGTH
    assert_close(found.gap, gap, rtol=1e-9, atol=1e-12)
    change = sum(abs(a - b) for a, b in zip(new, previous, strict=True)) / LENGTH
    assert_close(found.change, change, rtol=1e-9, atol=1e-12)
    assert found.noise == max(noise, FLOOR)
    if found.verdict == "agrees":
        assert found.gap < SHARE * found.change + found.noise


@given(vectors(3), NOISE, st.permutations(range(LENGTH)))
def test_the_order_of_the_tokens_does_not_matter(three, noise, order):
    shuffled = [[values[i] for i in order] for values in three]
    assert judge(*shuffled, noise).verdict == judge(*three, noise).verdict


def test_nothing_changed_is_inconclusive_with_no_change():
    found = judge([-1.0], [-1.0], [-1.0], 0.0)
    assert (found.verdict, found.change, found.noise) == ("inconclusive", 0.0, FLOOR)
    assert "inconclusive" in str(found)


def test_noise_is_measured_and_never_below_the_floor():
    assert_close(measured_noise([-1.0, -2.0], [-1.1, -2.3]), 0.2, rtol=1e-9)
    assert measured_noise([-1.0], [-1.0]) == FLOOR


def test_other_lengths_and_values_that_are_none_are_refused():
    with pytest.raises(ShapeError, match="2 and 1 logprobs"):
        judge([-1.0, -1.0], [-1.0], [-1.0], 0.1)
    with pytest.raises(ShapeError, match="0 and 0"):
        measured_noise([], [])
    with pytest.raises(SamplerError, match="sampler's"):
        judge([math.nan], [-1.0], [-2.0], 0.1)
    with pytest.raises(DataError, match="trainer's"):
        judge([-1.0], [math.inf], [-2.0], 0.1)
