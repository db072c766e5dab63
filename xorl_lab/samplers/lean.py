"""Llama-type networks stripped to their products, for sampling.

The arithmetic of transformers' modules on their own weights, with less between the products, and
with adapters added to the shared base rather than merged into copies of it: a new version of the
weights, of whichever kind, costs nothing here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation

from xorl_lab.engine import attention, products
from xorl_lab.engine.adapters import PREFIX

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Values of ``model_type`` whose layers are computed here."""
GROUPS: Sequence[Sequence[str]] = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
"""The matrices of a layer, those with the same input together."""
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, (N, heads, D) queries, (N, kv heads, D) keys, values) -> (N, heads * D)."""


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
        x = torch.nn.functional.embedding(tokens, trunk.embed_tokens.weight)
        turn = _Turn(*(part[0, :, None] for part in trunk.rotary_emb(x[None], positions[None])))
        for index, (layer, groups) in enumerate(zip(trunk.layers, self._layers, strict=True)):
            of = [deltas.get((index, group[0])) for group in GROUPS]
            qkv = _products(groups[0], _norm(layer.input_layernorm, x), of[0])
            query, key, value = (part.unflatten(-1, (-1, self.width)) for part in qkv)
            if hasattr(layer.self_attn, "q_norm"):
                query = _norm(layer.self_attn.q_norm, query)
                key = _norm(layer.self_attn.k_norm, key)
            mixed = attend(index, turn(query), turn(key), value)
            (x,) = _products(groups[1], mixed, of[1], plus=x)
            gated = self._gated(layer.mlp, _norm(layer.post_attention_layernorm, x), of[2])
            (x,) = _products(groups[3], gated, of[3], plus=x)
        return _norm(trunk.norm, x)

    def _gated(self, mlp: Any, x: torch.Tensor, delta: Delta | None) -> torch.Tensor:  # noqa: ANN401
        gate, up = mlp.gate_proj, mlp.up_proj
        if delta is None and isinstance(mlp.act_fn, torch.nn.SiLU | SiLUActivation):
            gated = products.linear(x, gate.weight, gate.bias, silu=True)
            return gated.mul_(products.linear(x, up.weight, up.bias))
        left, right = _products([gate, up], x, delta)
        return mlp.act_fn(left).mul_(right)

    def logits(self, hidden: torch.Tensor, deltas: Deltas) -> torch.Tensor:
        """(N, H) -> (N, V)."""
        return _products([self._head], hidden, deltas.get((len(self._layers), "lm_head")))[0]


def supported(model: PreTrainedModel) -> bool:
    """True for an architecture that :class:`LeanWeights` computes."""
    return getattr(model.config, "model_type", "") in FAMILIES


def _products(
    layers: Sequence[torch.nn.Linear],
    x: torch.Tensor,
    delta: Delta | None,
    *,
    plus: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """(N, in) -> (N, out) for each of some layers with the same input, added to ``plus``."""
    results = [products.linear(x, m.weight, m.bias, plus=plus) for m in layers]
    if delta is not None:
        down = x @ delta.a.T
        start = 0
        for out, b in zip(results, delta.b, strict=True):
            if b is not None:
                out.addmm_(down[:, start : start + b.shape[1]], b.T)
                start += b.shape[1]
    return results


def _norm(norm: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ANN401 (each family has its own class)
    """Root mean square norm (Zhang & Sennrich 2019) along the last dimension."""
    fine = x.float()
    squares = torch.linalg.vector_norm(fine, dim=-1, keepdim=True).square_()
    scale = squares.div_(x.shape[-1]).add_(norm.variance_epsilon).rsqrt_()
    return (fine * scale).to(x.dtype).mul_(norm.weight)


class _Turn:
    """Rotary position embedding (Su et al. 2021), the halves of a head as real and imaginary.

    Args:
        cosine: (N, 1, D).
        sine: (N, 1, D).
    """

    def __init__(self, cosine: torch.Tensor, sine: torch.Tensor) -> None:
        self._cosine = cosine
        half = sine.shape[-1] // 2
        self._sine = torch.cat((-sine[..., :half], sine[..., half:]), -1)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(N, heads, D), each turned by its position."""
        swapped = x.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
        return (x * self._cosine).addcmul_(swapped, self._sine)
