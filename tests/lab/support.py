"""Runs on the model ``tiny``, and what to hold them against."""

import os
import string
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from xorl_lab.checkpoints import read
from xorl_lab.checkpoints.folder import STATE
from xorl_lab.lab import Lab, Run

PROMPTS = [
    {"prompt": f"{a}+{b}=", "wanted": string.ascii_lowercase + string.digits}
    for a in range(3)
    for b in range(3)
]
SETTINGS: dict[str, Any] = {
    "max_tokens": 4,
    "learning_rate": 5e-3,
    "prompts_per_step": 2,
    "group_size": 4,
    "preflight": False,
    "quiet": True,
}
EXAMPLES = [
    [{"role": "user", "content": f"{a}?"}, {"role": "assistant", "content": "yes"}]
    for a in range(5)
]
SUPERVISED: dict[str, Any] = {"learning_rate": 1e-2, "batch_size": 2, "quiet": True}
OF_THE_MACHINE = ("seconds:", "tokens_per_second", "memory:")


def share(completion: str, wanted: str) -> float:
    """A reward that a random model can raise."""
    return sum(c in wanted for c in completion) / 4


def lab_in(folder: Path, **arguments: Any) -> Lab:  # noqa: ANN401
    return Lab("tiny", folder=folder, device="cpu", dtype="float32", **{"rank": 4, **arguments})


def grpo(lab: Lab, steps: int = 3, **settings: Any) -> Run:  # noqa: ANN401
    """A run in the foreground, unless told otherwise."""
    reward = settings.pop("reward", share)
    prompts = settings.pop("prompts", PROMPTS)
    return lab.grpo(prompts, reward, **{**SETTINGS, "steps": steps, **settings})


def resume(lab: Lab, run: str, **settings: Any) -> Run:  # noqa: ANN401
    """Go on with a run, its settings as they were."""
    reward = settings.pop("reward", share)
    return lab.grpo(PROMPTS, reward, resume=run, preflight=False, quiet=True, **settings)


def numbers(run: Run) -> list[dict[str, float]]:
    """The metrics of each step, but for times and memory, and NaN left out."""
    frame = run.metrics
    kept = [c for c in frame.columns if not c.startswith(OF_THE_MACHINE) and c != "version"]
    rows = frame[kept].to_dict("index")
    return [
        {"step": step, **{k: v for k, v in row.items() if v == v}} for step, row in rows.items()
    ]


def drawn(run: Run) -> list[list[list[int]]]:
    """The tokens of each step."""
    return [
        [r.tokens for g in run.reader.groups(step) for r in g.rollouts]
        for step in run.metrics.index.tolist()
    ]


def same(one: Run, other: Run) -> None:
    """Both did the same, bit for bit."""
    assert numbers(one) == numbers(other)
    assert drawn(one) == drawn(other)


def checkpoint(lab: Lab, run: str, name: str) -> Path:
    return lab.folder / "checkpoints" / run / "weights" / name


def tensors(lab: Lab, run: str, name: str) -> dict[str, bytes]:
    """Every byte of the weights and moments in a checkpoint, which is whole."""
    folder = checkpoint(lab, run, name)
    read(folder)
    return {p.name: p.read_bytes() for p in sorted(folder.glob("*.safetensors"))}


def saved(lab: Lab, run: str) -> list[str]:
    """Names of a run's checkpoints in order of step."""
    folder = lab.folder / "checkpoints" / run / "weights"
    names = [p.parent.name for p in folder.glob(f"*/{STATE}")]
    return sorted(names, key=lambda n: (int(n.rpartition("-")[2]), n))


def texts(run: Run, kind: str) -> list[str]:
    return [e.text for e in run.reader.events() if e.kind == kind]


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for something that another thread does."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def threads() -> list[str]:
    """Threads that belong to runs."""
    names = [t.name for t in threading.enumerate()]
    return [n for n in names if n.startswith(("xorl-grpo", "xorl-sft", "xorl-stop", "lease of"))]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


class Gate:
    """A reward function that waits until it is let through."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.open = threading.Event()

    def __call__(self, completion: str, wanted: str) -> float:
        self.reached.set()
        self.open.wait(20)
        return share(completion, wanted)

    @contextmanager
    def closed(self):
        """Opened at the end, whatever happens."""
        try:
            yield self
        finally:
            self.open.set()
