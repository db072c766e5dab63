"""A SGLang server, seen from outside: what it serves, and its controls.

Field names and behaviour are those of SGLang 0.5.23, read in its source and run.  Completions come
through a :class:`~xorl_lab.client.sampling.SamplingClient`; this is what a weight sync needs.
"""

import contextlib
import json
import re
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import httpx

from xorl_lab.errors import ConfigError, LabError, SamplerError
from xorl_lab.samplers.base import check_prompt
from xorl_lab.samplers.named_tensors import buckets, by_value
from xorl_lab.samplers.wire import Connections, HTTPError, checked_url, refusal

if TYPE_CHECKING:
    import torch

OLDEST = (0, 5, 23)
"""The first version of SGLang whose requests and answers are known here."""
CONNECTIONS = 8
"""Controls that are under way at a time."""
GET_ATTEMPTS = 3
"""Tries of a question that changes nothing."""
FLUSH_SECONDS = 30.0
"""How long the prefix cache may be busy before flushing it is given up."""
HEALTH_SECONDS = 30.0
"""Longer than the 20 s after which SGLang itself takes its scheduler for dead."""
ASKED_TOO_MUCH = 2**53
"""No token: with this SGLang says what its vocabulary is."""
INCOMPLETE = "incomplete"
"""``weight_version`` of a server whose weights are being replaced, or were left half replaced."""
PauseMode = Literal["abort", "retract", "in_place"]


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
    lora_modules: tuple[str, ...]
    """Linear layers that adapters may change; empty if none were named."""
    dtype: str
    """Of the weights."""
    device: str
    """``cpu``, ``cuda``, …"""
    weight_version: str
    """What the weights are called there."""


