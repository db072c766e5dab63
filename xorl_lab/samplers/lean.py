"""Llama-type networks stripped to their products, for sampling.

The same arithmetic as transformers' modules, in fewer and larger steps: the three products of an
attention layer in one, the two of a gated MLP in one, weights laid out once as the CPU's matrix
kernels like them, and adapters added to the shared base rather than merged into copies of it.  A
new version of an adapter costs nothing; a new version of the full weights is laid out again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from xorl_lab.engine.adapters import PREFIX
from xorl_lab.samplers.products import Product

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Values of ``model_type`` whose layers are computed here."""
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, (N, heads, D) queries, (N, kv heads, D) keys, values) -> (N, heads * D)."""
GROUPS: Mapping[str, Sequence[str]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""Layers of a decoder block whose products are computed as one."""


@dataclass(frozen=True, slots=True)
class Delta:
    """An adapter's share of one product: columns ``start:stop`` get s (x A') B'."""

    start: int
    stop: int
    a: torch.Tensor
    """(r, in) in the network's dtype."""
    b: torch.Tensor
    """(r, out), scaled, in the network's dtype."""


Deltas = dict[tuple[int, str], list[Delta]]
"""By layer and group."""


class LeanWeights:
    """The weights of one model, ready for inference.

    Args:
        model: a causal language model for which :func:`supported` is true.  Its embedding, norms
            and biases are shared, its matrices are laid out anew.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        trunk: Any = model.get_decoder()
        config: Any = model.config
        self.device = model.device
        self.dtype = model.dtype
        self.heads = int(config.num_attention_heads)
        self.kv_heads = int(config.num_key_value_heads)
        self.width = int(
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        self.scaling = float(trunk.layers[0].self_attn.scaling)
        """Of the attention scores."""
        self._embedding = cast("torch.Tensor", trunk.embed_tokens.weight)
        self._rotary = trunk.rotary_emb
        self._norm = trunk.norm
        self._blocks = list(trunk.layers)
        self._products = [
            {
                name: Product([block.get_submodule(m) for m in group])
                for name, group in GROUPS.items()
            }
            for block in self._blocks
        ]
        self._head = Product([cast("torch.nn.Linear", model.get_output_embeddings())])

    @property
    def layers(self) -> int:
        """Number of decoder blocks."""
        return len(self._blocks)

    def deltas(self, adapter: Mapping[str, torch.Tensor], scale: float) -> Deltas:
        """Arrange an adapter, under PEFT's file names, for :meth:`hidden` and :meth:`logits`."""
        result: Deltas = {}
        for layer in range(self.layers):
            for name, members in GROUPS.items():
                modules = [f"model.layers.{layer}.{m}" for m in members]
                if found := self._group(modules, self._products[layer][name], adapter, scale):
                    result[layer, name] = found
        if found := self._group(["lm_head"], self._head, adapter, scale):
            result[self.layers, "head"] = found
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
        x = torch.nn.functional.embedding(tokens, self._embedding)
        cosine, sine = self._rotary(x[None], positions[None])
        cosine, sine = cosine[0, :, None], sine[0, :, None]
        kept = self.kv_heads * self.width
        for layer, block in enumerate(self._blocks):
            products = self._products[layer]
            attention = block.self_attn
            qkv = _apply(products["qkv"], block.input_layernorm(x), deltas.get((layer, "qkv")))
            query, key, value = qkv.split((self.heads * self.width, kept, kept), -1)
            query = query.view(len(x), self.heads, self.width)
            key = key.view(len(x), self.kv_heads, self.width)
            if hasattr(attention, "q_norm"):
                query, key = attention.q_norm(query), attention.k_norm(key)
            query, key = _rotate(query, cosine, sine), _rotate(key, cosine, sine)
            value = value.view(len(x), self.kv_heads, self.width)
            mixed = attend(layer, query, key, value)
            x = x + _apply(products["o"], mixed, deltas.get((layer, "o")))
            both = _apply(
                products["gate_up"],
                block.post_attention_layernorm(x),
                deltas.get((layer, "gate_up")),
            )
            gate, up = both.chunk(2, -1)
            gated = block.mlp.act_fn(gate).mul_(up)
            x = x + _apply(products["down"], gated, deltas.get((layer, "down")))
        return self._norm(x)

    def logits(self, hidden: torch.Tensor, deltas: Deltas) -> torch.Tensor:
        """(N, H) -> (N, V)."""
        return _apply(self._head, hidden, deltas.get((self.layers, "head")))

    def _group(
        self,
        modules: Sequence[str],
        product: Product,
        adapter: Mapping[str, torch.Tensor],
        scale: float,
    ) -> list[Delta]:
        found: list[Delta] = []
        for module, (start, stop) in zip(modules, product.columns, strict=True):
            a = adapter.get(f"{PREFIX}{module}.lora_A.weight")
            if a is not None:
                b = adapter[f"{PREFIX}{module}.lora_B.weight"]
                scaled = (b.T * scale).to(self.dtype).contiguous()
                found.append(Delta(start, stop, a.to(self.dtype), scaled))
        return found


def supported(model: PreTrainedModel) -> bool:
    """True for an architecture that :class:`LeanWeights` computes."""
    return getattr(model.config, "model_type", "") in FAMILIES


def _apply(product: Product, x: torch.Tensor, deltas: list[Delta] | None) -> torch.Tensor:
    out = product(x)
    for delta in deltas or ():
        out[:, delta.start : delta.stop].addmm_(x @ delta.a.T, delta.b)
    return out


def _rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding (Su et al. 2021), the halves of a head as real and imaginary."""
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat((-second, first), -1) * sine
