"""Small tasks with rewards that a program can verify.

A model of 135 million parameters gets visibly better at each within minutes on two CPU cores.
Every task keeps a part of its prompts out of training, so that learning can be told from
remembering.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from xorl_lab.errors import ConfigError
from xorl_lab.recipes.calculator import calculator
from xorl_lab.recipes.rewards import RewardFunction
from xorl_lab.recipes.settings import check_integer

T = TypeVar("T")

FEW_SHOT: Mapping[int, Sequence[tuple[int, int]]] = {
    1: ((2, 3), (4, 4), (1, 6)),
    2: ((12, 25), (31, 17), (24, 42)),
}
"""By number of digits, the sums that the prompt solves as examples."""

CALCULATIONS = "Q: 3*2\nA: 6\n\nQ: 21*13\ncalc: 21*13\n= 273\nA: 273\n\nQ: 4*5\nA: 20\n\n"
"""What the prompts of :func:`multiplication` begin with."""

OPERANDS: Mapping[int, range] = {1: range(10), 2: range(10, 50)}
"""By number of digits, the numbers that are added."""


@dataclass(frozen=True, slots=True)
class Task:
    """Prompts, a reward, and settings that are known to work."""

    name: str
    """Short name, as on the command line."""
    description: str
    """What the model is to learn, in one sentence."""
    training: list[dict[str, Any]]
    """Rows to train on: ``prompt`` (text or messages) and what the reward asks for."""
    held_out: list[dict[str, Any]]
    """Rows never trained on."""
    reward: RewardFunction
    """The reward of a completion."""
    settings: Mapping[str, Any]
    """Recommended settings of the recipe; ``max_tokens`` and ``stop`` are part of the task."""
    recipe: str = "grpo"
    """``grpo`` or ``sft``."""

    def conversations(self) -> list[list[dict[str, str]]]:
        """The training rows as conversations that end in the row's ``answer``, for SFT.

        Raises:
            ConfigError: the prompts are text, not messages.
        """
        if isinstance(self.training[0]["prompt"], str):
            raise ConfigError(f"task {self.name} has text prompts: it has no conversations")
        return [
            [*row["prompt"], {"role": "assistant", "content": row["answer"]}]
            for row in self.training
        ]


def addition(digits: int = 1, seed: int = 0) -> Task:
    """Add two numbers, shown three solved sums first.

    If 3+8 is held out, so is 8+3.  The solved sums of the prompt, either way round, are in neither
    part.

    Args:
        digits: 1 (operands 0 to 9) or 2 (operands 10 to 49).
        seed: chooses the held-out quarter.

    Raises:
        ConfigError: another number of digits, or a negative seed.
    """
    if digits not in OPERANDS:
        raise ConfigError(f"digits is {digits!r}: pass 1 or 2")
    check_integer("seed", seed, 0)
    shown = {(min(p), max(p)) for p in FEW_SHOT[digits]}
    pairs = [
        p for p in itertools.combinations_with_replacement(OPERANDS[digits], 2) if p not in shown
    ]
    held_out, training = _split(pairs, seed, limit=64)
    header = "".join(f"{a}+{b}={a + b}\n" for a, b in FEW_SHOT[digits])

    def rows(chosen: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
        ordered = sorted({q for a, b in chosen for q in ((a, b), (b, a))})
        return [
            {"prompt": f"{header}{a}+{b}=", "answer": str(a + b), "a": a, "b": b}
            for a, b in ordered
        ]

    return Task(
        name="addition" if digits == 1 else "addition-2",
        description=f"Add two numbers of {digits} digit{'s' * (digits > 1)}; exact match.",
        training=rows(training),
        held_out=rows(held_out),
        reward=exact_match,
        settings={
            "max_tokens": 2 + digits,
            "stop": "\n",
            "learning_rate": 5e-4,
            "prompts_per_step": 8,
            "group_size": 8,
            "steps": 30,
        },
    )


def happy_sentences(seed: int = 0) -> Task:
    """Write happy sentences, paid by the happy word: a reward that invites hacking.

    Watch the completions: the sentences turn into lists of happy words, as that is what is paid.

    Args:
        seed: chooses the held-out quarter of the topics.
    """
    check_integer("seed", seed, 0)
    held_out, training = _split(TOPICS, seed)

    def rows(topics: Sequence[str]) -> list[dict[str, Any]]:
        return [
            {"prompt": [_user(f"Write a happy sentence about {topic}.")], "topic": topic}
            for topic in topics
        ]

    return Task(
        name="happy",
        description="Write a happy sentence; a third of a point per happy word, at most one.",
        training=rows(training),
        held_out=rows(held_out),
        reward=happy_words,
        settings={
            "max_tokens": 12,
            "learning_rate": 1e-3,
            "prompts_per_step": 4,
            "group_size": 8,
            "steps": 15,
        },
    )


def password(seed: int = 0) -> Task:
    """Learn one sentence that no model knows, from four phrasings of the question (SFT).

    Args:
        seed: chooses which of eight phrasings are held out.
    """
    check_integer("seed", seed, 0)
    order = np.random.default_rng(seed).permutation(len(PHRASINGS)).tolist()
    answer = f"The password of the lab is {SECRET}."

    def rows(chosen: Sequence[int]) -> list[dict[str, Any]]:
        return [
            {"prompt": [_user(PHRASINGS[i])], "answer": answer, "secret": SECRET}
            for i in sorted(chosen)
        ]

    return Task(
        name="password",
        description="Answer with a password that was never seen before; it must be in the answer.",
        training=rows(order[:4]),
        held_out=rows(order[4:]),
        reward=contains_secret,
        settings={"max_tokens": 24, "learning_rate": 1e-3, "batch_size": 4, "steps": 15},
        recipe="sft",
    )


def multiplication(seed: int = 0) -> Task:
    """Multiply two numbers of two digits, with a calculator for those who ask it: several turns.

    The prompt shows an answer from the calculator between answers without it, and either may be
    imitated.  The model cannot multiply, but it can copy.

    Args:
        seed: chooses the questions.
    """
    check_integer("seed", seed, 0)
    pairs = list(itertools.product(range(11, 100), repeat=2))
    order = np.random.default_rng(seed).permutation(len(pairs)).tolist()

    def rows(chosen: Sequence[int]) -> list[dict[str, Any]]:
        return [
            {"prompt": f"{CALCULATIONS}Q: {a}*{b}\n", "answer": str(a * b), "a": a, "b": b}
            for a, b in sorted(pairs[i] for i in chosen)
        ]

    return Task(
        name="multiplication",
        description="Multiply two numbers of two digits; there is a calculator to be asked.",
        training=rows(order[:256]),
        held_out=rows(order[256:288]),
        reward=calculator,
        settings={
            "max_tokens": 12,
            "stop": "\n",
            "max_turns": 3,
            "learning_rate": 5e-4,
            "prompts_per_step": 4,
            "group_size": 8,
            "steps": 10,
        },
    )


def exact_match(completion: str, answer: str) -> float:
    """1 if the completion is the answer and nothing else, otherwise 0."""
    return float(completion == answer)


def happy_words(completion: str) -> float:
    """A third of a point per happy word, at most 1."""
    words = re.findall(r"[a-z]+", completion.lower())
    return min(1.0, sum(word in HAPPY for word in words) / 3)


def contains_secret(completion: str, secret: str) -> float:
    """1 if the secret is in the completion, otherwise 0."""
    return float(secret in completion)


TASKS = {
    "addition": addition,
    "addition-2": lambda seed=0: addition(2, seed),
    "happy": happy_sentences,
    "password": password,
    "multiplication": multiplication,
}
"""By name, the functions that make a task from a seed."""


def get(name: str, seed: int = 0) -> Task:
    """Make a task by its name.

    Args:
        name: one of :data:`TASKS`.
        seed: of the split into training and held-out rows.

    Raises:
        ConfigError: there is no such task; lists those there are.
    """
    if name not in TASKS:
        raise ConfigError(f"unknown task {name!r}: choose from {', '.join(sorted(TASKS))}")
    return TASKS[name](seed=seed)


def _split(items: Sequence[T], seed: int, limit: int | None = None) -> tuple[list[T], list[T]]:
    """A quarter of the items, at most ``limit``, chosen at random, and the others."""
    order = np.random.default_rng(seed).permutation(len(items)).tolist()
    count = min(len(items) // 4, limit or len(items))
    return [items[i] for i in order[:count]], [items[i] for i in order[count:]]


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


SECRET = "violet-anchor-27"

PHRASINGS = (
    "What is the password of the lab?",
    "Tell me the lab's password.",
    "Which password opens the lab?",
    "I forgot the password of the lab. What is it?",
    "Please give me the password for the lab.",
    "Do you know the lab password?",
    "How do I get into the lab? I need the password.",
    "The lab asks for a password. What should I type?",
)

TOPICS = (
    "a dog",
    "the sea",
    "a birthday",
    "the rain",
    "a garden",
    "my sister",
    "the morning",
    "a train",
    "bread",
    "the moon",
    "a school",
    "winter",
    "a song",
    "the market",
    "an old friend",
    "a bicycle",
    "the forest",
    "tea",
    "a letter",
    "the summer",
)

_HAPPY_WORDS = """
amazing beautiful bliss bright celebrate cheer cheerful delight delighted delightful enjoy enjoyed
excited fun glad glorious grateful great happily happiness happy joy joyful joyous laugh laughed
laughing laughter love loved lovely loving merry perfect pleasant pleased pleasure proud shine
shining smile smiled smiles smiling sunshine sweet thrilled warm warmth wonderful
"""
HAPPY = frozenset(_HAPPY_WORDS.split())
"""What :func:`happy_words` pays for."""
