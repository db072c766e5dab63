"""A SGLang server, seen from outside: what it serves, and its controls.

Field names and behaviour are those of SGLang 0.5.23, read in its source and run.  Completions come
through a :class:`~xorl_lab.client.sampling.SamplingClient`; this is what a weight sync needs.
"""

import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast
from urllib.parse import urlsplit

import httpx

from xorl_lab.errors import ConfigError, SamplerError
from xorl_lab.samplers.base import check_prompt
from xorl_lab.samplers.sglang.connection import SGLangHTTP
from xorl_lab.samplers.sglang.facts import INCOMPLETE, ServerFacts, be_healthy, look
from xorl_lab.samplers.sglang.weights import adapter_by_value, send_weights

if TYPE_CHECKING:
    import torch

FLUSH_SECONDS = 30.0
"""How long the prefix cache may be busy before flushing it is given up."""
BUCKET_BYTES = 256 * 2**20
"""Size of the requests in which weights are sent."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")
ROUNDING = 1e-3
"""What a logprob may be above 0, as it is rounded."""
PauseMode = Literal["abort", "retract", "in_place"]

__all__ = ["INCOMPLETE", "PauseMode", "SGLang", "ServerFacts"]


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
        self._http = SGLangHTTP(url, api_key, timeout)
        self.url = self._http.url
        self._facts: ServerFacts | None = None
        self._adapters: set[str] = set()
        """Names that were ever used here."""
        self.here = urlsplit(self.url).hostname in LOOPBACK
        """The server is on this machine, and sees its folders."""
        self._updating = threading.Lock()

    def close(self) -> None:
        """End the connections; the server goes on."""
        self._http.close()

    # What it serves.

    def connect(self) -> ServerFacts:
        """Make sure that a SGLang of a known version serves there, and ask what.

        Raises:
            SamplerError: nothing answers, or it is still loading; ``retryable``.
            ConfigError: it is no SGLang, too old, or our own server.
        """
        facts = look(self._http)
        be_healthy(self._http)
        self._facts = facts
        return facts

    @property
    def facts(self) -> ServerFacts:
        """What the server said when it was last asked; asks if it was not.

        Raises:
            SamplerError: nothing answers; ``retryable``.
            ConfigError: it is no SGLang, too old, or our own server.
        """
        if self._facts is None:
            self._facts = look(self._http)
        return self._facts

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
        faults = facts.misfits(
            vocab_size=vocab_size, model=model, rank=rank, context_length=context_length
        )
        if faults:
            raise ConfigError(f"the SGLang server at {self.url} does not fit: {'; '.join(faults)}")
        return facts

    # Adapters.

    def load_adapter(self, name: str, folder: Path, *, again: bool = False) -> None:
        """Load a LoRA adapter in PEFT's form.

        A server on this machine reads the folder itself; to another one its files are sent.

        Args:
            name: that ``/generate`` knows it by.  Never use one twice: unloading is soft in
                SGLang, which goes on serving the old weights under it.
            folder: on this machine.
            again: the name was used before, is unloaded, and is to mean these weights now.

        Raises:
            ConfigError: the name was used before.
            SamplerError: the server did not take it; says why.
        """
        if name in self._adapters and not again:
            raise ConfigError(
                f"adapter {name!r} was loaded before: SGLang may still hold its old weights under "
                "that name, so pass a new one"
            )
        body: dict[str, Any] = {"lora_name": name, "pinned": False}
        what = f"load adapter {name!r} from {folder}"
        if self.here:
            body["lora_path"] = str(folder.absolute())
            self._http.order("/load_lora_adapter", body, what)
        else:
            body |= adapter_by_value(folder, self.facts)
            self._http.order("/load_lora_adapter_from_tensors", body, what)
        self._adapters.add(name)

    def unload_adapter(self, name: str) -> None:
        """Free the memory that an adapter takes.

        Raises:
            SamplerError: the server does not know it.
        """
        self._http.order("/unload_lora_adapter", {"lora_name": name}, f"unload adapter {name!r}")

    # Full weights.

    def weight_version(self) -> str:
        """What the server calls its weights now.

        Raises:
            SamplerError: nothing answers.
        """
        return str(self._http.document("/model_info").get("weight_version", ""))

    def name_weights(self, version: str) -> None:
        """Have the server call its weights by another name; nothing else changes.

        Raises:
            SamplerError: the server did not obey.
        """
        body = {"new_version": version, "abort_all_requests": False}
        self._http.order("/update_weight_version", body, "name its weights")

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
            self._http.order("/update_weights_from_disk", body, f"load the weights in {folder}")
        self.flush_cache()

    def update_from_tensors(
        self,
        tensors: "Iterable[tuple[str, torch.Tensor]]",
        version: str,
        bucket_bytes: int = BUCKET_BYTES,
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
        facts = self.facts
        with self._updating:
            return send_weights(self._http, facts, tensors, version, bucket_bytes)

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
        self._http.order("/pause_generation", {"mode": mode}, "pause")

    def resume(self) -> None:
        """Let generation go on.

        Raises:
            SamplerError: the server did not obey.
        """
        self._http.order("/continue_generation", {}, "continue")

    def flush_cache(self, patience: float = FLUSH_SECONDS) -> None:
        """Forget the prefix cache; waits while requests are under way.

        Args:
            patience: seconds to wait.

        Raises:
            SamplerError: it was still busy then, or does not answer.
        """
        end, pause = time.monotonic() + patience, 0.02
        while True:
            response = self._http.exchange("POST", "/flush_cache", None, self._http.timeout)
            if response.is_success:
                return
            if response.status_code != httpx.codes.BAD_REQUEST:
                raise self._http.refused("flush its cache", response)
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
        self._http.order("/abort_request", {"abort_all": True}, "give up what is under way")

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
        answer = self._http.order("/generate", body, "score a text")
        try:
            pairs = cast("list[list[Any]]", answer["meta_info"]["input_token_logprobs"])[1:]
            logprobs = [float(pair[0]) for pair in pairs]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise SamplerError(
                f"{self.url}/generate answered a question for logprobs with "
                f"{str(answer)[:200]!r} ({type(error).__name__}: {error})"
            ) from error
        if [pair[1] for pair in pairs] != list(tokens[1:]) or not all(
            logprob <= ROUNDING for logprob in logprobs
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
        self._http.order("/release_memory_occupation", {}, "release its memory")

    def resume_memory(self) -> None:
        """Take the memory again; full weights have to be sent anew.

        Raises:
            SamplerError: the server did not.
        """
        self._http.order("/resume_memory_occupation", {}, "take its memory again")
