"""What stands behind a run in the process that drives it."""

import logging
import threading
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from xorl_lab.lab.control import Control

if TYPE_CHECKING:
    from collections.abc import Callable

    from xorl_lab.client import TrainingClient
    from xorl_lab.lab.run import Run
    from xorl_lab.widgets import RunView

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Links:
    """What leads from one run to the next."""

    again: "Callable[..., Run]"
    """Takes it up again from its last checkpoint, with some settings changed."""
    branch: "Callable[..., Run]"
    """Begins another run from one of its checkpoints, named first."""
    load: "Callable[[], TrainingClient]"
    """The model as the run left it, from its last checkpoint."""
    prompts: object = None
    """What it was given to be answered, as it was given; None if it samples nothing."""


@dataclass
class Live:
    """What stands behind a run that this process drives, or drove."""

    control: Control
    """Steers it."""
    client: "TrainingClient | None"
    """The trained model; None once it was let go."""
    links: Links | None = None
    """What may follow; None for a loop of the caller's own."""
    ended: threading.Event = field(default_factory=threading.Event)
    """Set once it has ended and is saved."""
    error: BaseException | None = None
    """What made it fail."""
    views: "list[RunView]" = field(default_factory=list)
    """What shows it."""

    def settle(self, error: BaseException | None = None) -> None:
        """It has ended: tell whoever waits, and leave pictures where it was shown."""
        self.error = error
        self.ended.set()
        views, self.views = self.views, []
        for view in views:
            try:
                view.end()
            except Exception:  # the run itself is well, and recorded
                logger.exception("a view of the run could not be finished")

    def forget(self, view: "RunView") -> None:
        """A view was closed."""
        if view in self.views:
            self.views.remove(view)

    def release(self) -> None:
        """Let go of the trained model of a run that has ended; its last checkpoint has it.

        What IPython keeps of the outputs of cells would hold every model otherwise.
        """
        if self.ended.is_set() and self.links is not None:
            if self.error is not None:
                traceback.clear_frames(self.error.__traceback__)
            self.client = None
