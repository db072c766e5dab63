"""Made-up runs with rollouts: real-looking streams, hostile texts, and a tokenizer for them."""

import math
import random
import re
import threading

import numpy as np

from xorl_lab.errors import DataError
from xorl_lab.types import Alternatives, Group, Rollout, SampledSequence, StepRecord

END, START = 256, 257
SPECIAL = {END: b"<|im_end|>", START: b"<|im_start|>"}
# ruff: noqa: E501  (texts are texts)
WORDS = [
    "the",
    "a",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "it",
    "for",
    "was",
    "on",
    "are",
    "with",
    "as",
    "I",
    "his",
    "they",
    "be",
    "at",
    "one",
    "have",
    "this",
    "from",
    "or",
    "had",
    "by",
    "not",
    "but",
    "what",
    "all",
    "were",
    "we",
    "when",
    "your",
    "can",
    "said",
    "there",
    "use",
    "an",
    "each",
    "which",
    "she",
    "do",
    "how",
    "their",
    "if",
    "will",
    "up",
    "other",
    "about",
    "out",
    "many",
    "then",
    "them",
    "these",
    "so",
    "some",
    "her",
    "would",
    "make",
    "like",
    "him",
    "into",
    "time",
    "has",
    "look",
    "two",
    "more",
    "write",
    "go",
    "see",
    "number",
    "no",
    "way",
    "could",
    "people",
    "my",
    "than",
    "first",
    "water",
    "been",
    "call",
    "who",
    "oil",
    "its",
    "now",
    "find",
    "long",
    "down",
    "day",
    "did",
    "get",
    "come",
    "made",
    "may",
    "part",
    "answer",
    "therefore",
    "because",
    "sum",
    "equals",
    "plus",
    "carry",
    "digit",
]
CLEAN = [
    "To add 27 and 45, first add the ones: 7 plus 5 equals 12, so write 2 and carry 1. Then 2 plus 4 "
    "plus the carry equals 7.\n\nThe answer is 72.",
    "27 + 45\n= 20 + 40 + 7 + 5\n= 60 + 12\n= 72",
    "The sum is 72 because 27 + 45 = 72 ✅ — 七十二 👨‍👩‍👧 caf\u0065\u0301",
    "I think that the answer is 62. It could also be 71, but I would say 62.",
    "answer answer answer answer answer answer answer answer answer answer",
]
HOSTILE = {
    "script": '<script>window.pwned = 1</script><img src=x onerror="window.pwned = 2"><iframe '
    "src='javascript:parent.pwned=3'></iframe><svg onload=window.pwned=4><a href=\"//evil.example\">",
    "markdown": "# Title\n```js\nwindow.pwned = 5\n```\n[link](javascript:window.pwned=6) <thinking>",
    "latex": "$\\frac{1}{2}$ \\(\\href{javascript:window.pwned=7}{x}\\) $$\\int_0^1$$ \\begin{align}x",
    "ansi": "\x1b[31mred\x1b[0m \x1b]8;;http://evil.example\x07link\x1b]8;;\x07 \x1b[2J\x07\x08",
    "bidi": "\u202eevil\u202c \u2066left\u2069 \u05d0\u05d1\u05d2 123 \u0627\u0644\u0639 \u200f<\u200e",
    "zero width": "a\u200bb\u200cc\u200dd\ufeffe\u2060f\u00adg\u034fh\U000e0041\U000e0042i\ufe05",
    "nul": "a\0b\x01c\x7fd\x85e\u2028f\u2029g\r\nh\ri\vj\fk",
    "zalgo": "z" + "\u0301\u0316" * 60 + " a\u0338",
    "surrogate": "half \ud800 other \udfff end",
    "emoji": "👨‍👩‍👧‍👦 🏳️‍🌈 🇩🇪🇫🇷 👍🏽 1️⃣ 🏴󠁧󠁢󠁷󠁬󠁳󠁿 漢字 e\u0301 \u1112\u1161\u11ab नि",
    "template": "{{constructor.constructor('window.pwned=8')()}} ${window.pwned=9} </textarea></pre>",
}


