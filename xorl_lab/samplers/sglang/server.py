"""A SGLang server of this process: from the name of a model to a server that answers."""

import functools
import secrets
import time
from pathlib import Path
from typing import Self

from xorl_lab.errors import ConfigError, SamplerError
from xorl_lab.home import home
from xorl_lab.samplers.sglang import install as sglang_install
from xorl_lab.samplers.sglang import plan as sglang_plan
from xorl_lab.samplers.sglang.install import interpreter
from xorl_lab.samplers.sglang.models import served
from xorl_lab.samplers.sglang.process import Progress, ServerProcess, free_port, tell

__all__ = ["SGLangServer", "interpreter"]

ATTEMPTS = 3
"""Ports to try, where none is asked for: another process may take one before SGLang does."""
LOGS_KEPT = 20
"""Of the logs in the home of xorl_lab."""


class SGLangServer(ServerProcess):
    """A SGLang server that this process has started and that ends with it.

    Made by :meth:`start`; ``url`` is where it answers, ``log`` the file with all that it wrote, and
    ``alive`` whether it runs.  It is a context manager that stops it.  A process that is forked
    from this one may use the URL, but cannot stop the server.

    Args:
        plan: what it is to be.
        port: where it listens, on 127.0.0.1.
        log: file that its output is added to.
    """

    def __init__(self, plan: sglang_plan.Plan, port: int, log: Path) -> None:
        self.plan = plan
        command = sglang_plan.command(plan, port)
        environment = functools.partial(sglang_plan.environment, plan)
        super().__init__(plan.served.name, port, command, environment, log)

    @classmethod
    def start(  # noqa: PLR0913 (each is a choice of the caller's)
        cls,
        model: str | Path,
        *,
        max_rank: int | None = 32,
        dtype: str = "auto",
        device: str = "auto",
        port: int | None = None,
        python: str | Path | None = None,
        log: Path | None = None,
        timeout: float = 600.0,
        progress: Progress | None = tell,
        experts: bool = False,
        threads: int | None = None,
        cache_tokens: int | None = None,
    ) -> Self:
        """Start a server and wait until it answers.

        Args:
            model: a name (``tiny``, ``SmolLM2-135M-Instruct``, …) or a folder, that of an exported
                full checkpoint too.
            max_rank: largest rank of adapters that can be loaded; None = no adapters.
            dtype: ``float32``, ``bfloat16``, or ``auto``: float32 on a CPU, bfloat16 on a GPU.
            device: ``cpu``, ``cuda``, or ``auto``: a GPU where there is one and SGLang can use it.
            port: where to listen, on 127.0.0.1; None = any free one.
            python: interpreter of the environment with SGLang; None looks for one.
            log: file for its output; None = one of its own in the home of xorl_lab.
            timeout: seconds to wait until it answers.
            progress: called with a sentence whenever it is a stage further; by default they are
                written to standard error, which a notebook shows. None = nothing is said.
            experts: whether chosen experts can be asked for (mixtures of experts alone).
            threads: for arithmetic on a CPU; None = $OMP_NUM_THREADS, else half of the cores.
            cache_tokens: tokens in the cache of keys and values; None = as many as the rule in
                :mod:`xorl_lab.samplers.sglang.plan` gives.

        Returns:
            The server, ready.

        Raises:
            ConfigError: no environment has SGLang, the model cannot be served, the port is taken,
                or the GPU is too small.
            SamplerError: it ended, or did not answer in time; with the end of its log.
        """
        say = progress or (lambda _: None)
        free_port(port)  # what is cheap to find wrong comes first
        chosen = sglang_install.require(python)
        plan = sglang_plan.make(
            served(model),
            chosen,
            sglang_plan.Wishes(device, dtype, max_rank, experts, threads, cache_tokens),
        )
        for attempt in range(1, ATTEMPTS + 1):
            where = free_port(port)
            server = cls(plan, where, log or new_log(plan.served.name, where))
            try:
                say(f"starting SGLang on the {plan.device.upper()}; its log is {server.log}")
                server.wait_ready(timeout, say)
            except BaseException as error:
                server.stop()
                again = port is None and attempt < ATTEMPTS and server.port_was_taken()
                if isinstance(error, SamplerError) and again:
                    continue
                raise
            return server
        raise AssertionError("the last attempt returns or raises")


def new_log(model: str, port: int) -> Path:
    """A file for a server's output; only the last LOGS_KEPT are kept."""
    folder = home() / "logs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        old = sorted(folder.glob("sglang-*.log"), key=lambda path: path.stat().st_mtime)
        for path in old[: -LOGS_KEPT + 1]:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written to ({error}): set XORL_LAB_HOME") from error
    moment = time.strftime("%Y%m%d-%H%M%S")
    name = f"sglang-{moment}-{Path(model).name}-{port}-{secrets.token_hex(2)}.log"
    return folder / name
