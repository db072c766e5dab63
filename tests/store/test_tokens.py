"""Values per token of a group, to bytes and back."""

import base64
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.closeness import assert_close
from tests.store.support import alternatives, floats, ids, record, same
from xorl_lab.errors import StoreError
from xorl_lab.store.arrays import pack, unpack
from xorl_lab.store.tokens import pack_group, unpack_group
from xorl_lab.types import Alternatives, Group, Rollout, StepRecord

BEFORE = """
AXgBzU/LbsIwEHTLof+Rsw8JUEEQ8XLqT0RRBZJLo5IEhfxdsdd/1s6ah0Cq2ms32bUzOzs7WT4oVeaTfJ7l8/RZl2Wy77tm
PyQ6WdbTRE90WVW6THa23Q7vhws8PcND92HbKzqDQKqz00C3hdIm9t4gNBvHnh7HbmObje0Pi90NS9aBFPuHobfrZjH067q1
/estLYqlP4n9MiTa2b22bYe+29f2D4dn0Tv21WlVPX0pxeoUL2r0eL7+44OZg0dhj8dx4OC8fDv2eOUaQbAElMJHyRCCQwYf
IQ5qdPpJZgqGC2eIKUYBXTYYMYaOQAIZCVlGvhA1gw2E9eQKmSnIkGh5JhgAyZMn8JmcJ/hEguYNbmaFNn0yr+BMFopfHCjw
ixYo7uLsG3WW4x9RSyPMGt1yLKYlsD+yeWEQZWCBiECkzoatn21y2xiKuSS6PvVvi10na28H3JfC60JmJ7Kqf3aOUt6fa+NW
LiusB/AmhlXeNU6rgYKjemIzOwcOAyGcfK9gdLqMeWhrszWcgABLpGoGkoyiIRGlBGcPOVxRTQUBFwGAZHwxdpJJWL+avEiD
tnyhhIdKqBlviqJkEElhPoWkiMUgln8EUYpw8oQ5ECwKli8yPPt4AIwvLpdYwM2/OPKTRiCb0ksDqWrqB/LIkg5Y55a0xT5D
RfkQevq+DY1UDuhFatXhQPLMPLdnYJ/n81f3LWjuN8/fVmqTIDB4jTMWvrOXb87z9eFpTF1TX6TEljSSe8jXe82dpOhqZvNR
kOKWfZL1PN0SJuEv+gSc7Zlahp07HbuP8hnvUYc+2dIRDUrcj5hDbwn///7oRZfUgAN/xpc4XWwBpAFYPhmUjtUF4IFFr7QB
Wi4Fczs4KUsMsRUEG7hW5ATzoQdQPGoJZxNBhb1I3UNiitOHQ+ln7XWiD/faSVoBaqEkgqyPhb9DfMmvX8s0IccnK8Zmaaum
Yu+ihUkacWcCflJ7477244v7AtLmzgn3tSTi4f4anxXQoEn+HFOM0IFto0b6W304YUXi+BH4isNoDsFC2fV/uPUg8zzFfFdc
rtKC/GVY3OCRRKns+aM2HhDFFN+bTjFCtTlXlUlYmrYKRLaEEYOFibepY4Wzkxedrdi+w6O3899NipOqWQI8vpnZlxkDmAdx
6EuxvtJqiENqvRx5XIDC9Vhxozs1WSsZ68atdUU1xRLaqwMzcfSJpCanlm5+sv//d4WucEWuIvIW+LADjRqWqUpSAvSoFSJj
mSc5MlP9CCeMf33YqLGssW589SOtFALK8dvdZB1G9VYt7fca3Qh1tl/nQnWRYPzchY0y2U2qHDlnEAqUACNO/sadMY8pnMlB
Xr/ONgH7xlpdwREbvIP3dVGFHE3fBfSxs/L4p4tPkNKkFfEWKR3NOk7zJ6XxsAoTSRRIEOwPXkSeASYtAK6AG/GAM7yay6CX
4nZGkqawWvrhTh8=
"""
"""A group as it was written before alternatives were recorded."""


def drawn(rng: np.random.Generator, length: int, **further: object) -> Rollout:
    logprobs = floats(-rng.exponential(1, length))
    return Rollout(ids(rng, length).tolist(), logprobs, "t", "stop", 1, 0.5, **further)


