"""Keeping a SGLang server on the weights of a trainer, with proof.

**Adapters** are loaded under a name that no other weights ever get: unloading is soft in SGLang, a
later request would silently read the folder again.  So the folder goes when the adapter does.

**Full weights** replace what the server answers with when no adapter is named.  Generation is held
meanwhile, and only once nothing is under way, so that no completion mixes two versions; if the
server does not come to rest in time, what is under way goes on with the new weights and the report
says so (``mixed``).  An adapter can be merged into the base weights and sent in the same way, for
clients that name none.  The two exclude each other: an adapter loaded on top of other weights than
the base would be wrong, so each way of sending ends the other first.

**Proof.**  Each push ends with the canary (:mod:`xorl_lab.samplers.sync.canary`).  A server whose
weights are not known to be whole is left paused, and answers nobody until a push has succeeded.
"""

import contextlib
import secrets
import shutil
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from xorl_lab.engine.versions import WeightsVersion
from xorl_lab.errors import SamplerError
from xorl_lab.samplers.sync.canary import Canary, judge, measured_noise
from xorl_lab.samplers.sync.fit import allowed, other_model, require
from xorl_lab.samplers.sync.handover import rank_of
from xorl_lab.samplers.sync.parties import Server, Trainer
from xorl_lab.samplers.sync.report import SyncError, SyncReport
from xorl_lab.samplers.sync.rest import Traffic

if TYPE_CHECKING:
    from xorl_lab.samplers.sglang.controls import ServerFacts

__all__ = ["SyncError", "SyncReport", "WeightSync"]

PATIENCE = 300.0
"""Seconds for which requests under way are waited for before full weights are replaced."""
BUCKET_BYTES = 128 * 2**20
"""Most bytes of one message."""
UNTOUCHED = "default"
"""``weight_version`` of a server to which nobody has sent weights."""


@dataclass(slots=True)
class _Adapter:
    """One that the server has loaded."""

    version: WeightsVersion
    folder: Path
    report: SyncReport
    users: int = 1


@dataclass(slots=True)
class _Told:
    """What the trainer said of the weights that are in use, and of those before them."""

    now: list[float]
    before: list[float] = field(default_factory=list)


