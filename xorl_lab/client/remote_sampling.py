"""Sampling over HTTP, from any server that answers ``/generate`` as SGLang does.

What a real SGLang (0.5.23) does otherwise than the embedded sampler, and cannot be made to do:

- A seed fixes what is drawn only where it was started with ``--enable-deterministic-inference``;
  on a CPU (torch_native) never.
- Prompt and completion together may have two tokens less than the context, the prompt six.
- With both ``top_k`` and ``top_p`` its pytorch backend takes ``top_p`` as a share of the whole
  distribution, not of what ``top_k`` has left.
- Where the prompt ends inside a character, the text leaves out the bytes that complete it.
- Entropies are not known.
"""

import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import httpx

from xorl_lab.client.encoding import encode
from xorl_lab.client.flights import Flight, Limits, limits_of
from xorl_lab.client.generation import nothing_drawn, payload, response, spread_payload
from xorl_lab.client.transport import PREFIX
from xorl_lab.client.workers import Workers
from xorl_lab.errors import CancelledError, LabError, SamplerError
from xorl_lab.futures import APIFuture
from xorl_lab.samplers.base import SampleRequest, check_prompt
from xorl_lab.samplers.wire import Connections, HTTPError, checked_url, refusal
from xorl_lab.types import SampleResponse

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from xorl_lab.engine.routing import Experts


CONNECTIONS = 64
"""Requests under way at a time."""
ABORTERS = 4
"""Requests that are given up at a time, beside those under way."""
AGAIN_SECONDS = 1.0
"""Pause before a request is given up once more: it may have overtaken its own beginning."""
GIVE_UPS = 5
"""Times that a request is given up while it goes on."""
PASSING = (429, 502, 503, 504)
"""HTTP statuses that say that the server may answer later."""


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
        self._api_key = api_key
        self._pool = Workers(CONNECTIONS, "xorl-lab sample")
        self._aborters = Workers(ABORTERS, "xorl-lab abort")
        self._pending: set[APIFuture[SampleResponse]] = set()
        self._info: dict[str, Any] | None = None
        self._limits: Limits | None = None
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

    def experts(self) -> "Experts":
        """What the model that the server serves chooses from, by its files on this machine.

        Raises:
            ConfigError: this machine does not have them, or they are of a model without experts.
        """
        from xorl_lab.engine.models import experts  # noqa: PLC0415 (brings torch with it)

        return experts(self.base_model)

    def check(self, prompt: tuple[int, ...], max_tokens: int) -> None:
        """Raise a DataError for what would fail there; an id too large kills some servers."""
        limits = self.limits()
        check_prompt(prompt, max_tokens, limits.vocab_size, limits.context_length)

    def limits(self) -> Limits:
        """What the server can take, asked once.

        Raises:
            ConfigError: it is a SGLang that is too old.
            SamplerError: it does not answer.
        """
        if self._limits is None:
            info = self._model_info()
            self._limits = limits_of(info, self.base_url, self._api_key, self.timeout)
        return self._limits

    def submit(self, requests: Sequence[SampleRequest]) -> list[APIFuture[SampleResponse]]:
        """Send requests; cancelling a future gives its request up on the server too."""
        flights = [Flight(request, time.monotonic() + self.timeout) for request in requests]
        by_deadline: defaultdict[float, list[Flight]] = defaultdict(list)
        for flight in flights:
            self._take_off(flight)
            if flight.request.deadline is not None:
                by_deadline[flight.request.deadline].append(flight)
        for deadline, group in by_deadline.items():
            self._watch(deadline, group)
        return [flight.future for flight in flights]

    def _take_off(self, flight: Flight) -> None:
        def cancel() -> bool:
            accepted = flight.future.set_exception(CancelledError("sampling was cancelled"))
            if accepted:
                self._give_up(flight, GIVE_UPS)
            return accepted

        flight.future = APIFuture(cancel)
        with self._lock:
            self._pending.add(flight.future)
        flight.future.add_done_callback(self._forget)
        self._pool.submit(lambda: self._run(flight))

    def _forget(self, future: APIFuture[SampleResponse]) -> None:
        with self._lock:
            self._pending.discard(future)

    def _run(self, flight: Flight) -> None:
        request, future = flight.request, flight.future
        if future.done():
            flight.landed = True
            return
        now = time.monotonic()
        try:
            if request.deadline is not None and request.deadline <= now:
                future.set_result(nothing_drawn(request))
                return
            if flight.end <= now:
                raise self._too_late()
            limits = self.limits()
            rids = flight.rids(limits.sglang)
            adapter = self.adapter()
            single = len(rids) == 1
            body = (
                payload(request, adapter, rids[0])
                if single
                else spread_payload(request, adapter, rids)
            )
            answer = self._call("POST", "/generate", encode(body), flight.end - now)
            future.set_result(response(answer, request, limits.vocab_size, self.experts))
        except SampleTimeoutError as error:
            future.set_exception(error)
            self._abort(flight)
        except BaseException as error:  # noqa: BLE001 (belongs to the caller, not to this thread)
            future.set_exception(error)
        finally:
            flight.landed = True

    def _watch(self, deadline: float, group: list[Flight]) -> None:
        """Have what is under way at a deadline come back as aborted, or dropped."""
        timer = threading.Timer(max(0.0, deadline - time.monotonic()), self._late, (group,))
        timer.daemon = True
        timer.start()
        left = len(group)

        def count(_: APIFuture[SampleResponse]) -> None:
            nonlocal left
            with self._lock:
                left -= 1
            if left == 0:
                timer.cancel()

        for flight in group:
            flight.future.add_done_callback(count)

    def _late(self, group: list[Flight]) -> None:
        for flight in group:
            if not flight.request.keep_partial:
                message = "the prompt was still pending when its time was up"
                flight.future.set_exception(CancelledError(message))
            self._give_up(flight, GIVE_UPS)

    def _give_up(self, flight: Flight, times: int) -> None:
        """Have the server end a request, and look whether it did."""
        if flight.landed or times == 0:
            return

        def again() -> None:
            self._abort(flight)
            if not flight.landed:
                timer = threading.Timer(AGAIN_SECONDS, self._give_up, (flight, times - 1))
                timer.daemon = True
                timer.start()

        try:
            self._aborters.submit(again)
        except CancelledError:
            return  # The client was closed, and with it the connection.

    def _abort(self, flight: Flight) -> None:
        try:
            for rid in flight.rids(self.limits().sglang):
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
            got = self._wire.exchange(method, path, content, timeout)
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
        if got.has_redirect_location:
            raise SamplerError(
                f"{url} answered {got.status_code}, a redirect to "
                f"{got.headers['location'][:200]!r}: pass the server's own address"
            )
        if got.is_error:
            error = refusal(url, got)
            raise (
                SamplerError(str(error), retryable=error.status in PASSING)
                if isinstance(error, HTTPError)
                else error
            )
        try:
            return got.json() if got.content else {}
        except ValueError:
            raise SamplerError(
                f"{url} answered with something that is not JSON ({got.text[:80]!r}): check that "
                "base_url is that of a server with /generate"
            ) from None
