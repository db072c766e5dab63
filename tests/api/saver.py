"""A process that is told to save, in children of its own, and to die while it does so.

It is started once and loads a model once; each line of its input is a job, for which it forks.  A
checkpoint number n holds n in every tensor and as its step count, so that a mixture shows.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.engine.support import ADAM, accumulate, supervised
from xorl_lab.checkpoints import Address, catalog
from xorl_lab.engine import models, saving
from xorl_lab.engine.trainer import Trained
from xorl_lab.types import LoraRunSpec

KILLED = 9
"""Exit status of a child that died at its failpoint."""


class Saver:
    """Both kinds of model, and the failpoint of a child."""

    def __init__(self) -> None:
        self.loaded = models.load("tiny", device="cpu", dtype="float32")
        specs = {"lora": LoraRunSpec(rank=2, seed=1), "full": None}
        self.trained = {k: Trained("m", self.loaded.model, s) for k, s in specs.items()}
        for trained in self.trained.values():
            accumulate(trained, supervised(2))
            trained.optim_step(ADAM)
        self.events: list[str] = []
        self.at: int | None = None
        self.half = False

    def save(self, kind: str, what: str, place: Path, number: int, *, overwrite: bool) -> None:
        """Write checkpoint ``number``."""
        trained = self.trained[kind]
        trained.steps = trained.version = number
        with torch.no_grad():
            for tensor in (*trained.parameters.values(), *trained.optimizer.state().values()):
                tensor.fill_(number)
        facts = {"base_model": "tiny", "expires_at": None}
        if what == "weights":
            saving.save(trained, place, facts, overwrite=overwrite)
        else:
            saving.save_for_sampler(trained, self.loaded.tokenizer, place, facts)

    def plant(self, at: int | None, half: bool) -> None:
        """Die before call number ``at`` of those that change the disk, or with half of it done."""
        self.at, self.half = at, half
        for owner, name in (
            (os, "fsync"),
            (os, "unlink"),
            (os, "rmdir"),
            (Path, "mkdir"),
            (Path, "rename"),
            (Path, "write_text"),
            (Path, "write_bytes"),
            (saving, "save_file"),
        ):
            setattr(owner, name, self._watched(name, getattr(owner, name)))

    def _watched(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 (those of the function)
            self.events.append(name)
            if len(self.events) - 1 == self.at:
                if self.half:
                    function(*args, **kwargs)
                    path = args[1] if name == "save_file" else args[0]
                    os.truncate(path, Path(path).stat().st_size // 2)
                os._exit(KILLED)
            return function(*args, **kwargs)

        return call

    def run(self, job: dict[str, Any]) -> None:
        """One job, in a child."""
        address = Address("m", job["what"], "a")
        place = address.folder(Path(job["root"]))
        if job["do"] == "loop":
            number = 1
            while True:
                number += 1
                self.save(job["kind"], job["what"], place, number, overwrite=True)
        if job["do"] == "old":
            return self.save(job["kind"], job["what"], place, 1, overwrite=False)
        self.plant(job["at"], job["half"])
        if job["do"] == "delete":
            catalog.delete(Path(job["root"]), address)
        else:
            self.save(job["kind"], job["what"], place, 2, overwrite=job["do"] == "overwrite")
        count = json.dumps(self.events)
        with Path(job["events"]).open("w") as file:
            file.write(count)
        return None


def say(what: object) -> None:
    """One line to who gives the jobs."""
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


def main() -> None:
    """Fork for each line of the input; print the child's id, and its status when it has ended."""
    saver = Saver()
    for line in sys.stdin:
        child = os.fork()
        if not child:
            try:
                saver.run(json.loads(line))
            except BaseException as error:  # noqa: BLE001 (a child ends here whatever happens)
                sys.stderr.write(f"{type(error).__name__}: {error}\n")
                os._exit(1)
            os._exit(0)
        say(child)
        status = os.waitpid(child, 0)[1]
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        say("killed" if killed else os.WEXITSTATUS(status))


if __name__ == "__main__":
    main()
