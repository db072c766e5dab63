"""The whole way in one command: take a base model, train it, show what changed.

``xorl-lab demo`` runs :func:`run_demo`.
"""

import json
import math
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from xorl_lab.client import ServiceClient
from xorl_lab.engine import engine
from xorl_lab.recipes import tasks
from xorl_lab.recipes.console import LEGEND, interrupts, show_end, train
from xorl_lab.recipes.evaluate import evaluate
from xorl_lab.recipes.grpo import grpo
from xorl_lab.recipes.outcome import Outcome, outcome
from xorl_lab.recipes.report import RunReport, write_report
from xorl_lab.recipes.sft import sft
from xorl_lab.types import StepRecord

if TYPE_CHECKING:
    from xorl_lab.client import TrainingClient

MODEL = "SmolLM2-135M-Instruct"
"""The pretrained model of the demo."""
RANK = 16
"""Inner dimension of the LoRA adapter."""
ALPHA = 32.0
"""Scale of the LoRA adapter."""
INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What :func:`run_demo` did."""

    task: str
    """Name of the task."""
    model: str
    """Name of the base model."""
    seed: int
    """Seed of adapter, order, draws and held-out split."""
    outcome: Outcome
    """The start and the end beside each other."""
    interrupted: bool
    """True if it was stopped before its last step."""
    report: Path
    """The HTML report."""
    checkpoint: str
    """URI of the trained weights."""

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON values; what was not measured is None."""
        flat = asdict(self)
        numbers = flat.pop("outcome")
        clean = {k: v if math.isfinite(v) else None for k, v in numbers.items()}
        return {**flat, "report": str(self.report), **clean}


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What can be chosen."""

    seed: int = 0
    """Of everything random."""
    steps: int | None = None
    """Number of steps; None means the task's own."""
    task: str = "addition"
    """One of ``tasks.TASKS``."""
    model: str = MODEL
    """Base model."""
    report: Path | None = None
    """Where to write the report; None means ``reports/demo-SEED.html``."""


def run_demo(options: DemoOptions | None = None, *, console: Console | None = None) -> DemoResult:
    """Train a model on a task and write a report.

    Ctrl-C ends the run after the step at hand; checkpoint and report are written all the same.

    Args:
        options: what can be chosen.
        console: where to show progress; None means standard output.

    Raises:
        ConfigError: an option is wrong.
        LabError: training failed.
    """
    options = options or DemoOptions()
    console = console or Console(highlight=False)
    task = tasks.get(options.task, options.seed)
    settings: dict[str, Any] = {**task.settings, "seed": options.seed}
    if options.steps is not None:
        settings["steps"] = options.steps
    counts = f"{len(task.training)} prompts, {len(task.held_out)} held out"
    console.print(f"{task.description}  ({counts})", markup=False, style="bold")
    console.print(f"loading {options.model} ...", markup=False)
    client = ServiceClient().create_lora_training_client(
        options.model, RANK, alpha=ALPHA, seed=options.seed
    )
    limits = ("max_tokens", "stop", "max_turns")
    examine: dict[str, Any] = {k: settings[k] for k in limits if k in settings}
    before = evaluate(client, task.held_out, task.reward, **examine)
    console.print(f"held-out accuracy before: {before.accuracy:.2f}", markup=False)
    console.print(LEGEND, markup=False, style="dim", soft_wrap=True)
    records: list[StepRecord] = []
    with interrupts(console) as stop:
        train(_loop(client, task, settings), int(settings["steps"]), records, console, stop)
    interrupted = len(records) < int(settings["steps"])
    checkpoint = client.save_state(f"demo-{options.seed}", overwrite=True).result().path
    after = evaluate(client, task.held_out, task.reward, **examine)
    report = write_report(
        options.report or Path("reports") / f"demo-{options.seed}.html",
        RunReport(
            title=f"{options.model}: {task.description}",
            records=records,
            settings={"recipe": task.recipe, "task": task.name, **settings},
            environment=environment(options.model),
            before=before,
            after=after,
            note=f"Interrupted after step {len(records)}." if interrupted else "",
        ),
    )
    result = DemoResult(
        task=task.name,
        model=options.model,
        seed=options.seed,
        outcome=outcome(records, before, after),
        interrupted=interrupted,
        report=report,
        checkpoint=checkpoint,
    )
    files = {"checkpoint": checkpoint, "report": str(report)}
    show_end(before, after, result.outcome, files, console)
    return result


def demo_command(
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    steps: Annotated[
        int | None, typer.Option(help="Number of steps; the task's own if left out.")
    ] = None,
    task: Annotated[
        str, typer.Option(help=f"One of {', '.join(sorted(tasks.TASKS))}.")
    ] = "addition",
    model: Annotated[str, typer.Option(help="Base model.")] = MODEL,
    report: Annotated[
        Path | None, typer.Option(help="HTML report; reports/demo-SEED.html.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the result here too.")
    ] = None,
) -> None:
    """Watch a small pretrained model get better at a task by reinforcement learning."""
    result = run_demo(DemoOptions(seed, steps, task, model, report))
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(result.to_dict()) + "\n", encoding="utf-8")
    if result.interrupted:
        raise typer.Exit(INTERRUPTED)


def main(arguments: Sequence[str]) -> None:
    """Run the command line of the demo.

    Args:
        arguments: what stands behind ``xorl-lab demo``.
    """
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(demo_command)
    app(list(arguments), prog_name="xorl-lab demo")


def environment(base_model: str) -> dict[str, str]:
    """What a run depends on beside its settings: model, device, dtype, processor, versions.

    Args:
        base_model: a model that is loaded already, on the device that was chosen by itself.
    """
    loaded = engine.get(base_model).loaded
    names = ("xorl-lab", "torch", "transformers", "peft")
    return {
        "model": loaded.name,
        **({"weights": loaded.note} if loaded.note else {}),
        "parameters": f"{loaded.parameters / 1e6:.1f} million",
        "adapter": f"LoRA, rank {RANK}, alpha {ALPHA:g}",
        "device": loaded.device,
        "dtype": loaded.dtype,
        "machine": f"{platform.system()} {platform.machine()}",
        "Python": platform.python_version(),
        **{name: _version(name) for name in names},
        "written": time.strftime("%Y-%m-%d %H:%M"),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _loop(
    client: "TrainingClient", task: tasks.Task, settings: Mapping[str, Any]
) -> Iterator[StepRecord]:
    if task.recipe == "sft":
        kept = {k: v for k, v in settings.items() if k not in ("max_tokens", "stop")}
        return sft(client, task.conversations(), **kept)
    extras = {"held_out": task.held_out, "evaluate_every": 10, "report_base_kl": True}
    return grpo(client, task.training, task.reward, **extras, **settings)
