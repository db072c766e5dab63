"""The lab: a model with trainer, sampler and record, and the runs on it."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xorl_lab.checkpoints import catalog, names
from xorl_lab.client import ServiceClient
from xorl_lab.engine import engine
from xorl_lab.errors import CheckpointError, ConfigError
from xorl_lab.home import home
from xorl_lab.lab import card, compare, console, launch
from xorl_lab.lab.autosave import step_of
from xorl_lab.lab.jobs import Job, grpo_job, require_same_data, sft_job
from xorl_lab.lab.run import Links, Run
from xorl_lab.lab.track import Track
from xorl_lab.recipes.rewards import RewardFunction
from xorl_lab.recipes.settings import suggest
from xorl_lab.store import Parent, Reader, Store
from xorl_lab.types.checkpoints import Checkpoint

if TYPE_CHECKING:
    import pandas as pd

    from xorl_lab.client import SamplingClient, TrainingClient

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
SAVE_EVERY, KEEP = 10, 10
"""Steps between two checkpoints, and how many of a run are kept."""
_TAKEN = ("base_model", "rank", "model_id", "alpha", "seed")


@dataclass(frozen=True, slots=True)
class Conduct:
    """How a run is conducted, whatever it does."""

    name: str | None = None
    """Of the run and of its model; None = the recipe's, numbered."""
    resume: str | None = None
    """A run to go on with, from its last checkpoint."""
    branch: tuple[str, str] | None = None
    """A run and one of its checkpoints to begin from."""
    background: bool | None = None
    """None = in a live notebook."""
    preflight: bool = True
    """Try the task on a few prompts first, and warn of what stands in the way."""
    save_every: int = SAVE_EVERY
    """Steps between checkpoints; 0 = at the end only."""
    keep: int = KEEP
    """Checkpoints to keep; 0 = all."""
    concurrent: bool = False
    """Leave another run of this lab that is under way alone, rather than stop it."""
    quiet: bool = False
    """Print nothing where there is no dashboard."""


