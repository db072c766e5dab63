"""How a SGLang server is started: its command line, its variables, and how much memory it takes.

On one GPU trainer and server share the memory like this.  The server may take half of what is free
when it starts, or less where its weights, the cache of ``cache_tokens`` tokens and GPU_SLACK of
working space are less; the trainer's weights are there by then, so the other half is for its
activations.  ``--enable-memory-saver`` lets the server give its part back around training, and a
copy of its weights in main memory brings them back.
"""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

from xorl_lab.engine import models
from xorl_lab.errors import ConfigError
from xorl_lab.samplers.sglang.install import CPU_FOLDER, clean_environment
from xorl_lab.samplers.sglang.models import SIZES, Served

CPU_CACHE = 2**30
"""Bytes for the cache of keys and values on a CPU."""
CACHE_LIMITS = (4096, 131072)
"""Tokens in the cache, whatever their size: at least, at most."""
ROWS = {"cpu": 64, "cuda": 256}
"""Completions that are drawn at the same time; others wait."""
ADAPTERS_AT_ONCE = 4
"""Adapters, and the base model, that one batch may mix."""
GPU_SHARE = 0.5
"""Of the free memory of a GPU, at most."""
GPU_SLACK = 2 * 2**30
"""Bytes of a GPU for what is neither weights nor cache."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a caller asks of a server."""

    device: str = "auto"
    """``cpu``, ``cuda`` or ``auto``."""
    dtype: str = "auto"
    """``float32``, ``bfloat16`` or ``auto``."""
    max_rank: int | None = 32
    """Largest rank of an adapter; None = no adapters."""
    experts: bool = False
    """Whether chosen experts can be asked for."""
    threads: int | None = None
    """For arithmetic on a CPU; None = as the rule says."""
    cache_tokens: int | None = None
    """Tokens that the cache of keys and values holds; None = as the rule says."""

    def __post_init__(self) -> None:
        for name in ("max_rank", "threads", "cache_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}: pass at least 1, or None")
        if self.device not in ("auto", "cpu", "cuda"):
            raise ConfigError(
                f"device is {self.device!r}: a SGLang server runs on auto, cpu or cuda"
            )


@dataclass(frozen=True, slots=True)
class Plan:
    """What a server is to be."""

    served: Served
    """The model."""
    python: Path
    """Interpreter of the environment with SGLang."""
    device: str
    """``cpu`` or ``cuda``."""
    dtype: str
    """``float32`` or ``bfloat16``."""
    max_rank: int | None
    """Largest rank of an adapter; None = no adapters."""
    experts: bool
    """Whether chosen experts can be asked for."""
    cache_tokens: int
    """Tokens that the cache of keys and values holds."""
    threads: int
    """For arithmetic on a CPU."""
    memory_fraction: float | None = None
    """Of a GPU's free memory, for weights and cache; None on a CPU."""


def make(served: Served, python: Path, wishes: Wishes) -> Plan:
    """From what is asked for to what a server is to be.

    Args:
        served: the model.
        python: interpreter of the environment with SGLang.
        wishes: what is asked for.

    Raises:
        ConfigError: the device or dtype is not to be had, the model has no experts to tell of, or
            the GPU is too small.
    """
    if wishes.experts and not served.experts:
        raise ConfigError(f"{served.name} has no experts: leave experts=True out")
    device = resolve_device(wishes.device, python)
    dtype = models.resolve_dtype(wishes.dtype, device)
    free, budget = 0, CPU_CACHE
    if device == "cuda":
        torch.cuda.empty_cache()
        free = int(torch.cuda.mem_get_info()[0])
        budget = max(0, int(GPU_SHARE * free) - served.weight_bytes - GPU_SLACK)
    tokens = wishes.cache_tokens or cache_tokens(served, dtype, budget)
    fraction = memory_fraction(served, dtype, tokens, free) if device == "cuda" else None
    return Plan(
        served=served,
        python=python,
        device=device,
        dtype=dtype,
        max_rank=wishes.max_rank,
        experts=wishes.experts,
        cache_tokens=tokens,
        threads=wishes.threads or default_threads(),
        memory_fraction=fraction,
    )


