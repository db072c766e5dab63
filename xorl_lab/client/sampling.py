"""The sampling client: completions from one immutable version of the weights."""

import operator
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from xorl_lab.client.async_names import with_async
from xorl_lab.client.remote_sampling import RemoteSource
from xorl_lab.errors import CancelledError, ConfigError, DataError
from xorl_lab.futures import APIFuture
from xorl_lab.samplers.base import SampleRequest, check_request, draw_seed, repeat_seed
from xorl_lab.samplers.rows import deadline_in
from xorl_lab.types import BatchSampleResult, ModelInput, SampleResponse, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from xorl_lab.samplers.sync.report import SyncReport

Prompt = ModelInput | str


class Source(Protocol):
    """Where completions come from: a version in this process, or a server."""

    @property
    def base_model(self) -> str:
        """Name of the base model."""
        ...

    @property
    def model_id(self) -> str:
        """Name of the trained model; empty for the base model."""
        ...

    @property
    def version(self) -> int | None:
        """Number of the weights, if it is known and fixed."""
        ...

    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The base model's tokenizer."""
        ...

    def check(self, prompt: tuple[int, ...], max_tokens: int) -> None:
        """Raise a DataError if the prompt cannot be sampled from."""
        ...

    def submit(self, requests: Sequence[SampleRequest]) -> list[APIFuture[SampleResponse]]:
        """Queue requests, all at once."""
        ...


@with_async("sample", "sample_batch")
class SamplingClient:
    """Draws completions.

    Made by a service or training client, or for a server that has a ``/generate``.

    Args:
        base_url: of that server, e.g. ``http://localhost:30000``.
        model_path: URI of an adapter that the server has loaded; empty = what it serves.
        api_key: sent as a bearer token.
        timeout: seconds that an answer may take.
    """

    def __init__(
        self,
        base_url: str,
        model_path: str = "",
        api_key: str | None = None,
        timeout: float = 1800.0,
    ) -> None:
        self._source: Source = RemoteSource(base_url, model_path, api_key, timeout)

    @classmethod
    def of(cls, source: Source) -> "SamplingClient":
        """A client of a source that is there already."""
        client = cls.__new__(cls)
        client._source = source
        return client

    @property
    def version(self) -> int | None:
        """Number of the weights that it samples from; None if only the server knows."""
        return self._source.version

    @property
    def model_id(self) -> str:
        """Name of the trained model; empty for the base model."""
        return self._source.model_id

    @property
    def base_model(self) -> str:
        """Name of the base model."""
        return self._source.base_model

    @property
    def sync(self) -> "SyncReport | None":
        """What became of sending its weights to a sampler elsewhere; None where there is none."""
        return getattr(self._source, "report", None)

    def get_tokenizer(self) -> "PreTrainedTokenizerBase":
        """The base model's tokenizer."""
        return self._source.tokenizer()

    def sample(  # noqa: PLR0913  (each is a feature of its own, and the first five are xorl's)
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        num_samples: int = 1,
        return_logprobs: bool = True,
        lora_path: str | None = None,
        *,
        prompt_logprobs: bool = False,
        top_logprobs: int = 0,
        entropies: bool = False,
        timeout: float | None = None,
    ) -> APIFuture[SampleResponse]:
        """Draw completions of one prompt.

        Args:
            prompt: token ids, or text (encoded without added special tokens).
            sampling_params: how to draw; None = the defaults.
            num_samples: completions wanted; they share one pass over the prompt.
            return_logprobs: report the logprob of each drawn token.
            lora_path: name of another adapter that the server has loaded; servers only.
            prompt_logprobs: report the prompt tokens' logprobs too (at temperature 1).
            top_logprobs: number of alternatives to report per token.
            entropies: report the entropy of each token's distribution too; None from servers.
            timeout: seconds after which to answer with what has been drawn (``abort``).

        Returns:
            Future of the completions, in order of sample index.

        Raises:
            DataError: the prompt is empty, too long, or has an id outside the vocabulary.
            ConfigError: a setting is out of range.
        """
        params = _params(sampling_params)
        check_request(num_samples, top_logprobs)
        request = SampleRequest(
            self._tokens(prompt, params),
            params,
            num_samples,
            draw_seed(params),
            return_logprobs,
            prompt_logprobs,
            top_logprobs,
            entropies,
            deadline_in(timeout),
            keep_partial=True,
            lora_path=lora_path,
        )
        return self._source.submit([request])[0]

    def sample_batch(  # noqa: PLR0913  (as above)
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        num_samples: int = 1,
        return_logprobs: bool = True,
        timeout: float | None = None,
        *,
        top_logprobs: int = 0,
        entropies: bool = False,
    ) -> APIFuture[BatchSampleResult]:
        """Draw completions of many prompts.

        Args:
            prompts: as for :meth:`sample`; one that cannot be used fails alone.
            sampling_params: how to draw, for all, or one for each prompt.  A prompt that comes
                again with the same seed gets random numbers of its own.
            num_samples: completions wanted of each prompt.
            return_logprobs: report the logprob of each drawn token.
            timeout: seconds after which the prompts still pending are cancelled.
            top_logprobs: number of alternatives to report per token.
            entropies: report the entropy of each token's distribution too; None from servers.

        Returns:
            Future of what became of each prompt, ordered by index.

        Raises:
            ConfigError: a setting is out of range.
            DataError: ``prompts`` is no list.
        """
        if isinstance(prompts, str | ModelInput) or not isinstance(prompts, Sequence):
            raise DataError(
                f"prompts is a {type(prompts).__name__}: pass a list of prompts, each text or "
                "ModelInput.from_ints(token_ids)"
            )
        each = _params_of_each(sampling_params, len(prompts))
        check_request(num_samples, top_logprobs)
        deadline = deadline_in(timeout)
        requests: dict[int, SampleRequest] = {}
        failed: dict[int, DataError] = {}
        seen: Counter[tuple[tuple[int, ...], int]] = Counter()
        for index, (prompt, (params, seed)) in enumerate(zip(prompts, each, strict=True)):
            try:
                tokens = self._tokens(prompt, params)
            except DataError as error:
                failed[index] = error
                continue
            # The same prompt again with the same seed is meant as a further draw, not as a copy.
            fresh = repeat_seed(seed, seen[tokens, seed])
            seen[tokens, seed] += 1
            requests[index] = SampleRequest(
                tokens,
                params,
                num_samples,
                fresh,
                return_logprobs,
                top_logprobs=top_logprobs,
                entropies=entropies,
                deadline=deadline,
            )
        futures = self._source.submit(list(requests.values()))
        return _gather(dict(zip(requests, futures, strict=True)), failed)

    def _tokens(self, prompt: Prompt, params: SamplingParams) -> tuple[int, ...]:
        if isinstance(prompt, str):
            tokens = tuple(self.get_tokenizer().encode(prompt, add_special_tokens=False))
        elif isinstance(prompt, ModelInput):
            tokens = prompt.tokens
        else:
            raise DataError(
                f"the prompt is a {type(prompt).__name__}: pass text or "
                "ModelInput.from_ints(token_ids)"
            )
        self._source.check(tokens, params.max_tokens)
        return tokens

    def __repr__(self) -> str:
        named = "" if self.version is None else f" version {self.version}"
        what = f"{self.model_id!r}{named}" if self.model_id else "base"
        return f"SamplingClient({self.base_model}, {what})"


