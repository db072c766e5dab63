"""``/generate``: what is sent, and what of the answer is believed."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from xorl_lab.errors import ConfigError, SamplerError
from xorl_lab.samplers.base import SampleRequest, repeat_seed
from xorl_lab.samplers.experts import BYTES, SHAPE, from_meta
from xorl_lab.samplers.sglang.facts import INCOMPLETE
from xorl_lab.types import SampledSequence, SampleResponse
from xorl_lab.types.results import StopReason

if TYPE_CHECKING:
    from xorl_lab.engine.routing import Choice, Experts

STOP_REASONS: dict[str, StopReason] = {"stop": "stop", "length": "length", "abort": "abort"}
NEUTRAL: dict[str, Any] = {
    "frequency_penalty": 0.0,
    "ignore_eos": False,
    "min_new_tokens": 0,
    "min_p": 0.0,
    "no_stop_trim": False,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "skip_special_tokens": True,
}
"""Said aloud, since a server may have been started with other defaults."""
PER_TOKEN = (
    "input_token_logprobs",
    "input_top_logprobs",
    "output_token_logprobs",
    "output_top_logprobs",
    BYTES,
    SHAPE,
)
"""Parts of ``meta_info`` that have places of their own in our answer, or none."""
SPANS = "weight_versions"
"""In ``meta_info``: which weights drew which tokens; in ours only if there were several."""
SEEDS = 2**63
"""SGLang takes smaller ones only."""


def payload(request: SampleRequest, adapter: str, rid: str) -> dict[str, Any]:
    """A request for all completions of a prompt.

    Args:
        request: what is wanted.
        adapter: name of the adapter; empty for what is served.
        rid: names the request.
    """
    return {
        **_common(request, adapter),
        "input_ids": list(request.prompt),
        "sampling_params": {
            **_settings(request),
            "n": request.num_samples,
            "sampling_seed": request.seed,
        },
        "logprob_start_len": 0 if request.prompt_logprobs else -1,
        "rid": rid,
    }


def spread_payload(request: SampleRequest, adapter: str, rids: Sequence[str]) -> dict[str, Any]:
    """A request for all completions of a prompt as SGLang can give them up, one id for each.

    With ``n`` SGLang makes up ids of its own, which nobody can abort; and where it honours seeds,
    one seed would draw the same completion ``n`` times.

    Args:
        request: what is wanted.
        adapter: name of the adapter; empty for what is served.
        rids: as many ids as completions.
    """
    settings = _settings(request)
    seeds = [repeat_seed(request.seed, i) % SEEDS for i in range(request.num_samples)]
    first = 0 if request.prompt_logprobs else -1
    return {
        **_common(request, adapter),
        "input_ids": [list(request.prompt)] * request.num_samples,
        "sampling_params": [{**settings, "sampling_seed": seed} for seed in seeds],
        "logprob_start_len": [first] + [-1] * (request.num_samples - 1),
        "rid": list(rids),
    }


def _common(request: SampleRequest, adapter: str) -> dict[str, Any]:
    path = request.lora_path or adapter
    return {
        "return_logprob": request.return_logprobs or request.prompt_logprobs,
        "top_logprobs_num": request.top_logprobs,
        **({"lora_path": path} if path else {}),
        **({"return_routed_experts": True} if request.params.return_routed_experts else {}),
    }


def _settings(request: SampleRequest) -> dict[str, Any]:
    params = request.params
    settings = {
        **NEUTRAL,
        "max_new_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
    }
    if params.stop_strings:
        settings["stop"] = list(params.stop_strings)
    if params.stop_token_ids:
        settings["stop_token_ids"] = list(params.stop_token_ids)
    return settings


def nothing_drawn(request: SampleRequest) -> SampleResponse:
    """The answer to a request whose time was up before it was sent."""
    logprobs: list[float] | None = [] if request.return_logprobs else None
    empty = [SampledSequence([], "abort", logprobs, "") for _ in range(request.num_samples)]
    return SampleResponse(empty, {})


def response(
    answer: object, request: SampleRequest, vocab_size: int, experts: Callable[[], "Experts"]
) -> SampleResponse:
    """The answer from its JSON.

    Args:
        answer: what came.
        request: what was asked for.
        vocab_size: V, ids must be smaller.
        experts: asked what the model chooses from, if experts were wanted and the answer does not
            say it.

    Raises:
        SamplerError: it is not what was asked for; says what is wrong.
    """
    items = cast("list[Any]", answer if isinstance(answer, list) else [answer])
    try:
        sequences = [_sequence(item, request, vocab_size) for item in items]
        if request.params.return_routed_experts:
            sequences = [
                replace(
                    sequence, routed_experts=_experts(item["meta_info"], sequence, request, experts)
                )
                for item, sequence in zip(items, sequences, strict=True)
            ]
        if len(sequences) != request.num_samples:
            raise _WrongError(
                f"there are {len(sequences)} completions of {request.num_samples} that were asked "
                "for"
            )
        infos: list[dict[str, Any]] = [dict(item["meta_info"]) for item in items]
        if any(info.get("weight_version") == INCOMPLETE for info in infos):
            raise SamplerError(
                "the server's weights are incomplete, as an update of them has failed or is under "
                "way: send the weights again",
                retryable=True,
            )
        prompt = _prompt_logprobs(infos[0], request) if request.prompt_logprobs else None
        return SampleResponse(sequences, _meta(infos, sequences, request), prompt)
    except _WrongError as error:
        raise SamplerError(f"/generate answered wrongly: {error}") from error
    except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
        raise SamplerError(
            f"/generate answered with {str(answer)[:200]!r}, which lacks what was asked for "
            f"({type(error).__name__}: {error})"
        ) from error


class _WrongError(Exception):
    """An answer has the right form but cannot be right."""


def _sequence(item: Mapping[str, Any], request: SampleRequest, vocab_size: int) -> SampledSequence:
    meta = item["meta_info"]
    tokens = [int(token) for token in item["output_ids"]]
    outside = [token for token in tokens if not 0 <= token < vocab_size]
    if outside:
        raise _WrongError(f"it drew token {outside[0]}, but ids are 0 to {vocab_size - 1}")
    logprobs = _logprobs(meta, tokens) if request.return_logprobs else None
    top = _top(meta, tokens) if request.top_logprobs else None
    reason = _stop_reason(meta, tokens, request.params.max_tokens)
    return SampledSequence(tokens, reason, logprobs, str(item.get("text") or ""), top)


def _experts(
    meta: Mapping[str, Any],
    sequence: SampledSequence,
    request: SampleRequest,
    known: Callable[[], "Experts"],
) -> "Choice | None":
    """The experts of all tokens that were read; None of a completion that was given up early."""
    if BYTES not in meta:
        if sequence.stop_reason == "abort":
            return None
        raise _WrongError(
            "it does not say which experts were chosen: start SGLang with "
            "--enable-return-routed-experts (SGLangServer.start(..., experts=True)), and ask it "
            "only of a mixture of experts"
        )
    if not sequence.tokens:
        return None
    try:
        return from_meta(meta, len(request.prompt) + len(sequence.tokens) - 1, known)
    except ConfigError as error:
        raise _WrongError(
            f"it sends the chosen experts as bytes, and what shape they have cannot be told here "
            f"({error})"
        ) from error
    except ValueError as error:
        raise _WrongError(str(error)) from error


def _logprobs(meta: Mapping[str, Any], tokens: list[int]) -> list[float]:
    pairs: list[Any] = meta.get("output_token_logprobs") or []
    if len(pairs) != len(tokens):
        raise _WrongError(f"there are {len(tokens)} tokens but {len(pairs)} logprobs")
    if any(int(pair[1]) != token for pair, token in zip(pairs, tokens, strict=True)):
        raise _WrongError("its logprobs are those of other tokens")
    return _finite(pair[0] for pair in pairs)


def _top(meta: Mapping[str, Any], tokens: list[int]) -> list[list[tuple[int, float]]]:
    steps: list[Any] = meta.get("output_top_logprobs") or []
    if len(steps) != len(tokens):
        raise _WrongError(f"there are {len(tokens)} tokens but alternatives to {len(steps)}")
    return [
        list(zip((int(e[1]) for e in step), _finite(e[0] for e in step), strict=True))
        for step in steps
    ]


def _prompt_logprobs(meta: Mapping[str, Any], request: SampleRequest) -> list[float | None] | None:
    pairs: list[Any] = meta.get("input_token_logprobs") or []
    if not pairs and (meta.get("finish_reason") or {}).get("type") == "abort":
        return None
    if tuple(int(pair[1]) for pair in pairs) != request.prompt:
        raise _WrongError(
            f"the prompt has {len(request.prompt)} tokens, but it has logprobs of {len(pairs)}, or "
            "of others"
        )
    return [None, *_finite(pair[0] for pair in pairs[1:])]


def _finite(values: Iterable[Any]) -> list[float]:
    """Values as floats; SGLang writes NaN as null."""
    found = list(values)
    bad = [v for v in found if not isinstance(v, int | float) or not math.isfinite(v)]
    if bad:
        raise _WrongError(
            f"a logprob is {bad[0]}: the weights there may be damaged, or overflow in their dtype"
        )
    return [float(v) for v in found]


def _stop_reason(meta: Mapping[str, Any], tokens: list[int], max_tokens: int) -> StopReason:
    finish: Mapping[str, Any] = meta.get("finish_reason") or {}
    reason = STOP_REASONS.get(str(finish.get("type")))
    if reason is None:
        raise _WrongError(
            f"it ended because of {finish.get('type')!r}: {', '.join(STOP_REASONS)} are known"
        )
    if finish.get("matched") == "NaN happened":
        raise _WrongError("its logits are NaN: the weights there may be damaged")
    if len(tokens) > max_tokens:
        raise _WrongError(f"it drew {len(tokens)} tokens, but {max_tokens} were allowed")
    if reason == "length" and len(tokens) < max_tokens:
        raise _WrongError(
            f"it ended at {len(tokens)} tokens, though {max_tokens} were allowed: there is no room "
            "for more in its context or cache: lower max_tokens"
        )
    return reason


def _meta(
    infos: Sequence[Mapping[str, Any]], sequences: Sequence[SampledSequence], request: SampleRequest
) -> dict[str, Any]:
    """What is known of the whole answer, without values per token."""
    first = {k: v for k, v in infos[0].items() if k not in (*PER_TOKEN, SPANS)}
    meta = {
        **first,
        "seed": request.seed,
        "prompt_tokens": len(request.prompt),
        "completion_tokens": sum(len(s.tokens) for s in sequences),
    }
    versions = _versions(infos)
    # A completion during which the weights changed, or two with different ones.
    return meta | ({SPANS: versions} if len(versions) > 1 else {})


def _versions(infos: Iterable[Mapping[str, Any]]) -> list[str]:
    """All names of weights that the completions were drawn from, in the order met."""
    found: dict[str, None] = {}
    for info in infos:
        for span in info.get(SPANS) or [{"version": info.get("weight_version")}]:
            found.setdefault(str(span["version"]))
    return list(found)
