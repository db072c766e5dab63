"""A run as a person holds it: watch it, steer it, look into it, branch from it."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xorl_lab.errors import ConfigError
from xorl_lab.lab.control import Control
from xorl_lab.store import Reader, RunInfo, RunStatus

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

    from xorl_lab.client import TrainingClient
    from xorl_lab.widgets import RunView

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Links:
    """What leads from one run to the next."""

    again: "Callable[..., Run]"
    """Takes it up again from its last checkpoint, with some settings changed."""
    branch: "Callable[..., Run]"
    """Begins another run from one of its checkpoints, named first."""


@dataclass
class Live:
    """What stands behind a run that this process drives, or drove."""

    control: Control
    """Steers it."""
    client: "TrainingClient"
    """The trained model."""
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
                view.finish()
                view.close()
            except Exception:  # the run itself is well, and recorded
                logger.exception("a view of the run could not be finished")


class Run:
    """One run, live or finished.  As the last value of a cell it shows itself.

    While it goes on that is the live dashboard; afterwards a picture that a saved notebook keeps,
    and :meth:`view` gives the dashboard to explore.

    Made by :class:`~xorl_lab.lab.lab.Lab`.

    Args:
        reader: of its record.
        live: what stands behind it; None if another process drove it.
    """

    def __init__(self, reader: Reader, live: Live | None = None) -> None:
        self.reader = reader
        """Its record."""
        self.live = live
        """What stands behind it in this process, if anything."""

    @property
    def name(self) -> str:
        """Its name, which is also that of the trained model."""
        return self.reader.info.name

    @property
    def info(self) -> RunInfo:
        """What it was begun with."""
        return self.reader.info

    @property
    def going(self) -> bool:
        """True while this process drives it."""
        return self.live is not None and not self.live.ended.is_set()

    @property
    def status(self) -> RunStatus:
        """How it stands: state, last step, when, and why."""
        return self.reader.status()

    @property
    def metrics(self) -> "pd.DataFrame":
        """One row per step, one column per number."""
        return self.reader.metrics()

    @property
    def warnings(self) -> list[str]:
        """What the run warned of, each sentence once."""
        return list(dict.fromkeys(e.text for e in self.reader.events() if e.kind == "warning"))

    @property
    def client(self) -> "TrainingClient":
        """The trained model.

        Raises:
            ConfigError: it is not in this process: resume the run first.
        """
        if self.live is None:
            raise ConfigError(
                f"the model of run {self.name!r} is not in this process: resume the run, or load "
                "one of its checkpoints"
            )
        return self.live.client

    def rollouts(self, **query: Any) -> "pd.DataFrame":  # noqa: ANN401
        """One row per completion.

        Args:
            query: ``where``, ``order_by``, ``descending``, ``limit``, ``offset`` of
                :meth:`xorl_lab.store.Reader.rollouts`.
        """
        return self.reader.rollouts(**query)

    # Steering.

    def pause(self) -> None:
        """Halt before the next step."""
        self._steered().pause()

    def step(self) -> None:
        """Run one more step, then pause."""
        self._steered().step()

    def set(self, name: str, value: float) -> None:
        """Change a setting from the next step on, such as ``learning_rate``.

        Raises:
            ConfigError: it cannot be changed on the way, or the value is out of range.
        """
        self._steered().set(name, value)

    def resume(self, **changes: Any) -> "Run":  # noqa: ANN401 (settings of the recipe)
        """Go on: after a pause, or from the last checkpoint where the run has ended.

        Args:
            changes: settings to change, such as ``steps``; a run under way is stopped for that.

        Raises:
            ConfigError: a setting is unknown or out of range, nothing is left to do, or the data
                is not at hand.
        """
        if self.going and not changes:
            self._steered().resume()
            return self
        if self.live is None or self.live.links is None:
            raise self._no_data(f"resume={self.name!r}")
        self.stop()
        return self.live.links.again(**changes)

    def stop(self, wait: bool = True) -> "Run":
        """End the run.  A step under way is given up unless it has changed the weights already.

        A reward function that is being called is not interrupted: the run ends when it returns.

        Args:
            wait: return once it has ended and is saved.
        """
        if self.live is not None and self.going:
            self.live.control.stop()
            # A step that asks for its own end, in its reward function say, cannot wait for it.
            if wait and not self.live.control.here:
                self.live.ended.wait()
        return self

    def wait(self, timeout: float | None = None) -> "Run":
        """Wait for the end of the run; Ctrl-C, or the kernel's interrupt, stops it.

        Args:
            timeout: seconds; None = as long as it takes.

        Raises:
            LabError: what made the run fail; so is whatever else did, as it was raised.
            TimeoutError: the time is up; the run goes on.
            ConfigError: called by a step of the run, which would wait for itself.
        """
        if self.live is None:
            return self
        if self.live.control.here:
            raise ConfigError(f"run {self.name!r} cannot wait for itself: wait outside of its step")
        try:
            if not self.live.ended.wait(timeout):
                raise TimeoutError(f"run {self.name!r} goes on after {timeout} seconds")
        except KeyboardInterrupt:
            self.stop()
        if self.live.error is not None:
            raise self.live.error
        return self

    def branch(self, checkpoint: str, **changes: Any) -> "Run":  # noqa: ANN401 (settings)
        """Begin another run from one of this one's checkpoints.

        Steps are counted on, so that the two can be compared; with the same settings the branch
        repeats what this run did.

        Args:
            checkpoint: its name, such as ``step-40``; behind one that the run did not name itself
                steps are counted from 1.
            changes: settings that are to differ; ``name`` names the new run.

        Raises:
            ConfigError: a setting is unknown or out of range, or the data is not at hand.
            CheckpointError: there is no such checkpoint.
        """
        if self.live is None or self.live.links is None:
            raise self._no_data(f"branch=({self.name!r}, {checkpoint!r})")
        return self.live.links.branch(checkpoint, **changes)

    # Showing.

    def view(self, beside: Sequence["Run"] = ()) -> "RunView":
        """The live dashboard.

        Args:
            beside: further runs to draw over it.
        """
        # Imported when something is shown: it takes a moment, and needs the notebook's packages.
        from xorl_lab.widgets import RunView  # noqa: PLC0415

        readers = [self.reader, *(run.reader for run in beside)]
        if self.live is None or not self.going:
            return RunView(readers)
        view = RunView(readers, self.live.control)
        self.live.views.append(view)
        if not self.going:  # it ended meanwhile
            self.live.settle(self.live.error)
        return view

    def show(self, beside: Sequence["Run"] = ()) -> None:
        """Display the dashboard in this cell."""
        view = self.view(beside)
        view.show()
        if self._over():  # by now: the picture stays when the notebook is saved
            view.finish()
            view.close()

    def figure(self, *names: str, beside: Sequence["Run"] = ()) -> "go.Figure":
        """A figure to explore and to export.

        Args:
            names: metrics; none = the usual ones.
            beside: further runs to draw over it.
        """
        from xorl_lab.widgets import figure  # noqa: PLC0415

        return figure([self.reader, *(r.reader for r in beside)], names)

    def export(self, path: str | Path) -> Path:
        """Write the dashboard to one HTML file that needs no network."""
        from xorl_lab.widgets import export_html  # noqa: PLC0415

        export_html([self.reader], Path(path))
        return Path(path)

    def __repr__(self) -> str:
        info = self.info
        steps = f", {info.total} steps" if info.total else ""
        return f"Run({info.name!r}: {info.kind} of {info.model}{steps})"

    def _ipython_display_(self) -> None:
        self.show()

    def _no_data(self, argument: str) -> ConfigError:
        kind = self.info.kind
        if kind not in ("grpo", "sft"):
            return ConfigError(
                f"run {self.name!r} was a loop of its caller's own: begin it again with a client "
                "made from one of its checkpoints, see lab.checkpoints"
            )
        return ConfigError(
            f"the data of run {self.name!r} is not at hand here: call lab.{kind} with the same "
            f"data and {argument}"
        )

    def _over(self) -> bool:
        return not self.going and self.status.state not in ("running", "paused")

    def _steered(self) -> Control:
        if self.live is None or not self.going:
            state = self.status.state
            raise ConfigError(
                f"run {self.name!r} is {state} and not driven from here, so it cannot be steered: "
                "resume it, or steer it where it was begun"
            )
        return self.live.control
