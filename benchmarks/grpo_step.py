"""Where the time of a GRPO step goes, and what share of the machine's matrix rate is reached.

    make bench

Runs steps of the demo's main job and prints medians.  Times depend on the machine and on what else
it does: compare ratios of one run only.
"""

import argparse
import statistics
import sys
import tempfile
import time

import torch

from xorl_lab.client import ServiceClient
from xorl_lab.recipes import tasks
from xorl_lab.recipes.grpo import grpo

PHASES = ("sample", "score", "train", "sync", "total")


def matrix_rate(size: int = 1024, rounds: int = 5) -> float:
    """Floating-point operations per second of a float32 product of two square matrices."""
    a = torch.randn(size, size)
    a @ a
    seconds: list[float] = []
    for _ in range(rounds):
        start = time.perf_counter()
        a @ a
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / statistics.median(seconds)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    task = tasks.get("addition", arguments.seed)
    settings = {**task.settings, "steps": arguments.steps, "seed": arguments.seed}
    with tempfile.TemporaryDirectory() as home:
        client = ServiceClient(home=home).create_lora_training_client(
            arguments.model, 16, seed=arguments.seed
        )
        records = list(grpo(client, task.training, task.reward, **settings))[1:]
    out = sys.stdout.write
    out(f"{arguments.model}, {client.device} {client.dtype}, {torch.get_num_threads()} threads\n")
    out(f"float32 matrix product: {matrix_rate() / 1e9:.1f} GFLOP/s\n")
    out(f"{len(records)} steps behind one to warm up\n")
    for phase in PHASES:
        name = f"seconds:{phase}"
        seconds = [r.metrics[name] for r in records if name in r.metrics]
        if seconds:
            spread = f"{min(seconds):.3f} to {max(seconds):.3f}"
            out(f"  {phase:7s} median {statistics.median(seconds):.3f} s ({spread})\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
