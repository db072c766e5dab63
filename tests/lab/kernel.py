"""Kernels that train and are killed, in children of a process that has imported everything.

Each line of its input is a job: a folder, settings, and the failpoint at which to die.
"""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.lab.support import PROMPTS, SETTINGS, lab_in, share
from xorl_lab.checkpoints import catalog
from xorl_lab.engine import saving
from xorl_lab.engine.trainer import Trained
from xorl_lab.lab import preflight
from xorl_lab.lab.loop import Loop
from xorl_lab.samplers.embedded import EmbeddedSampler
from xorl_lab.store import Store, Writer

PLACES: dict[str, tuple[Any, str]] = {
    "create": (Store, "create"),
    "step": (Writer, "step"),
    "event": (Writer, "event"),
    "status": (Writer, "status"),
    "close": (Writer, "close"),
    "taken": (Loop, "taken"),
    "save": (saving, "save"),
    "file": (saving, "save_file"),
    "fsync": (os, "fsync"),
    "mkdir": (Path, "mkdir"),
    "rename": (Path, "rename"),
    "remove": (shutil, "rmtree"),
    "drop": (catalog, "try_delete"),
    "backward": (Trained, "forward_backward"),
    "optimize": (Trained, "optim_step"),
    "snapshot": (Trained, "snapshot"),
    "draw": (EmbeddedSampler, "run_quantum"),
    "preflight": (preflight, "check_grpo"),
}
"""What a failpoint may lie before or behind."""
TURNED, RATE = 3, 1e-3
"""The step behind which a job may turn the learning rate, and to what."""


def die() -> None:
    """As ``kill -9`` does."""
    os.kill(os.getpid(), signal.SIGKILL)


def plant(place: str, number: int, behind: bool) -> None:
    """Die before or behind a call."""
    owner, name = PLACES[place]
    function: Callable[..., Any] = getattr(owner, name)
    left = number

    def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 (those of the function)
        nonlocal left
        left -= 1
        if left == 0 and not behind:
            die()
        result = function(*args, **kwargs)
        if left == 0:
            die()
        return result

    setattr(owner, name, call)


def turn() -> None:
    """Turn the learning rate behind one step."""
    taken = Loop.taken

    def then(self: Loop, record: Any) -> None:  # noqa: ANN401
        taken(self, record)
        if record.step == TURNED:
            self.control.set("learning_rate", RATE)

    Loop.taken = then  # type: ignore[method-assign]


def run(job: dict[str, Any]) -> None:
    """One job, in a child."""
    if job.get("turn"):
        turn()
    if job.get("at"):
        plant(*job["at"])
    lab = lab_in(Path(job["folder"]))
    sys.stdout.write("begun\n")
    sys.stdout.flush()
    settings = {**SETTINGS, "background": True, **job["settings"]}
    made = lab.grpo(PROMPTS, share, **settings)
    if not job.get("leave"):
        made.wait()


def main() -> None:
    """Fork for each line of the input; tell the child's id, and its status when it has ended."""
    for line in sys.stdin:
        child = os.fork()
        if not child:
            code = 0
            try:
                run(json.loads(line))
            except BaseException as error:  # noqa: BLE001 (a child ends here whatever happens)
                sys.stderr.write(f"{type(error).__name__}: {error}\n")
                code = 1
            if json.loads(line).get("leave"):
                sys.exit(code)  # with what a process does at its end
            os._exit(code)
        sys.stdout.write(f"{child}\n")
        sys.stdout.flush()
        status = os.waitpid(child, 0)[1]
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        sys.stdout.write(f"{'killed' if killed else os.WEXITSTATUS(status)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