class Tokenizer:
    """Bytes, two special tokens, and words with the blank before them."""

    def __init__(self):
        self.table = [bytes([i]) for i in range(256)] + list(SPECIAL.values())
        self.table += [f" {word}".encode() for word in WORDS]
        self.ids = {piece: i for i, piece in enumerate(self.table) if i not in SPECIAL}

    def encode(self, text):
        data = text.encode("utf-8", "replace")
        found = []
        for part in re.findall(rb" [A-Za-z]+|[\s\S]", data):
            if part in self.ids:
                found.append(self.ids[part])
            else:
                found += list(part)
        return found

    def pieces(self, tokens):
        return [self.table[t] for t in tokens]


TOKENIZER = Tokenizer()


def streams(tokens, seed, *, masked=0.0):
    """Values per token that look like those of a run, NaN where a token has none."""
    draw = np.random.default_rng(seed)
    n = len(tokens)
    logprobs = -draw.gamma(0.35, 1.6, n)
    trainer = logprobs + draw.normal(0, 0.04, n)
    ref = logprobs + draw.normal(-0.05, 0.3, n)
    ratio = np.exp(draw.normal(0, 0.12, n))
    entropies = np.abs(draw.gamma(0.7, 0.9, n))
    flags = np.where(ratio > 1.2, 1.0, 0.0) + np.where(draw.random(n) < masked, 2.0, 0.0)
    flags += np.where(draw.random(n) < masked, 4.0, 0.0)
    ref[draw.random(n) < masked] = math.nan
    names = ("trainer_logprobs", "ref_logprobs", "ratio", "entropies", "flags")
    values = (trainer, ref, ratio, entropies, flags)
    return logprobs, {name: v.tolist() for name, v in zip(names, values, strict=True)}


def top(tokens, logprobs, seed, k=5):
    """(C, k) likely ids, the drawn one nearly always among them."""
    draw = np.random.default_rng(seed)
    ids = draw.integers(258, len(TOKENIZER.table), (len(tokens), k)).astype(np.int32)
    values = np.sort(-draw.gamma(1.2, 2.0, (len(tokens), k)).astype(np.float32))[:, ::-1]
    place = draw.integers(0, k + 1, len(tokens))
    for i, token in enumerate(tokens):
        if place[i] < k:
            ids[i, place[i]] = token
            values[i, place[i]] = logprobs[i]
    order = np.argsort(-values, axis=1, kind="stable")
    return np.take_along_axis(ids, order, 1), np.take_along_axis(values, order, 1)


def rollout(text, seed, *, reward=0.5, advantage=0.0, masked=0.05, end=True, error=None):
    tokens = TOKENIZER.encode(text) + ([END] if end else [])
    logprobs, more = streams(tokens, seed, masked=masked)
    return Rollout(
        tokens=tokens,
        logprobs=logprobs.tolist(),
        text=text,
        stop_reason="stop" if end else "length",
        version=seed % 7,
        reward=reward,
        reward_parts={} if reward is None else {"correct": reward - 0.1, "format": 0.1},
        advantage=advantage,
        error=error,
        streams=more,
        top_logprobs=Alternatives(*top(tokens, logprobs, seed)),
    )


