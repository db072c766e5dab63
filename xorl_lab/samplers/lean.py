"""Llama-type networks stripped to their products, for sampling.

The arithmetic of transformers' modules on their own weights, with less between the products, and
with adapters added to the shared base rather than merged into copies of it: a new version of the
weights, of whichever kind, costs nothing here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation

from xorl_lab.engine import attention, products
from xorl_lab.engine.adapters import PREFIX
from xorl_lab.samplers.heads import heads_of
from xorl_lab.samplers.norm import Norm

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Values of ``model_type`` whose layers are computed here."""
GROUPS: Sequence[Sequence[str]] = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
"""The matrices of a layer, those with the same input together."""
Attend = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, (N, heads, D) queries, (N, kv heads, D + D) keys and values) -> (N, heads * D)."""


@dataclass(frozen=True, slots=True)
class Delta:
    """An adapter's share of the products with one input."""

    a: torch.Tensor
    """(sum of r, in): the matrices A, one below the other."""
    b: list[torch.Tensor | None]
    """Per product (out, r), scaled by alpha / r, or None where there is no adapter: as many columns
    as the product has rows of A, in the same order."""


Deltas = dict[tuple[int, str], Delta]
"""By layer and first module of the group."""
_NONE: Sequence[Delta | None] = (None,) * len(GROUPS)


class LeanWeights:
    """The weights of one model, read in place, or in layouts that are made for them once.

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
        self._heads = [heads_of(layer.self_attn) for layer in trunk.layers]
        self._matrices = [
            [own.matrices, *([_matrix(layer.get_submodule(m)) for m in g] for g in GROUPS[1:])]
            for own, layer in zip(self._heads, trunk.layers, strict=True)
        ]
        names = ("input_layernorm", "post_attention_layernorm")
        self._norms = [[Norm(layer.get_submodule(n)) for n in names] for layer in trunk.layers]
        self._last_norm = Norm(trunk.norm)
        self._head = _matrix(model.get_output_embeddings())
        act = trunk.layers[0].mlp.act_fn
        silu = isinstance(act, torch.nn.SiLU | SiLUActivation)
        self._act = partial(torch.nn.functional.silu, inplace=True) if silu else act

    def deltas(self, adapter: Mapping[str, torch.Tensor], scale: float) -> Deltas:
        """Arrange an adapter for :meth:`hidden` and :meth:`logits`.

        Args:
            adapter: tensors under PEFT's file names.
            scale: alpha / r.
        """
        groups = {
            (layer, group[0]): [f"model.layers.{layer}.{m}" for m in group]
            for layer in range(len(self._heads))
            for group in GROUPS
        }
        groups[len(self._heads), "lm_head"] = ["lm_head"]
        result: Deltas = {}
        for key, modules in groups.items():
            names = [f"{PREFIX}{module}.lora_{{}}.weight" for module in modules]
            a = [adapter[n.format("A")] for n in names if n.format("A") in adapter]
            if a:
                b = [adapter.get(n.format("B")) for n in names]
                scaled = [None if m is None else (m * scale).to(self.dtype) for m in b]
                if key[1] == GROUPS[0][0]:
                    scaled = self._heads[key[0]].arranged(scaled)
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
        x = torch.nn.functional.embedding(tokens, trunk.embed_tokens.weight)
        cosine, sine = (part[0] for part in trunk.rotary_emb(x[None], positions[None]))
        turn = self._heads[0].turns(cosine, sine)
        for index, own in enumerate(self._heads):
            (before, between), (into, out, gates, down) = self._norms[index], self._matrices[index]
            of = [deltas.get((index, group[0])) for group in GROUPS] if deltas else _NONE
            query, both = own.turned(_products(into, before(x), of[0]), turn)
            (x,) = _products(out, attend(index, query, both), of[1], x)
            gate, up = _products(gates, between(x), of[2])
            (x,) = _products(down, self._act(gate).mul_(up), of[3], x)
        return self._last_norm(x)

    def logits(self, hidden: torch.Tensor, deltas: Deltas) -> torch.Tensor:
        """(N, H) -> (N, V)."""
        return _products([self._head], hidden, deltas.get((len(self._heads), "lm_head")))[0]


def supported(model: PreTrainedModel) -> bool:
    """True for an architecture that :class:`LeanWeights` computes."""
    return getattr(model.config, "model_type", "") in FAMILIES


def _matrix(module: Any) -> products.Matrix:  # noqa: ANN401
    return products.Matrix(module.weight, module.bias)


def _products(
    matrices: Sequence[products.Matrix],
    x: torch.Tensor,
    delta: Delta | None,
    plus: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """(N, in) -> (N, out) for each of some matrices with the same input, added to ``plus``."""
    results = [matrix(x, plus) for matrix in matrices]
    if delta is None:
        return results
    down = x @ delta.a.T
    start = 0
    for out, b in zip(results, delta.b, strict=True):
        if b is not None:
            out.addmm_(down[:, start : start + b.shape[1]], b.T)
            start += b.shape[1]
    return results
