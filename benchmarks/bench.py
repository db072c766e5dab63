"""Runs two sides in turns: A B A B, each blocked while the other works."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.channel import Job, Sample, Worker
from benchmarks.results import Row

OURS, PEERS = "ours", "peers"


@dataclass(frozen=True, slots=True)
class Task:
    """What both sides are to do."""

    case: str
    """Name of the case in both workers."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Known before the first round."""
    command: Mapping[str, Any] = field(default_factory=dict)
    """Sent with each round."""


@dataclass(frozen=True, slots=True)
class Side:
    """Who works, and in which precision."""

    name: str
    """``ours`` or ``peers``."""
    dtype: str = "float32"
    """``float32`` or ``bfloat16``."""


class Bench:
    """What all cases need to know.

    Args:
        model: folder of the model.
        pythons: the interpreters of ``ours`` and ``peers``.
        threads: of torch, on both sides.
        rounds: per side; the first warms up and is dropped, unless it is the only one.
        shapes: of a GRPO step, how many to run.
        fastest: each side in whichever precision is faster here.
    """

    def __init__(
        self,
        model: Path,
        pythons: Mapping[str, Path],
        threads: int,
        rounds: int,
        *,
        shapes: int = 1,
        fastest: bool = False,
    ) -> None:
        self.model = model
        self.pythons = pythons
        self.threads = threads
        self.rounds = rounds
        self.shapes = shapes
        self.versions: dict[str, dict[str, str | None]] = {}
        self.why_float32 = "" if fastest else "not asked for"
        if fastest:
            self.why_float32 = self._why_float32()
            say(self.why_float32 or "bfloat16 products are faster here: trying both on each side")
        self.fastest = fastest

    def start(self, task: Task, side: Side) -> Worker:
        """Start a worker and wait until its model is loaded."""
        job = Job(task.case, str(self.model), side.dtype, self.threads, task.settings)
        worker = Worker(side.name, self.pythons[side.name], job)
        self.versions[side.name] = worker.facts["versions"]
        return worker

    def alone(self, task: Task, commands: Sequence[Mapping[str, Any]]) -> list[list[Sample]]:
        """Rounds of ours alone; per command all rounds but the warm-up."""
        with self.start(task, Side(OURS)) as worker:
            return [self._kept([worker.round(c) for _ in range(self.rounds)]) for c in commands]

    def pair(self, case: str, shape: str, task: Task) -> Row:
        """Both sides in turns, in float32 or each in what is fastest."""
        ours, peer = self._choose(task, OURS), self._choose(task, PEERS)
        judged: list[tuple[str, str]] = []
        dtype = "float32"
        if self.fastest:
            judged.append((case, "fastest"))
            dtype = f"fastest: {ours.dtype} / {peer.dtype}"
        if ours.dtype == peer.dtype == "float32":
            judged.append((case, "float32"))
        return self.duel(
            Row(case, shape, dtype, [], [], (None, None), "", tuple(judged)), task, ours, peer
        )

    def duel(self, row: Row, task: Task, ours: Side, peer: Side) -> Row:
        """Fill a row with the rounds of two sides."""
        say(f"{row.case}, {row.shape}, {row.dtype}")
        with ExitStack() as stack:
            a = stack.enter_context(self.start(task, ours))
            b = stack.enter_context(self.start(task, peer))
            first: list[Sample] = []
            second: list[Sample] = []
            for number in range(1, self.rounds + 1):
                first.append(a.round(task.command))
                second.append(b.round(task.command))
                say(
                    f"  round {number} of {self.rounds}: "
                    f"{first[-1].seconds:.2f} s, peer {second[-1].seconds:.2f} s"
                )
            resident = (a.facts["resident"], b.facts["resident"])
        note = "; ".join(filter(None, [row.note, same_loss(first, second)]))
        return Row(
            row.case,
            row.shape,
            row.dtype,
            self._kept(first),
            self._kept(second),
            resident,
            note,
            row.judged,
        )

    def _kept(self, samples: list[Sample]) -> list[Sample]:
        return samples[1:] or samples

    def _choose(self, task: Task, name: str) -> Side:
        """The faster precision of a side, by the second of two rounds of each."""
        if self.why_float32:
            return Side(name)
        seconds: dict[str, float] = {}
        for dtype in ("float32", "bfloat16"):
            with self.start(task, Side(name, dtype)) as worker:
                worker.round(task.command)
                seconds[dtype] = worker.round(task.command).seconds
        say(f"  {name}: " + ", ".join(f"{d} {s:.2f} s" for d, s in seconds.items()))
        return Side(name, min(seconds, key=lambda d: seconds[d]))

    def _why_float32(self) -> str:
        """Why float32 is the fastest precision of this machine; empty if it may not be."""
        with self.start(Task("machine"), Side(OURS)) as worker:
            rates = worker.round().extra
        if max(rates["square"], rates["skinny"]) > 1:
            return ""
        return (
            f"bfloat16 products run at {rates['square']:.3f} (square) and {rates['skinny']:.3f} "
            "(32 rows) times the rate of float32 here, so the fastest is float32"
        )


def same_loss(ours: Sequence[Sample], peer: Sequence[Sample]) -> str:
    """A note on the loss of the first round, which is that of the untrained adapter on both."""
    if "loss" not in ours[0].extra:
        return ""
    a, b = ours[0].extra["loss"], peer[0].extra["loss"]
    return f"first loss {a:.4f}, peer {b:.4f}"


def say(text: str) -> None:
    """Show progress, beside the tables on standard output."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
