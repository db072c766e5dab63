"""A request under way (task) and each of its samples (row)."""

import time
from typing import TYPE_CHECKING, cast

import numpy as np

from xorl_lab.engine.models import LoadedModel
from xorl_lab.engine.versions import WeightsVersion
from xorl_lab.errors import CancelledError, ConfigError
from xorl_lab.futures import APIFuture
from xorl_lab.samplers.base import SampleRequest
from xorl_lab.samplers.drawing import stream
from xorl_lab.types import SampledSequence, SampleResponse

if TYPE_CHECKING:
    from xorl_lab.engine.routing import Choice
    from xorl_lab.types.results import StopReason

TAIL = 8
"""Tokens beyond a stop string's own bytes that are decoded to look for it."""


class Task:
    """A request on its way through the sampler."""

    def __init__(
        self, version: WeightsVersion, request: SampleRequest, loaded: LoadedModel
    ) -> None:
        self.version = version
        self.request = request
        self.tokenizer = loaded.tokenizer
        self.model = loaded.name
        self.stop_ids = {*loaded.eos_ids, *(request.params.stop_token_ids or ())}
        self.future: APIFuture[SampleResponse] = APIFuture(self._cancel)
        self.prompt_logprobs: list[float | None] | None = None
        self._rows: list[Row] = []
        self._taken = 0

    @property
    def span(self) -> int:
        """Positions that each of its rows may come to hold."""
        return len(self.request.prompt) + self.request.params.max_tokens

    @property
    def remaining(self) -> int:
        """Samples that have not become rows yet."""
        return self.request.num_samples - self._taken

    def take(self, count: int) -> list["Row"]:
        """Turn up to ``count`` waiting samples into rows."""
        count = max(0, min(count, self.remaining))
        fresh = [Row(self, self._taken + i) for i in range(count)]
        self._rows += fresh
        self._taken += count
        return fresh

    def check_deadline(self, now: float) -> None:
        """Give up if the time is over: with what there is, or as cancelled."""
        deadline = self.request.deadline
        if deadline is None or now < deadline or self.future.done():
            return
        if self.request.keep_partial:
            while self.remaining:
                self.take(self.remaining)
            for row in self._rows:
                row.stop_reason = row.stop_reason or "abort"
            self.finish()
        else:
            self.future.set_exception(
                CancelledError("the prompt was still pending when its time was up")
            )

    def finish(self) -> None:
        """Answer, if every sample has ended."""
        if self.remaining or any(row.stop_reason is None for row in self._rows):
            return
        sequences = [row.sequence() for row in self._rows]
        meta = {
            "model": self.model,
            "weight_version": self.version.number,
            "seed": self.request.seed,
            "prompt_tokens": len(self.request.prompt),
            "completion_tokens": sum(len(s.tokens) for s in sequences),
        }
        self.future.set_result(SampleResponse(sequences, meta, self.prompt_logprobs))
        # Rows know their task: without this only the cycle collector would free the weights.
        self._rows.clear()

    def _cancel(self) -> bool:
        return self.future.set_exception(CancelledError("sampling was cancelled"))


class Row:
    """One sample: what has been drawn so far."""

    __slots__ = (
        "entropies",
        "experts",
        "logprobs",
        "stop_reason",
        "stream",
        "task",
        "tokens",
        "top",
    )

    def __init__(self, task: Task, sample: int) -> None:
        self.task = task
        self.stream = stream(task.request.seed, task.request.prompt, sample)
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.top: list[list[tuple[int, float]]] = []
        self.entropies: list[float] = []
        self.experts: list[Choice] = []
        """Of what has been read: (P, L, K) of the prompt, then (1, L, K) of each token."""
        self.stop_reason: StopReason | None = None

    @property
    def wants_experts(self) -> bool:
        """True if the experts are to be reported."""
        return self.task.request.params.return_routed_experts

    @property
    def finished(self) -> bool:
        """True if it has ended, or nobody waits for it."""
        return self.stop_reason is not None or self.task.future.done()

    def append(
        self, token: int, logprob: float, top: list[tuple[int, float]], entropy: float | None
    ) -> None:
        """Note a drawn token, and end if it is the last."""
        request = self.task.request
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if request.top_logprobs:
            self.top.append(top[: request.top_logprobs])
        if request.entropies and entropy is not None:
            self.entropies.append(entropy)
        if token in self.task.stop_ids or self._stop_string() is not None:
            self.stop_reason = "stop"
        elif len(self.tokens) >= request.params.max_tokens:
            self.stop_reason = "length"
        if self.stop_reason is not None:
            self.task.finish()

    def sequence(self) -> SampledSequence:
        """The completion as the caller gets it."""
        request = self.task.request
        return SampledSequence(
            list(self.tokens),
            self.stop_reason or "abort",
            list(self.logprobs) if request.return_logprobs else None,
            self._text(),
            list(self.top) if request.top_logprobs else None,
            list(self.entropies) if request.entropies else None,
            np.concatenate(self.experts) if self.experts else None,
        )

    def _stop_string(self) -> str | None:
        """A stop string that the last tokens complete, if there is one."""
        stops = self.task.request.params.stop_strings
        if not stops:
            return None
        # A token is at least one byte, so this many tokens hold the longest stop string.
        window = max(len(s.encode()) for s in stops) + TAIL
        tail = self.tokens[-window:]
        decode = self.task.tokenizer.decode
        # Special tokens are not in the text, but their names may be asked for as stops.
        texts = (decode(tail), decode(tail, skip_special_tokens=True))
        return next((s for s in stops for text in texts if s in text), None)

    def _text(self) -> str:
        """The tokens decoded, without the stop token or what a stop string begins."""
        tokens = self.tokens
        if tokens and tokens[-1] in self.task.stop_ids:
            tokens = tokens[:-1]
        text = cast("str", self.task.tokenizer.decode(tokens, skip_special_tokens=True))
        cuts = [text.find(s) for s in self.task.request.params.stop_strings]
        found = [cut for cut in cuts if cut >= 0]
        return text[: min(found)] if found else text


def deadline_in(seconds: float | None) -> float | None:
    """The moment that is this many seconds away, for :attr:`SampleRequest.deadline`.

    Raises:
        ConfigError: ``seconds`` is negative, NaN or no number.
    """
    if seconds is None:
        return None
    if not isinstance(seconds, int | float) or not seconds >= 0:
        raise ConfigError(f"timeout is {seconds!r}: pass seconds >= 0, or None")
    return time.monotonic() + seconds
