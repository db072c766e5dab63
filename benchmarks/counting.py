"""How much work a batch needs at least, whatever computes it: counted in distinct tokens.

A token is distinct if no other sequence has the same beginning up to and with it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Work:
    """The least that one GRPO step has to compute."""

    prompts: int
    """Distinct tokens of all prompts."""
    sampled: int
    """Passes of one token through the layers while drawing: the last token of each needs none."""
    drawn_from: int
    """Positions whose logits are drawn from: one per prompt, then one per further token."""
    trained: int
    """Distinct tokens of prompts and completions, but for the last of each."""
    targets: int
    """Distinct positions whose logits are trained."""
    steps: int
    """Passes over the weights while drawing: one for the prompts, one per token of the longest."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Weights of a model, in numbers."""

    layers: int
    """Of all linear layers but the head."""
    head: int
    """Of the head."""

    @classmethod
    def of(cls, folder: Path) -> "Sizes":
        """Read them off the configuration of a Llama-like model."""
        c = json.loads((folder / "config.json").read_text())
        width, heads = c["hidden_size"], c["num_attention_heads"]
        keys = c.get("num_key_value_heads", heads)
        size = c.get("head_dim") or width // heads
        block = width * size * (2 * heads + 2 * keys) + 3 * width * c["intermediate_size"]
        return cls(layers=c["num_hidden_layers"] * block, head=c["vocab_size"] * width)

    def sampling(self, work: Work) -> int:
        """Operations of drawing: 2 x weights of the layers per token, 2 x head per draw."""
        return 2 * self.layers * (work.prompts + work.sampled) + 2 * self.head * work.drawn_from

    def training(self, work: Work) -> int:
        """Operations of forward and backward through frozen weights: twice those of forward."""
        return 2 * (2 * self.layers * work.trained + 2 * self.head * work.targets)

    def read(self, passes: int, width: int = 4) -> int:
        """Bytes of reading all weights so many times, each of ``width`` bytes."""
        return passes * width * (self.layers + self.head)


def grpo_work(prompts: Sequence[Sequence[int]], groups: Sequence[Sequence[Sequence[int]]]) -> Work:
    """Count the work of a step.

    Args:
        prompts: P sequences of token ids.
        groups: the completions of each.

    >>> grpo_work([[1, 2]], [[[3, 4], [3, 5]]])
    Work(prompts=2, sampled=2, drawn_from=3, trained=3, targets=2, steps=2)
    """
    drawn = [len(c) for group in groups for c in group]
    targets: set[int] = set()
    tree: dict[tuple[int, int], int] = {}
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            node = 0
            for place, token in enumerate([*prompt, *completion][:-1]):
                node = tree.setdefault((node, token), len(tree) + 1)
                if place >= len(prompt) - 1:
                    targets.add(node)
    further = sum(drawn) - len(drawn)
    return Work(
        prompts=distinct(prompts),
        sampled=further,
        drawn_from=len(prompts) + further,
        trained=len(tree),
        targets=len(targets),
        steps=max(drawn),
    )


def distinct(sequences: Sequence[Sequence[int]]) -> int:
    """Number of distinct tokens of some sequences.

    >>> distinct([[1, 2, 3], [1, 2, 4]])
    4
    """
    tree: dict[tuple[int, int], int] = {}
    for sequence in sequences:
        node = 0
        for token in sequence:
            node = tree.setdefault((node, token), len(tree) + 1)
    return len(tree)
