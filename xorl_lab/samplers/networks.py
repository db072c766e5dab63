"""A version of the weights as the sampler reads it: prompts in, then one token per row and step."""

import functools
import logging
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from xorl_lab.engine import attention, routing
from xorl_lab.engine.adapters import MergedCopy
from xorl_lab.engine.logprobs import head_of, run_packed, run_trunk
from xorl_lab.engine.packing import PackedRow, pack
from xorl_lab.engine.versions import WeightsVersion
from xorl_lab.samplers.cache import PromptCache, RowCache
from xorl_lab.samplers.graphs import GraphedNetwork, Recordings
from xorl_lab.samplers.lean import Deltas, LeanWeights, supported

logger = logging.getLogger(__name__)
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""Relative difference from transformers' hidden states up to which the lean network is trusted."""


class Network(Protocol):
    """One version of the weights."""

    def prefill(self, row: PackedRow, cache: PromptCache) -> torch.Tensor:
        """Read a packed row of L prompt tokens: (L, H) hidden states."""
        ...

    def step(self, tokens: torch.Tensor, cache: RowCache) -> torch.Tensor:
        """Read the next token of each of R rows, (R,) ids: (R, H) hidden states."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(N, H) -> (N, V)."""
        ...


class PlainNetwork:
    """transformers' own modules, for architectures that the lean network does not compute."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    @functools.cached_property
    def routers(self) -> list[Any]:
        """What chooses the experts, layer by layer; empty for a dense model."""
        return list(routing.routers(self.model).values())

    def prefill(self, row: PackedRow, cache: PromptCache) -> torch.Tensor:
        """See :class:`Network`."""
        return run_packed(self.model, row, cache)

    def step(self, tokens: torch.Tensor, cache: RowCache) -> torch.Tensor:
        """See :class:`Network`."""
        positions, mask = cache.begin_step(tokens.device)
        hidden = run_trunk(self.model, tokens[:, None], positions, mask, cache)[:, 0]
        cache.end_step()
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See :class:`Network`."""
        return head_of(self.model)(hidden)


class LeanNetwork:
    """The lean weights with an adapter, or with none."""

    def __init__(self, weights: LeanWeights, deltas: Deltas) -> None:
        self.weights = weights
        self.deltas = deltas

    def prefill(self, row: PackedRow, cache: PromptCache) -> torch.Tensor:
        """See :class:`Network`."""
        weights = self.weights
        on_cpu = weights.device.type == "cpu"
        layout = attention.blocks(row, weights.sharing) if on_cpu else None
        mask = None if on_cpu else torch.from_numpy(row.attention_mask()).to(weights.device)

        def attend(layer: int, query: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
            q, k, v = (x.transpose(0, 1) for x in (query, *both.tensor_split(2, -1)))
            cache.update(k[None], v[None], layer)
            if layout is not None:
                return attention.attend(q, k, v, layout, weights.scaling).flatten(1)
            mixed = torch.nn.functional.scaled_dot_product_attention(
                q[None], k[None], v[None], attn_mask=mask, scale=weights.scaling, enable_gqa=True
            )
            return mixed[0].transpose(0, 1).flatten(1)

        tokens, positions = (
            torch.from_numpy(x).to(weights.device) for x in (row.tokens, row.positions)
        )
        return weights.hidden(tokens, positions, attend, self.deltas)

    def step(self, tokens: torch.Tensor, cache: RowCache) -> torch.Tensor:
        """See :class:`Network`."""
        weights = self.weights
        positions, mask = cache.begin_step(weights.device)
        bias = torch.zeros(mask.shape, dtype=weights.dtype, device=weights.device)
        bias = bias.masked_fill_(~mask, -torch.inf).expand(-1, weights.kv_heads, -1, -1)
        bias = bias.flatten(0, 1)

        def attend(layer: int, query: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
            keys, values = cache.write(layer, both)
            # The heads that share a key are the rows of one small product.
            folded = query.view(len(keys), -1, weights.width)
            scores = torch.baddbmm(bias, folded, keys, alpha=weights.scaling)
            return torch.bmm(scores.softmax(-1), values).view(len(query), -1)

        hidden = weights.hidden(tokens, positions[:, 0], attend, self.deltas)
        cache.end_step()
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See :class:`Network`."""
        return self.weights.logits(hidden, self.deltas)


class Networks:
    """The networks of the versions that are being drawn from.

    Args:
        base: the base model.
    """

    def __init__(self, base: PreTrainedModel) -> None:
        self._base = base
        self._lean: LeanWeights | None = None
        self._plain = not supported(base)
        self._merged = MergedPool(base)
        self._recordings = Recordings()
        self._busy: dict[WeightsVersion, tuple[PreTrainedModel, Network]] = {}

    def acquire(self, version: WeightsVersion) -> Network:
        """The network of a version, made on first use."""
        # When the trained full weights move on, a version that is still read gets a copy.
        source = version.full if version.full is not None else self._base
        model, network = self._busy.get(version, (None, None))
        if network is None or model is not source:
            network = self._make(version, source)
            self._busy[version] = (source, network)
        return network

    def release(self, version: WeightsVersion) -> None:
        """Nobody draws from this version at the moment: what was made for it is let go."""
        if self._busy.pop(version, None) is not None:
            self._merged.release(version)

    def _make(self, version: WeightsVersion, source: PreTrainedModel) -> Network:
        if not self._plain and self._lean is None:
            self._lean = _checked(self._base)
            self._plain = self._lean is None
        if self._lean is None:
            adapted = version.adapter is not None
            return PlainNetwork(self._merged.acquire(version) if adapted else source)
        weights = self._lean if version.full is None else LeanWeights(source)
        network = LeanNetwork(weights, weights.deltas(version.adapter or {}, version.scale))
        on_cuda = weights.device.type == "cuda"
        return GraphedNetwork(network, source, self._recordings) if on_cuda else network


class MergedPool:
    """Copies of the base with an adapter merged in, reused from version to version."""

    def __init__(self, base: PreTrainedModel) -> None:
        self._base = base
        self._busy: dict[WeightsVersion, MergedCopy] = {}
        self._idle: tuple[WeightsVersion, MergedCopy] | None = None

    def acquire(self, version: WeightsVersion) -> PreTrainedModel:
        """The merged copy of a version, made on first use."""
        if version not in self._busy:
            idle_version, copy = self._idle or (None, MergedCopy(self._base))
            self._idle = None
            if idle_version is not version:
                copy.load(version.adapter or {}, version.scale)
            self._busy[version] = copy
        return self._busy[version].model

    def release(self, version: WeightsVersion) -> None:
        """Nobody draws from this version at the moment; one idle copy is kept for the next."""
        copy = self._busy.pop(version, None)
        if copy is not None:
            self._idle = (version, copy)


@torch.no_grad()
def _checked(model: PreTrainedModel) -> LeanWeights | None:
    """The lean weights of a model, if they compute what its modules do."""
    weights = LeanWeights(model)
    row = pack([[1, 2, 3, 4], [1, 5]])[0]
    expected = run_packed(model, row).float()
    got = LeanNetwork(weights, {}).prefill(row, PromptCache()).float()
    difference = float((got - expected).norm() / expected.norm())
    if difference <= TOLERANCE.get(model.dtype, 1e-4):
        return weights
    logger.warning(
        "sampling runs through transformers' modules, which is slower: the lean network's hidden "
        "states differ from theirs by %.2g",
        difference,
    )
    return None