def there_and_back(group: Group):
    return unpack_group(pack_group(group, "a group").data)[1]


def test_a_group_written_before_alternatives_were_recorded_is_read():
    rng = np.random.default_rng(0)

    def made(length, names=(), logprobs=True):
        tokens = [int(x) for x in rng.integers(0, 49152, length)]
        drawn = floats(-rng.exponential(1, length)) if logprobs else []
        return tokens, drawn, {name: floats(rng.normal(size=length)) for name in names}

    names = ("trainer_logprobs", "entropies")
    wanted = [made(70, names), made(0), made(3, (), logprobs=False), made(2, names[1:])]
    prompt, got = unpack_group(base64.b64decode(BEFORE))
    assert prompt.tolist() == [7, 49151, 0]
    for (tokens, logprobs, streams), values in zip(wanted, got, strict=True):
        assert values.tokens.tolist() == tokens
        assert values.logprobs.tolist() == logprobs
        assert {name: stream.tolist() for name, stream in values.streams.items()} == streams
        assert values.top_ids.shape == values.top_logprobs.shape == (len(tokens), 0)


def test_arrays_that_a_later_version_adds_are_left_out():
    packed = pack_group(record(1, top=2).groups[0], "a group").data
    more = {"later:what": np.arange(9, dtype=np.int32), **unpack(packed)}
    for one, other in zip(unpack_group(pack(more))[1], unpack_group(packed)[1], strict=True):
        assert same(one, other)


@given(
    shapes=st.lists(st.tuples(st.integers(0, 40), st.none() | st.integers(0, 6)), max_size=6),
    seed=st.integers(0, 2**32 - 1),
)
def test_alternatives_of_any_shape_come_back_to_the_bit(shapes, seed):
    rng = np.random.default_rng(seed)
    rollouts = [drawn(rng, length) for length, _ in shapes]
    for i, (length, width) in enumerate(shapes):
        if width is not None:
            top = alternatives(rng, length, width)
            top.logprobs[rng.random(top.logprobs.shape) < 0.2] = np.nan
            top.ids[np.isnan(top.logprobs)] = -1
            top.logprobs[rng.random(top.logprobs.shape) < 0.1] = -np.inf
            rollouts[i] = replace(rollouts[i], top_logprobs=top)
    for rollout, values in zip(rollouts, there_and_back(Group("p", [1], rollouts)), strict=True):
        wanted = rollout.top_logprobs
        if wanted is None:
            wanted = alternatives(rng, len(rollout.tokens), 0)
        assert (values.top_ids.dtype, values.top_logprobs.dtype) == (np.int32, np.float32)
        assert values.top_ids.shape == values.top_logprobs.shape == wanted.ids.shape
        assert values.top_ids.tobytes() == wanted.ids.tobytes()
        assert values.top_logprobs.tobytes() == wanted.logprobs.tobytes()


def test_alternatives_come_back_through_the_store(store):
    recorded = record(1, streams=("entropies", "ratio", "flags"), length=80, top=5)
    absent = record(2)
    with store.create(name="run", kind="grpo", model="tiny") as writer:
        writer.step(recorded)
        writer.step(absent)
    reader = store.run("run")
    assert reader.groups(1) == recorded.groups
    assert reader.groups(2) == absent.groups
    assert all(r.top_logprobs is None for g in reader.groups(2) for r in g.rollouts)
    numbers = reader.rollouts().index.tolist()
    shapes = [reader.rollout(i).top_ids.shape for i in numbers]
    assert shapes == [(80, 5)] * 6 + [(5, 0)] * 6


@pytest.mark.parametrize(
    ("shape", "other"), [((3, 5), (3, 4)), ((2, 5), (2, 5)), ((3,), (3,)), ((3, 5, 1), (3, 5, 1))]
)
def test_alternatives_that_do_not_fit_are_refused(store, shape, other):
    rng = np.random.default_rng(0)
    top = Alternatives(np.zeros(shape, np.int32), np.zeros(other, np.float32))
    group = Group("p", [1], [drawn(rng, 2), drawn(rng, 3, top_logprobs=top)])
    with (
        store.create(name="run", kind="grpo", model="tiny") as writer,
        pytest.raises(StoreError) as caught,
    ):
        writer.step(StepRecord(1, {}, [group]))
    assert str(caught.value) == (
        f"top_logprobs of rollout 1 of group 0 of step 1 has ids {shape} and logprobs {other} but "
        "there are 3 tokens: pass (tokens, alternatives) each"
    )
    assert store.run("run").count() == 0