class WeightSync:
    """Keeps one outside SGLang server on the weights of one trainer.  Thread-safe.

    Args:
        server: the server; connected to at the first push.
        trainer: whose weights they are.
        folder: where adapters lie while they are loaded; the server must be able to read it.
        patience: seconds for which requests under way are waited for.
        disk: send full weights through ``folder`` rather than over the connection.
        strict: raise where the canary disagrees; False only reports it.
    """

    def __init__(
        self,
        server: Server,
        trainer: Trainer,
        folder: Path,
        *,
        patience: float = PATIENCE,
        disk: bool = False,
        strict: bool = True,
    ) -> None:
        self.server = server
        self.trainer = trainer
        self.lock = threading.RLock()
        """Held while weights are sent; held by others it keeps the weights in place."""
        self._folder = folder
        self._patience = patience
        self._disk = disk
        self._strict = strict
        self._noise: float | None = None
        self._rank = 0
        self._tag: str | None = None
        self._names: set[str] = set()
        self._held: WeightsVersion | None = None
        self._told: _Told | None = None
        self._adapters: dict[str, _Adapter] = {}
        self._models: dict[str, _Told] = {}
        self._released: deque[str] = deque()
        self.traffic = Traffic()
        """Requests of this process that are under way there."""

    # Sending.

    def push(self, version: WeightsVersion) -> SyncReport:
        """Send weights: an adapter as one, under a name of its own; others in place of the old.

        The same adapter again is not sent again.  Each push of it wants a :meth:`release`.

        Raises:
            SyncError: the server answers with other weights than it was sent.
            SamplerError: it does not answer, or did not take them.
            ConfigError: it does not fit the trainer.
        """
        with self.lock:
            if version.adapter is None:
                return self.publish(version)
            self.check()
            for adapter in self._adapters.values():
                if adapter.version is version:
                    adapter.users += 1
                    return replace(adapter.report, seconds=0.0, bytes=0)
            name = f"{version.model_id}-v{version.number}-{secrets.token_hex(4)}"
            return self.load(version, name)

    def load(self, version: WeightsVersion, name: str) -> SyncReport:
        """Load an adapter under a given name.  One that has it already is ended first.

        Raises: as :meth:`push`.
        """
        started = time.perf_counter()
        with self.lock:
            self._connect(rank_of(version))
            if self.serves(name, version):
                return replace(self._adapters[name].report, seconds=0.0, bytes=0)
            self._tidy()
            _, mixed = self._hold(self._base)
            if name in self._adapters:
                self._unload(name)
            folder = self._folder / f"{name}-{secrets.token_hex(4)}"
            again = name in self._names
            try:
                size = self.trainer.write_adapter(version, folder)
                self._names.add(name)
                self.server.load_adapter(name, folder, again=again)
            except BaseException:
                self._discard(name, folder)  # it may have been loaded, and the answer lost
                raise
            try:
                told = self._models.get(version.model_id) or _Told(self.trainer.score(self._base))
                now = _Told(self.trainer.score(version), told.now)
                canary = self._examine(now, name)
            except BaseException:
                self._discard(name, folder)
                raise
            report = self._report(version, name, started, size, canary, mixed=mixed)
            self._adapters[name] = _Adapter(version, folder, report)
            self._require_arrival(report)
            self._models[version.model_id] = now
            return report

    def publish(self, version: WeightsVersion) -> SyncReport:
        """Have the server answer with these weights when no adapter is named.

        An adapter is merged into the base weights; those that are loaded are ended.

        Raises: as :meth:`push`.
        """
        started = time.perf_counter()
        with self.lock:
            self._connect(None)
            self._tidy()
            sent, mixed = self._hold(version)
            assert self._told is not None
            try:
                canary = self._examine(self._told, None)
            except BaseException:
                self._held = None
                raise
            report = self._report(version, "", started, sent, canary, mixed=mixed)
            self._require_arrival(report)
            return report

    def release(self, name: str) -> None:
        """One who has pushed an adapter samples from it no more.

        When nobody does, it is unloaded before the next push.  Takes no lock: collecting garbage
        may call it at any moment.
        """
        self._released.append(name)

    def check(self) -> None:
        """Notice if the server was started again, or was sent weights by somebody else.

        Raises:
            SamplerError: it does not answer.
        """
        with self.lock:
            if self._noise is None:
                return
            named = self.server.weight_version()
            if named == UNTOUCHED or (self._tag is not None and named != self._tag):
                self._forget()

    def tidy(self) -> None:
        """Unload the adapters that nobody wants, now."""
        with self.lock:
            self._tidy()

    def close(self) -> None:
        """Unload all adapters and end the connection; the server goes on with its weights."""
        with self.lock:
            for name in list(self._adapters):
                self._unload(name)
            self.server.close()

    # What is there.

    def serves(self, name: str, version: WeightsVersion) -> bool:
        """Whether a request now would be answered with these weights."""
        if name:
            adapter = self._adapters.get(name)
            return adapter is not None and adapter.version is version
        return self._held is version

    @property
    def noise(self) -> float | None:
        """Mean distance of server and trainer on the base weights, nats; None before a push."""
        return self._noise

    @property
    def tag(self) -> str | None:
        """``weight_version`` of the server as it is known here; None while it is not known."""
        return self._tag

    @property
    def adapters(self) -> Mapping[str, WeightsVersion]:
        """Those that are loaded, by name."""
        return {name: adapter.version for name, adapter in self._adapters.items()}

    # How.

    def _connect(self, rank: int | None) -> None:
        """Make sure that the server fits the trainer, and is as it was left."""
        self.check()
        if self._noise is None or (rank or 0) > self._rank:
            facts = require(self.server, self.trainer, rank)
            if self._noise is None:
                self._noise = self._measure(facts)
            self._rank = max(self._rank, rank or 0)

    def _measure(self, facts: "ServerFacts") -> float:
        """Have the server hold the base model, and compare the two."""
        trainer = self.trainer
        limit = allowed(facts, trainer)
        mine = trainer.score(trainer.base)
        noise = self._distance(mine) if facts.weight_version == UNTOUCHED else None
        if noise is not None and noise <= limit:
            self._tag = f"base-{secrets.token_hex(4)}"
            self.server.name_weights(self._tag)
        else:
            # Somebody has sent it other weights, or it was started from others.
            self._transfer(trainer.base)
            noise = self._distance(mine)
        if noise > limit:
            self._held = None
            raise other_model(facts, trainer, noise)
        self._held, self._told = trainer.base, _Told(mine)
        return noise

    def _forget(self) -> None:
        """Nothing that was known of the server holds any more."""
        self._noise = self._held = self._told = self._tag = None
        for name in list(self._adapters):
            self._unload(name)
        self._models = {}

    @property
    def _base(self) -> WeightsVersion:
        return self.trainer.base

    def _hold(self, version: WeightsVersion) -> tuple[int, bool]:
        """Have the server answer with these weights; bytes sent, and whether versions mix."""
        if self._held is version:
            return 0, False
        before = self._told.now if self._told is not None else self.trainer.score(self._base)
        now = self.trainer.score(version)
        result = self._transfer(version)
        self._told = _Told(now, before)
        return result

    def _transfer(self, version: WeightsVersion) -> tuple[int, bool]:
        for name in list(self._adapters):
            self._unload(name)
        tag = f"{version.model_id or 'base'}-v{version.number}-{secrets.token_hex(4)}"
        self._held = self._tag = None
        mixed = self.traffic.bring_to_rest(self.server, self._patience)
        try:
            sent = self._send(version, tag)
        except BaseException as error:
            if not isinstance(error, Exception):
                raise
            raise SamplerError(
                f"version {version.number} of {version.model_id or self.trainer.name!r} was not "
                f"taken by {self.server.url} ({type(error).__name__}: {error}): its weights may be "
                "neither old nor new, so it is held and answers nobody until they are sent again: "
                "sync once more, or start it again",
                retryable=True,
            ) from error
        self.server.resume()
        self._held, self._tag = version, tag
        return sent, mixed

    def _send(self, version: WeightsVersion, tag: str) -> int:
        if not self._disk:
            tensors = self.trainer.tensors(version)
            return self.server.update_from_tensors(tensors, tag, BUCKET_BYTES)
        folder = self._folder / tag
        try:
            size = self.trainer.write_model(version, folder)
            self.server.update_from_disk(folder, tag)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return size

    def _examine(self, told: _Told, name: str | None) -> Canary:
        said = self.server.score(self.trainer.text, name)
        assert self._noise is not None
        return judge(said, told.now, told.before or told.now, self._noise)

    def _require_arrival(self, report: SyncReport) -> None:
        """Raise if the weights have not arrived; nobody samples from them then."""
        if report.canary.verdict != "disagrees" or not self._strict:
            return
        if report.name:
            adapter = self._adapters.pop(report.name)
            self._discard(report.name, adapter.folder)
        else:
            assert self._told is not None
            self._held, self._told = None, _Told(self._told.before)
        raise SyncError(
            f"{report.describe()}: it answers with other weights than it was sent; sync again, and "
            "if that does not help start it again"
        )

    def _report(
        self,
        version: WeightsVersion,
        name: str,
        started: float,
        size: int,
        canary: Canary,
        *,
        mixed: bool = False,
    ) -> SyncReport:
        seconds = time.perf_counter() - started
        return SyncReport(
            version.model_id,
            version.number,
            name,
            seconds,
            size,
            canary,
            mixed,
            self.server.url,
        )

    def _distance(self, mine: Sequence[float]) -> float:
        return measured_noise(self.server.score(self.trainer.text), mine)

    def _tidy(self) -> None:
        while self._released:
            name = self._released.popleft()
            adapter = self._adapters.get(name)
            if adapter is not None:
                adapter.users -= 1
                if adapter.users <= 0:
                    self._unload(name)

    def _unload(self, name: str) -> None:
        adapter = self._adapters.pop(name)
        self._discard(name, adapter.folder)

    def _discard(self, name: str, folder: Path) -> None:
        # A server that does not know it, or is gone, has nothing left to unload.
        with contextlib.suppress(SamplerError):
            self.server.unload_adapter(name)
        shutil.rmtree(folder, ignore_errors=True)
