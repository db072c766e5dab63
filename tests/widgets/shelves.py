"""Checkpoints to look at: made up, with a lineage, and commands that record what is asked."""

import itertools
import random
import threading
import time
from typing import Any

from xorl_lab.errors import CheckpointError, ConfigError
from xorl_lab.types.results import SampledSequence

NOW = 1_800_000_000.0
SETTINGS = {
    "steps": 60,
    "learning_rate": 1e-4,
    "group_size": 8,
    "prompts_per_step": 4,
    "max_tokens": 64,
    "temperature": 1.0,
    "loss": "policy_loss",
    "kl_coef": 0.0,
    "rank": 16,
    "seed": 0,
}
WORDS = [
    "The",
    "answer",
    "is",
    "42",
    ",",
    "because",
    "six",
    "times",
    "seven",
    "makes",
    "forty",
    "two",
    ".",
    "Let",
    "us",
    "check",
    "it",
]


def checkpoint(run: str, step: int | None, *, now: float = NOW, **more) -> dict[str, Any]:
    """One checkpoint whose metrics follow from its step."""
    name = more.pop("label", f"step-{step}")
    done = (step or 0) / 60
    entry = {
        "name": f"{run}/{name}",
        "run": run,
        "step": step,
        "kind": "weights",
        "parent": None,
        "megabytes": 19.6,
        "created": now - 7200 + 60 * (step or 0),
        "expires": None,
        "metrics": {
            "reward": 0.1 + 0.8 * done - 0.1 * done**2,
            "loss:mean": 0.05 - 0.03 * done,
            "kl_base": 0.35 * done**1.2,
            "entropy_sample": 2.1 - done,
            "held_out:accuracy": 0.05 + 0.7 * done,
            "grad_norm": 0.9 + 0.2 * done,
        },
        "settings": dict(SETTINGS),
        "held": "",
    }
    return entry | more


def run(name: str, state: str = "finished", parent: str | None = None, kind: str = "grpo"):
    """One run."""
    return {"name": name, "kind": kind, "state": state, "parent": parent, "model": "tiny"}


def tree(now: float = NOW) -> dict[str, Any]:
    """Three runs, one of them branched off another, one whose origin was deleted."""
    first = [checkpoint("grpo-1", step, now=now) for step in (10, 20, 30, 40, 50, 60)]
    for before, after in itertools.pairwise(first):
        after["parent"] = before["name"]
    first.append(
        checkpoint(
            "grpo-1", 60, now=now, label="for-sampling", kind="sampler_weights", megabytes=9.8
        )
    )
    changed = SETTINGS | {"learning_rate": 3e-5, "kl_coef": 0.02, "steps": 80}
    second = [
        checkpoint("grpo-2", step, now=now + 1800, settings=changed, parent=parent, held=held)
        for step, parent, held in (
            (50, "grpo-1/step-40", ""),
            (60, "grpo-2/step-50", ""),
            (70, "grpo-2/step-60", "grpo-2 is running and would resume from it"),
        )
    ]
    second[0]["expires"] = now + 2400
    third = [checkpoint("warm start", 20, now=now - 90_000, parent="grpo-1/step-5")]
    return {
        "checkpoints": [*first, *second, *third],
        "runs": [
            run("grpo-1"),
            run("grpo-2", "running", "grpo-1/step-40"),
            run("warm start", "crashed", "grpo-1/step-5", "sft"),
        ],
        "disk": {"used": 215_600_000, "budget": 500_000_000},
    }


