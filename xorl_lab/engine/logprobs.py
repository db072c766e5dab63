"""The trainer's log-probabilities: rows of packed tokens in, one number per target out.

The full (T, V) matrix of logits is never held.  The head runs on the trained positions only, as
contiguous 2-D rows, CHUNK of them at a time.  A frozen head computes the gradient on the way; one
that is trained computes each chunk again in the backward pass.
"""

import inspect
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from xorl_lab.engine import attention
from xorl_lab.engine.packing import PackedRow
from xorl_lab.engine.routing import replayed

CHUNK = 256
"""Positions whose logits are held at a time: CHUNK * V numbers."""


def run_packed(model: PreTrainedModel, row: PackedRow, cache: object | None = None) -> torch.Tensor:
    """Run the trunk of a causal language model over one packed row.

    Args:
        model: the causal language model; its head is not run.
        row: L tokens; with experts, these are the ones that they go through.
        cache: takes the keys and values of every node, if given.

    Returns:
        (L, H) hidden states after the last norm, in the model's dtype.
    """
    if row.experts is not None:
        with replayed(model, row.experts):
            return run_packed(model, replace(row, experts=None), cache)
    device = model.device
    tokens = torch.from_numpy(row.tokens).to(device)[None]
    positions = torch.from_numpy(row.positions).to(device)[None]
    if attention.used_by(model):
        dtype = torch.promote_types(model.dtype, torch.float32)
        layout = attention.blocks(row, attention.heads_per_key(model), dtype)
        # A mask that is ready keeps transformers from making one, which the layout stands in for.
        ready = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
        return run_trunk(model, tokens, positions, ready, cache, layout=layout)[0]
    mask = torch.from_numpy(row.attention_mask()).to(device)
    return run_trunk(model, tokens, positions, mask[None, None], cache)[0]


def run_trunk(
    model: PreTrainedModel,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    mask: torch.Tensor,
    cache: object | None = None,
    **extra: object,
) -> torch.Tensor:
    """Run all but the head.

    Args:
        model: the causal language model.
        tokens: (B, T) int64.
        positions: (B, T) int64 position ids.
        mask: (B, 1, T, S) bool, True where a query may look at a key.
        cache: object with ``update(keys, values, layer)``, or None.
        extra: what the attention is told besides, such as ``layout``.

    Returns:
        (B, T, H) hidden states.
    """
    trunk = model.get_decoder()
    extra["use_cache"] = cache is not None
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
    if frozen(head):
        weight = cast("torch.nn.Linear", head).weight
        return cast("torch.Tensor", _FrozenHead.apply(hidden, weight, targets, temperature, chunk))
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


def frozen(head: torch.nn.Module) -> bool:
    """True for a plain linear head without bias whose weight gets no gradient."""
    if type(head) is not torch.nn.Linear or head.bias is not None:
        return False
    return not (torch.is_grad_enabled() and head.weight.requires_grad)


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


class _FrozenHead(torch.autograd.Function):
    """Logprobs of targets, with d logprob / d hidden computed on the way, where it is needed.

    A target's logprob depends on its own hidden state h alone: with p = softmax(W h / t) it is
    d / dh = (W[target] - W' p) / t.  So M rows of that width stand in for the (M, V) logits that
    autograd would keep or compute again.

    The logits are held with the vocabulary first: a product of few rows by many columns runs at
    twice the speed that way round on a CPU.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,  # noqa: ANN401
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        chunk: int,
    ) -> torch.Tensor:
        result: list[torch.Tensor] = []
        slopes: list[torch.Tensor] = []
        for states, wanted in zip(hidden.split(chunk), targets.split(chunk), strict=True):
            logits = _scaled(weight @ states.T, temperature)
            picked = logits.gather(0, wanted[None])[0]
            greatest = logits.amax(0)
            masses = logits.sub_(greatest).exp_()
            total = masses.sum(0)
            result.append(picked - greatest - total.log())
            if ctx.needs_input_grad[0]:
                mean = weight.T @ masses.div_(total).to(weight.dtype)
                slopes.append((weight[wanted] - mean.T).div_(temperature))
        ctx.save_for_backward(*([torch.cat(slopes)] if slopes else []))
        return torch.cat(result)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401  # pyright: ignore[reportIncompatibleMethodOverride]
        (slopes,) = ctx.saved_tensors
        return slopes * grad[:, None].to(slopes.dtype), None, None, None, None


def _chunk_logprobs(
    hidden: torch.Tensor, head: torch.nn.Module, targets: torch.Tensor, temperature: float
) -> torch.Tensor:
    logits = _scaled(head(hidden), temperature)
    picked = logits.gather(-1, targets[:, None]).squeeze(-1)
    return picked - torch.logsumexp(logits, -1)


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return logits if temperature == 1.0 else logits / temperature