class Lab:
    """A model to try, train and compare, and the record of all that was done with it.

    Args:
        model: name of the base model, or a local folder.
        rank: inner dimension of the adapter; None trains the full weights.
        alpha: the adapter's update is scaled by alpha / rank; None = 32.
        seed: fixes the adapter's initial values.
        folder: of record and checkpoints; None = ``$XORL_LAB_HOME`` or ``~/.xorl_lab``.
        device: ``auto``, ``cpu``, ``cuda`` or ``mps``.
        dtype: ``auto``, ``float32`` or ``bfloat16``.
        base_url: of a training server; None = ``$XORL_BASE_URL``, and without that this process.
        adapter: further arguments of ``ServiceClient.create_lora_training_client``.

    Raises:
        ConfigError: the model or an argument is unknown, or out of range.
        StoreError: the record cannot be read or written.
    """

    def __init__(  # noqa: PLR0913
        self,
        model: str = DEFAULT_MODEL,
        *,
        rank: int | None = 32,
        alpha: float | None = None,
        seed: int = 0,
        folder: str | Path | None = None,
        device: str = "auto",
        dtype: str = "auto",
        base_url: str | None = None,
        **adapter: Any,  # noqa: ANN401 (checked below)
    ) -> None:
        self.model = model
        self.folder = Path(folder or home()).expanduser()
        self._adapter: dict[str, Any] = _checked(adapter) | {"alpha": alpha, "seed": seed}
        self._rank = rank
        self._where = (device, dtype)
        self._service = ServiceClient(base_url, home=self.folder, device=device, dtype=dtype)
        self._store = Store(self.folder)
        self._base = self._service.create_sampling_client(base_model=model)

    @property
    def service(self) -> ServiceClient:
        """Makes clients on the same checkpoints, for loops of one's own."""
        return self._service

    # Training.

    def grpo(
        self,
        prompts: object,
        reward: RewardFunction,
        *,
        held_out: object = None,
        **settings: Any,  # noqa: ANN401 (checked by the recipe and by Conduct)
    ) -> Run:
        """Reinforcement learning from a reward function.

        Args:
            prompts: strings, conversations, or a DataFrame or dicts with a column ``prompt``.
            reward: called by name with what it asks for of ``prompt``, ``completion``, ``tokens``,
                ``stop_reason`` and the other columns; returns a number, or a dict of numbers.
            held_out: prompts never trained on, for evaluation.
            settings: fields of :class:`~xorl_lab.recipes.grpo.GrpoSettings` and of
                :class:`Conduct`.

        Returns:
            The run: at once in a live notebook, at its end elsewhere.

        Raises:
            ConfigError, DataError: an argument does not fit; nothing was begun.
        """
        conduct, rest = _parted(settings)
        job = grpo_job(prompts, reward, held_out, self._stored(conduct) | rest)
        return self._begin(job, conduct, rest)

    def sft(
        self,
        examples: Sequence[object],
        *,
        held_out: Sequence[object] | None = None,
        **settings: Any,  # noqa: ANN401 (checked by the recipe and by Conduct)
    ) -> Run:
        """Supervised fine-tuning on examples.

        Args:
            examples: conversations, or dicts with ``tokens`` and ``weights``.
            held_out: examples never trained on.
            settings: fields of :class:`~xorl_lab.recipes.sft.SftSettings` and of :class:`Conduct`.

        Returns:
            The run: at once in a live notebook, at its end elsewhere.

        Raises:
            ConfigError, DataError: an argument does not fit; nothing was begun.
        """
        conduct, rest = _parted(settings)
        job = sft_job(examples, held_out, self._stored(conduct) | rest)
        return self._begin(job, conduct, rest)

    def track(
        self,
        name: str,
        client: "TrainingClient",
        *,
        settings: Mapping[str, Any] | None = None,
        knobs: Mapping[str, float] | None = None,
        save_every: int = SAVE_EVERY,
    ) -> Track:
        """Record a loop of one's own: dashboard, pause and stop, checkpoints.

        Args:
            name: of the run.
            client: the model that the loop trains.
            settings: for the record.
            knobs: numbers that may be changed on the way: read them from ``run.knobs``.
            save_every: steps between checkpoints; 0 = at the end only.

        Returns:
            To be used in ``with``; see :class:`~xorl_lab.lab.track.Track`.
        """
        return Track(self._store, client, name, dict(settings or {}), dict(knobs or {}), save_every)

    # Looking.

    def run(self, name: str) -> Run:
        """A run by name or id; live if it is under way in this process.

        Raises:
            StoreError: there is none; lists those there are.
        """
        reader = self._store.run(name)
        for run in launch.others(self._store.path):
            if run.info.id == reader.info.id:
                return run
        return Run(reader)

    def runs(self) -> "pd.DataFrame":
        """All runs, the newest first, with how they stand."""
        return self._store.frame()

    def checkpoints(self, run: str | None = None) -> "pd.DataFrame":
        """The checkpoints on the disk.

        Args:
            run: of this run alone.
        """
        import pandas as pd  # noqa: PLC0415 (takes a second)

        found = self._listed(run)
        return pd.DataFrame([_row(c) for c in found], columns=list(_COLUMNS))

    def sample(
        self,
        prompt: object,
        n: int = 1,
        *,
        checkpoint: str = "base",
        **params: Any,  # noqa: ANN401
    ) -> compare.Samples:
        """Try the model.

        Args:
            prompt: a string, or a list of messages.
            n: completions.
            checkpoint: ``base``, or as of :meth:`compare`.
            params: ``max_tokens`` (64), ``temperature`` (1), ``top_p``, ``top_k``, ``stop``,
                ``seed``.
        """
        return compare.sample(self._weights(checkpoint), prompt, n, params)

    def compare(
        self,
        checkpoints: Sequence[str],
        prompts: object,
        **params: Any,  # noqa: ANN401
    ) -> compare.Comparison:
        """The same prompts answered by several weights, side by side.

        Args:
            checkpoints: ``base``; ``RUN`` = its present or last weights; ``RUN/step-40``; or a
                checkpoint's name alone where only one run has it.
            prompts: as for :meth:`grpo`.
            params: as of :meth:`sample`; greedy unless ``temperature`` says otherwise.
        """
        return compare.compare({c: self._weights(c) for c in checkpoints}, prompts, params)

    def __repr__(self) -> str:
        return f"Lab({self.model!r})"

    def _repr_html_(self) -> str:
        return card.markup(self._facts())

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: ANN401
        del cycle
        printer.text(card.text(self._facts()))

    # How it is done.

    def _begin(self, job: Job, conduct: Conduct, chosen: Mapping[str, Any]) -> Run:
        others = [] if conduct.concurrent else launch.others(self._store.path)
        total = job.total
        if conduct.resume is not None:
            reader = self._store.run(conduct.resume)
            require_same_data(job, reader.info.settings, reader.info.name)
            for other in others:
                other.stop()
            done, path = self._last_checkpoint(reader.info.name, reader.status().step)
            job = job.changed(_turned(reader, done, chosen))
            total = job.total
            writer = self._store.resume(reader.info.id, after=done, total=total)
        else:
            for other in others:
                other.stop()
            parent, done, path = self._parent(conduct)
            writer = self._store.create(
                name=names.check_model_id(conduct.name or f"{job.kind}-1"),
                kind=job.kind,
                model=self.model,
                settings=job.described() | {"adapter": self._adapter | {"rank": self._rank}},
                total=total,
                parent=parent,
            )
        try:
            client = self._client(writer.info.name, path)
        except BaseException as error:
            writer.status("failed", str(error))
            writer.close()
            raise
        reader = self._store.run(writer.info.id)
        start = launch.Start(
            client,
            self._service.create_rest_client(writer.info.name),
            done,
            preflight=conduct.preflight and not done,
            save_every=conduct.save_every,
            keep=conduct.keep,
        )
        live = console.in_live_notebook()
        background = live if conduct.background is None else conduct.background
        told = console.teller(total, quiet=conduct.quiet or live or background)
        link = Links(self._again(job, conduct, reader), self._branching(job, conduct, reader))
        return launch.launch(
            job, reader, writer, start, link, told=told, background=background, show=live
        )

    def _again(self, job: Job, conduct: Conduct, reader: Reader) -> Callable[..., Run]:
        """What takes a run up again."""
        onward = replace(conduct, resume=reader.info.name, branch=None, name=None)
        return lambda **changes: self._begin(job.changed(changes), onward, changes)

    def _branching(self, job: Job, conduct: Conduct, reader: Reader) -> Callable[..., Run]:
        """What begins another run from a checkpoint of one."""
        run = reader.info.name

        def branch(checkpoint: str, **changes: Any) -> Run:  # noqa: ANN401
            own = {k: v for k, v in changes.items() if k in Conduct.__dataclass_fields__}
            origin = {"name": f"{run}-branch", "branch": (run, checkpoint), "resume": None}
            rest = {k: v for k, v in changes.items() if k not in own}
            return self._begin(job.changed(rest), replace(conduct, **{**origin, **own}), rest)

        return branch

    def _client(self, name: str, path: str | None) -> "TrainingClient":
        if path is not None:
            return self._service.create_training_client_from_state_with_optimizer(
                path, self.model, model_id=name
            )
        if self._rank is None:
            return self._service.create_training_client(self.model, name)
        return self._service.create_lora_training_client(
            self.model, self._rank, model_id=name, **self._adapter
        )

    def _stored(self, conduct: Conduct) -> dict[str, Any]:
        """The settings of the run that is resumed or branched from."""
        origin = conduct.resume or (conduct.branch[0] if conduct.branch else None)
        if origin is None:
            return {}
        return dict(self._store.run(origin).info.settings.get("recipe", {}))

    def _parent(self, conduct: Conduct) -> tuple[Parent | None, int, str | None]:
        if conduct.branch is None:
            return None, 0, None
        run, checkpoint = conduct.branch
        info = self._store.run(run).info
        path = self._path(info.name, checkpoint)
        done = step_of(checkpoint) or 0
        return Parent(info.id, checkpoint, done), done, path

    def _last_checkpoint(self, run: str, recorded: int) -> tuple[int, str | None]:
        """The latest step of a run that is both recorded and saved; the folders are the truth."""
        found: list[tuple[int, str]] = []
        for name, path in self._paths(run).items():
            step = step_of(name)
            if step is not None and step <= recorded:
                found.append((step, path))
        return max(found, default=(0, None))

    def _paths(self, run: str) -> dict[str, str]:
        saved = [(names.Address.parse(c.path), c.path) for c in self._listed(run)]
        return {address.name: path for address, path in saved if address.kind == "weights"}

    def _listed(self, run: str | None) -> list[Checkpoint]:
        if self._service.root is not None:
            return catalog.listing(self._service.root, run)
        return self._service.create_rest_client().list_checkpoints(run).result().checkpoints

    def _path(self, run: str, checkpoint: str) -> str:
        found = self._paths(run)
        if checkpoint not in found:
            raise CheckpointError(
                "checkpoint.not_found",
                f"run {run!r} has no checkpoint {checkpoint!r}{suggest(checkpoint, found)}",
            )
        return found[checkpoint]

    def _weights(self, reference: str) -> "SamplingClient":
        """The sampling client of ``base``, ``RUN``, ``RUN/NAME`` or ``NAME``."""
        if reference == "base":
            return self._base
        for run in launch.others(self._store.path):
            if run.name == reference:
                return run.client.save_weights_and_get_sampling_client()
        known = [info.name for info in self._store.runs()]
        if "/" in reference:
            run, name = reference.split("/", 1)
            return self._saved(self._path(run, name))
        if reference in known:
            _, path = self._last_checkpoint(reference, self._store.run(reference).status().step)
            if path is None:
                raise ConfigError(f"run {reference!r} has no checkpoint yet: wait, or name another")
            return self._saved(path)
        having = {run: p for run in known if (p := self._paths(run).get(reference))}
        if len(having) != 1:
            what = "no run has" if not having else f"runs {', '.join(having)} have"
            raise ConfigError(
                f"{what} a checkpoint {reference!r}: name one as RUN/CHECKPOINT, or base"
            )
        return self._saved(next(iter(having.values())))

    def _saved(self, path: str) -> "SamplingClient":
        return self._service.create_sampling_client(model_path=path)

    def _facts(self) -> dict[str, str]:
        root = self._service.root
        loaded = engine.get(self.model, *self._where).loaded if root is not None else None
        return card.facts(loaded, root, self._store, self.folder, self._rank)


