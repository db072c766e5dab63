"""The samplers that a server knows: its own, and SGLang servers that it sends weights to."""

import asyncio
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from xorl_lab.engine.versions import WeightsVersion
from xorl_lab.errors import LabError
from xorl_lab.samplers.sglang.controls import SGLang
from xorl_lab.samplers.sglang.facts import ServerFacts
from xorl_lab.samplers.sync.handover import Handover
from xorl_lab.samplers.sync.sync import SyncError, SyncReport, WeightSync
from xorl_lab.server.bodies import AddEndpointIn
from xorl_lab.server.security import LOOPBACK
from xorl_lab.server.settings import ServerSettings
from xorl_lab.types.checkpoints import InferenceEndpoint

HEALTH_SECONDS = 2.0
"""How long another server may take to say that it is there."""
MAX_LOADED = 16
"""Adapters that a server elsewhere holds at a time; the oldest are unloaded."""
HOST = re.compile(r"[A-Za-z0-9.-]{1,253}|[0-9A-Fa-f:.]{2,45}")
Place = tuple[str, int]
"""Host and port."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of sending weights to one endpoint."""

    place: Place
    """Where."""
    success: bool
    """It answers with them."""
    message: str
    """What was done, or why not."""
    report: SyncReport | None = None
    """Figures, where weights were sent."""
    disagrees: bool = False
    """The endpoint answers with other weights than it was sent."""

    def data(self) -> dict[str, Any]:
        """The JSON form: host, port, success and message, as xorl has them, and more."""
        host, port = self.place
        known = {"host": host, "port": port, "success": self.success, "message": self.message}
        return known | ({} if self.report is None else {"sync": self.report.data()})


