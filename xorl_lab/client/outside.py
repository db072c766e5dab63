"""A SGLang server as the sampler of models that this process trains."""

import atexit
import contextlib
import shutil
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from xorl_lab.client.remote_sampling import RemoteSource
from xorl_lab.engine.engine import Engine
from xorl_lab.engine.versions import WeightsVersion
from xorl_lab.errors import ConfigError, SamplerError
from xorl_lab.futures import APIFuture
from xorl_lab.samplers.base import SampleRequest, check_prompt
from xorl_lab.samplers.embedded import EmbeddedSampler
from xorl_lab.samplers.sglang.controls import SGLang
from xorl_lab.samplers.sglang.server import SGLangServer
from xorl_lab.samplers.sync.handover import Handover, rank_of
from xorl_lab.samplers.sync.sync import WeightSync
from xorl_lab.types import SampleResponse

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from xorl_lab.samplers.sync.report import SyncReport

OWN = "sglang"
"""Names a server that is started for the model, rather than the URL of one."""
LEAST_RANK = 32
"""Adapters up to this rank can be loaded into a server that is started for a model."""
TIMEOUT = 1800.0
"""Seconds that an answer may take."""


class Process(Protocol):
    """A server that was started for a model; see ``SGLangServer``."""

    url: str

    @property
    def alive(self) -> bool: ...  # noqa: D102
    def stop(self) -> None: ...  # noqa: D102


Start = Callable[[Engine, int], Process]
"""Starts a server for an engine that takes adapters up to a rank."""


