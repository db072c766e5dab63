"""``POST /generate`` in SGLang's request and response shape, on the embedded sampler.

What differs from SGLang: a setting that the sampler does not have is refused unless its value
changes nothing; an aborted request answers without the tokens drawn so far; the prompt's logprobs
hold a value for every position but the first.
"""

import asyncio
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import Field, JsonValue

from xorl_lab.errors import CancelledError, ConfigError, DataError
from xorl_lab.futures import APIFuture
from xorl_lab.samplers import experts
from xorl_lab.samplers.base import SampleRequest, check_prompt, check_request, draw_seed
from xorl_lab.server.bodies import Body, Text, TokenId
from xorl_lab.server.inference import Inference
from xorl_lab.types import SampledSequence, SampleResponse, SamplingParams

RENAMED = {"max_new_tokens": "max_tokens"}
"""SGLang's name to ours; the others are the same."""
TAKEN = ("max_new_tokens", "n", "sampling_seed", "seed", "stop", "stop_token_ids")
FLOATS = ("temperature", "top_p")
NEUTRAL: dict[str, tuple[object, ...]] = {
    "frequency_penalty": (0, None),
    "ignore_eos": (False, None),
    "min_new_tokens": (0, None),
    "min_p": (0, None),
    "no_stop_trim": (False, None),
    "presence_penalty": (0, None),
    "repetition_penalty": (1, None),
    "skip_special_tokens": (True, None),
    "spaces_between_special_tokens": (True, None),
}
"""Settings of SGLang that the embedded sampler lacks: these values change nothing."""
ACCEPTED = {*TAKEN, *FLOATS, "top_k", *NEUTRAL}
MAX_PROMPTS = 4096
"""Most prompts of one request."""
MAX_COMPLETIONS = 16384
"""Most completions of one request."""


