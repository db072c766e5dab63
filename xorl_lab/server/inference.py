"""What the sampler answers with: published weights, adapters by name, and the known endpoints."""

import asyncio
import hashlib
import json
import re
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import httpx

from xorl_lab.checkpoints import Address, glance
from xorl_lab.client.local import LocalService
from xorl_lab.engine.versions import WeightsVersion
from xorl_lab.errors import CheckpointError, ConfigError
from xorl_lab.server.bodies import AddEndpointIn
from xorl_lab.server.security import LOOPBACK
from xorl_lab.server.settings import ServerSettings
from xorl_lab.types.checkpoints import InferenceEndpoint, SyncWeightsResponse

MAX_ADAPTERS = 64
"""Registered weights that are held; those that were used least lately are dropped."""
MAX_ADAPTER_BYTES = 8 * 2**30
"""Memory that they may take, about; the newest are held whatever they take."""
HEALTH_SECONDS = 2.0
"""How long another server may take to say that it is there."""
HOST = re.compile(r"[A-Za-z0-9.-]{1,253}|[0-9A-Fa-f:.]{2,45}")


class Inference:
    """The sampling side of a server.

    Args:
        settings: the server's.
        service: opens the model and loads checkpoints.
    """

    def __init__(self, settings: ServerSettings, service: LocalService) -> None:
        self.settings = settings
        self.service = service
        self.engine, self.sampler = service.open(settings.model)
        self.published: WeightsVersion = self.engine.base_version
        """What ``/generate`` without an adapter answers with."""
        self.ports: set[int] = {p for p in (settings.port, settings.sampler_port) if p}
        """Ports of this very server."""
        self._adapters: OrderedDict[str, WeightsVersion] = OrderedDict()
        """By a name that no other weights ever get."""
        self._names: dict[str, str] = {}
        """Checkpoint name, and URI, to the key of the weights that were registered last."""
        self._endpoints: dict[tuple[str, int], InferenceEndpoint] = {}

    def version(self, name: str | None) -> WeightsVersion:
        """The weights that a request asks for.

        Args:
            name: ``lora_path`` of the request; None or empty = the published ones.

        Raises:
            ConfigError: no adapter of that name is registered.
        """
        if not name:
            return self.published
        key = self._names.get(name, name)
        version = self._adapters.get(key)
        if version is None:
            raise ConfigError(
                f"no adapter {name[:200]!r} is registered: call create_sampling_session with its "
                f"path first; there are {sorted(self.adapters())[:20]}"
            )
        self._adapters.move_to_end(key)
        return version

    def adapters(self) -> list[str]:
        """Names of the registered adapters."""
        return [name for name in self._names if "://" not in name]

    async def register(self, model_path: str, *, bind: bool = False) -> str:
        """Load a checkpoint for sampling, under its name; an older one of that name is replaced.

        Args:
            model_path: ``xorl://MODEL/sampler_weights/NAME``, or ``sampler_weights/NAME`` of the
                default model.
            bind: answer with a name that only these weights ever have.

        Returns:
            The name that requests give as ``lora_path``.

        Raises:
            CheckpointError: it is missing, damaged, or of another base model.
        """
        path = model_path if "://" in model_path else f"xorl://default/{model_path}"
        address = Address.parse(path)
        loop = asyncio.get_running_loop()
        key, version = await loop.run_in_executor(None, self._load, address)
        self._adapters.setdefault(key, version)
        self._adapters.move_to_end(key)
        self._names |= {address.name: key, address.uri: key}
        self._drop_oldest()
        return key if bind else address.name

    def _load(self, address: Address) -> tuple[str, WeightsVersion]:
        """A checkpoint's weights, unless they are held already, and the key for them."""
        folder = address.folder(self.settings.root)
        while True:
            key = _key(address, glance(folder))
            version = self._adapters.get(key)
            if version is not None:
                return key, version
            engine, _, version = self.service.sampling_version(address.uri)
            if engine is not self.engine:
                raise CheckpointError(
                    "validation.checkpoint_config_mismatch",
                    f"checkpoint {address.uri} is of base model {engine.loaded.name!r}, but this "
                    f"server serves {self.engine.loaded.name!r}",
                    {"base_model": engine.loaded.name},
                )
            if _key(address, glance(folder)) == key:
                return key, version
            # It was replaced while it was read.

    def _drop_oldest(self) -> None:
        sizes = {key: _bytes(version) for key, version in self._adapters.items()}
        total = sum(sizes.values())
        for key in list(self._adapters)[:-1]:
            if len(self._adapters) <= MAX_ADAPTERS and total <= MAX_ADAPTER_BYTES:
                break
            total -= sizes[key]
            del self._adapters[key]
        self._names = {name: key for name, key in self._names.items() if key in self._adapters}

    def publish(self, version: WeightsVersion, seconds: float) -> SyncWeightsResponse:
        """Let ``/generate`` answer with these weights from now on.

        Args:
            version: the weights.
            seconds: how long it took to get them.
        """
        self.published = version
        results: list[dict[str, Any]] = []
        for endpoint in self._endpoints.values():
            embedded = self.is_embedded(endpoint.host, endpoint.port)
            message = (
                f"samples from version {version.number} of {version.model_id!r}"
                if embedded
                else "pushing weights to outside servers is not supported yet: register this "
                "server's own sampler port instead"
            )
            place = {"host": endpoint.host, "port": endpoint.port}
            results.append({**place, "success": embedded, "message": message})
        failed = [r for r in results if not r["success"]]
        return SyncWeightsResponse(
            success=not failed,
            message=(
                f"{failed[0]['host']}:{failed[0]['port']}: {failed[0]['message']}"
                if failed
                else f"/generate samples from version {version.number} of {version.model_id!r}"
            ),
            transfer_time=seconds,
            total_bytes=_bytes(version),
            num_parameters=len(_tensors(version)),
            num_buckets=1,
            endpoints_synced=results,
        )

    def is_embedded(self, host: str, port: int) -> bool:
        """True if an address is this server's own."""
        return port in self.ports and host in {*LOOPBACK, self.settings.host, "0.0.0.0"}

    async def add(self, body: AddEndpointIn) -> tuple[InferenceEndpoint | None, str]:
        """Register a sampler.

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
        if not embedded and not await _healthy(host, body.port):
            return None, (
                f"{host}:{body.port} does not answer GET /health within {HEALTH_SECONDS:g} s: "
                "start the sampler first"
            )
        endpoint = InferenceEndpoint(
            host,
            body.port,
            body.worker_port or body.port,
            body.world_size,
            server_info=self.server_info() if embedded else None,
        )
        self._endpoints[host, body.port] = endpoint
        what = "the embedded sampler" if embedded else "an outside server, which gets no weights"
        return endpoint, f"added {host}:{body.port}: {what}"

    def remove(self, host: str, port: int) -> bool:
        """Forget a sampler.  Returns False if it was not there."""
        return self._endpoints.pop((host.strip(), port), None) is not None

    async def list(self) -> list[InferenceEndpoint]:
        """The registered samplers, each asked how it is."""

        async def look(endpoint: InferenceEndpoint) -> InferenceEndpoint:
            fine = self.is_embedded(endpoint.host, endpoint.port) or await _healthy(
                endpoint.host, endpoint.port
            )
            place = (endpoint.host, endpoint.port, endpoint.worker_port, endpoint.world_size)
            return InferenceEndpoint(*place, healthy=fine, server_info=endpoint.server_info)

        return list(await asyncio.gather(*map(look, self._endpoints.values())))

    def server_info(self) -> dict[str, Any]:
        """What the embedded sampler says of itself, under SGLang's names."""
        loaded = self.engine.loaded
        return {
            "model_path": loaded.name,
            "served_model_name": loaded.name,
            "tokenizer_path": loaded.name,
            "tp_size": 1,
            "dp_size": 1,
            "enable_lora": True,
            "max_lora_rank": None,
            "context_length": loaded.context_length,
            "vocab_size": loaded.vocab_size,
            "dtype": loaded.dtype,
            "device": loaded.device,
            "weight_version": str(self.published.number),
            "version": "xorl-lab",
        }


def timer() -> float:
    """A clock for durations, in seconds."""
    return time.perf_counter()


async def _healthy(host: str, port: int) -> bool:
    """Ask a server for ``/health``; no proxies, no redirects, no patience."""
    name = f"[{host}]" if ":" in host else host
    try:
        async with httpx.AsyncClient(timeout=HEALTH_SECONDS, trust_env=False) as client:
            response = await client.get(f"http://{name}:{port}/health")
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError):
        return False
    return response.status_code == 200


def _key(address: Address, state: Mapping[str, Any]) -> str:
    """A name for what is saved there now: its digests are in it, and when it was saved."""
    text = json.dumps(state, sort_keys=True).encode()
    return f"{address.uri}@{hashlib.blake2b(text, digest_size=8).hexdigest()}"


def _bytes(version: WeightsVersion) -> int:
    return sum(t.numel() * t.element_size() for t in _tensors(version))


def _tensors(version: WeightsVersion) -> list[Any]:
    if version.adapter is not None:
        return list(version.adapter.values())
    return [] if version.full is None else list(version.full.parameters())
