"""The trainer's log-probabilities: rows of packed tokens in, one number per target out.

The full (T, V) matrix of logits is never held.  The head runs on the trained positions only, as
contiguous 2-D rows, CHUNK of them at a time, and each chunk is computed again in the backward pass.
"""

import inspect
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import cast

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from xorl_lab.engine.packing import PackedRow

CHUNK = 256
"""Positions whose logits are held at a time: CHUNK * V numbers."""


def run_packed(model: PreTrainedModel, row: PackedRow, cache: object | None = None) -> torch.Tensor:
    """Run the trunk of a causal language model over one packed row.

    Args:
        model: the causal language model; its head is not run.
        row: L tokens.
        cache: takes the keys and values of every node, if given.

    Returns:
        (L, H) hidden states after the last norm, in the model's dtype.
    """
    device = model.device
    mask = torch.from_numpy(row.attention_mask()).to(device)
    return run_trunk(
        model,
        torch.from_numpy(row.tokens).to(device)[None],
        torch.from_numpy(row.positions).to(device)[None],
        mask[None, None],
        cache,
    )[0]


def run_trunk(
    model: PreTrainedModel,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    mask: torch.Tensor,
    cache: object | None = None,
) -> torch.Tensor:
    """Run all but the head.

    Args:
        model: the causal language model.
        tokens: (B, T) int64.
        positions: (B, T) int64 position ids.
        mask: (B, 1, T, S) bool, True where a query may look at a key.
        cache: object with ``update(keys, values, layer)``, or None.

    Returns:
        (B, T, H) hidden states.
    """
    trunk = model.get_decoder()
    extra: dict[str, object] = {"use_cache": cache is not None}
    if cache is not None:
        # transformers 5.24 renamed the argument and warns about the old name.
        names = inspect.signature(trunk.forward).parameters
        extra["cache" if "cache" in names else "past_key_values"] = cache
    output = trunk(input_ids=tokens, position_ids=positions, attention_mask=mask, **extra)
    return output.last_hidden_state


def head_of(model: PreTrainedModel) -> torch.nn.Module:
    """The module that maps (m, H) hidden states to (m, V) logits."""
    return cast("torch.nn.Module", model.get_output_embeddings())


def token_logprobs(
    hidden: torch.Tensor,
    head: torch.nn.Module,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    chunk: int = CHUNK,
    draws: torch.Generator | None = None,
) -> torch.Tensor:
    """Log-probability of each target under softmax(head(hidden) / temperature).

    Args:
        hidden: (M, H) float, the positions that predict the targets.
        head: maps (m, H) to (m, V) logits.
        targets: (M,) int64 ids.
        temperature: > 0; divides the logits.
        chunk: positions whose logits are held at a time.
        draws: generator of the head's dropout, if it has one: a chunk that is computed again gets
            the same draws again.

    Returns:
        (M,) nats, float32 (float64 if ``hidden`` is), with gradient to ``hidden`` and the head.
    """
    parts = [
        checkpoint(
            _chunk_logprobs,
            hidden[start : start + chunk],
            head,
            targets[start : start + chunk],
            temperature,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=lambda: _replayed(draws),
        )
        for start in range(0, len(targets), chunk)
    ]
    return torch.cat(parts)


def token_entropies(
    hidden: torch.Tensor, head: torch.nn.Module, *, temperature: float = 1.0, chunk: int = CHUNK
) -> torch.Tensor:
    """Entropy of softmax(head(hidden) / temperature) at each position.

    Args:
        hidden: (M, H) float.
        head: maps (m, H) to (m, V) logits.
        temperature: > 0; divides the logits.
        chunk: positions whose logits are held at a time.

    Returns:
        (M,) nats, without gradient.
    """
    parts: list[torch.Tensor] = []
    with torch.no_grad():
        for start in range(0, len(hidden), chunk):
            logits = _scaled(head(hidden[start : start + chunk]), temperature)
            logprobs = logits - torch.logsumexp(logits, -1, keepdim=True)
            parts.append(-(logprobs.exp() * logprobs).sum(-1))
    return torch.cat(parts)


def gather_positions(
    hidden: torch.Tensor, row: PackedRow, positions: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Pick hidden states out of a packed row.

    Args:
        hidden: (L, H).
        row: the row.
        positions: per member of the row, (m,) int64 positions in that sequence.

    Returns:
        (sum of m, H), member by member.
    """
    index = torch.cat(
        [torch.from_numpy(slots)[where] for slots, where in zip(row.slots, positions, strict=True)]
    )
    return hidden.index_select(0, index.to(hidden.device))


def _replayed(
    draws: torch.Generator | None,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of the first computation and of its repetition, which starts from the same state."""
    if draws is None:
        return nullcontext(), nullcontext()
    state = draws.get_state()

    @contextmanager
    def again() -> Generator[None]:
        now = draws.get_state()
        draws.set_state(state)
        try:
            yield
        finally:
            draws.set_state(now)

    return nullcontext(), again()


def _chunk_logprobs(
    hidden: torch.Tensor, head: torch.nn.Module, targets: torch.Tensor, temperature: float
) -> torch.Tensor:
    logits = _scaled(head(hidden), temperature)
    picked = logits.gather(-1, targets[:, None]).squeeze(-1)
    return picked - torch.logsumexp(logits, -1)


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return logits if temperature == 1.0 else logits / temperature