class GenerateIn(Body):
    """``/generate``."""

    text: Text | list[Text] | None = None
    input_ids: list[TokenId] | list[list[TokenId]] | None = None
    sampling_params: dict[str, JsonValue] | list[dict[str, JsonValue]] | None = None
    return_logprob: bool | list[bool] | None = False
    logprob_start_len: int | list[int] | None = -1
    top_logprobs_num: int | list[int] | None = 0
    return_text_in_logprobs: bool = False
    lora_path: Text | list[Text | None] | None = None
    rid: Text | list[Text] | None = None
    stream: bool = False
    return_routed_experts: bool = False
    routed_experts_start_len: int = Field(default=0, ge=0)
    token_ids_logprob: JsonValue = Field(default=None)


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt of a request, checked."""

    request: SampleRequest
    lora_path: str | None
    rid: str
    start: int
    """First prompt position whose logprob is wanted; negative = none."""
    with_text: bool
    """Decode each token beside its logprob."""
    experts_from: int = 0
    """First position whose experts are wanted, where they are."""


class Generator:
    """Carries out ``/generate``.

    Args:
        inference: the weights to sample from.
    """

    def __init__(self, inference: Inference) -> None:
        self.inference = inference
        self._running: dict[str, set[APIFuture[SampleResponse]]] = {}

    @property
    def active(self) -> int:
        """Prompts that are being worked on."""
        return sum(len(futures) for futures in self._running.values())

    async def generate(
        self, body: GenerateIn, gone: "asyncio.Future[None]"
    ) -> dict[str, Any] | list[dict[str, Any]]:
        """Answer a request.

        Args:
            body: what was asked for.
            gone: done when the client is no longer there; its samples are given up then.

        Returns:
            One object for one prompt and n = 1, else a list, prompt by prompt.

        Raises:
            ConfigError: a setting is unknown or out of range.
            DataError: a prompt cannot be used.
            SamplerError: sampling failed.
        """
        loop = asyncio.get_running_loop()
        asks, single = await loop.run_in_executor(None, self._asks, body)
        versions = [self.inference.version(ask.lora_path) for ask in asks]
        futures: list[APIFuture[SampleResponse]] = []
        for ask, version in zip(asks, versions, strict=True):
            future = self.inference.sampler.submit(version, ask.request)
            futures.append(future)
            self._running.setdefault(ask.rid, set()).add(future)
        try:
            responses = await _all(futures, gone)
        finally:
            for ask, future in zip(asks, futures, strict=True):
                future.cancel()
                running = self._running.get(ask.rid, set())
                running.discard(future)
                if not running:
                    self._running.pop(ask.rid, None)
        answers = await loop.run_in_executor(None, self._answers, asks, responses)
        return answers[0] if single and len(answers) == 1 else answers

    def abort(self, rid: str, *, everything: bool = False) -> int:
        """Give up what is running under an id, or all.  Returns how many prompts."""

        def named(name: str) -> bool:
            return everything or name == rid or (rid != "" and name.startswith(f"{rid}_"))

        wanted = [name for name in self._running if named(name)]
        futures = [f for name in wanted for f in self._running.get(name, ())]
        return sum(future.cancel() for future in futures)

    def _asks(self, body: GenerateIn) -> tuple[list[Ask], bool]:
        _refuse_unsupported(body)
        prompts, single = self._prompts(body)
        count = len(prompts)
        settings = _spread(body.sampling_params, count, "sampling_params")
        paths = _spread(body.lora_path, count, "lora_path")
        rids = _rids(body.rid, count)
        with_logprobs = _spread(body.return_logprob, count, "return_logprob")
        starts = _spread(body.logprob_start_len, count, "logprob_start_len")
        tops = _spread(body.top_logprobs_num, count, "top_logprobs_num")
        loaded = self.inference.engine.loaded
        asks: list[Ask] = []
        for i, prompt in enumerate(prompts):
            params, samples = sampling_params(settings[i] or {})
            params = replace(params, return_routed_experts=body.return_routed_experts)
            wanted = bool(with_logprobs[i])
            top = (tops[i] or 0) if wanted else 0
            check_request(samples, top)
            check_prompt(prompt, params.max_tokens, loaded.vocab_size, loaded.context_length)
            start = -1 if starts[i] is None or not wanted else starts[i]
            seed = draw_seed(params)
            request = SampleRequest(prompt, params, samples, seed, wanted, start >= 0, top)
            first = body.routed_experts_start_len
            if first > len(prompt):
                raise ConfigError(
                    f"routed_experts_start_len is {first}, but the prompt has {len(prompt)} tokens:"
                    " pass one that lies in it"
                )
            asks.append(Ask(request, paths[i], rids[i], start, body.return_text_in_logprobs, first))
        total = sum(ask.request.num_samples for ask in asks)
        if total > MAX_COMPLETIONS:
            raise ConfigError(
                f"{total} completions were asked for at once: ask for at most {MAX_COMPLETIONS}"
            )
        return asks, single

    def _prompts(self, body: GenerateIn) -> tuple[list[tuple[int, ...]], bool]:
        """The prompts as ids, and whether there is just one, not in a list."""
        if (body.text is None) == (body.input_ids is None):
            raise DataError("pass exactly one of 'text' and 'input_ids'")
        if body.text is not None:
            texts = [body.text] if isinstance(body.text, str) else body.text
            encode = self.inference.engine.loaded.tokenizer.encode
            prompts = [tuple(encode(text, add_special_tokens=False)) for text in texts]
            single = isinstance(body.text, str)
        else:
            ids: list[Any] = list(body.input_ids or [])
            single = not (ids and isinstance(ids[0], list))
            prompts = [tuple(ids)] if single else [tuple(entry) for entry in ids]
        if not 1 <= len(prompts) <= MAX_PROMPTS:
            raise DataError(f"there are {len(prompts)} prompts: pass 1 to {MAX_PROMPTS}")
        return prompts, single

    def _answers(self, asks: list[Ask], responses: list[SampleResponse | None]) -> list[Any]:
        return [
            self._answer(ask, response, sequence)
            for ask, response in zip(asks, responses, strict=True)
            for sequence in (
                [SampledSequence([], "abort", [], "")] * ask.request.num_samples
                if response is None
                else response.sequences
            )
        ]

    def _answer(
        self, ask: Ask, response: SampleResponse | None, sequence: SampledSequence
    ) -> dict[str, Any]:
        request, loaded = ask.request, self.inference.engine.loaded
        info = (response.meta_info or {}) if response is not None else {}
        meta: dict[str, Any] = {
            "id": ask.rid,
            "finish_reason": _finish(sequence, request.params, loaded.eos_ids),
            "prompt_tokens": len(request.prompt),
            "completion_tokens": len(sequence.tokens),
            "cached_tokens": 0,
            "weight_version": str(info.get("weight_version", "")),
        }
        if request.return_logprobs:
            meta["output_token_logprobs"] = self._pairs(
                ask, list(zip(sequence.tokens, sequence.logprobs or [], strict=True))
            )
        if request.top_logprobs:
            meta["output_top_logprobs"] = [
                self._pairs(ask, top) for top in sequence.top_logprobs or []
            ]
        if ask.start >= 0 and response is not None and response.prompt_logprobs is not None:
            prompt = list(zip(request.prompt, response.prompt_logprobs, strict=True))
            meta["input_token_logprobs"] = self._pairs(ask, prompt[ask.start :])
        if sequence.routed_experts is not None:
            meta |= experts.to_meta(sequence.routed_experts, ask.experts_from)
        return {"text": sequence.text or "", "output_ids": sequence.tokens, "meta_info": meta}

    def _pairs(self, ask: Ask, pairs: Any) -> list[list[Any]]:  # noqa: ANN401
        tokenizer = self.inference.engine.loaded.tokenizer
        return [
            [logprob, token, tokenizer.decode([token]) if ask.with_text else None]
            for token, logprob in pairs
        ]


def sampling_params(given: Mapping[str, Any]) -> tuple[SamplingParams, int]:
    """SGLang's sampling parameters as ours.

    Returns:
        The parameters, and the number of completions.

    Raises:
        ConfigError: a name is unknown, or a value of the wrong type or out of range.
    """
    unknown = sorted(set(given) - ACCEPTED)
    if unknown:
        raise ConfigError(f"unknown sampling_params {unknown}: choose from {sorted(ACCEPTED)}")
    for name, values in NEUTRAL.items():
        if name in given and given[name] not in values:
            raise ConfigError(
                f"sampling_params.{name} is {given[name]!r}, which the embedded sampler does not "
                f"offer: leave it out"
            )
    values = {RENAMED.get(k, k): v for k, v in given.items() if k not in NEUTRAL and v is not None}
    samples = values.pop("n", 1)
    stops = values.get("stop_token_ids", [])
    if not isinstance(stops, list) or not all(type(s) is int for s in stops):
        raise ConfigError(f"stop_token_ids is {stops!r}: pass a list of integers")
    stop = values.get("stop", "x")
    if not isinstance(stop, str | list):
        raise ConfigError(f"stop is {stop!r}: pass a string or a list of strings")
    if stop in ([], ""):
        del values["stop"]
    return SamplingParams(**values), samples


def _refuse_unsupported(body: GenerateIn) -> None:
    for name, on in {
        "stream": body.stream,
        "token_ids_logprob": body.token_ids_logprob is not None,
    }.items():
        if on:
            raise ConfigError(f"{name} is not offered by the embedded sampler: leave it out")


def _spread(value: Any, count: int, name: str) -> list[Any]:  # noqa: ANN401
    """One value per prompt, from one for all or a list of them."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise ConfigError(f"{name} has {len(value)} entries but there are {count} prompts")
    return value


