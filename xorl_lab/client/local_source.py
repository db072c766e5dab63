"""Completions from weights that this process holds."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from xorl_lab.engine.engine import Engine
from xorl_lab.engine.versions import WeightsVersion
from xorl_lab.errors import ConfigError
from xorl_lab.futures import APIFuture
from xorl_lab.samplers.base import SampleRequest, check_prompt
from xorl_lab.samplers.embedded import EmbeddedSampler
from xorl_lab.types import SampleResponse

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class LocalSource:
    """Completions from one immutable version of the weights, drawn in this process.

    Args:
        engine: the base model and its thread.
        sampler: the sampler on it.
        weights: what to sample from.
    """

    def __init__(self, engine: Engine, sampler: EmbeddedSampler, weights: WeightsVersion) -> None:
        self._engine = engine
        self._sampler = sampler
        self._weights = weights

    @property
    def base_model(self) -> str:
        """Name of the base model."""
        return self._engine.loaded.name

    @property
    def model_id(self) -> str:
        """Name of the trained model; empty for the base model."""
        return self._weights.model_id

    @property
    def version(self) -> int:
        """Number of the weights."""
        return self._weights.number

    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The base model's tokenizer."""
        return self._engine.loaded.tokenizer

    def check(self, prompt: tuple[int, ...], max_tokens: int) -> None:
        """Raise a DataError if the prompt cannot be sampled from."""
        loaded = self._engine.loaded
        check_prompt(prompt, max_tokens, loaded.vocab_size, loaded.context_length)

    def submit(self, requests: Sequence[SampleRequest]) -> list[APIFuture[SampleResponse]]:
        """Queue requests, all at once.

        Raises:
            ConfigError: a request names an adapter of its own.
        """
        for request in requests:
            if request.lora_path is not None:
                raise ConfigError(
                    f"lora_path is {request.lora_path!r}, but this client samples from one version "
                    "of the weights: use create_sampling_client(model_path=...) for another"
                )
        return self._sampler.submit_all(self._weights, requests)


class Embedded:
    """The sampler of this process, for whoever makes sources.

    Args:
        engine: the base model and its thread.
        sampler: the sampler on it.
    """

    def __init__(self, engine: Engine, sampler: EmbeddedSampler) -> None:
        self._engine = engine
        self._sampler = sampler

    def expect(self, rank: int) -> None:
        """It takes adapters of any rank."""

    def source(self, version: WeightsVersion) -> LocalSource:
        """Completions from a version."""
        return LocalSource(self._engine, self._sampler, version)

    lazily = source

    def rest(self) -> None:
        """It shares the model's memory, and has none of its own to give back."""
