"""What the sampler answers with: published weights, and adapters by name.

A request that names no adapter is answered with the weights that were published last, by this
server's own sampler and by every SGLang server that is registered: full weights, or the base model
with the adapter merged in.  Registering a checkpoint loads its adapter everywhere, on the base
weights: a SGLang server then answers with the base model when none is named, until the next sync.
"""

import asyncio
import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from xorl_lab.checkpoints import Address, glance
from xorl_lab.client.local import LocalService
from xorl_lab.engine.versions import WeightsVersion
from xorl_lab.errors import CheckpointError, ConfigError, SamplerError
from xorl_lab.samplers.sync.handover import Handover
from xorl_lab.server.endpoints import Endpoints
from xorl_lab.server.requests import Conflict
from xorl_lab.server.settings import ServerSettings
from xorl_lab.types.checkpoints import SyncWeightsResponse

MAX_ADAPTERS = 64
"""Registered weights that are held; those that were used least lately are dropped."""
MAX_ADAPTER_BYTES = 8 * 2**30
"""Memory that they may take, about; the newest are held whatever they take."""


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
        self.endpoints = Endpoints(
            settings, lambda: Handover(self.engine, self.sampler), self.server_info
        )
        """The registered samplers."""
        self._adapters: OrderedDict[str, WeightsVersion] = OrderedDict()
        """By a name that no other weights ever get."""
        self._names: dict[str, str] = {}
        """Checkpoint name, and URI, to the key of the weights that were registered last."""

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
            SamplerError: an endpoint elsewhere did not take it.
        """
        path = model_path if "://" in model_path else f"xorl://default/{model_path}"
        address = Address.parse(path)
        loop = asyncio.get_running_loop()
        key, version = await loop.run_in_executor(None, self._load, address)
        self._adapters.setdefault(key, version)
        self._adapters.move_to_end(key)
        self._names |= {address.name: key, address.uri: key}
        self._drop_oldest()
        failed = [o for o in await self.endpoints.load(version, address.name) if not o.success]
        if failed:
            told = "; ".join(f"{o.place[0]}:{o.place[1]}: {o.message}" for o in failed)
            raise SamplerError(f"{address.name!r} was not loaded everywhere: {told}")
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

    async def publish(self, version: WeightsVersion, started: float) -> SyncWeightsResponse:
        """Let ``/generate`` answer with these weights from now on, here and at all endpoints.

        Args:
            version: the weights.
            started: when they were asked for, by :func:`timer`.

        Raises:
            Conflict: an endpoint answers with other weights than it was sent.
        """
        self.published = version
        outcomes = await self.endpoints.publish(version)
        failed = [o for o in outcomes if not o.success]
        wrong = [o.message for o in failed if o.disagrees]
        if wrong:
            # Loudly: a loop that goes on would draw from one model and train another.
            raise Conflict("; ".join(wrong))
        sent = sum(o.report.bytes for o in outcomes if o.report is not None)
        told = "; ".join(o.message for o in outcomes if o.report is not None)
        fine = f"/generate samples from version {version.number} of {version.model_id!r}"
        return SyncWeightsResponse(
            success=not failed,
            message=(
                "; ".join(f"{o.place[0]}:{o.place[1]}: {o.message}" for o in failed)
                if failed
                else fine + (f"; {told}" if told else "")
            ),
            transfer_time=timer() - started,
            total_bytes=sent or _bytes(version),
            num_parameters=len(_tensors(version)),
            num_buckets=1,
            endpoints_synced=[o.data() for o in outcomes],
        )

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
