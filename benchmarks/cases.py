"""The cases that have a peer."""

from collections.abc import Iterator

from benchmarks import machine, workload
from benchmarks.bench import OURS, Bench, Side, Task
from benchmarks.results import Line, Row
from benchmarks.summary import Agreement, short

Found = Iterator[Row | Line]

SHAPES: dict[str, tuple[int | None, int]] = {
    "short prompts, 12 tokens": (None, 12),
    "short prompts, 64 tokens": (None, 64),
    "prompts of 200, 16 tokens": (200, 16),
    "prompts of 200, 64 tokens": (200, 64),
}
"""Of a GRPO step: tokens of the prompts (None = a short question), longest completion."""
MICRO_BATCH = 8
"""Rows that trl trains on at once where prompts are long: all 32 would take over 20 GB."""
LEARNING_STEPS, SEEDS, LAST = 12, 3, 5


def grpo(bench: Bench) -> Found:
    """One GRPO step of 4 prompts x 8 completions, beside trl's GRPOTrainer."""
    chosen = list(SHAPES.items())[: bench.shapes]
    for number, (shape, (prompt_tokens, max_tokens)) in enumerate(chosen):
        row = bench.pair("grpo", shape, grpo_task(prompt_tokens, max_tokens))
        yield row if number == 0 else _unjudged(row)


def sampling(bench: Bench) -> Found:
    """8 prompts x 8 completions x 64 tokens, beside transformers generate."""
    command = {"prompts": 8, "samples": 8, "tokens": 64}
    yield bench.pair("sampling", "8 prompts x 8 x 64 tokens", Task("sampling", {}, command))


def train_lengths(bench: Bench) -> Found:
    """One training step on sequences of unequal lengths, beside a padded loop of peft."""
    command = {"lengths": workload.spread_lengths(32, 256, 16)}
    yield bench.pair("train_lengths", "16 sequences of 32 to 256", Task("train", {}, command))


def train_shared(bench: Bench) -> Found:
    """One training step on completions of one prompt, beside a padded loop of peft."""
    command = {"prompt": 200, "count": 8, "length": 48}
    yield bench.pair("train_shared", "8 x 48 behind a prompt of 200", Task("train", {}, command))


def bf16(bench: Bench) -> Found:
    """One GRPO step of ours in bfloat16, beside ours in float32, where the processor has AMX."""
    shape, (prompt_tokens, max_tokens) = next(iter(SHAPES.items()))
    if not machine.has_amx():
        yield Line("bf16", "bfloat16 beside float32", "does not apply: the processor has no AMX")
        return
    note = "the peer is ours in float32"
    row = Row("bf16", shape, "bfloat16", [], [], (None, None), note, (("bf16", "bfloat16"),))
    task = grpo_task(prompt_tokens, max_tokens)
    yield bench.duel(row, task, Side(OURS, "bfloat16"), Side(OURS))


def learning(bench: Bench) -> Found:
    """Whether ours and trl's learn alike: a happy sentence in 12 tokens, three seeds."""
    curves: dict[str, list[list[float]]] = {"ours": [], "peer": []}
    steps = Bench(bench.model, bench.pythons, bench.threads, LEARNING_STEPS + 1)
    for seed in range(SEEDS):
        row = steps.pair("learning", f"seed {seed}", grpo_task(0, 12, "happy", seed))
        curves["ours"].append([s.extra["reward"] for s in row.ours])
        curves["peer"].append([s.extra["reward"] for s in row.peer])
        yield _unjudged(row)
    bench.versions |= steps.versions
    parts = {f"the last {LAST} steps": -LAST, f"all {LEARNING_STEPS} steps": 0}
    for what, first in parts.items():
        means = {n: [sum(c[first:]) / len(c[first:]) for c in each] for n, each in curves.items()}
        found = Agreement.of(means["ours"], means["peer"])
        yield Line(
            "learning",
            f"mean reward of {what}, {SEEDS} seeds",
            f"ours {short(found.ours)}, trl {short(found.peer)}, "
            f"standard error of the difference {short(found.error)}",
            "agree" if found.holds else "differ by more than two standard errors",
        )


def grpo_task(
    prompt_tokens: int | None, max_tokens: int, reward: str = "untied", seed: int = 0
) -> Task:
    """A GRPO step of both workers."""
    settings = {"prompt_tokens": prompt_tokens, "max_tokens": max_tokens}
    settings["micro_batch"] = MICRO_BATCH if prompt_tokens else None
    return Task("grpo", {**settings, "reward": reward, "seed": seed})


def _unjudged(row: Row) -> Row:
    """A row without goals."""
    return Row(row.case, row.shape, row.dtype, row.ours, row.peer, row.resident, row.note)