class Outside:
    """A server elsewhere that samples from the weights of one engine.

    Nothing is started or connected to before it is needed.  Where it was started for the model and
    shares its GPU, it gives its memory back while the model is trained.

    Args:
        engine: the base model and its thread.
        embedded: the sampler on it; evaluates the canary's text.
        where: :data:`OWN`, or the URL of a server.
        start: starts a server.
        key: sent to the server as a bearer token.
    """

    def __init__(
        self,
        engine: Engine,
        embedded: EmbeddedSampler,
        where: str,
        start: Start | None = None,
        *,
        key: str | None = None,
    ) -> None:
        self.engine = engine
        self.where = where
        self.key = key
        self._handover = Handover(engine, embedded)
        self._start = start
        self._lock = threading.RLock()
        self._process: Process | None = None
        self._sync: WeightSync | None = None
        self._remote: RemoteSource | None = None
        self._rank = LEAST_RANK
        self._resting = False
        self._folder: Path | None = None
        self.shares_gpu = where == OWN and engine.loaded.device == "cuda"
        """Server and trainer use the memory of one GPU."""

    def expect(self, rank: int) -> None:
        """Adapters of this rank are going to be sent: a server that is started then takes them."""
        self._rank = max(self._rank, rank)

    def source(self, version: WeightsVersion) -> "OutsideSource":
        """Completions from a version, which is sent there now.

        Raises:
            SamplerError: it was not taken, or the server is gone.
            ConfigError: the server does not fit, or cannot be started.
        """
        source = OutsideSource(self, version)
        source.bind()
        return source

    def lazily(self, version: WeightsVersion) -> "OutsideSource":
        """Completions from a version, which is sent there when the first is asked for."""
        return OutsideSource(self, version)

    def awake(self) -> tuple[WeightSync, RemoteSource]:
        """The server with all its memory, started if need be.

        Raises:
            SamplerError: it is gone, or did not start.
            ConfigError: there is none to start.
        """
        with self._lock:
            if self._process is not None and not self._process.alive:
                self.close()
            if self._sync is None or self._remote is None:
                return self._opened()
            if self._resting:
                torch.cuda.empty_cache()  # what training has left is the server's again
                try:
                    self._sync_server().resume_memory()
                except SamplerError:
                    self.close()  # nobody knows what it holds: the next call starts another
                    raise
                self._resting = False
            return self._sync, self._remote

    def rest(self) -> None:
        """The model is about to be trained: give the memory of a shared GPU back to it."""
        with self._lock:
            if (
                not self.shares_gpu
                or self._resting
                or self._sync is None
                or self._sync.traffic.under_way
            ):
                return
            if not self._sync.lock.acquire(blocking=False):
                return  # it is being sent weights
            try:
                server = self._sync_server()
                # A server with anything under way refuses to flush, but does not survive a release.
                with contextlib.suppress(SamplerError):
                    server.flush_cache(0.0)
                    server.release_memory()
                    self._resting = True
            finally:
                self._sync.lock.release()

    def close(self) -> None:
        """Stop a server that was started for the model, and forget any other."""
        with self._lock:
            process, self._process = self._process, None
            remote, self._remote = self._remote, None
            folder, self._folder = self._folder, None
            sync, self._sync, self._resting = self._sync, None, False
        if remote is not None:
            remote.close()
        if sync is not None:
            (sync.close if process is None else sync.server.close)()
        if process is not None:
            process.stop()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def _opened(self) -> tuple[WeightSync, RemoteSource]:
        url = self.where
        if self.where == OWN:
            self._process = (self._start or started)(self.engine, self._rank)
            url = self._process.url
        folder = Path(tempfile.mkdtemp(prefix="xorl-lab-adapters-"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._folder = folder
        self._sync = WeightSync(SGLang(url, self.key, TIMEOUT), self._handover, folder)
        self._remote = RemoteSource(url, "", self.key, TIMEOUT)
        return self._sync, self._remote

    def _sync_server(self) -> SGLang:
        assert self._sync is not None
        server = self._sync.server
        assert isinstance(server, SGLang)
        return server


class OutsideSource:
    """Completions from one immutable version of the weights, drawn by a server elsewhere.

    Where the server has been sent other weights meanwhile, it is sent these again.

    Args:
        outside: the server.
        version: the weights.
    """

    def __init__(self, outside: Outside, version: WeightsVersion) -> None:
        self._outside = outside
        self._version = version
        self._hold = _Hold()
        self.report: SyncReport | None = None
        """What became of sending the weights last; None before that."""
        weakref.finalize(self, self._hold.let_go).atexit = False

    @property
    def base_model(self) -> str:
        """Name of the base model."""
        return self._outside.engine.loaded.name

    @property
    def model_id(self) -> str:
        """Name of the trained model; empty for the base model."""
        return self._version.model_id

    @property
    def version(self) -> int:
        """Number of the weights."""
        return self._version.number

    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The base model's tokenizer."""
        return self._outside.engine.loaded.tokenizer

    def check(self, prompt: tuple[int, ...], max_tokens: int) -> None:
        """Raise a DataError if the prompt cannot be sampled from."""
        loaded = self._outside.engine.loaded
        check_prompt(prompt, max_tokens, loaded.vocab_size, loaded.context_length)

    def bind(self) -> tuple[WeightSync, RemoteSource, str]:
        """Make sure that the server has the weights; the name that they have there.

        Raises:
            SamplerError, ConfigError: as :meth:`Outside.source`.
        """
        rank = rank_of(self._version)
        if rank is not None:
            self._outside.expect(rank)
        sync, remote = self._outside.awake()
        with sync.lock:
            sync.check()
            if self._hold.sync is not sync or not sync.serves(self._hold.name, self._version):
                self._hold.let_go()
                self.report = sync.push(self._version)
                self._hold.take(sync, self.report.name)
            return sync, remote, self._hold.name

    def submit(self, requests: Sequence[SampleRequest]) -> list[APIFuture[SampleResponse]]:
        """Send requests, all at once.

        Raises:
            ConfigError: a request names an adapter of its own.
            SamplerError: the server has not the weights, and does not take them.
        """
        for request in requests:
            if request.lora_path is not None:
                raise ConfigError(
                    f"lora_path is {request.lora_path!r}, but this client samples from one version "
                    "of the weights: use create_sampling_client(model_path=...) for another"
                )
        sync, remote, name = self.bind()
        with sync.lock:  # whoever sends weights waits for what has begun
            if not sync.serves(name, self._version):
                sync, remote, name = self.bind()
            sync.traffic.begin(len(requests))
            tag = sync.tag
            named = [replace(request, lora_path=name or None) for request in requests]
            try:
                drawn = remote.submit(named)
            except BaseException:
                for _ in requests:
                    sync.traffic.end()
                raise
        return [self._of_version(future, sync, tag) for future in drawn]

    def _of_version(
        self, drawn: APIFuture[SampleResponse], sync: WeightSync, tag: str | None
    ) -> APIFuture[SampleResponse]:
        """The answer in the terms of this process, if it was drawn from these weights."""
        version = self._version
        result: APIFuture[SampleResponse] = APIFuture(drawn.cancel)

        def arrived(future: APIFuture[SampleResponse]) -> None:
            sync.traffic.end()
            error = future.exception(0)
            if error is not None:
                result.set_exception(error)
                return
            response = future.result(0)
            meta = dict(response.meta_info or {})
            told = meta.get("weight_version")
            if told not in (None, tag):
                result.set_exception(
                    SamplerError(
                        f"{sync.server.url} answered with weights that it calls {told!r}, where "
                        f"{tag!r} was sent: they were replaced while it drew, so the completion "
                        "mixes versions: sample again",
                        retryable=True,
                    )
                )
                return
            meta |= {"weight_version": version.number, "model": self.base_model}
            result.set_result(replace(response, meta_info=meta))

        drawn.add_done_callback(arrived)
        return result


class _Hold:
    """A name on the server that is let go when its client is."""

    def __init__(self) -> None:
        self.sync: WeightSync | None = None
        self.name = ""

    def take(self, sync: WeightSync, name: str) -> None:
        self.sync, self.name = sync, name

    def let_go(self) -> None:
        sync, self.sync = self.sync, None
        if sync is not None and self.name:
            sync.release(self.name)


def started(engine: Engine, rank: int) -> SGLangServer:
    """Start a server for a model, and say how far it is."""
    loaded = engine.loaded

    def say(sentence: str) -> None:
        sys.stderr.write(f"SGLang for {loaded.name}: {sentence}\n")
        sys.stderr.flush()

    return SGLangServer.start(
        loaded.name, max_rank=rank, dtype=loaded.dtype, device=loaded.device, progress=say
    )


_known: dict[tuple[str, str, str, str], Outside] = {}
_lock = threading.Lock()


def outside(
    engine: Engine, embedded: EmbeddedSampler, where: str, key: str | None = None
) -> Outside:
    """The server of an engine at an address; one each per process, until another key is given."""
    loaded = engine.loaded
    place = (where, loaded.name, loaded.device, loaded.dtype)
    with _lock:
        found = _known.get(place)
        if found is None or found.engine is not engine or found.key != key:
            if found is not None:
                found.close()
            found = _known[place] = Outside(engine, embedded, where, key=key)
        return found


def close_all() -> None:
    """Stop the servers that were started here."""
    with _lock:
        known = list(_known.values())
        _known.clear()
    for each in known:
        each.close()


atexit.register(close_all)