class SGLang:
    """One SGLang server: what it serves, and its controls.

    May be used from several threads; every call waits for its answer.

    Args:
        url: e.g. ``http://localhost:30000``.
        api_key: sent as a bearer token.
        timeout: seconds that an answer may take.

    Raises:
        ConfigError: the URL is none.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout: float = 1800.0) -> None:
        self.url = checked_url(url)
        self.timeout = timeout
        self._wire = Connections(self.url, api_key, CONNECTIONS)
        self._facts: ServerFacts | None = None
        self._adapters: set[str] = set()
        """Names that were ever used here."""
        self._updating = threading.Lock()

    def close(self) -> None:
        """End the connections; the server goes on."""
        self._wire.close()

    # What it serves.

    def connect(self) -> ServerFacts:
        """Make sure that a SGLang of a known version serves there, and ask what.

        Raises:
            SamplerError: nothing answers, or it is still loading; ``retryable``.
            ConfigError: it is no SGLang, too old, or our own server.
        """
        info = self._document("/model_info")
        if "xorl_lab" in info:
            raise ConfigError(
                f"{self.url} is `xorl-lab serve`, not SGLang: use "
                f"ServiceClient(base_url={self.url!r}), which trains and samples there"
            )
        if "model_path" not in info:
            raise self._stranger(f"GET /model_info has no model_path: {str(info)[:120]}")
        self._be_healthy()
        server = self._document("/server_info")
        version = str(server.get("version", "unknown"))
        if _numbers(version) < OLDEST:
            raise ConfigError(
                f"{self.url} is SGLang {version}, but {'.'.join(map(str, OLDEST))} or newer is "
                "needed: upgrade it (pip install -U sglang)"
            )
        self._facts = self._gathered(info, server, version)
        return self._facts

    @property
    def facts(self) -> ServerFacts:
        """What the server said when it was last connected to; connects first if need be."""
        return self._facts or self.connect()

    def require(
        self,
        *,
        vocab_size: int,
        model: str,
        rank: int | None,
        context_length: int | None = None,
    ) -> ServerFacts:
        """Make sure that the server fits a trainer.

        Args:
            vocab_size: V of the model that is trained.
            model: its name, for the message.
            rank: of the adapter that will be sent; None for full weights.
            context_length: that the server must have at least.

        Raises:
            ConfigError: it does not fit; says everything that does not, with both sides.
            SamplerError: nothing answers; ``retryable``.
        """
        facts = self.connect()
        faults: list[str] = []
        if facts.vocab_size != vocab_size:
            faults.append(
                f"its model {facts.model_path!r} has {facts.vocab_size} token ids, but {model!r}, "
                f"which is trained, has {vocab_size}: serve the same model"
            )
        if facts.dp_size != 1:
            faults.append(
                f"it runs {facts.dp_size} replicas, and SGLang takes new weights only without: "
                "start it with --dp-size 1"
            )
        if context_length is not None and facts.context_length < context_length:
            faults.append(
                f"its context holds {facts.context_length} tokens, but {context_length} are "
                f"needed: start it with --context-length {context_length}"
            )
        faults += [] if rank is None else _unfit_for_adapters(facts, rank)
        if faults:
            raise ConfigError(f"the SGLang server at {self.url} does not fit: {'; '.join(faults)}")
        return facts

    # Adapters.

    def load_adapter(self, name: str, folder: Path) -> None:
        """Load a LoRA adapter in PEFT's form.

        Args:
            name: that ``/generate`` knows it by.  Never use one twice: unloading is soft in
                SGLang, which goes on serving the old weights under it.
            folder: on the server's machine.

        Raises:
            ConfigError: the name was used before.
            SamplerError: the server did not take it; says why.
        """
        if name in self._adapters:
            raise ConfigError(
                f"adapter {name!r} was loaded before: SGLang may still hold its old weights under "
                "that name, so pass a new one"
            )
        body = {"lora_name": name, "lora_path": str(folder.absolute()), "pinned": False}
        self._control("/load_lora_adapter", body, f"load adapter {name!r} from {folder}")
        self._adapters.add(name)

    def unload_adapter(self, name: str) -> None:
        """Free the memory that an adapter takes.

        Raises:
            SamplerError: the server does not know it.
        """
        self._control("/unload_lora_adapter", {"lora_name": name}, f"unload adapter {name!r}")

    # Full weights.

    def update_from_disk(self, folder: Path, version: str) -> None:
        """Replace all weights by those of a checkpoint, and forget the prefix cache.

        Args:
            folder: in Hugging Face's form, on the server's machine.
            version: what the server calls them from now on.

        Raises:
            SamplerError: the server did not take them; it goes on with the old ones.
        """
        path = str(folder.absolute())
        body = {"model_path": path, "weight_version": version, "flush_cache": False}
        with self._updating:
            self._control("/update_weights_from_disk", body, f"load the weights in {folder}")
        self.flush_cache()

    def update_from_tensors(
        self,
        tensors: "Iterable[tuple[str, torch.Tensor]]",
        version: str,
        bucket_bytes: int = 256 * 2**20,
    ) -> int:
        """Replace weights by tensors that are sent along.  The prefix cache is not flushed.

        Between two buckets the server may answer with weights that are partly new: pause it.

        Args:
            tensors: (name, values) under Hugging Face's names, any device.
            version: what the server calls the weights once all of them are there; until then
                :data:`INCOMPLETE`.
            bucket_bytes: most bytes of one request; a larger tensor is sent alone.

        Returns:
            Bytes of tensors that were sent.

        Raises:
            SamplerError: not all of them arrived.  The server goes on, but with weights that are
                neither the old nor the new ones until the next update.
        """
        facts, sent, begun = self.facts, 0, False
        with self._updating:
            try:
                self._begin()
                for bucket, last in buckets(tensors, bucket_bytes):
                    payload = by_value(bucket, facts.dtype)
                    body = {
                        "serialized_named_tensors": [payload] * facts.tp_size,
                        "flush_cache": False,
                        "weight_version": version if last else INCOMPLETE,
                    }
                    begun = True
                    self._control("/update_weights_from_tensor", body, "send weights")
                    sent += sum(tensor.nbytes for _, tensor in bucket)
            except BaseException as error:
                self._abandon(version, mixed=begun)
                if not begun or not isinstance(error, Exception):
                    raise
                raise SamplerError(
                    f"only {sent} bytes of version {version!r} had arrived at {self.url} when "
                    f"sending the weights failed ({type(error).__name__}: {error}): what it serves "
                    "is undefined until weights are sent again",
                    retryable=True,
                ) from error
            self._control("/end_weight_update", {}, "finish the new weights")
        return sent

    def _begin(self) -> None:
        try:
            self._control("/begin_weight_update", {}, "take new weights")
        except SamplerError as error:
            if "already open" not in str(error):
                raise
            # Whoever opened it has died: nobody else updates this server.
            self._control("/end_weight_update", {}, "end an update that was left open")
            self._control("/begin_weight_update", {}, "take new weights")

    def _abandon(self, version: str, *, mixed: bool) -> None:
        """Close an update that failed, so that the server is usable, and let it say so."""
        # Where it was not open, or the server is gone, there is nothing to close.
        with contextlib.suppress(LabError):
            self._control("/end_weight_update", {}, f"give version {version!r} up")
        if mixed:
            with contextlib.suppress(LabError):
                self._control("/update_weight_version", {"new_version": INCOMPLETE}, "mark it")

    # Generation.

    def pause(self, mode: PauseMode = "abort") -> None:
        """Hold generation; requests that come meanwhile wait.

        Args:
            mode: what becomes of those under way.  ``abort``: they answer with what they have;
                ``retract`` and ``in_place``: they go on after :meth:`resume`, with the weights of
                then, on prompts read anew or on the old cache.

        Raises:
            SamplerError: the server did not obey.
        """
        self._control("/pause_generation", {"mode": mode}, "pause")

    def resume(self) -> None:
        """Let generation go on.

        Raises:
            SamplerError: the server did not obey.
        """
        self._control("/continue_generation", {}, "continue")

    def flush_cache(self, patience: float = FLUSH_SECONDS) -> None:
        """Forget the prefix cache; waits while requests are under way.

        Args:
            patience: seconds to wait.

        Raises:
            SamplerError: it was still busy then, or does not answer.
        """
        end, pause = time.monotonic() + patience, 0.02
        while True:
            response = self._exchange("POST", "/flush_cache", None, self.timeout)
            if response.is_success:
                return
            if response.status_code != httpx.codes.BAD_REQUEST:
                raise self._refused("flush its cache", response)
            if time.monotonic() + pause > end:
                raise SamplerError(
                    f"{self.url} did not flush its prefix cache within {patience:g} s, as requests "
                    "were under way: wait for them, or pause it first",
                    retryable=True,
                )
            time.sleep(pause)
            pause = min(2 * pause, 1.0)

    def abort_all(self) -> None:
        """Give up whatever is under way; it answers with what it has."""
        self._control("/abort_request", {"abort_all": True}, "give up what is under way")

    def score(self, tokens: Sequence[int], adapter: str | None = None) -> list[float]:
        """How likely each token but the first is, given those before it.

        Args:
            tokens: N ids.
            adapter: name under which it was loaded; None for the weights that are served.

        Returns:
            N - 1 logprobs in nats, at temperature 1.

        Raises:
            DataError: an id is outside the vocabulary, or there are too many.
            SamplerError: the server does not answer, or not what was asked.
        """
        check_prompt(tuple(tokens), 0, self.facts.vocab_size, self.facts.room)
        body: dict[str, Any] = {
            "input_ids": list(tokens),
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        if adapter is not None:
            body["lora_path"] = adapter
        answer = self._control("/generate", body, "score a text")
        try:
            pairs = cast("list[list[Any]]", answer["meta_info"]["input_token_logprobs"])[1:]
            logprobs = [float(pair[0]) for pair in pairs]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise SamplerError(
                f"{self.url}/generate answered a question for logprobs with "
                f"{str(answer)[:200]!r} ({type(error).__name__}: {error})"
            ) from error
        if [pair[1] for pair in pairs] != list(tokens[1:]) or not all(
            logprob <= 0 for logprob in logprobs
        ):
            raise SamplerError(
                f"{self.url}/generate answered {len(tokens)} tokens with the logprobs {logprobs}: "
                "one that is no more than 0 was expected for each but the first"
            )
        return logprobs

    # Memory.

    def release_memory(self) -> None:
        """Give weights and cache back to the GPU (no effect on CPU).

        Raises:
            SamplerError: the server did not; it must be idle, and started with
                ``--enable-memory-saver``.
        """
        self._control("/release_memory_occupation", {}, "release its memory")

    def resume_memory(self) -> None:
        """Take the memory again; full weights have to be sent anew.

        Raises:
            SamplerError: the server did not.
        """
        self._control("/resume_memory_occupation", {}, "take its memory again")

    # The wire.

    def _be_healthy(self) -> None:
        response = self._exchange("GET", "/health", None, min(self.timeout, HEALTH_SECONDS))
        if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            raise SamplerError(
                f"the SGLang server at {self.url} is not ready (503 from /health): it is still "
                "starting, or its scheduler is paused or stuck: wait, or look into its log",
                retryable=True,
            )
        if response.is_error:
            raise self._refused("say that it is well", response)

    def _gathered(
        self, info: Mapping[str, Any], server: Mapping[str, Any], version: str
    ) -> ServerFacts:
        rank = server.get("max_lora_rank")
        context = self._context()
        longest = server.get("max_req_input_len")
        modules = cast("list[str]", server.get("lora_target_modules") or [])
        return ServerFacts(
            url=self.url,
            model_path=str(info["model_path"]),
            vocab_size=self._vocab_size(),
            context_length=context,
            # Of its longest request SGLang keeps 5 positions from a prompt, and one from the whole.
            room=context if longest is None else min(context, int(longest) + 4),
            version=version,
            dp_size=int(server.get("dp_size") or 1),
            tp_size=int(server.get("tp_size") or 1),
            lora=bool(server.get("enable_lora")),
            max_lora_rank=None if rank is None else int(rank),
            lora_modules=tuple(modules),
            dtype=str(server.get("dtype", "auto")),
            device=str(server.get("device", "unknown")),
            weight_version=str(info.get("weight_version", "")),
        )

    def _context(self) -> int:
        cards = self._document("/v1/models").get("data")
        try:
            lengths = [card["max_model_len"] for card in cast("list[dict[str, Any]]", cards)]
            return int(next(length for length in lengths if length))
        except (TypeError, KeyError, ValueError, StopIteration):
            raise self._stranger(f"GET /v1/models names no max_model_len: {cards!r:.120}") from None

    def _vocab_size(self) -> int:
        # SGLang has no page that says it, but refuses to score a token that is none, with reasons.
        body = {
            "input_ids": [0],
            "sampling_params": {"max_new_tokens": 1},
            "return_logprob": True,
            "token_ids_logprob": [ASKED_TOO_MUCH],
        }
        response = self._exchange("POST", "/generate", body, self.timeout)
        found = re.search(r"valid range is \[0, (\d+)\)", response.text)
        if found is None:
            raise self._stranger(
                f"POST /generate does not say its vocabulary: {response.text[:120]!r}"
            )
        return int(found[1])

    def _document(self, path: str) -> dict[str, Any]:
        """The answer to a question that may be asked again."""
        response = self._exchange("GET", path, None, self.timeout)
        if response.status_code in (401, 403):
            raise ConfigError(
                f"{self.url}{path} answered {response.status_code}: pass the api_key that the "
                "server was started with"
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
            raise self._stranger(
                f"GET {path} answered {response.status_code}: {response.text[:80]!r}"
            )
        return cast("dict[str, Any]", value)

    def _stranger(self, why: str) -> ConfigError:
        return ConfigError(
            f"what answers at {self.url} is no SGLang server that is known here ({why}): check "
            f"host and port, and that it is SGLang {'.'.join(map(str, OLDEST))} or newer"
        )

    def _control(self, path: str, body: Mapping[str, Any], what: str) -> dict[str, Any]:
        """Have the server do something, once."""
        response = self._exchange("POST", path, body, self.timeout)
        if not response.is_success:
            raise self._refused(what, response)
        try:
            answer = response.json() if response.content else {}
        except ValueError:
            answer = {}
        answer = cast("dict[str, Any]", answer) if isinstance(answer, dict) else {}
        if answer.get("success") is False:
            raise self._refused(what, response)
        return answer

    def _refused(self, what: str, response: httpx.Response) -> SamplerError:
        error = refusal(str(response.request.url), response)
        passing = isinstance(error, HTTPError) and (error.passing or error.status == 503)
        return SamplerError(f"SGLang did not {what}: {error}", retryable=passing)

    def _exchange(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout: float
    ) -> httpx.Response:
        url = f"{self.url}{path}"
        content = None if body is None else json.dumps(body, allow_nan=False)
        attempts = GET_ATTEMPTS if method == "GET" else 1
        for attempt in range(1, attempts + 1):
            try:
                response = self._wire.exchange(method, path, content, timeout)
            except httpx.ReadTimeout as error:
                raise SamplerError(
                    f"{url} did not answer within {timeout:g} s: look whether the server hangs, or "
                    "pass a larger timeout",
                    retryable=True,
                ) from error
            except httpx.HTTPError as error:
                # A connection that was refused has been tried again already.
                if attempt < attempts and not isinstance(error, httpx.ConnectError):
                    continue
                raise SamplerError(
                    f"{url} did not answer ({type(error).__name__}: {error}): check that the "
                    "server runs there; it listens only once its model is loaded",
                    retryable=True,
                ) from error
            except RuntimeError as error:
                raise SamplerError(f"{url} was not asked: the connection was closed") from error
            if response.has_redirect_location:
                raise ConfigError(
                    f"{url} answered {response.status_code}, a redirect to "
                    f"{response.headers['location'][:200]!r}: pass the server's own address"
                )
            return response
        raise AssertionError("unreachable")


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version; an unknown one counts as the oldest.

    >>> _numbers("0.5.23.post1"), _numbers("0.4.9rc2"), _numbers("unknown")
    ((0, 5, 23), (0, 4, 9), ())
    """
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    return () if found is None else tuple(int(n or 0) for n in found.groups())


def _unfit_for_adapters(facts: ServerFacts, rank: int) -> list[str]:
    start = f"start it with --enable-lora --max-lora-rank {rank}"
    if not facts.lora:
        return [f"it takes no LoRA adapters: {start}"]
    if facts.max_lora_rank is not None and facts.max_lora_rank < rank:
        return [
            f"it takes adapters up to rank {facts.max_lora_rank}, but yours has {rank}: {start}"
        ]
    return []
