"""From logits to tokens: exact draws whose random numbers depend on the sample alone.

A uniform number is a hash of (seed, prompt, sample index, position), so a sample draws the same
numbers alone, in any batch and in any order, and different prompts draw different ones.

The draw inverts the cumulative distribution in two levels (which block of the vocabulary, then
which token in it), which reads the (R, V) matrix twice.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from xorl_lab.errors import SamplerError
from xorl_lab.types import SamplingParams

BLOCK = 128
"""Tokens in a block of the two-level draw."""
CANDIDATES = 1024
"""Tokens among which top_p is looked for first."""
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Drawn:
    """One token for each of R rows."""

    tokens: torch.Tensor
    """(R,) int64."""
    logprobs: torch.Tensor
    """(R,) float64, nats, over the whole vocabulary at the sampling temperature (1 if greedy)."""
    top_ids: torch.Tensor
    """(R, K) int64: the most likely tokens, best first; K = 0 if not asked for."""
    top_logprobs: torch.Tensor
    """(R, K) float64, nats."""
    entropies: torch.Tensor | None = None
    """(R,) float64, nats, of the same distribution as the logprobs, if asked for."""


def stream(seed: int, prompt: Sequence[int], sample: int) -> int:
    """Key of one sample's random numbers."""
    text = np.asarray(prompt, dtype="<i8").tobytes()
    digest = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    return _mix(_mix(seed & _MASK) ^ _mix(digest) ^ ((sample + 1) * _GOLDEN & _MASK))


