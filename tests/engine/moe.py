"""Mixture-of-experts models of three families, random and small, and their blocks written out."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from xorl_lab.engine import models, products, tiny
from xorl_lab.engine.routing import Choice

COMMON = {
    "vocab_size": 259,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}


def qwen(**changes: object) -> PreTrainedModel:
    config = {"intermediate_size": 48, "moe_intermediate_size": 24, "num_experts": 6}
    config |= {"norm_topk_prob": True, **changes}
    return _made(Qwen3MoeForCausalLM, Qwen3MoeConfig(**(COMMON | config)))


def olmoe() -> PreTrainedModel:
    config = {"intermediate_size": 24, "num_experts": 6, "norm_topk_prob": False}
    return _made(OlmoeForCausalLM, OlmoeConfig(**(COMMON | config)))


def mixtral() -> PreTrainedModel:
    config = {"intermediate_size": 24, "num_local_experts": 6}
    return _made(MixtralForCausalLM, MixtralConfig(**(COMMON | config)))


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3_moe": qwen,
    "olmoe": olmoe,
    "mixtral": mixtral,
}


def _made(architecture: type[PreTrainedModel], config: object) -> PreTrainedModel:
    model = tiny._build(architecture, config, torch.float32).eval()
    model.requires_grad_(False)
    models.attend_by_blocks(model)
    products.prepare(model)
    return model


def choice_of(model: PreTrainedModel, tokens: list[int]) -> Choice:
    """(T, L, K) experts by transformers' own account: the K greatest of its router's logits."""
    with torch.no_grad():
        output = model(input_ids=torch.tensor([tokens]), output_router_logits=True)
    logits = torch.stack(output.router_logits, 1)
    return logits.topk(2, -1).indices.to(torch.int16).numpy()


def other_choice(shape: tuple[int, int], seed: int = 0, count: int = 6, chosen: int = 2) -> Choice:
    """(T, L, K) experts drawn at random, different ones for each token."""
    draw = np.random.default_rng(seed)
    ranks = draw.random((*shape, count)).argsort(-1)
    return ranks[..., :chosen].astype(np.int16)


def block_output(block: torch.nn.Module, hidden: torch.Tensor, chosen: torch.Tensor):
    """(N, H) what a block makes of hidden states with these experts: each token by itself."""
    gate, experts = block.gate, block.experts
    rows = []
    for token, ids in zip(hidden, chosen.tolist(), strict=True):
        chances = torch.exp(gate.weight @ token)
        chances = chances / chances.sum()
        share = chances[ids]
        if getattr(gate, "norm_topk_prob", True):
            share = share / share.sum()
        total = torch.zeros_like(token)
        for weight, i in zip(share, ids, strict=True):
            low, high = (experts.gate_up_proj[i] @ token).chunk(2)
            total = total + weight * (experts.down_proj[i] @ (low * torch.sigmoid(low) * high))
        rows.append(total)
    return torch.stack(rows)


@contextmanager
def blocks_seen(model: PreTrainedModel) -> Iterator[list[tuple[torch.nn.Module, object, object]]]:
    """The blocks with experts that run inside, with what goes in and comes out, (N, H) each."""
    seen: list[tuple[torch.nn.Module, object, object]] = []

    def note(block, args, output) -> None:
        width = args[0].shape[-1]
        seen.append((block, args[0].reshape(-1, width), output.reshape(-1, width)))

    blocks = [m for m in model.modules() if hasattr(m, "experts") and hasattr(m, "gate")]
    handles = [block.register_forward_hook(note) for block in blocks]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
