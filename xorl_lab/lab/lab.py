"""The lab: a model with trainer, sampler and record, and the runs on it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xorl_lab.client import ServiceClient
from xorl_lab.errors import ConfigError
from xorl_lab.home import home
from xorl_lab.lab import active, card, compare
from xorl_lab.lab.adapter import checked_shape
from xorl_lab.lab.bench import Bench
from xorl_lab.lab.budget import Budget, parse_bytes
from xorl_lab.lab.conduct import SAVE_EVERY, parted
from xorl_lab.lab.desk import Desk
from xorl_lab.lab.jobs import grpo_task, sft_task
from xorl_lab.lab.run import Run
from xorl_lab.lab.starter import Starter
from xorl_lab.lab.track import Track
from xorl_lab.lab.weights import BASE, Weights
from xorl_lab.recipes.rewards import RewardFunction
from xorl_lab.store import Store

if TYPE_CHECKING:
    import pandas as pd

    from xorl_lab.client import TrainingClient
    from xorl_lab.widgets import CheckpointBrowser

DEFAULT_MODEL = "SmolLM2-135M-Instruct"


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
        sampler: what draws completions: None = ``embedded``, in this process; ``sglang``, a server
            that is started for the model; or the URL of a SGLang server that serves the same model.
        sampler_key: bearer token of that server; None = ``$XORL_SAMPLER_KEY``.
        base_url: of a training server; None = ``$XORL_BASE_URL``, and without that this process.
        disk_budget: bytes that all checkpoints may take, or a size such as ``"5GB"``; over it the
            oldest that runs saved by themselves are deleted.  None = any, and nothing is.
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
        sampler: str | None = None,
        sampler_key: str | None = None,
        base_url: str | None = None,
        disk_budget: float | str | None = None,
        **adapter: Any,  # noqa: ANN401 (checked below)
    ) -> None:
        self.model = model
        self.folder = Path(folder or home()).expanduser()
        self._sampler = sampler
        self._shape = checked_shape(rank, {"alpha": alpha, "seed": seed}, adapter)
        self._service = ServiceClient(
            base_url,
            home=self.folder,
            device=device,
            dtype=dtype,
            sampler=sampler,
            sampler_key=sampler_key,
        )
        self._store = Store(self.folder)
        base = self._service.create_sampling_client(base_model=model)
        self._weights = Weights(self._service, self._store, base)
        limit = None if disk_budget is None else parse_bytes(disk_budget)
        self._budget = None if limit is None else Budget(limit, self._weights)
        self._bench = Bench(model, self._weights, self._context, (device, dtype))
        self._starter = Starter(
            model, self._shape, (device, dtype), self._bench, budget=self._budget
        )
        self._desk = Desk(self._bench, (device, dtype), self._starter.fresh, limit)

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
                ``stop_reason`` and the other columns; returns a number, or a dict of numbers.  One
                that yields plays several turns: see :mod:`xorl_lab.recipes.environments`.
            held_out: prompts never trained on, for evaluation.
            settings: fields of :class:`~xorl_lab.recipes.grpo.GrpoSettings` and of
                :class:`~xorl_lab.lab.conduct.Conduct`.

        Returns:
            The run: at once in a live notebook, at its end elsewhere.

        Raises:
            ConfigError, DataError: an argument does not fit; nothing was begun.
        """
        task = grpo_task(prompts, reward, held_out)
        return self._starter.begin(task, *parted(settings, task.recipe))

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
            settings: fields of :class:`~xorl_lab.recipes.sft.SftSettings` and of
                :class:`~xorl_lab.lab.conduct.Conduct`.

        Returns:
            The run: at once in a live notebook, at its end elsewhere.

        Raises:
            ConfigError, DataError: an argument does not fit; nothing was begun.
        """
        task = sft_task(examples, held_out)
        return self._starter.begin(task, *parted(settings, task.recipe))

    def track(
        self,
        name: str,
        client: "TrainingClient",
        *,
        settings: Mapping[str, Any] | None = None,
        knobs: Mapping[str, float] | None = None,
        save_every: int = SAVE_EVERY,
        quiet: bool = False,
    ) -> Track:
        """Record a loop of one's own: dashboard, pause and stop, checkpoints.

        Args:
            name: of the run.
            client: the model that the loop trains.
            settings: for the record.
            knobs: numbers that may be changed on the way: read them from ``run.knobs``.
            save_every: steps between checkpoints; 0 = at the end only.
            quiet: show neither dashboard nor progress; :meth:`run` has it later.

        Returns:
            To be used in ``with``; see :class:`~xorl_lab.lab.track.Track`.

        Raises:
            ConfigError: the name, a knob or ``save_every`` is none.
        """
        return Track(
            self._bench,
            client,
            name,
            dict(settings or {}),
            dict(knobs or {}),
            save_every,
            self._budget,
            quiet,
        )

    # Looking.

    def run(self, name: str) -> Run:
        """A run by name or id; live if it is under way in this process.

        Raises:
            StoreError: there is none; lists those there are.
        """
        reader = self._store.run(name)
        for run in active.others(self._store.path):
            if run.info.id == reader.info.id:
                return run
        return Run(reader, bench=self._bench)

    def runs(self) -> "pd.DataFrame":
        """All runs, the newest first, with how they stand."""
        return self._store.frame()

    def checkpoints(self, run: str | None = None) -> "pd.DataFrame":
        """The checkpoints on the disk.

        Args:
            run: of this run alone.

        Raises:
            StoreError: there is no such run.
        """
        return self._weights.frame(run)

    def sample(
        self,
        prompt: object,
        n: int = 1,
        *,
        checkpoint: str = BASE,
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
        return compare.sample(self._weights.client(checkpoint), prompt, n, params)

    def compare(
        self,
        checkpoints: Sequence[str],
        prompts: object,
        *,
        rewards: RewardFunction | None = None,
        **params: Any,  # noqa: ANN401
    ) -> compare.Comparison:
        """The same prompts answered by several weights, side by side.

        Args:
            checkpoints: ``base``; ``RUN`` = its present or last weights; ``RUN/step-40``; or a
                checkpoint's name alone where only one run has it.
            prompts: as for :meth:`grpo`.
            rewards: a reward function to be called for every answer.
            params: as of :meth:`sample`; greedy unless ``temperature`` says otherwise.
        """
        if isinstance(checkpoints, str):
            raise ConfigError(f"checkpoints is {checkpoints!r}: pass a list, [{checkpoints!r}]")
        clients = {c: self._weights.client(c) for c in checkpoints}
        return compare.compare(clients, prompts, params, rewards)

    def browse(self) -> "CheckpointBrowser":
        """The browser of all checkpoints."""
        # Imported when something is shown: it takes a moment, and needs the notebook's packages.
        from xorl_lab.widgets import CheckpointBrowser  # noqa: PLC0415

        return CheckpointBrowser(self._desk)

    # Checkpoints.

    def load(self, checkpoint: str) -> "TrainingClient":
        """A client that trains from a checkpoint on, for loops of one's own.

        Args:
            checkpoint: as of :meth:`compare`; of the optimizer too, if that was saved.

        Raises:
            ConfigError, StoreError, CheckpointError: there is none, or it cannot be loaded.
        """
        return self._desk.training(checkpoint)

    @property
    def loaded(self) -> "TrainingClient | None":
        """What the browser of checkpoints loaded last; None before that."""
        return self._desk.client

    def delete(self, checkpoint: str) -> None:
        """Delete a checkpoint.  What was branched off it stays, and what is loaded already too.

        Args:
            checkpoint: ``RUN/NAME``, or a name that one run alone has.

        Raises:
            ConfigError: it is in use.
            StoreError, CheckpointError: there is no such checkpoint.
        """
        self._desk.delete(checkpoint)

    def expire(self, checkpoint: str, seconds: float | None) -> None:
        """Let a checkpoint expire: it is deleted when a lab is next made behind that time.

        Args:
            checkpoint: as of :meth:`delete`.
            seconds: from now; None = never.

        Raises:
            ConfigError: ``seconds`` is none.
            StoreError, CheckpointError: there is no such checkpoint.
        """
        self._desk.expire(checkpoint, seconds)

    def export(self, checkpoint: str, folder: str | Path, form: str = "peft") -> Path:
        """Write a checkpoint for others to load, with its tokenizer.

        Args:
            checkpoint: as of :meth:`compare`.
            folder: where to; new or empty.
            form: ``peft`` for an adapter, or ``merged`` for one model with all weights, which
                ``AutoModelForCausalLM.from_pretrained`` loads.

        Returns:
            The folder.

        Raises:
            ConfigError: the form does not fit, or the folder is taken.
            StoreError, CheckpointError: there is no such checkpoint, or it is damaged.
        """
        return Path(self._desk.export(checkpoint, str(folder), form))

    def __repr__(self) -> str:
        return f"Lab({self.model!r})"

    def _repr_html_(self) -> str:
        return card.markup(self._facts())

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: ANN401
        del cycle
        printer.text(card.text(self._facts()))

    def _context(self) -> int | None:
        loaded = self._starter.loaded()
        return None if loaded is None else loaded.context_length

    def _facts(self) -> dict[str, str]:
        rank = self._shape["rank"]
        facts = card.facts(
            self._starter.loaded(), self._service.root, self._store, self.folder, rank
        )
        return facts if self._sampler is None else facts | {"sampler": self._sampler}
