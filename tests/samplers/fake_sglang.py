"""A SGLang server and a trainer whose weights are lists of numbers: for tests of the sync."""

from types import SimpleNamespace

import torch

from xorl_lab.engine.versions import WeightsVersion
from xorl_lab.errors import ConfigError, SamplerError

TEXT = (1, 2, 3, 4, 5)


def version(number, *values, model_id="m", kind="lora"):
    """Weights that say these logprobs."""
    values = torch.tensor(values or [-1.0 - 0.5 * number] * 4)
    if kind == "lora":
        return WeightsVersion(model_id, number, {"x.lora_A.weight": values[None]}, 1.0)
    return WeightsVersion(model_id, number, full=values)


def said(weights):
    """The logprobs that weights say."""
    values = weights.adapter["x.lora_A.weight"][0] if weights.adapter else weights.full
    return [-1.0] * 4 if values is None else values.tolist()


class FakeTrainer:
    """Says what the versions say."""

    text, name, vocab_size, dtype = TEXT, "fake", 10, "float32"

    def __init__(self):
        self.base = WeightsVersion("", 0)
        self.written = []

    def score(self, weights):
        return said(weights)

    def write_adapter(self, weights, folder):
        folder.mkdir(parents=True)
        self.written.append(folder)
        torch.save(torch.tensor(said(weights)), folder / "weights")
        return 16

    def write_model(self, weights, folder):
        return self.write_adapter(weights, folder)

    def tensors(self, weights):
        for i, value in enumerate(said(weights)):
            yield f"t{i}", torch.tensor([value])


class FakeServer:
    """Keeps weights as SGLang does, and writes down what it is told.

    ``broken``: calls, by name, that fail; ``skipped``: those that do nothing and say nothing.
    """

    url = "http://fake"

    def __init__(self, noise=0.0, *, weights=None, named="default", max_rank=8, dtype="float32"):
        self.calls = []
        self.weights = list(weights or [-1.0] * 4)
        self.named = named
        self.adapters = {}
        self.paused = None
        self.busy = 0
        """Looks for which requests are under way."""
        self.noise, self.max_rank, self.dtype = noise, max_rank, dtype
        self.broken, self.skipped = {}, set()
        self.partly = None
        """Tensors after which an update breaks off."""

    def _note(self, name, *more):
        self.calls.append((name, *more))
        if self.broken.get(name, 0) > 0:
            self.broken[name] -= 1
            raise SamplerError(f"{name} failed", retryable=True)
        return name not in self.skipped

    @property
    def names(self):
        return [call[0] for call in self.calls]

    def require(self, *, vocab_size, model, rank, context_length=None):
        del context_length
        self._note("require", rank)
        assert (vocab_size, model) == (10, "fake")
        if rank is not None and rank > self.max_rank:
            raise ConfigError(f"takes adapters up to rank {self.max_rank}, but yours has {rank}")
        facts = {"weight_version": self.named, "dtype": self.dtype, "url": self.url}
        return SimpleNamespace(model_path="fake-model", **facts)

    def weight_version(self):
        return self.named

    def name_weights(self, name):
        self._note("name_weights")
        self.named = name

    def load_adapter(self, name, folder, *, again=False):
        if not self._note("load_adapter", name):
            self.adapters[name] = self.adapters.get(name, self.weights)
            return
        if name in self.adapters:
            raise SamplerError(f"{name} is loaded already")
        del again
        self.adapters[name] = torch.load(folder / "weights").tolist()

    def unload_adapter(self, name):
        self._note("unload_adapter", name)
        if name not in self.adapters:
            raise SamplerError(f"there is no {name}")
        del self.adapters[name]

    def update_from_disk(self, folder, name):
        assert self.paused
        if self._note("update_from_disk"):
            self.weights = torch.load(folder / "weights").tolist()
        self.named = name

    def update_from_tensors(self, tensors, name, bucket_bytes=0):
        assert self.paused
        assert bucket_bytes > 0
        told = self._note("update_from_tensors")
        sent = 0
        for i, (_, tensor) in enumerate(tensors):
            if self.partly == i:
                self.partly, self.named = None, "incomplete"
                raise SamplerError("the connection was lost", retryable=True)
            if told:
                self.weights[i] = float(tensor)
            sent += tensor.nbytes
        self.named = name
        return sent

    def pause(self, mode="abort"):
        self._note("pause", mode)
        self.paused = mode

    def resume(self):
        self._note("resume")
        self.paused = None

    def flush_cache(self, patience=1.0):
        self._note("flush_cache")
        if self.busy > 0 and self.paused != "retract":
            self.busy -= 1
            raise SamplerError("busy", retryable=True)
        del patience

    def score(self, tokens, adapter=None):
        self._note("score", adapter)
        assert tuple(tokens) == TEXT
        assert not self.paused, "a paused server would never answer"
        if adapter is not None and adapter not in self.adapters:
            raise SamplerError(f"no adapter {adapter}")
        values = self.weights if adapter is None else self.adapters[adapter]
        return [value + self.noise * (-1) ** i for i, value in enumerate(values)]

    def close(self):
        self._note("close")
