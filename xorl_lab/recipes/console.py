"""What the demo shows on the console while it runs, and how it is stopped."""

import signal
import threading
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from xorl_lab.recipes.evaluate import Evaluation
from xorl_lab.recipes.outcome import Outcome
from xorl_lab.recipes.tables import common_start, number
from xorl_lab.types import StepRecord

EXAMPLES = 6
"""Held-out prompts that are shown."""
LEGEND = """\
reward: mean of the step's completions; KL: distance from the base model, nats per token;
gap: by how much trainer and sampler disagree on a token's logprob, nats; then seconds"""
"""What the numbers of a step's line are."""
LAPS = ("sample", "train", "evaluate")
"""Parts of a step whose seconds are shown."""
PROMPT = 60
"""Characters of a prompt that are shown, from its end."""


def train(
    steps: Iterator[StepRecord],
    count: int,
    records: list[StepRecord],
    console: Console,
    stop: threading.Event,
) -> None:
    """Take the steps, show each with the time that is left, and end early when asked to.

    Args:
        steps: the loop.
        count: number of steps that it will take.
        records: where the steps that were done are put.
        console: where to show them.
        stop: set = end after the step at hand.
    """
    bar = Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
        console=console,
    )
    warned: set[str] = set()  # each is shown once; the report says at which steps
    try:
        with bar:
            shown = bar.add_task("", total=count)
            for record in steps:
                records.append(record)
                console.print(_line(record), soft_wrap=True)
                bar.update(shown, advance=1)
                for warning in [w for w in record.warnings if w not in warned]:
                    warned.add(warning)
                    console.print(Text(f"      {warning}", style="yellow"), soft_wrap=True)
                if stop.is_set():
                    return
    except KeyboardInterrupt:  # the second one: give the step up
        stop.set()


def _line(record: StepRecord) -> Text:
    """One step on one line: numbers, and seconds by what they went to."""
    metrics = record.metrics
    names = {
        "reward": "reward",
        "loss:mean": "loss",
        "kl_base": "KL",
        "held_out:accuracy": "held-out",
    }
    numbers = [f"{label} {metrics[n]:.3f}" for n, label in names.items() if n in metrics]
    if "kl_sampler_abs" in metrics:
        numbers.append(f"gap {metrics['kl_sampler_abs']:.0e}")
    laps = [f"{n} {metrics[f'seconds:{n}']:.1f}" for n in LAPS if f"seconds:{n}" in metrics]
    return Text(f"{record.step:4d}  {'  '.join(numbers)} | {' '.join(laps)} s")


def show_end(
    before: Evaluation,
    after: Evaluation,
    result: Outcome,
    files: Mapping[str, str],
    console: Console,
) -> None:
    """Show completions side by side, the numbers, and where the files are."""
    table = Table("prompt", "before", "after", title="Held-out prompts, greedy")
    pairs = list(zip(before.groups, after.groups, strict=True))
    start = common_start([old.prompt for old, _ in pairs])
    for old, new in pairs[:EXAMPLES]:
        prompt = " ".join(old.prompt[len(start) :].split())[-PROMPT:]
        cells = (prompt, old.rollouts[0].text, new.rollouts[0].text)
        table.add_row(*(Text(cell) for cell in cells))
    console.print(table)
    paths = [f"{name + ':':<19}{path}" for name, path in files.items()]
    for line in (
        f"held-out accuracy: {number(result.accuracy_before)} -> {number(result.accuracy_after)}",
        f"mean reward:       {number(result.reward_first)} -> {number(result.reward_last)} "
        f"(first and last {result.window} steps)",
        f"training took {result.seconds:.0f} s for {result.steps} steps",
        *paths,
    ):
        console.print(line, markup=False, soft_wrap=True)


@contextmanager
def interrupts(console: Console) -> Generator[threading.Event]:
    """Within this, the first Ctrl-C sets the event and the second raises KeyboardInterrupt."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        del number, frame
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        console.print("stopping after this step; press Ctrl-C again to give it up", markup=False)

    previous = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, previous)
