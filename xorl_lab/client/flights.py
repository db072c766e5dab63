"""Requests on their way to a sampling server, and what that server can take."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from xorl_lab.futures import APIFuture
from xorl_lab.samplers.base import SampleRequest
from xorl_lab.samplers.sglang.connection import SGLangHTTP, UnknownServerError
from xorl_lab.samplers.sglang.facts import look
from xorl_lab.types import SampleResponse

UNLIMITED = 2**31 - 1
"""Where a server does not tell its limits, its own checks have to do."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a server can take."""

    vocab_size: int
    """V: ids are smaller."""
    context_length: int
    """Tokens of prompt and completion together."""
    sglang: bool
    """It is a SGLang, which wants each completion to have an id of its own."""


def limits_of(
    info: Mapping[str, Any], base_url: str, api_key: str | None, timeout: float
) -> Limits:
    """What a server can take.

    Args:
        info: its ``/model_info``; our own server's says it all, SGLang is asked further.
        base_url: where it is.
        api_key: sent as a bearer token.
        timeout: seconds that an answer may take.

    Raises:
        ConfigError: it is a SGLang that is too old.
        SamplerError: it does not answer.
    """
    if "xorl_lab" in info or "vocab_size" in info:
        vocab, context = info.get("vocab_size"), info.get("context_length")
        return Limits(int(vocab or UNLIMITED), int(context or UNLIMITED), False)
    http = SGLangHTTP(base_url, api_key, timeout)
    try:
        facts = look(http)
    except UnknownServerError:
        return Limits(UNLIMITED, UNLIMITED, False)
    finally:
        http.close()
    return Limits(facts.vocab_size, facts.room, True)


@dataclass(slots=True, eq=False)
class Flight:
    """A request on its way."""

    request: SampleRequest
    """What is wanted."""
    end: float
    """``time.monotonic()`` after which nobody waits for the answer."""
    future: APIFuture[SampleResponse] = field(init=False)
    """The answer."""
    rid: str = field(default_factory=lambda: secrets.token_hex(8))
    """Its name on the server."""
    landed: bool = False
    """The server has nothing more to do for it."""

    def rids(self, sglang: bool) -> list[str]:
        """Its names on the server, one for each completion where they have to be told apart."""
        count = self.request.num_samples
        return [f"{self.rid}_{i}" for i in range(count)] if sglang and count > 1 else [self.rid]