def _params(params: SamplingParams | None) -> SamplingParams:
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise ConfigError(f"sampling_params is a {type(params).__name__}: pass SamplingParams(...)")
    return params


def _params_of_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[tuple[SamplingParams, int]]:
    """Settings and seed of each prompt; prompts that share settings share a seed."""
    if isinstance(params, Sequence):
        if len(params) != count:
            raise ConfigError(
                f"there are {len(params)} sampling_params but {count} prompts: pass one for each, "
                "or one for all"
            )
        return [(_params(one), draw_seed(_params(one))) for one in params]
    shared = _params(params)
    return [(shared, draw_seed(shared))] * count


def _gather(
    parts: dict[int, APIFuture[SampleResponse]], failed: Mapping[int, BaseException]
) -> APIFuture[BatchSampleResult]:
    """One future for all; cancelling it cancels what is still pending."""

    def cancel() -> bool:
        # First, or the last part to be cancelled would complete the whole with a result.
        accepted = whole.set_exception(CancelledError("sampling was cancelled"))
        for part in parts.values() if accepted else []:
            part.cancel()
        return accepted

    whole: APIFuture[BatchSampleResult] = APIFuture(cancel)
    left = len(parts)
    lock = threading.Lock()

    def count(_: APIFuture[SampleResponse]) -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            whole.set_result(_sort(parts, failed))

    if not parts:
        whole.set_result(_sort(parts, failed))
    for part in parts.values():
        part.add_done_callback(count)
    return whole


def _sort(
    parts: Mapping[int, APIFuture[SampleResponse]], failed: Mapping[int, BaseException]
) -> BatchSampleResult:
    result = BatchSampleResult([], list(failed.items()), [])
    for index, part in parts.items():
        error = part.exception()
        if error is None:
            result.completed.append((index, part.result()))
        elif isinstance(error, CancelledError):
            result.cancelled.append(index)
        else:
            result.failed.append((index, error))
    result.failed.sort(key=operator.itemgetter(0))
    return result
