"""What a SGLang server serves, and whether that fits what is trained."""

import re
from dataclasses import dataclass
from typing import Any, cast

import httpx

from xorl_lab.errors import ConfigError, SamplerError
from xorl_lab.samplers.sglang.connection import OLDEST, SGLangHTTP

PROBE_SECONDS = 60.0
"""How long the question for the vocabulary may take."""
HEALTH_SECONDS = 30.0
"""Longer than the 20 s after which SGLang itself takes its scheduler for dead."""
INCOMPLETE = "incomplete"
"""``weight_version`` of a server whose weights are being replaced, or were left half replaced."""
NO_TOKEN = 2**53
"""Asked about it, SGLang says what its vocabulary is."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a SGLang server says of itself."""

    url: str
    """Where it is."""
    model_path: str
    """The model's name or folder, on its machine."""
    vocab_size: int
    """V: ids are 0 to V - 1."""
    context_length: int
    """Longest sequence of the model, in tokens."""
    room: int
    """Tokens that prompt and completion together may have there: a little less."""
    version: str
    """Of SGLang."""
    dp_size: int
    """Replicas behind this address."""
    tp_size: int
    """GPUs over which each replica is spread."""
    lora: bool
    """Takes adapters."""
    max_lora_rank: int | None
    """Largest rank that it takes; None if none was set."""
    dtype: str
    """Of the weights."""
    device: str
    """``cpu``, ``cuda``, …"""
    weight_version: str
    """What the weights are called there."""

    def misfits(
        self, *, vocab_size: int, model: str, rank: int | None, context_length: int | None
    ) -> list[str]:
        """Everything about it that does not fit a trainer, in words.

        Args:
            vocab_size: V of the model that is trained.
            model: its name.
            rank: of the adapter that will be sent; None for full weights.
            context_length: that the server must have at least.
        """
        found: list[str] = []
        if self.vocab_size != vocab_size:
            found.append(
                f"its model {self.model_path!r} has {self.vocab_size} token ids, but {model!r}, "
                f"which is trained, has {vocab_size}: serve the same model"
            )
        if self.dp_size != 1:
            found.append(
                f"it runs {self.dp_size} replicas, and SGLang takes new weights only without: "
                "start it with --dp-size 1"
            )
        if context_length is not None and self.context_length < context_length:
            found.append(
                f"its context holds {self.context_length} tokens, but {context_length} are "
                f"needed: start it with --context-length {context_length}"
            )
        return found if rank is None else [*found, *self._misfits_of_adapter(rank)]

    def _misfits_of_adapter(self, rank: int) -> list[str]:
        start = f"start it with --enable-lora --max-lora-rank {rank}"
        if not self.lora:
            return [f"it takes no LoRA adapters: {start}"]
        if self.max_lora_rank is not None and self.max_lora_rank < rank:
            return [
                f"it takes adapters up to rank {self.max_lora_rank}, but yours has {rank}: {start}"
            ]
        return []


def look(http: SGLangHTTP) -> ServerFacts:
    """Make sure that a SGLang of a known version is there, and ask what it serves.

    Raises:
        SamplerError: nothing answers; ``retryable``.
        ConfigError: it is no SGLang, too old, or our own server.
    """
    info = http.document("/model_info")
    if "xorl_lab" in info:
        raise ConfigError(
            f"{http.url} is `xorl-lab serve`, not SGLang: use "
            f"ServiceClient(base_url={http.url!r}), which trains and samples there"
        )
    if "model_path" not in info:
        raise http.stranger(f"GET /model_info has no model_path: {str(info)[:120]}")
    server = http.document("/server_info")
    version = server.get("version")
    if not isinstance(version, str) or not _numbers(version):
        raise http.stranger(f"GET /server_info has the version {version!r}")
    if _numbers(version) < OLDEST:
        raise ConfigError(
            f"{http.url} is SGLang {version}, but {'.'.join(map(str, OLDEST))} or newer is "
            "needed: upgrade it (pip install -U sglang)"
        )
    rank, longest = server.get("max_lora_rank"), server.get("max_req_input_len")
    context = _context(http)
    return ServerFacts(
        url=http.url,
        model_path=str(info["model_path"]),
        vocab_size=_vocab_size(http),
        context_length=context,
        # Of its longest request SGLang keeps six positions from a prompt, and two from the whole.
        room=context if longest is None else min(context, int(longest) + 4),
        version=version,
        dp_size=int(server.get("dp_size") or 1),
        tp_size=int(server.get("tp_size") or 1),
        lora=bool(server.get("enable_lora")),
        max_lora_rank=None if rank is None else int(rank),
        dtype=str(server.get("dtype", "auto")),
        device=str(server.get("device", "unknown")),
        weight_version=str(info.get("weight_version", "")),
    )


def be_healthy(http: SGLangHTTP) -> None:
    """Make sure that the server generates.

    Raises:
        SamplerError: it does not, or nothing answers; ``retryable``.
    """
    response = http.exchange("GET", "/health", None, min(http.timeout, HEALTH_SECONDS))
    if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
        raise SamplerError(
            f"the SGLang server at {http.url} is not ready (503 from /health): it is still "
            "starting, or its scheduler is paused or stuck: wait, or look into its log",
            retryable=True,
        )
    if not response.is_success:
        raise http.refused("say that it is well", response)


def _context(http: SGLangHTTP) -> int:
    cards = http.document("/v1/models").get("data")
    try:
        lengths = [card["max_model_len"] for card in cast("list[dict[str, Any]]", cards)]
        return int(next(length for length in lengths if length))
    except (TypeError, KeyError, ValueError, StopIteration):
        raise http.stranger(f"GET /v1/models names no max_model_len: {cards!r:.120}") from None


def _vocab_size(http: SGLangHTTP) -> int:
    # SGLang has no page that says it, but refuses to score a token that is none, with reasons.
    body = {
        "input_ids": [0],
        "sampling_params": {"max_new_tokens": 1},
        "return_logprob": True,
        "token_ids_logprob": [NO_TOKEN],
    }
    # A server that was left paused answers no such question at all.
    text = http.exchange("POST", "/generate", body, min(http.timeout, PROBE_SECONDS)).text
    found = re.search(r"valid range is \[0, (\d+)\)", text)
    if found is None:
        raise http.stranger(f"POST /generate does not say its vocabulary: {text[:120]!r}")
    return int(found[1])


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, none if it has none.

    >>> _numbers("0.5.23.post1"), _numbers("0.4.9rc2"), _numbers("unknown")
    ((0, 5, 23), (0, 4, 9), ())
    """
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    return () if found is None else tuple(int(n or 0) for n in found.groups())
