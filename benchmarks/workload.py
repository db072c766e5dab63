"""What both sides are given: prompts, rewards, sequences of tokens.

Imported by the workers of both environments, so it needs nothing but Python.
"""

import math
import random
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

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
    "tea",
)
_WORDS = """
above again almost apple arrow autumn basket beach before behind below between blanket bottle
branch bread bridge brother bucket butter button candle carpet castle chair cheese circle city
cloud coffee copper corner cotton country dinner doctor door dream early earth evening farmer
father feather field finger flower forest garden glass gold grass green hammer harbor heart honey
horse house island jacket kitchen ladder lamp leaf letter library light lion little market meadow
metal mirror money mountain music needle ocean orange paper pencil picture pillow plate pocket
river road rocket salt school season shadow ship silver sister snow spoon spring stone street
summer table teacher thread tiger tower train tree valley village wagon water weather window
winter wood yellow
"""
WORDS = _WORDS.split()
_HAPPY = """
beautiful bright cheerful delight enjoy fun glad great happily happiness happy joy joyful joyous
laugh laughter love loved lovely loving smile smiles smiling sunshine sweet warm warmth wonderful
"""
HAPPY = frozenset(_HAPPY.split())
"""What :func:`happy` pays for."""


def prompts(tokenizer: Any, length: int | None) -> list[str]:  # noqa: ANN401 (of transformers)
    """One prompt per topic, written out by the chat template.

    Args:
        tokenizer: of the model.
        length: tokens that each must have at least; None = a short question as it is; 0 = a plain
            text of few tokens, without the template, to learn on in little time.  What is
            added are other words for each topic, and they come first: no prompt is the
            beginning of another, so there is no more to share than the template.

    Returns:
        Texts, to be encoded without special tokens.
    """
    if length == 0:
        return [f"A happy sentence about {topic}:" for topic in TOPICS]
    return [_prompt(tokenizer, topic, length or 0) for topic in TOPICS]


def openings() -> list[str]:
    """Texts of some ten tokens that hardly ever end within 64 more, as answers to questions do."""
    return [f"Once upon a time there was {topic}, and everyone knew that" for topic in TOPICS]


def _prompt(tokenizer: Any, topic: str, length: int) -> str:  # noqa: ANN401
    draw = random.Random(topic)
    question = f"Write a happy sentence about {topic}."
    words: list[str] = []
    while True:
        content = f"{' '.join(words)}. {question}" if words else question
        message = [{"role": "user", "content": content}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        if len(tokenizer.encode(text, add_special_tokens=False)) >= length:
            return str(text)
        words += draw.choices(WORDS, k=1 if words else max(1, length // 8))


def untied(completion: str) -> float:
    """A reward whose groups never tie in practice: the share of the letter e, and a bit of hash."""
    share = completion.count("e") / max(1, len(completion))
    return share + (zlib.crc32(completion.encode()) % 1000) / 1e5


def happy(completion: str) -> float:
    """A third of a point per happy word, at most 1: learnt within some fifteen steps."""
    words = re.findall(r"[a-z]+", completion.lower())
    return min(1.0, sum(word in HAPPY for word in words) / 3)


UNTRUNCATED = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "use_cache": True}
"""Arguments with which transformers' generate draws as ours does."""
REWARDS = {"untied": untied, "happy": happy}
"""By name, what a worker can be asked to reward."""


def without_signal(rewards: Sequence[float], group_size: int) -> int:
    """How many groups have equal rewards throughout.

    Args:
        rewards: of all completions, group by group.
        group_size: completions per group.

    >>> without_signal([1, 1, 2, 3], 2)
    1
    """
    groups = [rewards[i : i + group_size] for i in range(0, len(rewards), group_size)]
    return sum(len(set(group)) == 1 for group in groups)


def random_tokens(lengths: Sequence[int], vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Sequences of these lengths; the special tokens, at either end of vocabularies, are left out.

    >>> [len(s) for s in random_tokens([3, 2], 259)]
    [3, 2]
    """
    draw = random.Random(seed)
    return [[draw.randrange(3, vocab_size - 3) for _ in range(n)] for n in lengths]


def spread_lengths(low: int, high: int, count: int) -> list[int]:
    """``count`` lengths from ``low`` to ``high`` in equal steps.

    >>> spread_lengths(32, 256, 3)
    [32, 144, 256]
    """
    return [low + (high - low) * i // max(1, count - 1) for i in range(count)]


def shared(command: Mapping[str, int], vocab_size: int) -> list[list[int]]:
    """``count`` completions of ``length`` tokens behind one prompt of ``prompt`` tokens."""
    lengths = [command["prompt"], *[command["length"]] * command["count"]]
    prompt, *completions = random_tokens(lengths, vocab_size)
    return [[*prompt, *completion] for completion in completions]


def old(vocab_size: int) -> tuple[float, float]:
    """Logprob under the old policy (nats, uniform) and advantage of every trained token."""
    return -math.log(vocab_size), 0.5