def uniforms(streams: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per row, a function of its stream and position alone.

    Source: the output function of SplitMix64 (Steele, Lea & Flood 2014), applied to a counter.
    """
    words = [
        _mix((key + (position + 1) * _GOLDEN) & _MASK)
        for key, position in zip(streams, positions, strict=True)
    ]
    return (np.asarray(words, dtype=np.uint64) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def draw(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    numbers: npt.NDArray[np.float64],
    top: int = 0,
    entropies: bool = False,
) -> Drawn:
    """Draw one token per row.

    Args:
        logits: (R, V) in any float dtype.
        params: per row: temperature, top_k and top_p.
        numbers: (R,) uniform in [0, 1).
        top: K, alternatives to report per row; of equal ones those with lower ids.
        entropies: report the entropy of each row, which takes one more pass.

    Returns:
        Drawn: tokens, with logprobs of softmax(logits / temperature) before top-k and top-p.

    Raises:
        SamplerError: a row holds NaN or infinity, or nothing but minus infinity.
    """
    # Apple's GPUs have no float64, which the exact draw needs.
    logits = (logits.cpu() if logits.device.type == "mps" else logits).float()
    # From the greatest logit down, so that neither a huge logit nor a tiny temperature overflows.
    maxima = _maxima(logits)
    greatest = maxima.amax(-1, keepdim=True)
    temperatures = torch.tensor([p.temperature or 1.0 for p in params], dtype=torch.float32)
    plain = bool((temperatures == 1).all())
    temperatures = temperatures.clamp(min=torch.finfo(torch.float32).tiny).to(logits.device)

    def scaled(chosen: torch.Tensor) -> torch.Tensor:
        below = chosen - greatest
        return below if plain else below.div_(temperatures[:, None])

    below = scaled(logits)
    masses = below.exp() if entropies else below.exp_()
    sums = _blocks(masses)
    log_total = sums.sum(-1).log()
    if not bool(torch.isfinite(log_total).all()):
        raise SamplerError(
            "the model's logits are not finite: its weights have diverged, so go back to an "
            "earlier checkpoint and train on with a lower learning rate"
        )
    spread = _entropies(below, masses, log_total) if entropies else None
    kept = _restrict(masses, params)
    sums = sums if kept is masses else _blocks(kept)
    tokens = _invert(kept, sums, torch.from_numpy(numbers).to(logits.device))
    greedy = torch.tensor([p.temperature == 0 for p in params], device=logits.device)
    if bool(greedy.any()):
        tokens = torch.where(greedy, logits.argmax(-1), tokens)
    logprobs = scaled(logits.gather(-1, tokens[:, None])).squeeze(-1).double() - log_total
    ids = _best(logits, maxima, min(top, logits.shape[-1]))
    values = scaled(logits.gather(-1, ids)).double() - log_total[:, None]
    return Drawn(tokens, logprobs, ids, values, spread)


def _maxima(logits: torch.Tensor) -> torch.Tensor:
    """(R, V) -> (R, V / BLOCK), in the time that the greatest of each row takes."""
    whole = logits.shape[-1] // BLOCK
    found = logits[:, : whole * BLOCK].unflatten(-1, (whole, BLOCK)).amax(-1)
    rest = logits[:, whole * BLOCK :]
    return torch.cat([found, rest.amax(-1, keepdim=True)], -1) if rest.shape[-1] else found


def _best(logits: torch.Tensor, maxima: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of the greatest logits of each row, best first: (R, V), (R, V / BLOCK) -> (R, count).

    They lie in the blocks with the greatest maxima: for a token outside these each of them has one
    that goes before it.
    """
    if not count:
        return torch.zeros(len(logits), 0, dtype=torch.int64, device=logits.device)
    numbers = torch.arange(maxima.shape[-1], device=logits.device)
    blocks = _greatest(maxima, numbers, min(count, len(numbers)))
    columns = blocks[:, :, None] * BLOCK + torch.arange(BLOCK, device=logits.device)
    columns = columns.flatten(1)
    # What is beyond the vocabulary goes behind all that is in it, as its ids are higher.
    values = logits.gather(-1, columns.clamp(max=logits.shape[-1] - 1))
    values = torch.where(columns < logits.shape[-1], values, -torch.inf)
    return _greatest(values, columns, count)


def _greatest(values: torch.Tensor, ids: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of the greatest of (R, N) float32 values, of equal ones the lower: (R, count)."""
    # The bits of a float, all but the sign of a negative one turned over, are ordered as it is.
    bits = (values + 0.0).view(torch.int32)  # -0 and 0 are equal
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    return -((order << 32) - ids).topk(count, dim=-1).values & 0xFFFFFFFF


def _entropies(below: torch.Tensor, masses: torch.Tensor, log_total: torch.Tensor) -> torch.Tensor:
    """Of each row log Z - sum(e^l l) / Z: l (R, V) and e^l are given, Z is the sum of e^l.

    What holds l is overwritten.
    """
    products = below.mul_(masses)
    sums = _blocks(products).sum(-1)
    if bool(torch.isnan(sums).any()):  # 0 times minus infinity, of a token that is ruled out
        sums = _blocks(products.nan_to_num_(nan=0.0)).sum(-1)
    return (log_total - sums / log_total.exp()).clamp(min=0.0)


def _blocks(masses: torch.Tensor) -> torch.Tensor:
    """(R, V) -> (R, V / BLOCK) float64 sums."""
    short = -masses.shape[-1] % BLOCK
    padded = torch.nn.functional.pad(masses, (0, short)) if short else masses
    # Sums of 128 are good to the last place or two in float32; their sums need more.
    return padded.view(len(masses), -1, BLOCK).sum(-1).double()


def _invert(masses: torch.Tensor, sums: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The first token at which the running sum of masses, summed by blocks, exceeds its share."""
    cumulative = sums.cumsum(-1)
    target = numbers[:, None] * cumulative[:, -1:]
    block = torch.searchsorted(cumulative, target, right=True)
    block = block.clamp(max=cumulative.shape[-1] - 1)
    before = torch.where(block > 0, cumulative.gather(-1, (block - 1).clamp(min=0)), 0.0)
    columns = block * BLOCK + torch.arange(BLOCK, device=masses.device)
    inside = masses.gather(-1, columns.clamp(max=masses.shape[-1] - 1)).double()
    inside = torch.where(columns < masses.shape[-1], inside, 0.0)
    running = inside.cumsum(-1)
    # Rounding can leave the target a hair past the block's own sum: take its last token then.
    rest = (target - before).clamp(min=0.0)
    rest = torch.minimum(rest, torch.nextafter(running[:, -1:], torch.zeros_like(rest)))
    offset = torch.searchsorted(running, rest, right=True).clamp(max=BLOCK - 1)
    return (block * BLOCK + offset).squeeze(-1)


def _restrict(masses: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Zero what top_k and top_p leave out.  Rows without either are not touched."""
    rows = [i for i, p in enumerate(params) if p.top_k > 0 or p.top_p < 1]
    if not rows:
        return masses
    masses = masses.clone()
    for i in rows:
        kept = _kept(masses[i], params[i])
        masses[i] = torch.zeros_like(masses[i]).index_put((kept,), masses[i, kept])
    return masses


def _kept(masses: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The tokens that top_k and then top_p leave, of one row (V,), the most likely first."""
    limit = min(params.top_k, len(masses)) if params.top_k > 0 else len(masses)
    if params.top_k < 1:
        # Most of the mass is nearly always in the first few: sorting them alone is far cheaper.
        values, ids = masses.topk(min(CANDIDATES, limit))
        goal = params.top_p * masses.sum(dtype=torch.float64)
        reached = int(torch.searchsorted(values.double().cumsum(-1), goal))
        if reached < len(ids):
            return ids[: reached + 1]
    values, ids = masses.topk(limit)
    # As in transformers: top_p is a share of what top_k has left.
    running = values.double().cumsum(-1)
    reached = (
        limit if params.top_p == 1 else int(torch.searchsorted(running, params.top_p * running[-1]))
    )
    return ids[: reached + 1]


def _mix(word: int) -> int:
    word = (word + _GOLDEN) & _MASK
    word = ((word ^ (word >> 30)) * _MIX[0]) & _MASK
    word = ((word ^ (word >> 27)) * _MIX[1]) & _MASK
    return word ^ (word >> 31)