class Endpoints:
    """The registered samplers of a server.

    Args:
        settings: the server's.
        handover: makes the trainer's side of a sync, when the first is needed.
        describe: what the server's own sampler says of itself.
    """

    def __init__(
        self,
        settings: ServerSettings,
        handover: Callable[[], Handover],
        describe: Callable[[], dict[str, Any]],
    ) -> None:
        self.settings = settings
        self.ports: set[int] = {p for p in (settings.port, settings.sampler_port) if p}
        """Ports of this very server."""
        self._handover = handover
        self._describe = describe
        self._trainer: Handover | None = None
        self._known: dict[Place, InferenceEndpoint] = {}
        self._syncs: dict[Place, WeightSync] = {}
        self._folder: Path | None = None

    def is_embedded(self, host: str, port: int) -> bool:
        """True if an address is this server's own."""
        return port in self.ports and host in {*LOOPBACK, self.settings.host, "0.0.0.0"}

    async def add(self, body: AddEndpointIn) -> tuple[InferenceEndpoint | None, str]:
        """Register a sampler: this server's own, or a SGLang server that fits the model.

        Returns:
            The endpoint, or None and why not.
        """
        host = body.host.strip()
        if not HOST.fullmatch(host):
            return None, f"{host[:200]!r} is no host name or address"
        embedded = self.is_embedded(host, body.port)
        if not embedded and host not in LOOPBACK and self.settings.token is None:
            return None, (
                f"{host!r} is another machine: this server reaches out only if it was started "
                "with --token"
            )
        place, info, what = (host, body.port), self._describe(), "the embedded sampler"
        if not embedded:
            if not await _healthy(host, body.port):
                return None, (
                    f"{host}:{body.port} does not answer GET /health within {HEALTH_SECONDS:g} s: "
                    "start the sampler first, or wake it with POST /continue_generation if it is a "
                    "SGLang that was left paused"
                )
            try:
                facts = await _elsewhere(self._connect, place)
            except LabError as error:
                return None, str(error)
            info, what = _described(facts), f"SGLang {facts.version}, which is sent weights"
        endpoint = InferenceEndpoint(
            host, body.port, body.worker_port or body.port, body.world_size, server_info=info
        )
        self._known[place] = endpoint
        return endpoint, f"added {host}:{body.port}: {what}"

    async def remove(self, host: str, port: int) -> bool:
        """Forget a sampler; its adapters are unloaded.  Returns False if it was not there."""
        place = (host.strip(), port)
        known, sync = self._known.pop(place, None), self._syncs.pop(place, None)
        if sync is not None:
            await _elsewhere(sync.close)
        return known is not None

    async def listed(self) -> list[InferenceEndpoint]:
        """The registered samplers, each asked how it is."""

        async def look(endpoint: InferenceEndpoint) -> InferenceEndpoint:
            fine = self.is_embedded(endpoint.host, endpoint.port) or await _healthy(
                endpoint.host, endpoint.port
            )
            place = (endpoint.host, endpoint.port, endpoint.worker_port, endpoint.world_size)
            return InferenceEndpoint(*place, healthy=fine, server_info=endpoint.server_info)

        return list(await asyncio.gather(*map(look, self._known.values())))

    async def publish(self, version: WeightsVersion) -> list[Outcome]:
        """Have every sampler answer with these weights when a request names no adapter.

        An adapter is merged into the weights of servers elsewhere.
        """
        return await self._everywhere(lambda sync: sync.publish(version), version)

    async def load(self, version: WeightsVersion, name: str) -> list[Outcome]:
        """Load an adapter under a name on the servers elsewhere; the embedded sampler has it."""
        if version.adapter is None:
            message = (
                f"{name!r} holds full weights, and SGLang loads adapters by name: send them with "
                "sync_inference_weights, or start SGLang from the checkpoint's folder"
            )
            return [Outcome(place, False, message) for place in self._syncs]

        def send(sync: WeightSync) -> SyncReport:
            report = sync.load(version, name)
            for oldest in list(sync.adapters)[:-MAX_LOADED]:
                sync.release(oldest)
            return report

        return await self._everywhere(send, version, embedded=False)

    def close(self) -> None:
        """Unload what was loaded elsewhere."""
        syncs, self._syncs = list(self._syncs.values()), {}
        for sync in syncs:
            sync.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _everywhere(
        self,
        send: Callable[[WeightSync], SyncReport],
        version: WeightsVersion,
        *,
        embedded: bool = True,
    ) -> list[Outcome]:
        places = [p for p in self._known if embedded or not self.is_embedded(*p)]
        return list(await asyncio.gather(*(self._one(place, send, version) for place in places)))

    async def _one(
        self, place: Place, send: Callable[[WeightSync], SyncReport], version: WeightsVersion
    ) -> Outcome:
        if self.is_embedded(*place):
            message = f"samples from version {version.number} of {version.model_id!r}"
            return Outcome(place, True, message)
        sync = self._syncs.get(place)
        if sync is None:
            return Outcome(place, False, "it was removed meanwhile")
        try:
            report = await _elsewhere(send, sync)
        except LabError as error:
            return Outcome(place, False, str(error), disagrees=isinstance(error, SyncError))
        except OSError as error:  # the others' outcomes are not to be lost
            return Outcome(place, False, f"the weights could not be written ({error})")
        return Outcome(place, True, report.describe(), report)

    def _connect(self, place: Place) -> ServerFacts:
        """Make sure that a SGLang server fits."""
        host, port = place
        self._trainer = trainer = self._trainer or self._handover()
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="xorl-lab-adapters-"))
        sync = self._syncs.get(place)
        if sync is None:
            server = SGLang(_url(host, port), self.settings.sampler_key)
            sync = WeightSync(server, trainer, self._folder)
        vocab_size = trainer.vocab_size
        try:
            facts = sync.server.require(vocab_size=vocab_size, model=trainer.name, rank=None)
        except LabError:
            if place not in self._syncs:
                sync.server.close()
            raise
        self._syncs[place] = sync
        return facts


async def _elsewhere(run: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ANN401
    """Run something that waits for another server."""
    return await asyncio.get_running_loop().run_in_executor(None, partial(run, *arguments))


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _healthy(host: str, port: int) -> bool:
    """Ask a server for ``/health``; no proxies, no redirects, no patience."""
    try:
        async with httpx.AsyncClient(timeout=HEALTH_SECONDS, trust_env=False) as client:
            response = await client.get(f"{_url(host, port)}/health")
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError):
        return False
    return response.status_code == 200


def _described(facts: ServerFacts) -> dict[str, Any]:
    return {
        "model_path": facts.model_path,
        "served_model_name": facts.model_path,
        "tp_size": facts.tp_size,
        "dp_size": facts.dp_size,
        "enable_lora": facts.lora,
        "max_lora_rank": facts.max_lora_rank,
        "context_length": facts.context_length,
        "vocab_size": facts.vocab_size,
        "dtype": facts.dtype,
        "device": facts.device,
        "version": facts.version,
    }
