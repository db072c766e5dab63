"""Which network a version of the weights is read through, and for how long."""

import gc
import logging
import weakref

import pytest
import torch
from transformers import PreTrainedModel

from tests.samplers.test_lean import SCALE, apart, course, merged, random_adapter, random_model
from xorl_lab.engine import models
from xorl_lab.engine.sharing import clone
from xorl_lab.engine.trainer import Trained
from xorl_lab.engine.versions import WeightsVersion
from xorl_lab.samplers import networks
from xorl_lab.samplers.networks import LeanNetwork, Networks, PlainNetwork

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(scope="module")
def base() -> PreTrainedModel:
    return random_model("llama")


@pytest.fixture(scope="module")
def moe() -> PreTrainedModel:
    return models.load("tiny-moe", device="cpu", dtype="float32").model


def adapted(base: PreTrainedModel, number: int = 1, factor: float = 1.0) -> WeightsVersion:
    ends = ("q_proj", "k_proj", "v_proj", "o_proj")
    adapter = {n: t * factor for n, t in random_adapter(base, ends).items()}
    return WeightsVersion("a", number, adapter, SCALE)


def full(base: PreTrainedModel, factor: float = 1.1) -> WeightsVersion:
    model = clone(base)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    return WeightsVersion("f", 1, full=model)


def is_drawn_from(network, wanted: PlainNetwork) -> bool:
    pairs = zip(course(network, 3), course(wanted, 3), strict=True)
    return max(apart(a, b) for a, b in pairs) < 1e-4


def expected(base: PreTrainedModel, version: WeightsVersion) -> PlainNetwork:
    """A network that nothing else has a part in."""
    if version.full is not None:
        return PlainNetwork(version.full)
    return merged(base, version.adapter or {})


def test_every_kind_of_version_is_read_as_it_is(base):
    versions = [WeightsVersion("", 0), adapted(base), full(base)]
    pool = Networks(base)
    found = [pool.acquire(v) for v in versions]
    assert all(isinstance(n, LeanNetwork) for n in found)
    for i, network in enumerate(found):
        for j, version in enumerate(versions):
            assert is_drawn_from(network, expected(base, version)) == (i == j)


def test_a_version_that_is_drawn_from_keeps_its_network(base):
    pool, version = Networks(base), adapted(base)
    network = pool.acquire(version)
    pool.acquire(adapted(base, 2, 2.0))
    assert pool.acquire(version) is network


def test_what_was_released_is_made_anew_and_only_for_its_own_version(base):
    pool, first, second = Networks(base), adapted(base), adapted(base, 2, 2.0)
    network = pool.acquire(first)
    pool.release(first)
    other = pool.acquire(second)
    assert is_drawn_from(other, expected(base, second))
    assert pool.acquire(first) is not network
    assert is_drawn_from(pool.acquire(first), expected(base, first))


def test_releasing_what_was_not_acquired_changes_nothing(base):
    pool, version = Networks(base), adapted(base)
    network = pool.acquire(version)
    pool.release(adapted(base, 2))
    assert pool.acquire(version) is network
    pool.release(version)
    pool.release(version)
    assert is_drawn_from(pool.acquire(version), expected(base, version))


@pytest.mark.parametrize("idle", [False, True])
def test_full_weights_that_were_copied_are_read_from_the_copy(base, idle):
    trained, pool = Trained("f", base, None), Networks(base)
    version = trained.snapshot()
    before = pool.acquire(version)
    kept = PlainNetwork(clone(trained.model))
    if idle:
        pool.release(version)
    trained.load_weights({n: 1.3 * t for n, t in trained.weights().items()})
    assert version.full is not trained.model
    after = pool.acquire(version)
    assert after is not before
    assert is_drawn_from(after, kept)
    assert not is_drawn_from(before, kept)
    assert pool.acquire(version) is after
    latest = trained.snapshot()
    assert is_drawn_from(pool.acquire(latest), PlainNetwork(trained.model))


@pytest.mark.parametrize("wrong", ["differs", "not a number"])
def test_where_the_check_fails_transformers_computes_and_it_is_said_once(
    base, monkeypatch, caplog, wrong
):
    real = networks.LeanWeights.hidden

    def broken(weights, *args):
        hidden = real(weights, *args)
        return hidden * 1.001 if wrong == "differs" else hidden * torch.nan

    monkeypatch.setattr(networks.LeanWeights, "hidden", broken)
    pool, versions = Networks(base), [WeightsVersion("", 0), adapted(base), full(base)]
    with caplog.at_level(logging.WARNING):
        for version in versions:
            network = pool.acquire(version)
            assert isinstance(network, PlainNetwork)
            assert is_drawn_from(network, expected(base, version))
            pool.release(version)
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "slower" in caplog.text


def test_a_network_that_is_right_says_nothing(base, caplog):
    Networks(base).acquire(WeightsVersion("", 0))
    assert not caplog.records


def test_a_mixture_of_experts_goes_the_plain_way_silently(moe, caplog):
    pool, version = Networks(moe), adapted(moe)
    for each in (version, WeightsVersion("", 0)):
        network = pool.acquire(each)
        assert isinstance(network, PlainNetwork)
        assert is_drawn_from(network, expected(moe, each))
    assert not caplog.records


@pytest.mark.parametrize("back", ["while the other is drawn from", "before the other is"])
def test_merged_versions_that_alternate_keep_their_own_weights(moe, back):
    pool, first, second = Networks(moe), adapted(moe), adapted(moe, 2, 2.0)
    pool.acquire(first)
    pool.release(first)
    if back.startswith("before"):
        mine, other = pool.acquire(first), pool.acquire(second)
    else:
        other, mine = pool.acquire(second), pool.acquire(first)
    assert is_drawn_from(other, expected(moe, second))
    assert is_drawn_from(mine, expected(moe, first))


# Memory.


def test_no_version_is_held_when_nobody_draws(base):
    pool = Networks(base)
    versions = [adapted(base, n) for n in range(3)] + [full(base)]
    gone = [weakref.ref(v) for v in versions]
    for version in versions:
        pool.acquire(version)
    for version in versions:
        pool.release(version)
    versions.clear()
    del version
    gc.collect()
    assert all(r() is None for r in gone)


def test_replacing_full_weights_frees_what_was_read_before(base):
    pool, version = Networks(base), full(base)
    weights = weakref.ref(version.full.get_output_embeddings().weight)
    pool.acquire(version)
    version.full = clone(version.full)
    pool.acquire(version)
    gc.collect()
    assert weights() is None


def test_dropping_the_networks_frees_everything(base):
    pool, version = Networks(base), full(base)
    weights = weakref.ref(version.full.get_output_embeddings().weight)
    pool.acquire(version)
    pool.release(version)
    del pool, version
    gc.collect()
    assert weights() is None


def test_full_weights_that_nobody_reads_are_not_copied_before_the_next_step(base):
    trained, pool = Trained("f", base, None), Networks(base)
    version = trained.snapshot()
    pool.acquire(version)
    pool.release(version)
    del version
    gc.collect()
    trained.load_weights({n: t.clone() for n, t in trained.weights().items()})
    assert len(trained._copies) == 0