def group(step, position, size=4, prompts=3):
    draw = random.Random(1000 * step + position)
    number = (step + position) % prompts
    prompt = f"<|im_start|>What is {27 + number} + 45? Think first.\n"
    rewards = [round(min(1, max(0, draw.gauss(0.2 + step / 60, 0.25))), 3) for _ in range(size)]
    mean = sum(rewards) / size
    rollouts = [
        rollout(
            draw.choice(CLEAN),
            10_000 * step + 100 * position + i,
            reward=None if (step % 9, i) == (3, 1) else r,
            advantage=round(r - mean, 3),
            end=draw.random() > 0.2,
            error="ValueError: no <b>number</b> in 'text'" if (step % 9, i) == (3, 1) else None,
        )
        for i, r in enumerate(rewards)
    ]
    tokens = [START, *TOKENIZER.encode(prompt.removeprefix("<|im_start|>"))]
    return Group(prompt, tokens, rollouts, {"answer": 72 + number, "source": "<i>made up</i>"})


def record(writer, step, groups=3, size=4):
    writer.step(StepRecord(step, {"reward": 0.5}, [group(step, g, size) for g in range(groups)]))


def run(store, name="addition", steps=20, **more):
    """A finished run; returns its reader."""
    with store.create(name=name, kind="grpo", model="tiny", total=steps) as writer:
        for step in range(1, steps + 1):
            record(writer, step, **more)
        writer.status("finished")
    return store.run(writer.info.id)


def hostile(store, name="<b>hostile</b> \u202e", long=True):
    """A run whose texts try everything; the last are 1 MB and 100,000 tokens long."""
    texts = list(HOSTILE.values())
    rollouts = [rollout(text, i, reward=0.1 * i, error=text) for i, text in enumerate(texts)]
    groups = [Group(HOSTILE["latex"], TOKENIZER.encode(texts[4]), rollouts, {"row": texts[0]})]
    if long:
        million = ("<script>window.pwned = 10</script> the answer is \u202e72 漢字\n" * 18_000)[
            :1_000_000
        ]
        groups.append(Group("1 MB", [65], [plain(million, 1)], {}))
        many = TOKENIZER.encode("the answer " * 50_000 + "👨‍👩‍👧")[:100_000]
        logprobs, more = streams(many, 5, masked=0.01)
        text = b"".join(TOKENIZER.pieces(many)).decode("utf-8", "replace")
        drawn = Rollout(many, logprobs.tolist(), text, "length", 1, 2.0, streams=more)
        groups.append(Group("100,000 tokens", [65], [drawn], {}))
    with store.create(name=name, kind="grpo", model="<i>tiny</i>") as writer:
        writer.step(StepRecord(1, {"reward": 0.5}, groups))
        writer.status("finished")
    return store.run(writer.info.id)


def plain(text, seed):
    """A rollout without values but logprobs."""
    tokens = TOKENIZER.encode(text)
    logprobs = (-np.random.default_rng(seed).gamma(0.35, 1.6, len(tokens))).tolist()
    return Rollout(tokens, logprobs, text, "stop", 1, 0.0)


class Commands:
    """Draws from a made-up model; records what is asked of it."""

    def __init__(self, pause=0.0):
        self.calls = []
        self.go = threading.Event()
        self._pause = pause

    def pieces(self, tokens):
        return TOKENIZER.pieces(tokens)

    def special(self):
        return SPECIAL

    def weights(self):
        return ["base", "addition/step-10", "addition/step-20"]

    def resample(self, rollout, position, weights, params):
        self.calls.append((rollout, position, weights, dict(params)))
        self.go.wait(self._pause)
        if weights == "addition/step-10":
            raise DataError("addition/step-10 was <b>deleted</b>: choose other weights")
        found = []
        for i in range(params.get("n", 1)):
            words = random.Random(params.get("seed", 0) + i).choices(WORDS, k=params["max_tokens"])
            tokens = [TOKENIZER.ids[f" {word}".encode()] for word in words]
            logprobs, more = streams(tokens, i)
            ids, values = top(tokens, logprobs, i)
            tops = [
                list(zip(a.tolist(), b.tolist(), strict=True))
                for a, b in zip(ids, values, strict=True)
            ]
            found.append(
                SampledSequence(
                    tokens, "length", logprobs.tolist(), " ".join(words), tops, more["entropies"]
                )
            )
        return found