def command(plan: Plan, port: int) -> list[str]:
    """The command line of a server on 127.0.0.1.

    Args:
        plan: what it is to be.
        port: where it listens.
    """
    on_cpu = plan.device == "cpu"
    start = [str(CPU_FOLDER / "launch.py")] if on_cpu else ["-m", "sglang.launch_server"]
    line = [str(plan.python), *start, "--model-path", str(plan.served.folder)]
    line += ["--host", "127.0.0.1", "--port", str(port), "--device", plan.device]
    line += ["--dtype", plan.dtype, "--max-total-tokens", str(plan.cache_tokens)]
    line += ["--max-running-requests", str(ROWS[plan.device]), "--log-level-http", "warning"]
    # Else it looks for work without a pause, on a core that training needs.
    line += ["--sleep-on-idle"]
    if on_cpu:
        line += ["--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
        line += ["--disable-overlap-schedule"]
    else:
        line += ["--mem-fraction-static", f"{plan.memory_fraction:.3f}", "--enable-memory-saver"]
        line += ["--enable-weights-cpu-backup"]
        # The faster ones have no float32.
        line += ["--attention-backend", "triton"] if plan.dtype == "float32" else []
    if plan.max_rank is not None:
        line += ["--enable-lora", "--max-lora-rank", str(plan.max_rank)]
        line += ["--max-loras-per-batch", str(ADAPTERS_AT_ONCE)]
        line += ["--lora-backend", "torch_native"] if on_cpu else []
        line += ["--lora-target-modules", *plan.served.targets]
    return line + (["--enable-return-routed-experts"] if plan.experts else [])


def environment(plan: Plan, scratch: Path) -> dict[str, str]:
    """Variables for the process of a server.

    Args:
        plan: what it is to be.
        scratch: a folder for its temporary files, sockets among them.
    """
    variables = clean_environment()
    variables |= {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "TMPDIR": str(scratch)}
    # Else its processes meet on a port that is open to the network.
    variables["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file://{scratch}/meeting"
    if plan.device == "cpu":
        variables |= {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        variables |= {"OMP_NUM_THREADS": str(plan.threads)}
    return variables


def cache_tokens(served: Served, dtype: str, budget: int) -> int:
    """How many tokens fit into a cache, within CACHE_LIMITS; a whole context at least.

    Args:
        served: the model.
        dtype: of keys and values.
        budget: bytes.
    """
    least, most = CACHE_LIMITS
    fit = budget // (served.token_numbers * SIZES[dtype])
    return max(least, min(fit, most) // 1024 * 1024, min(served.context_length, most))


def memory_fraction(served: Served, dtype: str, tokens: int, free: int) -> float:
    """The part of a GPU's free memory that a server takes for weights and cache.

    Args:
        served: the model.
        dtype: of weights, keys and values.
        tokens: in the cache.
        free: bytes.

    Raises:
        ConfigError: weights and the smallest cache do not fit into GPU_SHARE of it.
    """
    token = served.token_numbers * SIZES[dtype]
    least = served.weight_bytes + CACHE_LIMITS[0] * token
    if least > GPU_SHARE * free:
        raise ConfigError(
            f"{served.name} takes {least / 2**30:.1f} GiB in a SGLang server, and half of the "
            f"{free / 2**30:.1f} GiB that are free on this GPU are for it, as training takes the "
            "rest: choose a smaller model, or a server on another machine (sampler='http://…')"
        )
    return min(GPU_SHARE, (served.weight_bytes + tokens * token + GPU_SLACK) / free)


def default_threads() -> int:
    """$OMP_NUM_THREADS, else half of the cores that this process may use: training has the rest."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdigit() and int(given) > 0:
        return int(given)
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (count or 1) // 2)


def resolve_device(device: str, python: Path) -> str:
    """Where a server runs: a GPU needs this process's torch and that of SGLang to see it.

    Args:
        device: ``auto``, ``cpu`` or ``cuda``.
        python: interpreter of the environment with SGLang.

    Raises:
        ConfigError: the device is not to be had.
    """
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return "cpu"
    models.resolve_device("cuda")
    ask = [str(python), "-c", "import torch; print(torch.cuda.is_available())"]
    done = subprocess.run(ask, capture_output=True, text=True, check=False, env=clean_environment())
    if done.stdout.strip() == "True":
        return "cuda"
    if device == "auto":
        return "cpu"
    raise ConfigError(
        f"the environment of {python} has no CUDA: make one with `xorl-lab sglang --install "
        "--gpu`, or pass device='cpu'"
    )
