"""What a browser of checkpoints may ask, and what a lab does with its checkpoints."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xorl_lab.checkpoints import catalog
from xorl_lab.errors import CheckpointError, ConfigError
from xorl_lab.lab import compare, exports
from xorl_lab.lab.bench import Bench
from xorl_lab.lab.holding import in_use, look
from xorl_lab.lab.resample import TOP
from xorl_lab.lab.tree import tree
from xorl_lab.lab.weights import BASE, Saved
from xorl_lab.recipes.prompts import encode_prompts
from xorl_lab.types import ModelInput, SampledSequence

if TYPE_CHECKING:
    from xorl_lab.client import TrainingClient

NAME_LENGTH = 100
"""Characters of a loaded model's name, before anything is put behind it."""


class Desk:
    """The checkpoints of a lab; a :class:`~xorl_lab.types.commands.CheckpointCommands`.

    Args:
        bench: of the lab.
        where: device and dtype, as the lab was given them.
        fresh: makes a client of the untrained model, under a name.
        budget: bytes that checkpoints may take; None = any.
    """

    def __init__(
        self,
        bench: Bench,
        where: tuple[str, str],
        fresh: Callable[[str], "TrainingClient"],
        budget: int | None,
    ) -> None:
        self._bench = bench
        self._weights = bench.weights
        self._where = where
        self._fresh = fresh
        self._budget = budget
        self._given: set[str] = set()
        self.client: TrainingClient | None = None
        """What :meth:`load` made last."""

    def tree(self) -> dict[str, Any]:
        """All checkpoints, their lineage and the disk, as JSON values."""
        return tree(self._weights, self._budget)

    def load(self, checkpoint: str) -> str:
        """Make it the weights of :attr:`client`; how to use them, in words."""
        self.client = self.training(checkpoint)
        return f"{checkpoint} is loaded: client = lab.loaded trains it"

    def training(self, checkpoint: str) -> "TrainingClient":
        """A client that trains from a checkpoint on, with its optimizer if it was saved.

        The trained model gets a name of its own, so that the checkpoint's run stays as it is.

        Args:
            checkpoint: as of :meth:`xorl_lab.Lab.compare`.

        Raises:
            ConfigError, StoreError, CheckpointError: there is none, or it cannot be loaded.
        """
        if checkpoint == BASE:
            return self._fresh(self._model_id(BASE))
        saved = self._weights.find(checkpoint)
        service = self._weights.service
        make = (
            service.create_training_client_from_state_with_optimizer
            if saved.resumable
            else service.create_training_client_from_state
        )
        return make(saved.entry.path, model_id=self._model_id(saved.reference))

    def branch(self, checkpoint: str, changes: Mapping[str, Any]) -> str:
        """Begin a run from a checkpoint, in the background; its name.

        Args:
            checkpoint: ``RUN/NAME``.
            changes: settings that are to differ.

        Raises:
            ConfigError: the data of its run is not at hand, or a setting does not fit.
            CheckpointError: there is no such checkpoint, or training cannot go on from it.
        """
        saved = self._weights.find(checkpoint)
        if not saved.resumable:
            raise CheckpointError(
                "checkpoint.no_optimizer",
                f"{checkpoint} is for sampling alone: branch from one that a run saved by itself",
            )
        infos = {info.name: info for info in self._weights.store.runs()}
        info = infos.get(saved.run)
        links = None if info is None else self._bench.links.get(info.id)
        if links is None:
            how = f"load it with lab.load({checkpoint!r})"
            if info is not None and info.kind in ("grpo", "sft"):
                pair = (saved.run, saved.address.name)
                how = f"call lab.{info.kind} with the data to train on and branch={pair}"
            raise ConfigError(f"the data of {saved.run!r} is not at hand in this kernel: {how}")
        onward = {"background": True, "quiet": True, **changes}
        return links.branch(saved.address.name, **onward).name

    def sample(
        self, checkpoint: str, prompt: str, params: Mapping[str, Any]
    ) -> Sequence[SampledSequence]:
        """Completions of one prompt, with alternatives and entropies."""
        chosen = {**compare.DEFAULTS, **params}
        n = chosen.pop("n", 1)
        given = compare.settings_of(chosen, compare.SAMPLING)
        client = self._weights.client(checkpoint)
        (encoded,) = encode_prompts([prompt], client.get_tokenizer())
        tokens = ModelInput.from_ints(encoded.tokens)
        future = client.sample(tokens, given, n, top_logprobs=TOP, entropies=True)
        return future.result().sequences

    def compare(
        self, left: str, right: str, prompts: Sequence[str], params: Mapping[str, Any]
    ) -> Sequence[Mapping[str, Any]]:
        """The same prompts with the same seeds under both."""
        clients = {name: self._weights.client(name) for name in dict.fromkeys((left, right))}
        given = {name: value for name, value in params.items() if name != "n"}
        found = compare.compare(clients, list(prompts), given)

        def side(mine: str, other: str, prompt: int) -> dict[str, Any]:
            pieces = found.pieces[mine][prompt]
            judged = found.logprobs[other].get(mine)  # of another base model: nothing to say
            return {
                "pieces": pieces,
                "logprobs": found.logprobs[mine][mine][prompt],
                "other": judged[prompt] if judged else [float("nan")] * len(pieces),
            }

        parts = found.divergence(left, right)
        return [
            {
                "prompt": prompt,
                "left": side(left, right, i),
                "right": side(right, left, i),
                "divergence": parts[i],
            }
            for i, prompt in enumerate(found.prompts)
        ]

    def delete(self, checkpoint: str) -> None:
        """Delete a checkpoint from the disk.

        What was branched off it, and what is loaded already, stays.

        Args:
            checkpoint: ``RUN/NAME``, or a name that one run alone has.

        Raises:
            ConfigError: it is in use, or a run is named and no checkpoint of it.
            StoreError, CheckpointError: there is no such checkpoint.
        """
        saved = self._one(checkpoint)
        held = in_use(*look(self._weights))
        if why := held.get(saved.entry.path):
            raise ConfigError(f"{checkpoint} cannot be deleted now: {why}")
        rest = self._weights.service.create_rest_client(saved.address.model_id)
        which = f"{saved.address.kind}/{saved.address.name}"
        answer = rest.delete_checkpoint(which).result()
        if not answer.success:
            raise CheckpointError(
                "checkpoint.not_deleted", f"{checkpoint} was not deleted: {answer.error}"
            )

    def expire(self, checkpoint: str, seconds: float | None) -> None:
        """Let a checkpoint expire.

        Args:
            checkpoint: as of :meth:`delete`.
            seconds: from now; None = never.

        Raises:
            ConfigError: ``seconds`` is none, or a server keeps the checkpoint.
            StoreError, CheckpointError: there is no such checkpoint.
        """
        if seconds is not None and (
            isinstance(seconds, bool)
            or not isinstance(seconds, int | float)
            or not 0 <= seconds < float("inf")
        ):
            raise ConfigError(f"seconds is {seconds!r}: pass a number >= 0, or None for never")
        saved = self._one(checkpoint)
        catalog.expire(self._root("when a checkpoint expires is set"), saved.address, seconds)

    def export(self, checkpoint: str, folder: str, form: str) -> str:
        """Write a checkpoint as ``peft`` adapter or ``merged`` Hugging Face model; the path."""
        saved = self._weights.find(checkpoint)
        root = self._root("the weights are")
        return str(exports.export(root, saved.address, Path(folder), form, self._where))

    def _one(self, checkpoint: str) -> Saved:
        """One checkpoint that is named itself, rather than as the last of its run."""
        saved = self._weights.find(checkpoint)
        if checkpoint == saved.run and checkpoint != saved.address.name:
            raise ConfigError(
                f"{checkpoint!r} is a run: name one of its checkpoints, such as {saved.reference!r}"
            )
        return saved

    def _root(self, what: str) -> Path:
        root = self._weights.service.root
        if root is None:
            raise ConfigError(f"{what} where the checkpoints are kept, on the server: do it there")
        return root

    def _model_id(self, reference: str) -> str:
        """A name that no folder of checkpoints has, no run, and no client of ours."""
        stem = re.sub(r"[^A-Za-z0-9_-]", "-", reference)[:NAME_LENGTH]
        root = self._weights.service.root
        taken = self._given | {info.name for info in self._weights.store.runs()}
        number = 1
        while True:
            name = f"{stem}-loaded" if number == 1 else f"{stem}-loaded-{number}"
            if name not in taken and (root is None or not (root / name).exists()):
                self._given.add(name)
                return name
            number += 1
