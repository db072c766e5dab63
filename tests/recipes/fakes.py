"""A client that records what it is sent and answers by a fixed rule: to test recipes."""

from collections.abc import Callable
from dataclasses import dataclass, field

from xorl_lab.engine.tiny import byte_tokenizer
from xorl_lab.futures import APIFuture
from xorl_lab.types import (
    BatchSampleResult,
    ForwardBackwardOutput,
    LossFnOutput,
    OptimStepResponse,
    SampledSequence,
    SampleResponse,
    TensorData,
)

EOS = 257
SAMPLER = -0.5
"""Logprob of every sampled token."""
BASE = -0.75
"""Logprob of every token under the base model."""


def trainer_logprob(version):
    """Logprob of every token under the trainer after so many steps: exact in binary."""
    return SAMPLER + 0.125 * version


@dataclass
class Call:
    """One call as it was made."""

    name: str
    data: list = field(default_factory=list)
    loss_fn: str = ""
    params: dict = field(default_factory=dict)
    version: int = 0


class FakeSampler:
    sync = None

    def __init__(self, client, version):
        self.client, self.version = client, version

    def sample_batch(self, prompts, params, num_samples=1, top_logprobs=0, entropies=False):
        result = BatchSampleResult([], [], [])
        for index, (prompt, chosen) in enumerate(zip(prompts, params, strict=True)):
            self.client.sampled.append((prompt.to_ints(), chosen, num_samples, self.version))
            text = byte_tokenizer_once().decode(prompt.to_ints())
            sequences = [self.client.answer(text, chosen, i) for i in range(num_samples)]
            result.completed.append((index, SampleResponse(sequences)))
        return APIFuture.completed(result)


class FakeClient:
    """Args: answer(prompt text, SamplingParams, index) -> SampledSequence."""

    base_model, device, dtype, vocab_size = "fake", "cpu", "float32", 259

    def __init__(self, answer: Callable, context_length=512):
        self.answer, self.context_length = answer, context_length
        self.version = 0
        self.calls: list[Call] = []
        self.sampled: list = []

    def get_tokenizer(self):
        return byte_tokenizer_once()

    def save_weights_and_get_sampling_client(self):
        return FakeSampler(self, self.version)

    def forward(self, data, loss_fn, loss_fn_params=None):
        return self._output("forward", data, loss_fn, loss_fn_params, trainer_logprob(self.version))

    def forward_backward(self, data, loss_fn, loss_fn_params=None):
        logprob = trainer_logprob(self.version)
        return self._output("forward_backward", data, loss_fn, loss_fn_params, logprob)

    def forward_base(self, data, loss_fn_params=None):
        return self._output("forward_base", data, "", loss_fn_params, BASE)

    def optim_step(self, adam):
        self.calls.append(Call("optim_step", params=adam.to_dict()))
        self.version += 1
        return APIFuture.completed(OptimStepResponse({"grad_norm": float(self.version)}))

    def _output(self, name, data, loss_fn, params, logprob):
        self.calls.append(Call(name, data, loss_fn, dict(params or {}), self.version))
        outputs = []
        for datum in data:
            count = len(datum.loss_fn_inputs["target_tokens"])
            zeros = TensorData([0.0] * count)
            outputs.append(LossFnOutput(0.0, TensorData([logprob] * count), zeros))
        metrics = {"loss:mean": 0.25, "ratio_min": 1.0 - self.version, "ratio_max": self.version}
        return APIFuture.completed(ForwardBackwardOutput(outputs, metrics, loss_fn))

    def named(self, name):
        return [c for c in self.calls if c.name == name]


_tokenizers: list = []


def byte_tokenizer_once():
    if not _tokenizers:
        _tokenizers.append(byte_tokenizer())
    return _tokenizers[0]


def sequence(text, stop_reason="stop"):
    """A completion of the given text, with the end-of-sequence token if it stopped."""
    tokens = byte_tokenizer_once().encode(text) + ([EOS] if stop_reason == "stop" else [])
    return SampledSequence(tokens, stop_reason, [SAMPLER] * len(tokens), text)