def _rids(rid: str | list[str] | None, count: int) -> list[str]:
    if isinstance(rid, str) and count > 1:
        return [f"{rid}_{i}" for i in range(count)]
    return [name or secrets.token_hex(16) for name in _spread(rid, count, "rid")]


def _finish(
    sequence: SampledSequence, params: SamplingParams, eos_ids: tuple[int, ...]
) -> dict[str, Any]:
    if sequence.stop_reason == "length":
        return {"type": "length", "length": params.max_tokens}
    if sequence.stop_reason == "abort":
        return {"type": "abort", "message": "the request was aborted"}
    last = sequence.tokens[-1]
    if last in (*eos_ids, *(params.stop_token_ids or ())) or len(params.stop_strings) != 1:
        return {"type": "stop", "matched": last}
    return {"type": "stop", "matched": params.stop_strings[0]}


async def _all(
    futures: list[APIFuture[SampleResponse]], gone: "asyncio.Future[None]"
) -> list[SampleResponse | None]:
    """Wait for all, None for those that were aborted; give up if the client is gone."""

    async def one(future: APIFuture[SampleResponse]) -> SampleResponse | None:
        try:
            return await future
        except CancelledError:
            return None

    whole = asyncio.gather(*map(one, futures))
    try:
        await asyncio.wait({whole, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not whole.done():
            for future in futures:
                future.cancel()
        return await whole
    finally:
        whole.cancel()
