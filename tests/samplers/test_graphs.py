"""Recorded decode steps: what a recording reads is where it was recorded, whoever steps in it."""

import logging
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.closeness import assert_close
from tests.samplers.support import ids, params, sequences, update
from xorl_lab.engine import models
from xorl_lab.engine.packing import pack
from xorl_lab.engine.sharing import clone
from xorl_lab.engine.versions import WeightsVersion
from xorl_lab.samplers import graphs, lean
from xorl_lab.samplers.cache import GRAIN, PromptCache, RowCache
from xorl_lab.samplers.graphs import GraphedNetwork, Recording, Recordings
from xorl_lab.samplers.lean import LeanWeights
from xorl_lab.samplers.networks import LeanNetwork, Networks


class Tape(TorchDispatchMode):
    """Records as CUDA does: each operation with the tensors, sizes and numbers of that time."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, result))
        return result

    def play(self, wanted: torch.Tensor) -> torch.Tensor:
        made: dict[int, torch.Tensor] = {}

        def now(x):
            return made.get(id(x), x) if isinstance(x, torch.Tensor) else x

        for func, args, kwargs, before in self.operations:
            after = func(*tree_map(now, args), **tree_map(now, kwargs))
            for old, new in zip(tree_leaves(before), tree_leaves(after), strict=True):
                made[id(old)] = new
        return made[id(wanted)]


class Recorder:
    """Counts recordings, and makes them without a GPU."""

    def __init__(self, *, taped: bool) -> None:
        self.taped = taped
        self.made = 0

    def __call__(self, run: graphs.Run, device: torch.device) -> graphs.Run:
        self.made += 1
        if not self.taped:
            return run
        with Tape() as tape:
            result = run()
        return lambda: tape.play(result)


class Batch:
    """The same rows twice: stepped by the lean network itself, and through recordings."""

    def __init__(self, seed: int = 0) -> None:
        self.draw = random.Random(seed)
        self.expected, self.recorded = RowCache(), RowCache()

    def join(self, plain: LeanNetwork, *lengths: int) -> None:
        """Add rows with keys and values that no prompt is needed for."""
        weights, total = plain.weights, sum(lengths)
        noise = torch.Generator().manual_seed(self.draw.randrange(2**32))
        prompts = PromptCache()
        for layer in range(len(weights._heads)):
            keys, values = torch.randn(
                2, weights.kv_heads, total, weights.width, generator=noise, dtype=weights.dtype
            )
            prompts.update(keys[None], values[None], layer)
        slots = np.split(np.arange(total), np.cumsum(lengths)[:-1])
        for cache in (self.expected, self.recorded):
            cache.add(prompts, slots)

    def keep(self, *rows: int) -> None:
        self.expected.keep(rows)
        self.recorded.keep(rows)

    def step(self, plain: LeanNetwork, network: GraphedNetwork, times: int = 1) -> None:
        for _ in range(times):
            tokens = torch.tensor([self.draw.randrange(256) for _ in range(len(self.expected))])
            same(network.step(tokens, self.recorded), plain.step(tokens, self.expected))
            assert self.recorded.lengths.tolist() == self.expected.lengths.tolist()


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert_close(actual, expected, rtol=1e-6, atol=1e-10)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def single():
    return clone(models.load("tiny", "cpu", "float32").model)


@pytest.fixture
def model(monkeypatch):
    """In double precision throughout, where kernels for different numbers of rows agree."""

    def norm(module) -> Callable[[torch.Tensor], torch.Tensor]:
        def applied(x: torch.Tensor) -> torch.Tensor:
            scale = (x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon).rsqrt()
            return x * scale * module.weight

        return applied

    monkeypatch.setattr(lean, "Norm", norm)
    return clone(models.load("tiny", "cpu", "float32").model).double()


@pytest.fixture
def weights(model) -> LeanWeights:
    return LeanWeights(model)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder(taped=True)


@pytest.fixture
def pool(recorder) -> Recordings:
    return Recordings(recorder)


def adapted(weights: LeanWeights, seed: int, rank: int = 4, scale: float = 0.5) -> LeanNetwork:
    """Some matrices of the first layer and the head have an adapter."""
    draw = torch.Generator().manual_seed(seed)
    layer = weights._trunk.layers[0]
    modules = {
        "model.layers.0.self_attn.q_proj": layer.self_attn.q_proj,
        "model.layers.0.self_attn.v_proj": layer.self_attn.v_proj,
        "model.layers.0.mlp.down_proj": layer.mlp.down_proj,
        "lm_head": weights._trunk.embed_tokens,  # of the same shape
    }
    adapter = {}
    for name, module in modules.items():
        out, into = module.weight.shape
        for part, shape in (("A", (rank, into)), ("B", (out, rank))):
            values = torch.randn(shape, generator=draw, dtype=torch.float64)
            adapter[f"base_model.model.{name}.lora_{part}.weight"] = values
    return LeanNetwork(weights, weights.deltas(adapter, scale))


@pytest.mark.parametrize("taped", [False, True])
def test_steps_are_those_of_the_lean_network_whatever_happens_to_the_rows(model, weights, taped):
    recorder = Recorder(taped=taped)
    pool = Recordings(recorder)
    pairs = [
        (plain, GraphedNetwork(plain, model, pool))
        for plain in (
            LeanNetwork(weights, {}),
            adapted(weights, 1),
            adapted(weights, 2, rank=2),
            adapted(weights, 3, scale=2.0),
        )
    ]
    draw = random.Random(5)
    batches = [Batch(i) for i in range(4)]
    grown = 0
    for _ in range(50):
        which = draw.randrange(4)
        batch, (plain, network) = batches[which], pairs[which]
        if len(batch.expected) < 3 or draw.random() < 0.3:
            batch.join(plain, *(draw.randrange(1, GRAIN - 2) for _ in range(draw.randrange(1, 6))))
        elif draw.random() < 0.4:
            rows = range(len(batch.expected))
            batch.keep(*draw.sample(rows, draw.randrange(1, len(rows) + 1)))
        width = batch.recorded._capacity()
        batch.step(plain, network, draw.randrange(1, 12))
        grown += batch.recorded._capacity() > width
    assert grown > 3
    assert max(len(b.expected) for b in batches) > 8
    assert recorder.made > 10
    for batch in batches:
        for layer in range(len(weights._heads)):
            span = int(batch.expected.lengths.max())
            got, wanted = (
                c._layers[layer][:, :, :, :span] for c in (batch.recorded, batch.expected)
            )
            same(got, wanted)


def test_logits_and_prefill_are_the_lean_network_s(single, pool):
    plain = adapted(LeanWeights(single), 1)
    network = GraphedNetwork(plain, single, pool)
    row = pack([[1, 2, 3], [1, 4]])[0]
    hidden = network.prefill(row, PromptCache())
    assert torch.equal(hidden, plain.prefill(row, PromptCache()))
    assert torch.equal(network.logits(hidden), plain.logits(hidden))


def test_a_batch_that_stays_is_copied_once(model, weights, pool):
    plain, batch = LeanNetwork(weights, {}), Batch()
    network = GraphedNetwork(plain, model, pool)
    batch.join(plain, 3, 4, 5)
    batch.step(plain, network)
    before = [t.data_ptr() for t in batch.recorded._layers]
    batch.step(plain, network, 20)
    assert [t.data_ptr() for t in batch.recorded._layers] == before
    (recording,) = pool._kept.values()
    assert before == [t.data_ptr() for t in recording._layers]


def test_there_is_one_recording_per_power_of_two_rows_and_capacity(model, weights, pool, recorder):
    plain, batch = LeanNetwork(weights, {}), Batch()
    network = GraphedNetwork(plain, model, pool)
    made = []
    for joining in (1, 1, 1, 1, 1):
        batch.join(plain, *[5] * joining)
        batch.step(plain, network)
        made.append(recorder.made)
    assert made == [1, 2, 3, 3, 4]
    batch.keep(0, 1, 2)
    batch.step(plain, network, GRAIN // 2)
    assert recorder.made == 4
    batch.step(plain, network, GRAIN // 2)
    assert recorder.made == 5


def test_versions_of_one_shape_share_recordings(model, weights, pool, recorder):
    batch = Batch()
    batch.join(LeanNetwork(weights, {}), 4, 5)
    for seed in range(4):
        plain = adapted(weights, seed)
        batch.step(plain, GraphedNetwork(plain, model, pool), 2)
    assert recorder.made == 1
    plain = adapted(weights, 0, rank=3)
    batch.step(plain, GraphedNetwork(plain, model, pool), 2)
    assert recorder.made == 2
    (first, _), (second, _) = pool._adapters.values()
    assert first[0, "self_attn.q_proj"].a.shape != second[0, "self_attn.q_proj"].a.shape


def test_an_adapter_is_copied_when_another_s_turn_comes(model, weights, pool, monkeypatch):
    batch = Batch()
    leans = [adapted(weights, seed) for seed in range(2)]
    networks = [GraphedNetwork(plain, model, pool) for plain in leans]
    batch.join(leans[0], 4, 5)
    loads: list[None] = []
    real = graphs._tensors
    monkeypatch.setattr(graphs, "_tensors", lambda d: loads.append(None) or real(d))
    for which, times in ((0, 3), (1, 3), (0, 2), (1, 1)):
        before = len(loads)
        batch.step(leans[which], networks[which], times)
        assert len(loads) - before in (0, 2)
    assert len(loads) == 2 * 3


def test_weights_that_were_trained_in_place_are_read_by_the_old_recording(model, pool, recorder):
    batch = Batch()
    for _ in range(3):
        plain = LeanNetwork(LeanWeights(model), {})
        if not len(batch.expected):
            batch.join(plain, 3, 7)
        batch.step(plain, GraphedNetwork(plain, model, pool), 3)
        for parameter in model.parameters():
            parameter.mul_(0.9)
    assert recorder.made == 1


def test_weights_at_another_place_have_recordings_of_their_own(model, pool, recorder):
    other = clone(models.load("tiny", "cpu", "float32").model).double()
    other.model.layers[0].mlp.down_proj.weight.mul_(2)
    batch = Batch()
    for each in (model, other, model):
        plain = LeanNetwork(LeanWeights(each), {})
        if not len(batch.expected):
            batch.join(plain, 3, 7)
        batch.step(plain, GraphedNetwork(plain, each, pool), 3)
    assert recorder.made == 2


def test_batches_of_one_shape_take_turns_in_a_recording(model, weights, pool, recorder):
    leans = [adapted(weights, seed) for seed in range(3)]
    networks = [GraphedNetwork(plain, model, pool) for plain in leans]
    batches = [Batch(seed) for seed in range(3)]
    for batch, plain, count in zip(batches, leans, (3, 4, 3), strict=True):
        batch.join(plain, *range(2, 2 + count))
    for _ in range(4):
        for batch, plain, network in zip(batches, leans, networks, strict=True):
            batch.step(plain, network, 4)
    assert recorder.made == 1


def test_what_a_diverged_batch_leaves_behind_reaches_nobody(model, weights, pool):
    plain = LeanNetwork(weights, {})
    network = GraphedNetwork(plain, model, pool)
    diverged, batch = Batch(1), Batch(2)
    diverged.join(plain, 2 * GRAIN - 9, 51, 52)
    for tensor in diverged.recorded._layers:
        tensor.fill_(torch.inf)
    network.step(torch.tensor([1, 2, 3]), diverged.recorded)
    batch.join(plain, GRAIN - 1, 4, 5)
    batch.step(plain, network, 3)
    assert batch.recorded._capacity() == diverged.recorded._capacity()


def test_the_result_of_a_step_stays_what_it_is(model, weights):
    output = torch.zeros(4, 64, dtype=torch.float64)

    def in_one_place(run: graphs.Run, device: torch.device) -> graphs.Run:
        return lambda: output.copy_(run())

    plain, batch = LeanNetwork(weights, {}), Batch()
    network = GraphedNetwork(plain, model, Recordings(in_one_place))
    batch.join(plain, 3, 4, 5)
    first = network.step(torch.tensor([1, 2, 3]), batch.recorded)
    before = first.clone()
    network.step(torch.tensor([4, 5, 6]), batch.recorded)
    assert torch.equal(first, before)


def test_the_least_recently_used_recordings_go_first(model, weights, pool, recorder, monkeypatch):
    monkeypatch.setattr(graphs, "KEPT", 2)
    plain = LeanNetwork(weights, {})
    network = GraphedNetwork(plain, model, pool)
    batches = [Batch(seed) for seed in range(3)]
    for rows, batch in zip((1, 2, 4), batches, strict=True):
        batch.join(plain, *[3] * rows)
    made = []
    for which in (0, 1, 1, 0, 2, 0, 1, 2):
        batches[which].step(plain, network)
        made.append(recorder.made)
        assert len(pool._kept) <= 2
    assert made == [1, 2, 2, 2, 3, 3, 4, 5]


def test_memory_bounds_the_recordings_but_for_the_latest(model, weights, pool, monkeypatch):
    plain, batch = LeanNetwork(weights, {}), Batch()
    network = GraphedNetwork(plain, model, pool)
    batch.join(plain, 3)
    batch.step(plain, network)
    (small,) = (r.size for r in pool._kept.values())
    monkeypatch.setattr(graphs, "BYTES", 3 * small)
    sizes = []
    for joining in (1, 2, 4, 8):
        batch.join(plain, *[3] * joining)
        batch.step(plain, network)
        sizes.append([r.size // small for r in pool._kept.values()])
    assert sizes == [[1, 2], [1, 2, 4], [8], [16]]


def failing(run: graphs.Run, device: torch.device) -> graphs.Run:
    raise RuntimeError("no graphs here")


@pytest.mark.parametrize("record", [failing, graphs.record])
def test_a_failed_recording_is_said_once_and_steps_go_on(model, weights, record, caplog):
    pool = Recordings(record)
    batch = Batch()
    batch.join(LeanNetwork(weights, {}), 3, 4)
    with caplog.at_level(logging.WARNING, graphs.__name__):
        for seed in range(3):
            plain = adapted(weights, seed)
            batch.step(plain, GraphedNetwork(plain, model, pool), 5)
            batch.join(plain, 9)
    assert len(caplog.records) == 1
    assert "cannot be recorded" in caplog.text
    assert not pool._kept


def test_a_batch_survives_that_a_later_recording_fails(model, weights):
    calls: list[graphs.Run] = []

    def second_fails(run: graphs.Run, device: torch.device) -> graphs.Run:
        calls.append(run)
        return run if len(calls) == 1 else failing(run, device)

    plain, batch = LeanNetwork(weights, {}), Batch()
    network = GraphedNetwork(plain, model, Recordings(second_fails))
    batch.join(plain, 3, 4)
    batch.step(plain, network, 2 * GRAIN)
    batch.join(plain, 5)
    batch.step(plain, network, 5)
    assert len(calls) == 2


def test_a_recorded_step_reads_nothing_back_from_the_device(model):
    """On meta tensors reading would raise, and mixing in those of the host is seen."""
    weights = LeanWeights(model.to("meta"))
    cache = RowCache()
    cache._widths = [(weights.width, weights.width) for _ in weights._heads]
    shape = (3, weights.kv_heads, 2, GRAIN, weights.width)
    for _ in weights._heads:
        cache._layers.append(torch.empty(shape, dtype=weights.dtype, device="meta"))
    recording = Recording(cache, 4, GRAIN)
    with Tape() as tape:
        hidden = LeanNetwork(weights, {}).step(recording.tokens, recording)
    assert hidden.shape == (4, 64)
    for func, *tensors in tape.operations:
        devices = {x.device.type for x in tree_leaves(tensors) if isinstance(x, torch.Tensor)}
        assert len(devices) == 1, func
        # The only tensor of the host is the lengths, which do not change.
        host = "_local_scalar_dense", "max", "add"
        assert devices == {"meta"} or func.__name__.split(".")[0] in host, func


def test_only_networks_on_cuda_are_recorded(single):
    networks = Networks(single)
    version = WeightsVersion("", 0)
    assert type(networks.acquire(version)) is LeanNetwork
    networks._lean.device = torch.device("cuda")
    network = networks.acquire(WeightsVersion("", 1))
    assert type(network) is GraphedNetwork
    assert network._pool is networks._recordings


@pytest.fixture
def record_all(monkeypatch) -> Callable[[Recorder], None]:
    """Every network that is made from now on steps through recordings."""

    def switch(recorder: Recorder) -> None:
        pool, real = Recordings(recorder), Networks._make

        def make(networks: Networks, version: WeightsVersion, source: object) -> GraphedNetwork:
            return GraphedNetwork(real(networks, version, source), source, pool)

        monkeypatch.setattr(Networks, "_make", make)

    return switch


def test_samples_are_the_same_through_recordings(service, record_all):
    def samples() -> list[list[int]]:
        trainer = service.create_lora_training_client("tiny", rank=4, seed=3)
        found = []
        for _ in range(2):
            update(trainer)
            client = trainer.save_weights_and_get_sampling_client()
            futures = [
                client.sample(ids(*prompt), params(max_tokens=tokens), count)
                for prompt, tokens, count in ((b"to be", 9, 4), (b"or not", 70, 2), (b"to", 30, 3))
            ]
            found += [tokens for future in futures for tokens in sequences(future.result())]
        return found

    expected = samples()
    recorder = Recorder(taped=True)
    record_all(recorder)
    assert samples() == expected
    assert recorder.made > 3
