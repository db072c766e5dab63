"""Questions and orders to a SGLang server: one answer or one error in words for each."""

import json
import weakref
from collections.abc import Mapping
from typing import Any, cast

import httpx

from xorl_lab.errors import ConfigError, SamplerError
from xorl_lab.samplers.wire import Connections, HTTPError, checked_url, refusal

OLDEST = (0, 5, 23)
"""The first version of SGLang whose requests and answers are known here."""
CONNECTIONS = 8
"""Questions and orders that are under way at a time."""
GET_ATTEMPTS = 3
"""Tries of a question that changes nothing."""


class UnknownServerError(ConfigError):
    """What answers is no SGLang that is known here."""


class SGLangHTTP:
    """A line to one server.

    Args:
        url: e.g. ``http://localhost:30000``.
        api_key: sent as a bearer token.
        timeout: seconds that an answer may take.

    Raises:
        ConfigError: the URL is none.
    """

    def __init__(self, url: str, api_key: str | None, timeout: float) -> None:
        self.url = checked_url(url)
        self.timeout = timeout
        self._wire = Connections(self.url, api_key, CONNECTIONS)
        weakref.finalize(self, self._wire.close).atexit = False

    def close(self) -> None:
        """End the connections."""
        self._wire.close()

    def document(self, path: str) -> dict[str, Any]:
        """The JSON object at a path; asked for again if the answer is lost.

        Raises:
            ConfigError: there is none, so that this is no SGLang, or the key is wrong.
            SamplerError: nothing answers, or it is starting or stopping; ``retryable``.
        """
        response = self.exchange("GET", path, None, self.timeout)
        if response.status_code in (401, 403):
            raise ConfigError(
                f"{self.url}{path} answered {response.status_code}: pass the key that the server "
                "was started with as sampler_key (api_key of SamplingClient), or set "
                "XORL_SAMPLER_KEY"
            )
        if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            raise SamplerError(
                f"{self.url}{path} answered 503: the server is starting or stopping: try again",
                retryable=True,
            )
        try:
            value = response.json() if response.is_success else None
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise self.stranger(
                f"GET {path} answered {response.status_code}: {response.text[:80]!r}"
            )
        return cast("dict[str, Any]", value)

    def order(self, path: str, body: Mapping[str, Any], what: str) -> dict[str, Any]:
        """Have the server do something, once.

        Args:
            path: of the order.
            body: its JSON.
            what: it is to do, for the message.

        Returns:
            The object that it answers with, empty if there is none.

        Raises:
            SamplerError: it did not; says why.  ``retryable`` if the answer was lost.
        """
        response = self.exchange("POST", path, body, self.timeout)
        if not response.is_success:
            raise self.refused(what, response)
        try:
            answer = response.json() if response.content else {}
        except ValueError:
            answer = {}
        answer = cast("dict[str, Any]", answer) if isinstance(answer, dict) else {}
        if answer.get("success") is False:
            raise self.refused(what, response)
        return answer

    def stranger(self, why: str) -> UnknownServerError:
        """The error that this is no SGLang that is known here."""
        return UnknownServerError(
            f"what answers at {self.url} is no SGLang server that is known here ({why}): check "
            f"host and port, and that it is SGLang {'.'.join(map(str, OLDEST))} or newer"
        )

    def refused(self, what: str, response: httpx.Response) -> SamplerError:
        """The error that the server did not do something."""
        error = refusal(str(response.request.url), response)
        passing = isinstance(error, HTTPError) and (error.passing or error.status == 503)
        return SamplerError(f"SGLang did not {what}: {error}", retryable=passing)

    def exchange(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout: float
    ) -> httpx.Response:
        """Send something and return the answer whatever it says; a GET is tried again.

        Raises:
            ConfigError: the answer sends us elsewhere.
            SamplerError: there was none; ``retryable``.
        """
        url = f"{self.url}{path}"
        content = None if body is None else json.dumps(body, allow_nan=False)
        response = self._patiently(method, path, content, timeout)
        if response.has_redirect_location:
            raise ConfigError(
                f"{url} answered {response.status_code}, a redirect to "
                f"{response.headers['location'][:200]!r}: pass the server's own address"
            )
        return response

    def _patiently(
        self, method: str, path: str, content: str | None, timeout: float
    ) -> httpx.Response:
        left = GET_ATTEMPTS if method == "GET" else 1
        while True:
            left -= 1
            try:
                return self._wire.exchange(method, path, content, timeout)
            except httpx.TimeoutException as error:
                raise SamplerError(
                    f"{self.url}{path} did not answer within {timeout:g} s: look whether the "
                    "server hangs, or pass a larger timeout",
                    retryable=True,
                ) from error
            except httpx.HTTPError as error:
                # A connection that was refused has been tried again below already.
                if left and not isinstance(error, httpx.ConnectError):
                    continue
                raise SamplerError(
                    f"{self.url}{path} did not answer ({type(error).__name__}: {error}): check "
                    "that the server runs there; SGLang listens only once its model is loaded",
                    retryable=True,
                ) from error
            except RuntimeError as error:
                raise SamplerError(f"{self.url}{path} was not asked: it was closed") from error
