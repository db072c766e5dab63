"""Runs to look at: made up, but with the metrics and events of real ones."""

import math
import random
from pathlib import Path

from xorl_lab.errors import ConfigError
from xorl_lab.store import Parent, Store, Writer
from xorl_lab.types import StepRecord

PARTS = ("correct", "format", "brevity")


def metrics(step: int, total: int = 100, seed: int = 0) -> dict[str, float]:
    """The metrics of one step of GRPO that goes well."""
    draw = random.Random(seed * 100_003 + step)
    done = step / total
    noise = lambda scale: draw.gauss(0, scale)  # noqa: E731
    rise = 1 / (1 + math.exp(-9 * (done - 0.35 - 0.05 * seed)))
    reward = min(1, max(0, 0.08 + 0.86 * rise + noise(0.04)))
    spread = 0.08 + 0.3 * reward * (1 - reward) + abs(noise(0.01))
    ratio = abs(noise(0.02))
    found = {
        "reward": reward,
        "reward:std": spread,
        "reward:min": 0.0,
        "reward:max": 1.0,
        "reward:part:correct": reward * 0.7,
        "reward:part:format": min(0.2, 0.05 + 0.3 * done),
        "reward:part:brevity": 0.1 * reward + noise(0.01),
        "rewards_failed": float(draw.random() < 0.03),
        "groups_without_signal": float(round(8 * max(0, reward - 0.55) + abs(noise(0.5)))),
        "completion_tokens": 11 - 4 * rise + noise(0.5),
        "truncated": max(0.0, 0.5 - 0.6 * rise + noise(0.05)),
        "kl_sampler": 0.002 + 0.001 * abs(noise(1)),
        "kl_sampler_abs": 0.04 + 0.004 * noise(1),
        "kl_base": 0.35 * done**1.2 + abs(noise(0.01)),
        "kl_base_abs": 0.5 * done + abs(noise(0.01)),
        "kl_sample_train_k3": 0.004 + abs(noise(0.002)),
        "entropy_sample": 2.1 - 1.3 * rise + noise(0.05),
        "loss:sum": noise(30.0),
        "loss:mean": noise(0.05) - 0.02 * (1 - done),
        "valid_tokens": 600 + 20 * noise(1),
        "ratio_mean": 1 + noise(0.003),
        "ratio_min": 0.6 - 4 * ratio,
        "ratio_max": 1.5 + 20 * ratio,
        "pg_clipfrac": 0.02 + abs(noise(0.01)),
        "tis_clipfrac": abs(noise(0.004)),
        "icepop_maskfrac": abs(noise(0.003)),
        "grad_norm": 0.9 + 0.4 * abs(noise(1)) + (3 if draw.random() < 0.03 else 0),
        "grad_scale": 1.0,
        "learning_rate": 1e-4 if step < 0.6 * total else 3e-5,
        "memory:process": 2.1e9 + 4e8 * done + 1e7 * noise(1),
        "version": float(step),
        "rows_without_signal": 0.0,
    }
    found |= {"seconds:sample": 1.2 + noise(0.08), "seconds:score": 0.02 + abs(noise(0.004))}
    found |= {"seconds:train": 1.0 + noise(0.05), "seconds:sync": 0.06 + abs(noise(0.01))}
    if step % 10 == 0:
        found |= {
            "held_out:accuracy": min(1, max(0, reward - 0.08 + noise(0.03))),
            "held_out:reward": reward - 0.06 + noise(0.03),
            "seconds:evaluate": 0.5 + noise(0.05),
        }
    found["seconds:total"] = sum(v for n, v in found.items() if n.startswith("seconds:"))
    found["tokens_per_second"] = 1500 / found["seconds:total"]
    return found


def record(writer: Writer, step: int, total: int = 100, seed: int = 0) -> None:
    """One step with whatever happens at it."""
    warnings = ["2 of 64 completions were cut off at max_tokens=12"] if step % 23 == 5 else []
    writer.step(StepRecord(step, metrics(step, total, seed), [], warnings))
    if step % 20 == 0:
        writer.event("checkpoint", f"checkpoint step-{step} saved (4.2 MB)", step=step)
    if step == round(0.6 * total):
        writer.event("knob", "learning_rate 1e-4 → 3e-5", step=step)
    if step % 10 == 0:
        writer.event(
            "log", f"held out: {metrics(step, total, seed).get('held_out:accuracy'):.2f}", step=step
        )


def finished(
    folder: Path, steps: int = 60, name: str = "addition", seed: int = 0
) -> tuple[Store, str]:
    """A store with one finished run; returns it and the run's name."""
    store = Store(folder)
    writer = store.create(name=name, kind="grpo", model="tiny", total=steps)
    with writer:
        for step in range(1, steps + 1):
            record(writer, step, steps, seed)
        writer.status("finished")
    return store, writer.info.name


def branched(store: Store, parent: str, steps: int = 60, seed: int = 1) -> str:
    """A run that was branched off another one."""
    info = store.run(parent).info
    origin = Parent(info.id, "step-20", 20)
    writer = store.create(
        name=f"{parent}-branch", kind="grpo", model="tiny", total=steps, parent=origin
    )
    with writer:
        for step in range(21, steps + 1):
            record(writer, step, steps, seed)
        writer.status("stopped", "stopped by hand")
    return writer.info.name


class Commands:
    """Records what is asked of a run."""

    def __init__(self) -> None:
        self.calls: list[object] = []
        self.values = {"learning_rate": 1e-4}

    def pause(self) -> None:
        self.calls.append("pause")

    def resume(self) -> None:
        self.calls.append("resume")

    def step(self) -> None:
        self.calls.append("step")

    def stop(self) -> None:
        self.calls.append("stop")

    def set(self, name: str, value: float) -> None:
        if value <= 0:
            raise ConfigError(f"{name} is {value}: pass a number > 0")
        self.calls.append((name, value))
        self.values[name] = value

    def knobs(self) -> dict[str, float]:
        return dict(self.values)
