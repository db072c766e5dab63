"""The cases that have no peer: how ours scales, starts, and uses the machine."""

import os
import statistics
import subprocess
import time
from collections.abc import Sequence

from benchmarks import goals
from benchmarks.bench import OURS, Bench, Side, Task
from benchmarks.cases import SHAPES, Found, grpo_task
from benchmarks.channel import ROOT, BenchError, Sample, environment
from benchmarks.counting import Sizes, Work
from benchmarks.results import Line
from benchmarks.summary import Spread

IMPORT = "import time; t = time.perf_counter(); import xorl_lab; print(time.perf_counter() - t)"
PHASES = ("sample", "score", "train", "sync")


def phases(bench: Bench) -> Found:
    """Where the time of a step of the demo's main job goes."""
    (samples,) = bench.alone(Task("addition"), [{}])
    yield Line("phases", "addition, whole step", f"{Spread.of([s.seconds for s in samples])} s")
    for phase in PHASES:
        seconds = Spread.of([s.extra["phases"][phase] for s in samples])
        yield Line("phases", f"addition, {phase}", f"{seconds} s")


def scaling(bench: Bench) -> Found:
    """Seconds per token against rows, sequences, lengths, group sizes, and adapters."""
    rows = {f"{n} rows": {"prompts": 1, "samples": n, "tokens": 32} for n in (1, 4, 16, 64)}
    drawn = bench.alone(Task("sampling"), list(rows.values()))
    for what, samples in zip(rows, drawn, strict=True):
        yield _per_token("sampling 32 tokens, " + what, samples)
    sequences = {f"{n} sequences of 128": {"lengths": [128] * n} for n in (1, 4, 16)}
    lengths = {f"4 sequences of {n}": {"lengths": [n] * 4} for n in (32, 128, 512)}
    groups = {
        f"groups of {n}, 16 tokens behind 64": {"prompt": 64, "count": n, "length": 16}
        for n in (2, 8, 32)
    }
    commands = sequences | lengths | groups
    trained = bench.alone(Task("train"), list(commands.values()))
    for what, samples in zip(commands, trained, strict=True):
        yield _per_token("training, " + what, samples)
    small = {"lengths": [64] * 4}
    for count in (1, 3):
        (samples,) = bench.alone(Task("train", {"adapters": count}), [small])
        yield _per_token(f"training, {count} adapter(s) in turn, 4 sequences of 64", samples)


def _per_token(what: str, samples: Sequence[Sample]) -> Line:
    each = Spread.of([1000 * s.seconds / s.tokens for s in samples])
    return Line("scaling", what, f"{each} ms per token ({samples[0].tokens} tokens)")


def start(bench: Bench) -> Found:
    """A fresh Python: importing the package, and everything up to the first reward."""
    python = str(bench.pythons[OURS])
    seconds = [float(_run(bench, [python, "-c", IMPORT])) for _ in range(bench.rounds + 2)][1:]
    spread = Spread.of(seconds)
    yield Line("start", "import xorl_lab", f"{spread} s", goals.IMPORT.verdict(spread.median))
    command = [python, "-m", "benchmarks.first_reward", str(bench.model)]
    whole: list[float] = []
    for _ in range(bench.rounds):
        begin = time.perf_counter()
        _run(bench, command)
        whole.append(time.perf_counter() - begin)
    spread = Spread.of(whole[1:] or whole)
    what = "from starting Python to the first reward of the addition task"
    yield Line("start", what, f"{spread} s", goals.FIRST_REWARD.verdict(spread.median))


def _run(bench: Bench, command: list[str]) -> str:
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | environment(bench.threads),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise BenchError(f"{command[1:3]} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def limits(bench: Bench) -> Found:
    """What share of the machine's limits a GRPO step reaches, phase by phase."""
    with bench.start(Task("machine"), Side(OURS)) as worker:
        rates = [worker.round().extra for _ in range(bench.rounds)]
    matmul = statistics.median(r["matmul_float32"] for r in rates)
    read = statistics.median(r["read"] for r in rates)
    yield Line("limits", "float32 matrix product 2048^3", f"{matmul / 1e9:.1f} GFLOP/s")
    yield Line("limits", "reading memory", f"{read / 1e9:.1f} GB/s")
    sizes = Sizes.of(bench.model)
    shape, (prompt_tokens, max_tokens) = next(iter(SHAPES.items()))
    (samples,) = bench.alone(grpo_task(prompt_tokens, max_tokens), [{}])
    for phase in ("sample", "train"):
        operations: list[float] = []
        reading: list[float] = []
        for sample in samples:
            work = Work(**sample.extra["work"])
            seconds = sample.extra["phases"][phase]
            needed = sizes.sampling(work) if phase == "sample" else sizes.training(work)
            passes = work.steps if phase == "sample" else 2
            operations.append(needed / seconds / matmul)
            reading.append(sizes.read(passes) / seconds / read)
        a, b = statistics.median(operations), statistics.median(reading)
        value = f"{a:.0%} of the matrix rate, {b:.0%} of the reading rate"
        yield Line("limits", f"{phase}, {shape}", value)
