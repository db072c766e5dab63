"""``make bench``: measure cases, print tables, keep the numbers.

Times depend on the machine and on what else it does: compare the ratios of one run.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import alone, cases, machine
from benchmarks.bench import OURS, PEERS, Bench, say
from benchmarks.cases import Found
from benchmarks.channel import ROOT, BenchError
from benchmarks.results import Results
from benchmarks.table import markdown

CASES: dict[str, Callable[[Bench], Found]] = {
    "grpo": cases.grpo,
    "sampling": cases.sampling,
    "train_lengths": cases.train_lengths,
    "train_shared": cases.train_shared,
    "bf16": cases.bf16,
    "scaling": alone.scaling,
    "start": alone.start,
    "limits": alone.limits,
    "phases": alone.phases,
    "learning": cases.learning,
}
LONG = ("learning",)
"""Run only if they are named."""
ALONE = ("bf16", "scaling", "start", "limits", "phases")
"""Run without the peers."""
HERE = ROOT / "benchmarks"


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    usual = ",".join(name for name in CASES if name not in LONG)
    parser.add_argument("--cases", default=usual, help=f"of {', '.join(CASES)}; not in: {LONG[0]}")
    parser.add_argument("--rounds", type=int, default=5, help="per side; the first warms up")
    shapes = len(cases.SHAPES)
    parser.add_argument(
        "--shapes", type=int, default=shapes, help="of grpo: only the first so many"
    )
    parser.add_argument("--threads", type=int, default=machine.cores())
    parser.add_argument("--dtype", choices=("float32", "fastest"), default="float32")
    parser.add_argument("--model", default="SmolLM2-135M-Instruct", help="a name, or a folder")
    parser.add_argument("--peers", type=Path, default=ROOT / ".venv-bench/bin/python")
    parser.add_argument("--write", action="store_true", help="write benchmarks/RESULTS.md")
    parser.add_argument(
        "--merge", type=Path, nargs="+", metavar="JSON", help="measure nothing: join earlier runs"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Measure and report."""
    options = parse(arguments)
    try:
        with tempfile.TemporaryDirectory() as folder:
            results = (
                Results.merge(Results.load(path) for path in options.merge)
                if options.merge
                else measure(options, Path(folder))
            )
    except BenchError as error:
        say(f"error: {error}")
        return 1
    text = markdown(results)
    sys.stdout.write(text)
    if options.write:
        (HERE / "RESULTS.md").write_text(text)
    return 0


def measure(options: argparse.Namespace, scratch: Path) -> Results:
    """Run the cases that were asked for; what is done is kept whatever becomes of the next.

    Raises:
        BenchError: an option is wrong, or a side failed.
    """
    names = options.cases.split(",")
    check(options, names)
    pythons = {OURS: Path(sys.executable), PEERS: options.peers}
    results = Results(machine.describe(), {})
    bench = Bench(
        folder_of(options.model, scratch),
        pythons,
        options.threads,
        options.rounds,
        shapes=options.shapes,
        fastest=options.dtype == "fastest",
    )
    path = HERE / "results" / f"{datetime.now(UTC):%Y-%m-%d-%H%M%S}.json"
    for name in names:
        for found in CASES[name](bench):
            results.add(found)
            results.settings = described(options, bench)
            results.save(path)
            path.with_suffix(".md").write_text(markdown(results))
    say(f"kept in {path.relative_to(ROOT)}")
    return results


def check(options: argparse.Namespace, names: list[str]) -> None:
    """Refuse what cannot be run, before anything is."""
    unknown = sorted(set(names) - set(CASES))
    if unknown:
        raise BenchError(f"no case is called {unknown[0]!r}: choose from {', '.join(CASES)}")
    for option in ("rounds", "threads", "shapes"):
        if getattr(options, option) < 1:
            raise BenchError(f"--{option} is {getattr(options, option)}: pass at least 1")
    if set(names) - set(ALONE) and not options.peers.exists():
        raise BenchError("the peers' environment is missing: `make bench` makes it")


def folder_of(model: str, scratch: Path) -> Path:
    """The model as a folder that both sides can load; random ones are written out first."""
    import torch  # noqa: PLC0415  (not where results are only merged)

    from xorl_lab.engine import models  # noqa: PLC0415
    from xorl_lab.engine.quiet import quiet  # noqa: PLC0415
    from xorl_lab.errors import ConfigError  # noqa: PLC0415

    try:
        if model not in models.RANDOM:
            return models.fetch(model)
        folder = scratch / model
        with quiet():
            models.RANDOM[model](torch.float32).save_pretrained(folder)
            models.tokenizer(model).save_pretrained(folder)
    except ConfigError as error:
        raise BenchError(str(error)) from error
    return folder


def described(options: argparse.Namespace, bench: Bench) -> dict[str, str]:
    """What was chosen, and the versions of both environments."""
    versions = {
        f"versions, {side}": ", ".join(f"{k} {v}" for k, v in found.items() if v)
        for side, found in bench.versions.items()
    }
    return {
        "model": Path(options.model).name,
        "threads": f"{bench.threads} on each side, soon asleep when they wait",
        "rounds": f"{bench.rounds}, of which one warms up",
        **({"precision": bench.why_float32 or "faster on each side"} if bench.fastest else {}),
        **versions,
    }


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
