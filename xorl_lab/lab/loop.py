"""A loop under way, and how it ends."""

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from xorl_lab.errors import LabError
from xorl_lab.lab.autosave import Autosave
from xorl_lab.lab.control import Control
from xorl_lab.lab.syncing import note_syncs
from xorl_lab.store import Writer
from xorl_lab.types import StepRecord

if TYPE_CHECKING:
    from xorl_lab.client import TrainingClient


class Loop:
    """Keeps record, weights and checkpoints of a run in agreement, however it ends.

    Args:
        client: the model.
        control: steers it.
        writer: of the record; closed at the end.
        autosave: of the weights.
        done: steps that lie behind the weights.
    """

    def __init__(
        self,
        client: "TrainingClient",
        control: Control,
        writer: Writer,
        autosave: Autosave,
        done: int,
    ) -> None:
        self.client = client
        self.control = control
        self.writer = writer
        self.last = done
        """Number of the last step that is recorded."""
        self._autosave = autosave
        self._version = client.version

    def taken(self, record: StepRecord) -> None:
        """A step was recorded, and the weights are those behind it."""
        self.last = record.step
        self._version = self.client.version
        note_syncs(self.writer, self.client, record.step)
        self._autosave.after(record.step)

    def run(self, work: Callable[[], str]) -> BaseException | None:
        """Do the work, save, and record how it ended.

        Args:
            work: returns ``finished`` or ``stopped``.

        Returns:
            What went wrong, if anything.
        """
        error: BaseException | None = None
        try:
            ending = work()
            self._save()
            why = self.control.why if ending == "stopped" else ""
            text = f"{ending}: {why}" if why else ending
            self.writer.event("end", text, step=self.last or None)
            self.writer.status(ending, why)
        except BaseException as caught:  # noqa: BLE001 (handed to whoever waits)
            error = caught
            self._failed(caught)
        finally:
            self.control.leave()
            trouble = self._closed()
        return error or trouble

    def _failed(self, error: BaseException) -> None:
        text = described(error)
        # A second Ctrl-C is the caller's wish too.
        state = "failed" if isinstance(error, Exception) else "stopped"
        for tell in (
            self._save,
            lambda: self.writer.event("error", text, step=self.last or None),
            lambda: self.writer.status(state, text),
        ):
            with suppress(Exception):  # the first error is the one to see
                tell()

    def _save(self) -> None:
        """Save, if the weights are those behind the last recorded step."""
        if not self.last:
            return
        # Behind whatever the last step left in the queue, which may change the weights yet.
        self.client.list_checkpoints().result()
        if self.client.version == self._version:
            self._autosave.save(self.last)

    def _closed(self) -> LabError | None:
        try:
            self.writer.close()
        except LabError as error:
            return error
        return None


def described(error: BaseException) -> str:
    """An error in words."""
    if isinstance(error, LabError):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        return "interrupted twice"
    return f"{type(error).__name__}: {error}"
