"""A run as a person holds it: watch it, steer it, look into it, branch from it."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xorl_lab.errors import ConfigError
from xorl_lab.lab.control import Control
from xorl_lab.lab.live import Links, Live
from xorl_lab.store import Reader, RunInfo, RunStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd
    import plotly.graph_objects as go

    from xorl_lab.client import TrainingClient
    from xorl_lab.lab.bench import Bench
    from xorl_lab.lab.diagnosis.result import Diagnosis
    from xorl_lab.lab.resample import Resampled
    from xorl_lab.lab.rescored import Rescored
    from xorl_lab.recipes.rewards import RewardFunction
    from xorl_lab.store import Condition
    from xorl_lab.widgets import RolloutInspector, RunView

_LOOK = 0.5
"""Seconds between looks at a run of another process."""


class Run:
    """One run, live or finished.  As the last value of a cell it shows itself.

    While it goes on that is the live dashboard; afterwards a picture that a saved notebook keeps,
    and :meth:`view` gives the dashboard to explore.

    Made by :class:`~xorl_lab.lab.lab.Lab`.

    Args:
        reader: of its record.
        live: what stands behind it; None if another process drove it.
        bench: what its lab lends it; None for a record alone.
    """

    def __init__(
        self, reader: Reader, live: Live | None = None, bench: "Bench | None" = None
    ) -> None:
        self.reader = reader
        """Its record."""
        self.live = live
        """What stands behind it in this process, if anything."""
        self._bench = bench

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
        """The trained model; loaded from the last checkpoint where another run was begun since.

        Raises:
            ConfigError: it is not in this process: resume the run first.
            CheckpointError: it was let go, and its last checkpoint is gone or damaged.
        """
        if self.live is None:
            raise ConfigError(
                f"the model of run {self.name!r} is not in this process: resume the run, or load "
                "one of its checkpoints"
            )
        if self.live.client is None:
            assert self.live.links is not None
            self.live.client = self.live.links.load()
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
                is not at hand; a run under way goes on.
        """
        if self.going and not changes:
            self._steered().resume()
            return self
        links = self._links()
        if links is None:
            raise self._no_data(f"resume={self.name!r}")
        return links.again(**changes)

    def stop(self, wait: bool = True) -> "Run":
        """End the run.  A step under way is given up unless it has changed the weights already.

        A reward function that is being called is not interrupted: the run ends when it returns.

        Args:
            wait: return once it has ended and is saved.

        Raises:
            ConfigError: it goes on in another process: stop it there.
        """
        if self.live is not None and self.going:
            self.live.control.stop()
            # A step that asks for its own end, in its reward function say, cannot wait for it.
            if wait and not self.live.control.here:
                self.live.ended.wait()
        elif not self._over():
            self._steered()  # raises
        return self

    def wait(self, timeout: float | None = None) -> "Run":
        """Wait for the end of the run; Ctrl-C, or the kernel's interrupt, stops it.

        A run of another process is waited for too, and not stopped by that.

        Args:
            timeout: seconds; None = as long as it takes.

        Raises:
            LabError: what made the run fail; so is whatever else did, as it was raised.
            TimeoutError: the time is up; the run goes on.
            ConfigError: called by a step of the run, which would wait for itself.
        """
        if self.live is None:
            return self._await_elsewhere(timeout)
        if self.going and self.live.control.here:
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
        links = self._links()
        if links is None:
            raise self._no_data(f"branch=({self.name!r}, {checkpoint!r})")
        return links.branch(checkpoint, **changes)

    # Looking into it.

    def resample(
        self,
        rollout: int,
        position: int,
        checkpoint: str | None = None,
        n: int = 1,
        **params: Any,  # noqa: ANN401
    ) -> "Resampled":
        """Continue a recorded rollout from one of its tokens, under any weights.

        Args:
            rollout: its id, from the index of :meth:`rollouts`.
            position: tokens of the completion that stay, 0 to its length.
            checkpoint: as of :meth:`xorl_lab.Lab.compare`; None = this run's present or last
                weights.
            n: continuations.
            params: ``max_tokens``, ``temperature``, ``stop`` (as the run drew, unless given),
                ``top_p``, ``top_k``, ``seed`` (0).

        Raises:
            ConfigError, DataError: something is out of range, or does not fit the context.
            StoreError, CheckpointError: there is no such rollout, or no such weights.
        """
        bench = self._lent("weights to draw from")
        chosen = self.name if checkpoint is None else checkpoint
        return bench.resample(self.reader, rollout, position, chosen, {"n": n, **params})

    def rescore(
        self,
        reward: "RewardFunction",
        where: "Sequence[Condition]" = (),
        *,
        prompts: object = None,
        quiet: bool = False,
    ) -> "Rescored":
        """Run another reward function over the recorded rollouts; nothing is sampled again.

        The function gets what it would have got in training; an environment is told what the model
        wrote, as long as it answers what was recorded.  Advantages are those of whole groups, of
        which the result shows the chosen rollouts.

        Args:
            reward: as for :meth:`xorl_lab.Lab.grpo`.
            where: which rollouts, as of :meth:`xorl_lab.store.Reader.rollouts`; all by default.
            prompts: what the run was given, for a function that asks for the prompt where that was
                a conversation, or for columns that JSON cannot hold; known if this lab began it.
            quiet: show no progress.

        Raises:
            ConfigError: the function asks for something that is not there.
            StoreError: there are no such rollouts, or a condition is none.
        """
        from xorl_lab.lab.rescore import rescore  # noqa: PLC0415 (as seldom as it is used)
        from xorl_lab.recipes.rewards import yields  # noqa: PLC0415 (as above)

        links = self._links()
        given = links.prompts if prompts is None and links is not None else prompts
        needed = given is not None or yields(reward)
        tokenizer = self._lent("a tokenizer").tokenizer if needed else None
        return rescore(self.reader, reward, where, given=given, tokenizer=tokenizer, quiet=quiet)

    def diagnose(
        self,
        rollouts: int = 16,
        *,
        step: int | None = None,
        temperature: float | None = None,
        sampler_dtype: str | None = None,
        quiet: bool = False,
    ) -> "Diagnosis":
        """Why do trainer and sampler disagree?

        Some recorded completions are evaluated again under control, one thing varied at a time:
        temperature, top-p and top-k, precision, version of the weights, adapter, positions,
        template, dropout, shape of the batch.

        Args:
            rollouts: the most completions.
            step: the step; None = the newest one behind a checkpoint that has a gap.
            temperature: at which it was drawn; None = as the run's settings say.
            sampler_dtype: in which the sampler is known to compute; None = as the trainer.
            quiet: show no progress.

        Returns:
            The cause, ``healthy`` if there is none, in words and with the evidence.

        Raises:
            ConfigError: an argument is out of range, or the model is not to be had.
        """
        from xorl_lab.lab.diagnosis.diagnose import Question  # noqa: PLC0415 (as seldom as it is used)

        question = Question(
            rollouts=rollouts, step=step, temperature=temperature, sampler_dtype=sampler_dtype
        )
        return self._lent("the models").diagnose(self, question, quiet)

    def inspect(self) -> "RolloutInspector":
        """The inspector of its rollouts, token by token."""
        from xorl_lab.widgets import RolloutInspector  # noqa: PLC0415 (as of view)

        bench = self._bench
        return RolloutInspector([self.reader], None if bench is None else bench.inspector(self))

    # Showing.

    def view(self, beside: "Run | Sequence[Run]" = ()) -> "RunView":
        """The live dashboard.

        Args:
            beside: a further run to draw over it, or several.

        Raises:
            ConfigError: ``beside`` holds something else.
        """
        # Imported when something is shown: it takes a moment, and needs the notebook's packages.
        from xorl_lab.widgets import RunView  # noqa: PLC0415

        readers = self._readers(beside)
        if self.live is None or not self.going:
            return RunView(readers)
        view = RunView(readers, self.live.control)
        self.live.views.append(view)
        view.on_close = self.live.forget
        if not self.going:  # it ended meanwhile
            self.live.settle(self.live.error)
        return view

    def show(self, beside: "Run | Sequence[Run]" = ()) -> None:
        """Display the dashboard in this cell; ``beside`` as of :meth:`view`."""
        view = self.view(beside)
        if self._over():
            view.close()  # what is shown then is the picture, which a saved notebook keeps
        view.show()

    def figure(self, *names: str, beside: "Run | Sequence[Run]" = ()) -> "go.Figure":
        """A figure to explore and to export.

        Args:
            names: metrics; none = the usual ones.
            beside: a further run to draw over it, or several.

        Raises:
            ConfigError: there is no such metric, or ``beside`` holds something else.
        """
        from xorl_lab.widgets import figure  # noqa: PLC0415

        return figure(self._readers(beside), names)

    def export(self, path: str | Path) -> Path:
        """Write the dashboard to one HTML file that needs no network.

        Args:
            path: of the file, ``.html``; missing folders are made.

        Raises:
            ConfigError: the file is to be of another kind.
            OSError: it cannot be written.
        """
        from xorl_lab.widgets import export_html  # noqa: PLC0415

        target = Path(path).expanduser()
        if target.suffix.lower() not in (".html", ".htm"):
            raise ConfigError(
                f"path is {str(path)!r}: end it in .html; for tables take run.metrics, "
                "run.rollouts() or run.reader.to_parquet(folder)"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        return export_html([self.reader], target)

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

    def _await_elsewhere(self, timeout: float | None) -> "Run":
        begun = time.monotonic()
        while not self._over():
            if timeout is not None and time.monotonic() - begun > timeout:
                raise TimeoutError(f"run {self.name!r} goes on after {timeout} seconds")
            time.sleep(_LOOK)
        return self

    def _links(self) -> Links | None:
        """What may follow, if the data is at hand: begun by this process, or by this lab before."""
        if self.live is not None and self.live.links is not None:
            return self.live.links
        return None if self._bench is None else self._bench.links.get(self.info.id)

    def _lent(self, what: str) -> "Bench":
        if self._bench is None:
            raise ConfigError(
                f"run {self.name!r} was not taken from a lab, which would have {what}: use "
                f"Lab(...).run({self.name!r})"
            )
        return self._bench

    def _readers(self, beside: "Run | Sequence[Run]") -> list[Reader]:
        runs = [beside] if isinstance(beside, Run) else list(beside)
        for run in runs:
            if not isinstance(run, Run):
                raise ConfigError(f"beside has {run!r}: pass runs, such as lab.run({run!r})")
        return [self.reader, *(run.reader for run in runs)]

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