def large(count: int, runs: int = 20, now: float = NOW) -> dict[str, Any]:
    """Many checkpoints, every other run branched off the one before."""
    draw = random.Random(0)
    checkpoints, listed = [], []
    for number in range(runs):
        origin = f"run-{number - 1}/step-10" if number % 2 else None
        listed.append(run(f"run-{number}", parent=origin))
        checkpoints += [
            checkpoint(f"run-{number}", 10 * (i + 1), now=now) for i in range(count // runs)
        ]
    for entry in checkpoints:
        entry["metrics"] = {name: draw.random() for name in entry["metrics"]}
    return {
        "checkpoints": checkpoints,
        "runs": listed,
        "disk": {"used": 19_600_000 * count, "budget": None},
    }


class Commands:
    """Does as told with made-up checkpoints, and records it."""

    def __init__(self, found: dict[str, Any] | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.found = tree(time.time()) if found is None else found
        self.delay = 0.0
        self.go = threading.Event()
        self.go.set()

    def tree(self) -> dict[str, Any]:
        return self.found

    def load(self, checkpoint: str) -> str:
        self._begin("load", checkpoint)
        return f"{checkpoint} is loaded: browser.client trains on it"

    def branch(self, checkpoint: str, changes: dict[str, Any]) -> str:
        self._begin("branch", checkpoint, dict(changes))
        unknown = [name for name in changes if name not in SETTINGS]
        if unknown:
            raise ConfigError(f"unknown setting {unknown[0]!r}: did you mean 'learning_rate'?")
        name = f"grpo-{len(self.found['runs']) + 1}"
        listed = [*self.found["runs"], run(name, "running", checkpoint)]
        self.found = self.found | {"runs": listed}
        return name

    def sample(self, checkpoint: str, prompt: str, params: dict[str, Any]):
        self._begin("sample", checkpoint, prompt, dict(params))
        if "long" in prompt:
            raise ConfigError("the prompt has 9000 tokens and the model takes 2048: shorten it")
        found = []
        for i in range(int(params.get("n", 1))):
            words = words_of(checkpoint, prompt, i)[: int(params.get("max_tokens", 64))]
            logprobs = [-0.1 * (k % 7) for k in range(len(words))]
            stop = "length" if i else "stop"
            tokens = list(range(len(words)))
            found.append(SampledSequence(tokens, stop, logprobs, "".join(words)))
        return found

    def compare(self, left: str, right: str, prompts: list[str], params: dict[str, Any]):
        self._begin("compare", left, right, list(prompts), dict(params))
        return [
            compared(left, right, prompt, int(params.get("max_tokens", 64))) for prompt in prompts
        ]

    def delete(self, checkpoint: str) -> None:
        self._begin("delete", checkpoint)
        left = [c for c in self.found["checkpoints"] if c["name"] != checkpoint]
        if len(left) == len(self.found["checkpoints"]):
            raise CheckpointError("checkpoint.not_found", f"there is no {checkpoint!r}")
        self.found = self.found | {"checkpoints": left}

    def export(self, checkpoint: str, folder: str, form: str) -> str:
        self._begin("export", checkpoint, folder, form)
        if folder.startswith("/proc"):
            raise CheckpointError("checkpoint.write", f"{folder} cannot be written to")
        return f"{folder.rstrip('/')}/{checkpoint.replace('/', '-')}-{form}"

    def _begin(self, *call) -> None:
        self.calls.append(call)
        assert self.go.wait(60)


def words_of(checkpoint: str, prompt: str, number: int) -> list[str]:
    """Pieces of a made-up completion."""
    draw = random.Random(f"{prompt}/{number}")
    chosen = [draw.choice(WORDS) for _ in range(28)]
    if checkpoint != "base":
        other = random.Random(checkpoint)
        at = draw.randrange(4, 12)
        chosen = chosen[:at] + [other.choice(WORDS) for _ in range(30 - at)]
    return [f" {word}" for word in chosen]


def compared(left: str, right: str, prompt: str, most: int) -> dict[str, Any]:
    """What :meth:`Commands.compare` answers for one prompt."""
    draw = random.Random(f"{left}/{right}/{prompt}")
    sides = {}
    pieces = {}
    for side, name in (("left", left), ("right", right)):
        pieces[side] = words_of(name, prompt, 0)[:most]
        own = [-abs(draw.gauss(0, 0.8)) for _ in pieces[side]]
        other = [value - draw.gauss(0.3, 0.9) ** 3 for value in own]
        sides[side] = {"pieces": pieces[side], "logprobs": own, "other": other}
    pairs = list(zip(pieces["left"], pieces["right"], strict=False))
    differ = [i for i, (a, b) in enumerate(pairs) if a != b]
    divergence = differ[0] if differ else None
    return {"prompt": prompt, **sides, "divergence": divergence}