@pytest.mark.parametrize("bad", [[1, "2"], [1, 2.5], [None, 1], [1, 2**31], [-1, 1], [1, 2**80]])
def test_what_is_no_id_is_refused(bad):
    group = Group("p", [1], [Rollout(bad, [-1.0, -1.0], "t", "stop", 1, 0.5)])
    with pytest.raises(StoreError, match=r"tokens of a group (are not all ids|reach from)"):
        pack_group(group, "a group")


@pytest.mark.parametrize("bad", ["1", None, [1.0], 10**400])
def test_what_is_no_number_is_refused(bad):
    group = Group("p", [1], [Rollout([1, 2], [-1.0, bad], "t", "stop", 1, 0.5)])
    with pytest.raises(StoreError, match="'logprobs' of a group is not all numbers"):
        pack_group(group, "a group")


def test_numbers_of_numpy_and_whole_ones_are_taken():
    values = [np.float32(0.5), np.int64(2), True, 3]
    rollout = Rollout([np.int32(1), 2, 3, 4], values, "t", "stop", 1, 0.5)
    (got,) = there_and_back(Group("p", [1], [rollout]))
    assert got.logprobs.tolist() == [0.5, 2.0, 1.0, 3.0]
    assert got.tokens.tolist() == [1, 2, 3, 4]


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    seed=st.integers(0, 2**32 - 1),
    gaps=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_means_are_over_what_there_is(lengths, seed, gaps):
    rng = np.random.default_rng(seed)
    names = ("entropies", "ratio", "flags")
    rollouts: list[Rollout] = []
    for length in lengths:
        streams = {name: rng.normal(size=length) for name in names if rng.random() < 0.8}
        for values in streams.values():
            values[rng.random(length) < gaps] = math.nan
        rollouts.append(drawn(rng, length, streams={n: floats(v) for n, v in streams.items()}))
    packed = pack_group(Group("p", [1], rollouts), "a group")
    for rollout, means in zip(rollouts, packed.means, strict=True):
        columns = {"logprobs": rollout.logprobs, **rollout.streams}
        if not rollout.tokens:
            del columns["logprobs"]
        assert set(means) == set(columns)
        for name, values in columns.items():
            there = [x for x in values if not math.isnan(x)]
            if there:
                assert_close(means[name], math.fsum(there) / len(there), rtol=1e-9, atol=1e-12)
            else:
                assert means[name] is None


def test_whose_tokens_they_are_comes_back_and_what_was_not_drawn_has_no_value(store):
    nan = math.nan
    episode = Rollout(
        [5, 6, 7, 8],
        [-0.5, nan, nan, -1.5],
        "a tool said b",
        "stop",
        1,
        0.5,
        streams={"entropies": [0.25, nan, nan, 0.75]},
        weights=[1.0, 0.0, 0.0, 1.0],
    )
    plain = Rollout([5], [-0.5], "a", "stop", 1, 0.5)
    with store.create(name="run", kind="grpo", model="tiny") as writer:
        writer.step(StepRecord(1, {}, [Group("p", [1], [episode, plain])]))
    reader = store.run("run")
    first, second = reader.walk()
    assert first.weights.tolist() == episode.weights
    assert first.turns == episode.turns == [(0, 1), (3, 4)]
    assert (second.weights, second.turns) == (None, [(0, 1)])
    again = first.rollout()
    assert again.weights == episode.weights
    assert again.drawn == 2
    assert str(again.logprobs) == str(episode.logprobs)
    assert str(again.streams) == str(episode.streams)
    assert second.rollout() == plain
    assert reader.rollouts()["mean:logprobs"].tolist() == [-1.0, -0.5]
    assert reader.rollouts()["mean:entropies"].tolist()[0] == 0.5