_COLUMNS = ("run", "name", "step", "kind", "megabytes", "created", "path")


def _row(checkpoint: Checkpoint) -> dict[str, Any]:
    address = names.Address.parse(checkpoint.path)
    return {
        "run": address.model_id,
        "name": address.name,
        "step": step_of(address.name),
        "kind": address.kind,
        "megabytes": round((checkpoint.size_bytes or 0) / 1e6, 1),
        "created": checkpoint.time,
        "path": checkpoint.path,
    }


def _turned(reader: Reader, done: int, chosen: Mapping[str, Any]) -> dict[str, float]:
    """The knobs as they stood behind a step, but for settings that are chosen anew."""
    events = [e for e in reader.events() if e.kind == "knob" and (e.step or 0) <= done]
    return {e.data["name"]: e.data["new"] for e in events if e.data["name"] not in chosen}


def _parted(settings: Mapping[str, Any]) -> tuple[Conduct, dict[str, Any]]:
    """What is for the conduct of the run, and what is for the recipe."""
    mine = {k: v for k, v in settings.items() if k in Conduct.__dataclass_fields__}
    return Conduct(**mine), {k: v for k, v in settings.items() if k not in mine}


def _checked(adapter: Mapping[str, Any]) -> dict[str, Any]:
    """Raise a ConfigError for arguments that creating an adapter does not take."""
    known = inspect.signature(ServiceClient.create_lora_training_client).parameters
    names_ = [n for n in known if n not in ("self", *_TAKEN)]
    for name in adapter:
        if name not in names_:
            raise ConfigError(f"Lab has no argument {name!r}{suggest(name, names_)}")
    return dict(adapter)
