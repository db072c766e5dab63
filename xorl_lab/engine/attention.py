"""Attention over a packed row of tokens, block by block.

A mask of (L, L) would make every token pay for every other token of its row, most of which it may
not see.  Here a block of neighbouring queries looks only at the keys that some query of the block
may see: its own sequence, as a rule.  The probabilities are not kept for the backward pass but
computed again (as in Dao et al. 2022, "FlashAttention", section 3.1).

transformers calls :func:`forward` in place of its own attention, through its public registry.
"""

import itertools
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from xorl_lab.engine.packing import PackedRow

NAME = "xorl_lab"
"""Under which transformers knows this attention."""
BLOCK = 64
"""Queries that are looked at together: more of them share one product, but see more strangers."""


@dataclass(frozen=True, slots=True)
class Block:
    """Neighbouring queries of a packed row and the keys that they look at."""

    queries: slice
    """n nodes of the row."""
    keys: list[slice]
    """S nodes of the row, in runs of neighbours."""
    bias: torch.Tensor
    """(g * n, S): 0 where the query may look at the key, else minus infinity, for each of the g
    heads that share a key."""


def blocks(row: PackedRow, sharing: int, dtype: torch.dtype = torch.float32) -> list[Block]:
    """Cut a packed row into blocks.

    Args:
        row: L nodes.
        sharing: g, heads that share a key.
        dtype: of the bias, float32 or float64.
    """
    mask = row.attention_mask()
    result: list[Block] = []
    for start, stop in itertools.pairwise(_cuts(row)):
        seen = np.flatnonzero(mask[start:stop].any(0))
        runs = np.split(seen, np.flatnonzero(np.diff(seen) > 1) + 1)
        keys = [slice(int(run[0]), int(run[-1]) + 1) for run in runs]
        allowed = torch.from_numpy(mask[start:stop][:, seen])
        bias = torch.zeros(allowed.shape, dtype=dtype).masked_fill_(~allowed, -torch.inf)
        result.append(Block(slice(start, stop), keys, bias.repeat(sharing, 1)))
    return result


def _cuts(row: PackedRow) -> list[int]:
    """Where blocks begin, and where the last one ends: where branches do, if that is near."""
    forks = row.parents != np.arange(-1, len(row.parents) - 1)
    cuts = [0]
    for node in range(1, len(forks)):
        length = node - cuts[-1]
        if length >= BLOCK or (length >= BLOCK // 2 and forks[node]):
            cuts.append(node)
    return [*cuts, len(forks)]


def use(model: PreTrainedModel) -> None:
    """Let a model attend through this module, if its architecture lets it be chosen."""
    if model.device.type == "cpu" and getattr(model, "_supports_attention_backend", False):
        model.set_attn_implementation(NAME)


def heads_per_key(model: PreTrainedModel) -> int:
    """How many attention heads share a key."""
    config: Any = model.config
    heads = int(config.num_attention_heads)
    return heads // int(getattr(config, "num_key_value_heads", None) or heads)


def used_by(model: PreTrainedModel) -> bool:
    """True if a model attends through this module."""
    return cast("Any", model.config)._attn_implementation == NAME


def forward(  # noqa: PLR0913  (the signature that transformers calls)
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    layout: list[Block] | None = None,
    **further: Any,  # noqa: ANN401
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend along the blocks of ``layout``; without one, as transformers does.

    Args:
        module: the attention layer.
        query: (B, heads, T, D).
        key: (B, heads of keys, S, D).
        value: like ``key``.
        attention_mask: (B, 1, T, S) where there is no layout.
        scaling: of the scores; 1 / sqrt(D) by default.
        layout: how the one row is cut.
        further: passed on.

    Returns:
        (B, T, heads, D), and None in place of the probabilities.
    """
    if layout is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **further
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attend(query[0], key[0], value[0], layout, scale)[None], None


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: list[Block], scale: float
) -> torch.Tensor:
    """Attention along the blocks of a packed row.

    Args:
        query: (H, L, D).
        key: (K, L, D); H is a multiple of K.
        value: like ``key``.
        layout: how the row is cut.
        scale: of the scores.

    Returns:
        (L, H, D), with gradient to all three.
    """
    return cast("torch.Tensor", _BlockAttention.apply(query, key, value, layout, scale))


class _BlockAttention(torch.autograd.Function):
    """(H, L, D) queries, (K, L, D) keys and values -> (L, H, D); H is a multiple of K."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,  # noqa: ANN401
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layout: list[Block],
        scale: float,
    ) -> torch.Tensor:
        heads, length, _ = query.shape
        queries, keys, values = _fine(query), _fine(key), _fine(value)
        out = query.new_empty(length, heads, value.shape[-1])
        for block in layout:
            q = _fold(queries[:, block.queries], len(key))
            chances = _chances(q, _gather(keys, block), block.bias, scale)
            mixed = torch.bmm(chances, _gather(values, block))
            out[block.queries] = _unfold(mixed, heads).transpose(0, 1)
        ctx.save_for_backward(query, key, value, out)
        ctx.layout, ctx.scale = layout, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, out = ctx.saved_tensors
        heads, groups = len(query), len(key)
        queries, keys, values, slopes = _fine(query), _fine(key), _fine(value), _fine(grad)
        drops = (slopes * _fine(out)).sum(-1).T[..., None]
        slopes = slopes.transpose(0, 1)
        grad_query = torch.empty_like(query)
        grad_key, grad_value = torch.zeros_like(keys), torch.zeros_like(values)
        for block in ctx.layout:
            q, g, drop = (_fold(x[:, block.queries], groups) for x in (queries, slopes, drops))
            k, v = _gather(keys, block), _gather(values, block)
            chances = _chances(q, k, block.bias, ctx.scale)
            _scatter(grad_value, block, torch.bmm(chances.transpose(1, 2), g))
            inner = torch.bmm(g, v.transpose(1, 2)).sub_(drop).mul_(chances)
            _scatter(grad_key, block, torch.bmm(inner.transpose(1, 2), q).mul_(ctx.scale))
            grad_query[:, block.queries] = _unfold(torch.bmm(inner, k).mul_(ctx.scale), heads)
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), None, None


def _chances(q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor, scale: float) -> torch.Tensor:
    """(K, g * n, D) queries and (K, S, D) keys -> (K, g * n, S) probabilities."""
    return torch.baddbmm(bias.expand(len(k), -1, -1), q, k.transpose(1, 2), alpha=scale).softmax(-1)


def _fine(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _fold(tensor: torch.Tensor, groups: int) -> torch.Tensor:
    """(H, n, D) -> (K, H / K * n, D): the heads that share a key, one below the other."""
    return tensor.reshape(groups, -1, tensor.shape[-1])


def _unfold(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """The inverse of :func:`_fold`."""
    return tensor.view(heads, -1, tensor.shape[-1])


def _gather(tensor: torch.Tensor, block: Block) -> torch.Tensor:
    """(K, L, D) -> (K, S, D): the keys or values that a block looks at."""
    parts = [tensor[:, run] for run in block.keys]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _scatter(total: torch.Tensor, block: Block, more: torch.Tensor) -> None:
    """Add (K, S, D) to the nodes that it was gathered from."""
    start = 0
    for run in block.keys:
        stop = start + run.stop - run.start
        total[:, run] += more[:, start:stop]
        start = stop


AttentionInterface.register(NAME, forward)
# For calls that are not ours, such as generate on a padded batch.
AttentionMaskInterface.register(NAME, sdpa_mask)
