"""Recorded completions evaluated again by forward passes that differ in one thing from each other.

Everything here runs on the worker thread of the engine, without gradient.  P tokens of a prompt and
C of its completion give C log-probabilities; a list of passages gives theirs one behind the other.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from xorl_lab.engine.logprobs import head_of, run_packed, run_trunk, token_logprobs
from xorl_lab.engine.packing import PackedRow, pack
from xorl_lab.engine.versions import WeightsVersion
from xorl_lab.samplers.cache import PromptCache, RowCache
from xorl_lab.samplers.networks import Network, Networks

Tick = Callable[[], object]
Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Passage:
    """A completion behind its prompt."""

    prompt: tuple[int, ...]
    """P token ids."""
    completion: tuple[int, ...]
    """C token ids, C >= 1."""

    @property
    def read(self) -> list[int]:
        """(P + C - 1,) what the model reads: the last token is only predicted."""
        return [*self.prompt, *self.completion[:-1]]

    def predicting(self, slots: NDArray[np.int64]) -> torch.Tensor:
        """Of the places of the tokens that are read, the C that predict the completion."""
        return torch.from_numpy(slots[len(self.prompt) - 1 :])


def packed(
    model: PreTrainedModel,
    passages: Sequence[Passage],
    temperature: float,
    tick: Tick,
    *,
    share: bool = True,
) -> Values:
    """As the trainer does it: merged into rows, equal beginnings computed once.

    Args:
        model: the weights.
        passages: what to evaluate.
        temperature: divides the logits.
        tick: called before each row.
        share: off = every passage has tokens of its own, as with dropout.
    """
    hidden = packed_states(model, passages, tick, share=share)
    return logprobs(model, hidden, passages, temperature)


def packed_states(
    model: PreTrainedModel, passages: Sequence[Passage], tick: Tick, *, share: bool = True
) -> torch.Tensor:
    """(N, H) hidden states that predict the N tokens of all completions; see :func:`packed`."""
    return _run(model, passages, pack([p.read for p in passages], share=share), tick)


def logprobs(
    model: PreTrainedModel, hidden: torch.Tensor, passages: Sequence[Passage], temperature: float
) -> Values:
    """Of (N, H) hidden states that predict the completions, the N log-probabilities."""
    targets = torch.tensor([t for p in passages for t in p.completion], device=hidden.device)
    with torch.no_grad():
        found = token_logprobs(hidden, head_of(model), targets, temperature=temperature)
    return found.double().cpu().numpy()


def logits(model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    """(N, H) hidden states -> (N, V) float32 logits."""
    with torch.no_grad():
        return head_of(model)(hidden).float()


def alone(
    model: PreTrainedModel, passages: Sequence[Passage], temperature: float, tick: Tick
) -> Values:
    """Each passage in a row of its own."""
    return np.concatenate([packed(model, [p], temperature, tick) for p in passages])


def shifted(
    model: PreTrainedModel,
    passages: Sequence[Passage],
    temperature: float,
    tick: Tick,
    shifts: Sequence[tuple[int, int]],
) -> Values:
    """With the position ids of prompt and completion moved.

    Args:
        model: the weights.
        passages: what to evaluate.
        temperature: divides the logits.
        tick: called before each row.
        shifts: per passage, what to add in its prompt and in its completion.
    """
    groups: dict[tuple[tuple[int, ...], tuple[int, int]], list[int]] = defaultdict(list)
    for index, (passage, shift) in enumerate(zip(passages, shifts, strict=True)):
        groups[passage.prompt, shift].append(index)
    parts: dict[int, Values] = {}
    for (prompt, (before, behind)), members in groups.items():
        chosen = [passages[i] for i in members]
        rows = [_moved(row, len(prompt), before, behind) for row in pack([p.read for p in chosen])]
        values = logprobs(model, _run(model, chosen, rows, tick), chosen, temperature)
        parts |= dict(zip(members, _parted(values, chosen), strict=True))
    return np.concatenate([parts[i] for i in range(len(passages))])


def padded(
    model: PreTrainedModel,
    passages: Sequence[Passage],
    temperature: float,
    tick: Tick,
    pads: Sequence[int],
    *,
    masked: bool,
) -> Values:
    """In one rectangular batch, padded to the left.

    Args:
        model: the weights.
        passages: B of them.
        temperature: divides the logits.
        tick: called first.
        pads: per passage, tokens of padding before it.
        masked: hide the padding from the attention and from the positions, as is right; off, the
            model reads it as if it were text.
    """
    tick()
    lengths = [pad + len(p.read) for p, pad in zip(passages, pads, strict=True)]
    filler = int(getattr(model.config, "pad_token_id", None) or 0)
    tokens = np.full((len(passages), max(lengths)), filler, dtype=np.int64)
    real = np.zeros(tokens.shape, dtype=np.bool_)
    for row, (passage, pad, length) in enumerate(zip(passages, pads, lengths, strict=True)):
        tokens[row, pad:length] = passage.read
        real[row, pad:] = True  # what follows the text cannot be seen from it anyway
    seen = real if masked else np.ones_like(real)
    positions = np.maximum(np.cumsum(seen, axis=1) - 1, 0)
    width = tokens.shape[1]
    # A token always sees itself, as no softmax over nothing is defined.
    mask = np.tril(np.ones((width, width), dtype=np.bool_)) & seen[:, None, :]
    mask |= np.eye(width, dtype=np.bool_)
    place = lambda array: torch.from_numpy(array).to(model.device)  # noqa: E731
    with torch.no_grad():
        hidden = run_trunk(model, place(tokens), place(positions), place(mask)[:, None])
    picked = [
        hidden[row, pad + len(p.prompt) - 1 : length]
        for row, (p, pad, length) in enumerate(zip(passages, pads, lengths, strict=True))
    ]
    return logprobs(model, torch.cat(picked), passages, temperature)


def decoded(
    base: PreTrainedModel,
    version: WeightsVersion,
    passages: Sequence[Passage],
    temperature: float,
    tick: Tick,
) -> Values:
    """As the sampler does it: one token after the other, with a cache of keys and values.

    Args:
        base: the base model.
        version: the weights.
        passages: what to evaluate.
        temperature: divides the logits.
        tick: called before each step.
    """
    network = Networks(base).acquire(version)
    cache = RowCache()
    found: list[list[float]] = [[] for _ in passages]
    rows: list[int] = []
    for row in pack(sorted({p.prompt for p in passages})):
        tick()
        rows += _prefill(network, cache, row, passages, found, temperature)
    for position in range(1, max(len(p.completion) for p in passages)):
        tick()
        staying = [i for i, r in enumerate(rows) if len(passages[r].completion) > position]
        if len(staying) < len(rows):
            rows = [rows[i] for i in staying]
            cache.keep(staying)
        last = torch.tensor([passages[r].completion[position - 1] for r in rows])
        with torch.no_grad():
            logits = network.logits(network.step(last.to(base.device), cache))
        targets = [passages[r].completion[position] for r in rows]
        for r, value in zip(rows, _picked(logits, targets, temperature), strict=True):
            found[r].append(value)
    return np.concatenate([np.asarray(values, dtype=np.float64) for values in found])


def _prefill(
    network: Network,
    cache: RowCache,
    row: PackedRow,
    passages: Sequence[Passage],
    found: list[list[float]],
    temperature: float,
) -> list[int]:
    """Read some prompts, and note the first tokens of their completions."""
    captured = PromptCache()
    prompts = sorted({p.prompt for p in passages})
    slots = {prompts[m]: nodes for m, nodes in zip(row.members, row.slots, strict=True)}
    here = [i for i, p in enumerate(passages) if p.prompt in slots]
    with torch.no_grad():
        hidden = network.prefill(row, captured)
        last = torch.tensor([int(slots[passages[i].prompt][-1]) for i in here])
        logits = network.logits(hidden[last.to(hidden.device)])
    cache.add(captured, [slots[passages[i].prompt] for i in here])
    targets = [passages[i].completion[0] for i in here]
    for i, value in zip(here, _picked(logits, targets, temperature), strict=True):
        found[i].append(value)
    return here


def _picked(logits: torch.Tensor, targets: Sequence[int], temperature: float) -> list[float]:
    fine = logits.float() / temperature
    wanted = torch.tensor(targets, device=fine.device)[:, None]
    return (fine.gather(-1, wanted)[:, 0] - torch.logsumexp(fine, -1)).tolist()


def _run(
    model: PreTrainedModel, passages: Sequence[Passage], rows: Sequence[PackedRow], tick: Tick
) -> torch.Tensor:
    parts: dict[int, torch.Tensor] = {}
    for row in rows:
        tick()
        with torch.no_grad():
            hidden = run_packed(model, row)
        for member, slots in zip(row.members, row.slots, strict=True):
            parts[member] = hidden[passages[member].predicting(slots).to(hidden.device)]
    return torch.cat([parts[i] for i in range(len(passages))])


def _moved(row: PackedRow, prompt: int, before: int, behind: int) -> PackedRow:
    shift = np.where(row.positions < prompt, before, behind)
    return replace(row, positions=np.maximum(row.positions + shift, 0))


def _parted(values: Values, passages: Sequence[Passage]) -> list[Values]:
    """One array per passage."""
    return np.split(values, np.cumsum([len(p.completion) for p in passages])[:-1])
