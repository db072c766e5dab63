"""Checkpoints of a run, taken by themselves: ``step-10``, ``step-20``, and so on."""

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from xorl_lab.errors import LabError, StoreError
from xorl_lab.store import Writer

if TYPE_CHECKING:
    from xorl_lab.client import TrainingClient
    from xorl_lab.client.rest import RestClient
    from xorl_lab.lab.budget import Budget

_NAME = re.compile(r"^(?:xorl://[^/]+/)?(?:weights/)?step-(\d+)$")


class Autosave:
    """Saves every so many steps and at the end, and keeps the latest so many of its checkpoints.

    Args:
        client: the model.
        rest: deletes what is no longer kept; None keeps all.
        writer: told of each checkpoint.
        every: steps between two; 0 = at the end only.
        keep: how many of them to keep; 0 = all.
        saved: the step of the run's checkpoint that the weights came from, 0 for none.
        earlier: steps of the checkpoints that the run has already, ascending.
        prefix: of the names.
        budget: for the checkpoints of all runs; None = none.
    """

    def __init__(  # noqa: PLR0913
        self,
        client: "TrainingClient",
        rest: "RestClient | None",
        writer: Writer,
        *,
        every: int,
        keep: int,
        saved: int = 0,
        earlier: Sequence[int] = (),
        prefix: str = "step",
        budget: "Budget | None" = None,
    ) -> None:
        self._client = client
        self._rest = rest
        self._writer = writer
        self._every = every
        self._keep = keep
        self._saved = saved
        self._prefix = prefix
        self._mine = list(earlier)
        self._budget = budget
        self._over = False

    def after(self, step: int) -> None:
        """A step was taken.  What keeps it from being saved is a warning: the run goes on."""
        if not self._every or step % self._every:
            return
        try:
            self.save(step)
        except (LabError, OSError) as error:
            self._warn(f"the weights behind step {step} could not be saved: {error}", step)

    def save(self, step: int) -> None:
        """Save now, as the state behind this step, unless that is saved already.

        Raises:
            LabError, OSError: it cannot be saved.
        """
        if step <= self._saved:
            return
        name = self._name(step)
        # What an earlier attempt left under this name is superseded, as its steps are.
        path = self._client.save_state(name, overwrite=True).result().path
        self._saved = step
        self._writer.event("checkpoint", f"saved as {name}", step=step, data={"path": path})
        self._mine = [*(s for s in self._mine if s != step), step]
        while self._rest is not None and 0 < self._keep < len(self._mine):
            self._drop(self._rest, self._mine.pop(0))
        if self._budget is not None:
            self._keep_to(self._budget, step)

    def _keep_to(self, budget: "Budget", step: int) -> None:
        """Make room; that there is none to be made is said once."""
        try:
            excess = budget.keep_to()
        except (LabError, OSError) as error:
            self._warn(f"the disk in use could not be looked at: {error}", step)
            return
        if excess is not None and (excess.deleted or not self._over):
            data = {"deleted": excess.deleted, "before": excess.before, "after": excess.after}
            with suppress(StoreError):  # as in a warning
                self._writer.event("warning", excess.text, step=step, data=data)
        self._over = excess is not None and excess.after > budget.limit

    def _drop(self, rest: "RestClient", step: int) -> None:
        name = self._name(step)
        try:
            answer = rest.delete_checkpoint(f"weights/{name}").result()
            trouble = None if answer.success or "not_found" in str(answer.error) else answer.error
        except (LabError, OSError) as error:
            trouble = str(error)
        if trouble is not None:
            self._warn(f"{name} was not deleted: {trouble}", step)

    def _warn(self, text: str, step: int) -> None:
        with suppress(StoreError):  # if the record cannot be written, the next step will tell
            self._writer.event("warning", text, step=step)

    def _name(self, step: int) -> str:
        return f"{self._prefix}-{step}"


def step_of(name: str) -> int | None:
    """The step of a checkpoint, from its name or path; None if a run did not name it.

    >>> step_of("weights/step-40"), step_of("mine")
    (40, None)
    """
    found = _NAME.match(name)
    return int(found[1]) if found else None
