"""Beginning a run, or taking one up again: name, record, model, and what may follow."""

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from xorl_lab.engine import engine
from xorl_lab.errors import CheckpointError, ConfigError, StoreError
from xorl_lab.lab import active, console, launch, origin
from xorl_lab.lab.autosave import Autosave
from xorl_lab.lab.bench import Bench
from xorl_lab.lab.budget import Budget
from xorl_lab.lab.conduct import Conduct, parted
from xorl_lab.lab.jobs import Job, Task
from xorl_lab.lab.live import Links
from xorl_lab.lab.origin import Origin
from xorl_lab.lab.run import Run
from xorl_lab.store import Reader, Writer

if TYPE_CHECKING:
    from xorl_lab.client import TrainingClient
    from xorl_lab.engine.models import LoadedModel


class Starter:
    """Begins the runs of one lab.

    Args:
        model: name of the base model.
        shape: of what is trained; see :func:`~xorl_lab.lab.adapter.checked_shape`.
        where: device and dtype, as the lab was given them.
        bench: of the lab; told what may follow each run.
        budget: for checkpoints on the disk; None = none.
    """

    def __init__(
        self,
        model: str,
        shape: Mapping[str, Any],
        where: tuple[str, str],
        bench: Bench,
        *,
        budget: Budget | None,
    ) -> None:
        self._model = model
        self._shape = shape
        self._where = where
        self._bench = bench
        self._budget = budget
        self._weights = bench.weights
        self._service = bench.weights.service
        self._store = bench.weights.store
        self._launched: weakref.WeakSet[Run] = weakref.WeakSet()

    def begin(
        self, task: Task, conduct: Conduct, chosen: Mapping[str, Any], instead: str | None = None
    ) -> Run:
        """Begin, resume or branch.

        Args:
            task: recipe and data.
            conduct: how.
            chosen: settings of the recipe that the caller names.
            instead: name of a run that is ended for this one though others may go on beside it.

        Raises:
            ConfigError, DataError, StoreError, CheckpointError: something does not fit; nothing
                was begun, and what was under way still is.
        """
        begun, job = self._planned(task, conduct, chosen)
        going = active.others(self._store.path)
        if conduct.concurrent:
            going = [run for run in going if run.name == instead]
        name = begun.reader.info.name if begun.reader else self._free_name(conduct.name, task.kind)
        ended = active.end(going, f"run {name!r} was begun")
        if ended:
            begun, job = self._planned(task, conduct, chosen)  # what they have saved counts
        self._release()
        if begun.reader is not None:
            _require_idle(begun.reader)
            client = self._client(begun.reader.info.name, begun)
            run = begun.reader.info.id
            writer = self._store.resume(run, after=begun.done, total=job.total)
        else:
            writer = self._create(job, conduct, begun)
            client = self._client_of_new(writer, begun)
        for other in ended:
            if other != name:
                text = f"run {other!r} was stopped for this one: concurrent=True lets both go on"
                writer.event("log", text, step=begun.done or None)
        run = self._launch(job, conduct, begun, writer, client)
        self._launched.add(run)
        return run

    def _planned(
        self, task: Task, conduct: Conduct, chosen: Mapping[str, Any]
    ) -> tuple[Origin, Job]:
        """Where to begin and what to do.

        Raises:
            ConfigError, DataError, StoreError, CheckpointError: it cannot be done.
        """
        begun = Origin()
        if conduct.resume is not None:
            begun = origin.resumed(self._store, self._weights, conduct.resume)
        elif conduct.branch is not None:
            begun = origin.branched(self._store, self._weights, *conduct.branch)
        source = begun.reader or (begun.parent and self._store.run(begun.parent.run or ""))
        if source:
            data = task.data if begun.reader else None
            origin.require_fit(source, task.kind, self._model, data)
        job = task.job(begun.settings, chosen)
        loaded = self.loaded()
        if loaded is not None:
            job.check(loaded.tokenizer, loaded.context_length)
        _require_steps(job, begun)
        return begun.chosen(chosen), job

    def _create(self, job: Job, conduct: Conduct, begun: Origin) -> Writer:
        return self._store.create(
            name=self._free_name(conduct.name, job.task.kind),
            kind=job.task.kind,
            model=self._model,
            settings=job.described() | {"adapter": begun.adapter or self._shape},
            total=job.total,
            parent=begun.parent,
        )

    def _client_of_new(self, writer: Writer, begun: Origin) -> "TrainingClient":
        try:
            return self._client(writer.info.name, begun)
        except BaseException:  # nothing was begun
            writer.close()
            self._store.delete(writer.info.id)
            raise

    def _launch(
        self, job: Job, conduct: Conduct, begun: Origin, writer: Writer, client: "TrainingClient"
    ) -> Run:
        live = console.in_live_notebook()
        background = live if conduct.background is None else conduct.background
        name = writer.info.name
        autosave = Autosave(
            client,
            self._service.create_rest_client(name),
            writer,
            every=conduct.save_every,
            keep=conduct.keep,
            saved=begun.done if begun.earlier else 0,
            earlier=begun.earlier,
            budget=self._budget,
        )
        start = launch.Start(
            client,
            begun,
            autosave,
            preflight=conduct.preflight and not begun.done,
            paused=conduct.paused and background,
            background=background,
            show=live,
            tell=console.Teller(job.total, quiet=conduct.quiet or live or background),
        )
        links = Links(
            self._again(job.task, conduct, name),
            self._branching(job.task, conduct, name),
            partial(self._load, name),
            job.task.prompts,
        )
        self._bench.links[writer.info.id] = links
        return launch.launch(job, writer, start, links, self._bench)

    def _again(self, task: Task, conduct: Conduct, run: str) -> Callable[..., Run]:
        """What takes a run up again."""

        def again(**changes: Any) -> Run:  # noqa: ANN401
            onward = {"name": None, "branch": None, "paused": False, "resume": run}
            return self.begin(task, *_changed(task, conduct, onward, changes), instead=run)

        return again

    def _branching(self, task: Task, conduct: Conduct, run: str) -> Callable[..., Run]:
        """What begins another run from a checkpoint of one."""

        def branch(checkpoint: str, **changes: Any) -> Run:  # noqa: ANN401
            onward = {"name": f"{run}-branch", "branch": (run, checkpoint)}
            onward |= {"paused": False, "resume": None}
            return self.begin(task, *_changed(task, conduct, onward, changes))

        return branch

    def _release(self) -> None:
        """Let the models of runs go that have ended and are saved."""
        for run in list(self._launched):
            last = self._weights.last(run.reader)
            if not run.going and last is not None and last.step == run.status.step:
                self._launched.discard(run)
                assert run.live is not None
                run.live.release()

    def _load(self, name: str) -> "TrainingClient":
        """The model as a run left it.

        Raises:
            CheckpointError: it has no checkpoint any more.
        """
        last = self._weights.last(self._store.run(name))
        if last is None:
            raise CheckpointError(
                "checkpoint.not_found",
                f"the model of run {name!r} was let go when another run was begun, and its "
                "checkpoints are gone: pass concurrent=True to keep several in memory",
            )
        return self._client(name, Origin(path=last.entry.path))

    def fresh(self, name: str) -> "TrainingClient":
        """A client of the untrained model."""
        return self._client(name, Origin())

    def _client(self, name: str, begun: Origin) -> "TrainingClient":
        if begun.path is not None:
            return self._service.create_training_client_from_state_with_optimizer(
                begun.path, self._model, model_id=name
            )
        shape = dict(begun.adapter or self._shape)
        if shape["rank"] is None:
            return self._service.create_training_client(self._model, name)
        return self._service.create_lora_training_client(self._model, model_id=name, **shape)

    def _free_name(self, name: str | None, kind: str) -> str:
        """A name that neither the record nor a folder of checkpoints knows."""
        taken = {info.name for info in self._store.runs()}
        root = self._service.root
        number = 1
        while True:
            stem = f"{kind}-{number}" if name is None else name
            free = stem if name is None or number == 1 else f"{stem}-{number}"
            if free not in taken and (root is None or not (root / free).exists()):
                return free
            number += 1

    def loaded(self) -> "LoadedModel | None":
        """The model, if this process holds it."""
        return engine.get(self._model, *self._where).loaded if self._service.root else None


def _changed(
    task: Task, conduct: Conduct, onward: Mapping[str, Any], changes: Mapping[str, Any]
) -> tuple[Conduct, dict[str, Any]]:
    """The conduct of a run that follows another, and the settings that are to differ."""
    before = {name: getattr(conduct, name) for name in Conduct.__dataclass_fields__}
    return parted({**before, **onward, **changes}, task.recipe)


def _require_idle(reader: Reader) -> None:
    """Raise a StoreError if someone is writing a run."""
    state = reader.status().state
    if state in ("running", "paused"):
        raise StoreError(
            f"run {reader.info.name!r} is {state} elsewhere, so it cannot be resumed here: stop it "
            "there first"
        )


def _require_steps(job: Job, begun: Origin) -> None:
    """Raise a ConfigError if there is nothing left to do."""
    if begun.reader is not None:
        status = begun.reader.status()
        name, done = f"run {begun.reader.info.name!r}", max(begun.done, status.step)
        over = status.state == "finished"
    else:
        name, done, over = "the checkpoint", begun.done, True
    if job.total < done or (job.total == done and over and done):
        raise ConfigError(
            f"{name} has {done} steps behind it, and {job.total} are asked for in all: pass "
            f"steps > {done}"
        )
