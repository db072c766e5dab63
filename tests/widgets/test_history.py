import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.closeness import assert_close
from xorl_lab.widgets.history import History


def made(values, name="a"):
    history = History()
    array = np.asarray(values, dtype=float)
    history.extend(np.arange(1, len(array) + 1), {name: array})
    return history


def test_columns_grow_and_new_ones_begin_with_nothing():
    history = History()
    for step in range(1, 1001):
        columns = {"a": np.array([float(step)])} | ({"b": np.array([1.0])} if step > 500 else {})
        history.extend(np.array([step]), columns)
    assert len(history) == 1000
    assert history.last == 1000
    assert_close(history.column("a"), np.arange(1, 1001), rtol=0)
    assert np.isnan(history.column("b")[:500]).all()
    assert history.names == ("a", "b")
    assert history.latest() == {"a": 1000.0, "b": 1.0}


def test_a_short_history_stays_as_it_is():
    table = made([1, 2, 3]).thin(10)
    assert table.steps.tolist() == [1, 2, 3]
    assert table.exact == 1


def test_columns_of_a_part():
    history = made([1, 2, 3])
    history.extend(np.array([4]), {"b": np.array([4.0])})
    table = history.table(2)
    assert table.column("a").tolist()[:1] == [3.0]
    assert table.column("b").tolist()[1:] == [4.0]
    assert np.isnan(table.column("c")).tolist() == [True, True]


def test_nothing_at_all():
    table = History().thin(10)
    assert len(table.steps) == 0
    assert table.wire() == b""


number = st.one_of(st.floats(-1e6, 1e6), st.just(np.nan), st.just(np.inf))


@given(st.lists(number, min_size=1, max_size=400), st.integers(8, 60), st.integers(0, 20))
def test_thinning_loses_no_extreme(values, points, tail):
    history = made(values)
    table = history.thin(points, tail=tail)
    steps, thinned = table.steps, table.values[:, 0]
    assert len(steps) <= points + -(-len(values) // max(1, points // 4)) + 2
    assert (np.diff(steps) > 0).all()
    known = np.array(values)[~np.isnan(values)]
    if len(known):
        assert np.nanmax(thinned) == known.max()
        assert np.nanmin(thinned) == known.min()
    else:
        assert np.isnan(thinned).all()
    exact = steps >= table.exact
    assert steps[exact].tolist() == list(range(table.exact, len(values) + 1))
    assert_close(
        np.nan_to_num(thinned[exact], nan=-7.0, posinf=-8.0),
        np.nan_to_num(np.array(values)[table.exact - 1 :], nan=-7.0, posinf=-8.0),
        rtol=0,
    )


def test_long_history_fits_a_screen():
    table = made(np.random.default_rng(0).normal(size=100_000)).thin(2400, tail=400)
    assert len(table.steps) <= 2500
    assert table.steps[-1] == 100_000
    assert (np.diff(table.steps[-400:]) == 1).all()


def test_a_part_in_full_with_a_neighbour_on_each_side():
    table = made(range(1, 101)).between(10, 12, 100)
    assert table.steps.tolist() == [9, 10, 11, 12, 13]


def test_the_wire_carries_steps_then_columns():
    history = made([0.5, 0.25])
    history.extend(np.array([3]), {"a": np.array([1.0]), "b": np.array([np.inf])})
    wire = history.table().wire()
    assert np.frombuffer(wire[:12], "<i4").tolist() == [1, 2, 3]
    columns = np.frombuffer(wire[12:], "<f4").reshape(2, 3)
    assert columns[0].tolist() == [0.5, 0.25, 1.0]
    assert np.isnan(columns[1, :2]).all()
    assert np.isinf(columns[1, 2])
