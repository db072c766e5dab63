"""What the tests of the sampler share: a held worker, a count of the work, a clock."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

import xorl_lab as xl
from xorl_lab.engine import engine as engines
from xorl_lab.engine.engine import Engine
from xorl_lab.engine.scheduler import Ticket
from xorl_lab.samplers import embedded, rows
from xorl_lab.samplers.networks import LeanNetwork, PlainNetwork

PATIENCE = 60.0
"""Seconds after which a test that waits for another thread gives up."""


def params(**fields: object) -> xl.SamplingParams:
    """Sampling parameters with a fixed seed, unless another is given."""
    return xl.SamplingParams(**({"seed": 1, "max_tokens": 12} | fields))


def ids(*tokens: int) -> xl.ModelInput:
    return xl.ModelInput.from_ints(tokens)


def sequences(response: xl.SampleResponse) -> list[list[int]]:
    return [s.tokens for s in response.sequences]


def datum(tokens: Sequence[int]) -> xl.Datum:
    """Every token but the first is a target."""
    return xl.Datum(xl.ModelInput.from_ints(tokens), {"labels": list(tokens)})


def update(client: xl.TrainingClient, steps: int = 1, rate: float = 1e-2) -> None:
    """Move the weights, by learning two sentences."""
    data = [datum(list(b"to be or not")), datum(list(b"that is"))]
    for _ in range(steps):
        client.forward_backward(data).result()
        client.optim_step(xl.AdamParams(learning_rate=rate)).result()


def engine_of(client: xl.SamplingClient | xl.TrainingClient) -> Engine:
    """The engine behind a client of these tests: asking for it again gives the same one."""
    return engines.get(client.base_model, "cpu", "float32")


def sampler_of(client: xl.SamplingClient) -> embedded.EmbeddedSampler:
    """The sampler on the engine of a client."""
    attached = engine_of(client).scheduler.backgrounds
    return next(b for b in attached if isinstance(b, embedded.EmbeddedSampler))


@contextmanager
def held(client: xl.SamplingClient | xl.TrainingClient) -> Iterator[None]:
    """Keep the worker thread busy, so that what is submitted meanwhile is waiting all at once."""
    engine = engine_of(client)
    entered, leave = threading.Event(), threading.Event()

    def wait(_: Ticket) -> None:
        entered.set()
        assert leave.wait(PATIENCE)

    future = engine.scheduler.submit(wait, name="held by a test")
    assert entered.wait(PATIENCE)
    try:
        yield
    finally:
        leave.set()
        future.result(PATIENCE)


class Counter:
    """Stands between the sampler and the model and notes what is computed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.prefills: list[int] = []
        """Nodes of each packed row of prompts."""
        self.steps: list[int] = []
        """Rows of each decode step."""
        self.cache_bytes: list[int] = []
        """Memory of keys and values at each decode step."""
        self.before_step: Callable[[int], object] = lambda _: None
        """Called on the worker with the number of the decode step that comes."""
        for network in (LeanNetwork, PlainNetwork):
            monkeypatch.setattr(network, "prefill", self._prefill(network.prefill))
            monkeypatch.setattr(network, "step", self._step(network.step))

    def _prefill(self, real):
        def prefill(network, row, cache):
            self.prefills.append(len(row.tokens))
            return real(network, row, cache)

        return prefill

    def _step(self, real):
        def step(network, tokens, cache):
            self.before_step(len(self.steps))
            self.steps.append(len(tokens))
            hidden = real(network, tokens, cache)
            self.cache_bytes.append(sum(t.nbytes for t in cache._layers))
            return hidden

        return step


class Clock:
    """A clock that goes only when a test moves it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(embedded, "time", self)
        monkeypatch.setattr(rows, "time", self)

    def monotonic(self) -> float:
        return self.now
