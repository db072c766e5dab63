"""Llama-type networks stripped to their products, for sampling.

The arithmetic of transformers' modules on their own weights, with less between the products, and
with adapters added to the shared base rather than merged into copies of it: a new version of the
weights, of whichever kind, costs nothing here.

Inside, the N tokens are the last dimension: with few of them a CPU's kernels take W x up to three
times as fast as x' W'.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from xorl_lab.engine import attention
from xorl_lab.engine.adapters import PREFIX

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Values of ``model_type`` whose layers are computed here."""
FEW = 12
"""Below as many tokens the kernels prefer their input the other way round."""
HEAD_ROWS = 2048
"""Rows of the head that are multiplied at a time, so that their result is turned in the cache."""
GROUPS: Sequence[Sequence[str]] = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
"""The matrices of a layer, those with the same input together."""
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, (heads, D, N) queries, (kv heads, D, N) keys, values) -> (heads * D, N)."""


@dataclass(frozen=True, slots=True)
class Delta:
    """An adapter's share of the products with one input."""

    a: torch.Tensor
    """(sum of r, in): the matrices A, one below the other."""
    b: list[torch.Tensor | None]
    """Per product (out, r), scaled by alpha / r, or None where there is no adapter."""


Deltas = dict[tuple[int, str], Delta]
"""By layer and first module of the group."""


class LeanWeights:
    """The weights of one model, read in place.

    Args:
        model: a causal language model for which :func:`supported` is true.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        trunk: Any = model.get_decoder()
        self.device = model.device
        self.dtype = model.dtype
        self.kv_heads = int(cast("Any", model.config).num_key_value_heads)
        self.sharing = attention.heads_per_key(model)
        """Heads that share a key."""
        self.width = int(trunk.layers[0].self_attn.head_dim)
        """D."""
        self.scaling = float(trunk.layers[0].self_attn.scaling)
        """Of the attention scores."""
        self._trunk = trunk
        self._head = cast("torch.nn.Linear", model.get_output_embeddings())
        self._layers = [
            [[cast("torch.nn.Linear", layer.get_submodule(m)) for m in group] for group in GROUPS]
            for layer in trunk.layers
        ]

    def deltas(self, adapter: Mapping[str, torch.Tensor], scale: float) -> Deltas:
        """Arrange an adapter for :meth:`hidden` and :meth:`logits`.

        Args:
            adapter: tensors under PEFT's file names.
            scale: alpha / r.
        """
        groups = {
            (layer, group[0]): [f"model.layers.{layer}.{m}" for m in group]
            for layer in range(len(self._layers))
            for group in GROUPS
        }
        groups[len(self._layers), "lm_head"] = ["lm_head"]
        result: Deltas = {}
        for key, modules in groups.items():
            names = [f"{PREFIX}{module}.lora_{{}}.weight" for module in modules]
            a = [adapter[n.format("A")] for n in names if n.format("A") in adapter]
            if a:
                b = [adapter.get(n.format("B")) for n in names]
                scaled = [None if m is None else (m * scale).to(self.dtype) for m in b]
                result[key] = Delta(torch.cat(a).to(self.dtype), scaled)
        return result

    def hidden(
        self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend, deltas: Deltas
    ) -> torch.Tensor:
        """Run all but the head.

        Args:
            tokens: (N,) ids.
            positions: (N,) position ids.
            attend: the attention, which also keeps the keys and values.
            deltas: the adapter.

        Returns:
            (N, H) hidden states after the last norm.
        """
        trunk = self._trunk
        rows = torch.nn.functional.embedding(tokens, trunk.embed_tokens.weight)
        cosine, sine = (part[0].T for part in trunk.rotary_emb(rows[None], positions[None]))
        x = rows.T.contiguous()
        for index, (layer, groups) in enumerate(zip(trunk.layers, self._layers, strict=True)):
            of = [deltas.get((index, group[0])) for group in GROUPS]
            qkv = _products(groups[0], _norm(layer.input_layernorm, x), of[0])
            query, key, value = (part.unflatten(0, (-1, self.width)) for part in qkv)
            if hasattr(layer.self_attn, "q_norm"):
                query = _norm(layer.self_attn.q_norm, query)
                key = _norm(layer.self_attn.k_norm, key)
            query, key = _rotate(query, cosine, sine), _rotate(key, cosine, sine)
            mixed = attend(index, query, key, value)
            x = x + _products(groups[1], mixed, of[1])[0]
            gate, up = _products(groups[2], _norm(layer.post_attention_layernorm, x), of[2])
            gated = layer.mlp.act_fn(gate).mul_(up)
            x = x + _products(groups[3], gated, of[3])[0]
        return _norm(trunk.norm, x).T.contiguous()

    def logits(self, hidden: torch.Tensor, deltas: Deltas) -> torch.Tensor:
        """(N, H) -> (N, V)."""
        delta = deltas.get((len(self._layers), "lm_head"))
        weight, bias = self._head.weight, self._head.bias
        if delta is not None or bias is not None or hidden.device.type != "cpu":
            return _products([self._head], hidden.T, delta)[0].T.contiguous()
        out = hidden.new_empty(len(hidden), len(weight))
        for start in range(0, len(weight), HEAD_ROWS):
            part = slice(start, start + HEAD_ROWS)
            out[:, part] = torch.mm(weight[part], hidden.T).T
        return out


def supported(model: PreTrainedModel) -> bool:
    """True for an architecture that :class:`LeanWeights` computes."""
    return getattr(model.config, "model_type", "") in FAMILIES


def _products(
    layers: Sequence[torch.nn.Linear], x: torch.Tensor, delta: Delta | None
) -> list[torch.Tensor]:
    """(in, N) -> (out, N) for each of some linear layers with the same input."""
    if x.shape[1] < FEW:
        x = x.T.contiguous().T
    results = [torch.mm(layer.weight, x) for layer in layers]
    if delta is not None:
        down = torch.mm(delta.a, x)
        start = 0
        for out, b in zip(results, delta.b, strict=True):
            if b is not None:
                out.addmm_(b, down[start : start + b.shape[1]])
                start += b.shape[1]
    for layer, out in zip(layers, results, strict=True):
        if layer.bias is not None:
            out.add_(layer.bias[:, None])
    return results


def _norm(norm: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ANN401 (each family has its own class)
    """Root mean square norm (Zhang & Sennrich 2019) along the features, (…, features, N)."""
    fine = x.float()
    scale = fine.pow(2).mean(-2, keepdim=True).add_(norm.variance_epsilon).rsqrt_()
    return (fine * scale).to(x.dtype).mul_(norm.weight[:, None])


def _rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding (Su et al. 2021), the halves of a head as real and imaginary."""
    first, second = x.chunk(2, -2)
    return (x * cosine).addcmul_(torch.cat((-second, first), -2), sine)
