"""Sampling over HTTP, from any server that answers ``/generate`` as SGLang does."""

import secrets
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import httpx

from xorl_lab.client.encoding import encode
from xorl_lab.client.transport import PREFIX
from xorl_lab.client.workers import Workers
from xorl_lab.errors import CancelledError, LabError, SamplerError
from xorl_lab.futures import APIFuture
from xorl_lab.samplers.base import SampleRequest, check_prompt
from xorl_lab.samplers.wire import Connections, HTTPError, checked_url, refusal
from xorl_lab.types import SampledSequence, SampleResponse

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


CONNECTIONS = 64
"""Requests under way at a time."""
ABORTERS = 4
"""Requests that are given up at a time, beside those under way."""
STOP_REASONS = ("stop", "length", "abort")


class SampleTimeoutError(SamplerError, TimeoutError):
    """The completions did not come within the client's ``timeout``."""


class RemoteSource:
    """A server with a ``/generate``.

    Args:
        base_url: e.g. ``http://localhost:30000``.
        model_path: URI or name of an adapter that it has loaded; empty = what it serves.  Our own
            server binds a URI to the weights that are saved there now; to others an adapter is
            known by the last part.
        api_key: sent as a bearer token.
        timeout: seconds that an answer may take.
        adapter: what the server calls it, if that is known.

    Raises:
        ConfigError: the URL is none.
        CheckpointError: there is no such checkpoint, or it does not fit.
    """

    def __init__(
        self,
        base_url: str,
        model_path: str,
        api_key: str | None,
        timeout: float,
        *,
        adapter: str | None = None,
    ) -> None:
        self.base_url = checked_url(base_url)
        self.model_path = model_path
        self.timeout = timeout
        self.model_id = model_path.removeprefix("xorl://").split("/")[0] if model_path else ""
        self.version: int | None = None
        self._wire = Connections(self.base_url, api_key, CONNECTIONS + ABORTERS)
        self._pool = Workers(CONNECTIONS, "xorl-lab sample")
        self._aborters = Workers(ABORTERS, "xorl-lab abort")
        self._pending: set[APIFuture[SampleResponse]] = set()
        self._info: dict[str, Any] | None = None
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._lock = threading.Lock()
        self._adapter = adapter
        weakref.finalize(self, self._wire.close).atexit = False
        if "/" in model_path:
            try:
                self.adapter()
            except SamplerError as error:
                if not error.retryable:
                    raise
                # It is not there yet: asked again when it is first needed.

    def adapter(self) -> str:
        """What the server calls the weights; empty for what it serves.

        Raises:
            CheckpointError: there is no such checkpoint, or it does not fit.
            SamplerError: the server does not answer.
        """
        if self._adapter is None:
            name = self.model_path.rsplit("/", 1)[-1]
            if "/" in self.model_path and "xorl_lab" in self._model_info():
                body = {"model_path": self.model_path, "bind": True}
                answer = self._post(f"{PREFIX}/create_sampling_session", body)
                name = str(cast("dict[str, Any]", answer)["lora_name"])
            self._adapter = name
        return self._adapter

    def close(self) -> None:
        """End the connections; what is still awaited is cancelled."""
        self._pool.close()
        self._aborters.close()
        with self._lock:
            pending, self._pending = self._pending, set()
        for future in pending:
            future.set_exception(CancelledError("the client was closed before the answer came"))
        self._wire.close()

    @property
    def base_model(self) -> str:
        """What the server says that it serves."""
        return str(self._model_info().get("model_path", ""))

    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The tokenizer of what the server serves, from this machine.

        Raises:
            ConfigError: this machine does not have it.
        """
        with self._lock:
            if self._tokenizer is None:
                from xorl_lab.engine.models import tokenizer  # noqa: PLC0415 (brings torch with it)

                self._tokenizer = tokenizer(self.base_model)
            return self._tokenizer

    def check(self, prompt: tuple[int, ...], max_tokens: int) -> None:
        """Raise a DataError for what would fail there; an id too large kills some servers."""
        info = self._model_info()
        vocab, context = info.get("vocab_size"), info.get("context_length")
        unlimited = 2**31 - 1
        check_prompt(prompt, max_tokens, int(vocab or unlimited), int(context or unlimited))

    def submit(self, requests: Sequence[SampleRequest]) -> list[APIFuture[SampleResponse]]:
        """Send requests; cancelling a future gives its request up on the server too."""
        return [self._submit(request) for request in requests]

    def _submit(self, request: SampleRequest) -> APIFuture[SampleResponse]:
        rid = secrets.token_hex(8)
        end = time.monotonic() + self.timeout

        def cancel() -> bool:
            accepted = future.set_exception(CancelledError("sampling was cancelled"))
            if accepted:
                self._aborters.submit(lambda: self._abort(rid))
            return accepted

        future: APIFuture[SampleResponse] = APIFuture(cancel)
        with self._lock:
            self._pending.add(future)
        future.add_done_callback(self._forget)
        if request.deadline is not None:
            timer = threading.Timer(
                max(0.0, request.deadline - time.monotonic()), self._late, (rid, request, future)
            )
            timer.daemon = True
            timer.start()
            future.add_done_callback(lambda _: timer.cancel())
        self._pool.submit(lambda: self._run(rid, request, future, end))
        return future

    def _forget(self, future: APIFuture[SampleResponse]) -> None:
        with self._lock:
            self._pending.discard(future)

    def _run(
        self, rid: str, request: SampleRequest, future: APIFuture[SampleResponse], end: float
    ) -> None:
        if future.done():
            return
        now = time.monotonic()
        try:
            if request.deadline is not None and request.deadline <= now:
                future.set_result(_nothing_drawn(request))
                return
            if end <= now:
                raise self._too_late()
            body = {**_payload(request, self.adapter()), "rid": rid}
            answer = self._call("POST", "/generate", encode(body), end - now)
            future.set_result(_response(answer, request))
        except SampleTimeoutError as error:
            future.set_exception(error)
            self._abort(rid)
        except BaseException as error:  # noqa: BLE001 (belongs to the caller, not to this thread)
            future.set_exception(error)

    def _late(self, rid: str, request: SampleRequest, future: APIFuture[SampleResponse]) -> None:
        """The time is up: what the server has drawn comes back as aborted, or is dropped."""
        if not request.keep_partial:
            message = "the prompt was still pending when its time was up"
            future.set_exception(CancelledError(message))
        self._abort(rid)

    def _abort(self, rid: str) -> None:
        try:
            self._post("/abort_request", {"rid": rid})
        except LabError:
            return  # A server that is gone has nothing left to give up.

    def _too_late(self) -> SampleTimeoutError:
        return SampleTimeoutError(
            f"{self.base_url}/generate did not answer within {self.timeout:g} s: pass a larger "
            "timeout, or send fewer prompts at once",
            retryable=True,
        )

    def _model_info(self) -> dict[str, Any]:
        if self._info is None:
            info = self._call("GET", "/model_info", None, self.timeout)
            self._info = cast("dict[str, Any]", info) if isinstance(info, dict) else {}
        return self._info

    def _post(self, path: str, body: Mapping[str, Any]) -> object:
        return self._call("POST", path, encode(body), self.timeout)

    def _call(self, method: str, path: str, content: str | None, timeout: float) -> object:
        url = f"{self.base_url}{path}"
        try:
            response = self._wire.exchange(method, path, content, timeout)
        except httpx.ReadTimeout as error:
            raise self._too_late() from error
        except httpx.HTTPError as error:
            raise SamplerError(
                f"{url} did not answer ({type(error).__name__}: {error}): check that the server "
                "runs there",
                retryable=True,
            ) from error
        except RuntimeError as error:
            raise CancelledError(f"{url} was not asked: the client is closed") from error
        if response.is_error:
            error = refusal(url, response)
            raise SamplerError(str(error)) if isinstance(error, HTTPError) else error
        try:
            return response.json() if response.content else {}
        except ValueError:
            raise SamplerError(f"{url} answered with something that is not JSON") from None


def _payload(request: SampleRequest, adapter: str) -> dict[str, Any]:
    params = request.params
    sampling: dict[str, Any] = {
        "max_new_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "n": request.num_samples,
        "sampling_seed": request.seed,
    }
    if params.stop_strings:
        sampling["stop"] = list(params.stop_strings)
    if params.stop_token_ids:
        sampling["stop_token_ids"] = list(params.stop_token_ids)
    body: dict[str, Any] = {
        "input_ids": list(request.prompt),
        "sampling_params": sampling,
        "return_logprob": request.return_logprobs or request.prompt_logprobs,
        "top_logprobs_num": request.top_logprobs,
        "logprob_start_len": 0 if request.prompt_logprobs else -1,
    }
    path = request.lora_path or adapter
    return body | ({"lora_path": path} if path else {})


def _nothing_drawn(request: SampleRequest) -> SampleResponse:
    """The answer to a request whose time was up before it was sent."""
    logprobs: list[float] | None = [] if request.return_logprobs else None
    empty = [SampledSequence([], "abort", logprobs, "") for _ in range(request.num_samples)]
    return SampleResponse(empty, {})


def _response(answer: object, request: SampleRequest) -> SampleResponse:
    """The answer from its JSON.

    Raises:
        SamplerError: it is not what ``/generate`` answers, or ids and logprobs differ in length.
    """
    items = cast("list[Any]", answer if isinstance(answer, list) else [answer])
    try:
        sequences = [_sequence(item, request) for item in items]
        meta = dict(items[0]["meta_info"])
        prompt = meta.get("input_token_logprobs")
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise SamplerError(
            f"/generate answered with {str(answer)[:200]!r}, which lacks what was asked for "
            f"({type(error).__name__}: {error})"
        ) from error
    if len(sequences) != request.num_samples:
        raise SamplerError(
            f"/generate answered with {len(sequences)} completions of {request.num_samples}"
        )
    logprobs = [entry[0] for entry in prompt] if request.prompt_logprobs and prompt else None
    return SampleResponse(sequences, meta, logprobs)


def _sequence(item: Mapping[str, Any], request: SampleRequest) -> SampledSequence:
    meta = item["meta_info"]
    tokens = [int(token) for token in item["output_ids"]]
    logprobs: list[float] | None = None
    if request.return_logprobs:
        logprobs = [float(entry[0]) for entry in meta["output_token_logprobs"]]
        if len(logprobs) != len(tokens):
            raise ValueError(f"{len(tokens)} tokens but {len(logprobs)} logprobs")
    reason = (meta.get("finish_reason") or {}).get("type", "abort")
    top = meta.get("output_top_logprobs") if request.top_logprobs else None
    return SampledSequence(
        tokens,
        reason if reason in STOP_REASONS else "stop",
        logprobs,
        str(item.get("text") or ""),
        None if top is None else [[(int(e[1]), float(e[0])) for e in step] for step in top],
    )
