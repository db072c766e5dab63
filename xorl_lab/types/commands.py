"""What a widget may ask of whoever owns runs and models; a widget knows no more."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from xorl_lab.types.results import SampledSequence


class RunCommands(Protocol):
    """Steering of one run: methods return at once, and it obeys at its next stopping point."""

    def pause(self) -> None:
        """Halt before the next step."""
        ...

    def resume(self) -> None:
        """Go on after a pause."""
        ...

    def step(self) -> None:
        """Run one more step, then pause."""
        ...

    def stop(self) -> None:
        """End the run, inside a step if need be; what is finished stays, and is saved."""
        ...

    def set(self, name: str, value: float) -> None:
        """Change a knob from the next step on.

        Raises:
            ConfigError: there is no such knob, or the value is out of its range.
        """
        ...

    def knobs(self) -> Mapping[str, float]:
        """What can be changed while the run goes on, such as ``learning_rate``, and its value."""
        ...


class InspectorCommands(Protocol):
    """What an inspector of rollouts may ask.  Calls may take seconds; any thread may make them."""

    def pieces(self, tokens: Sequence[int]) -> Sequence[bytes]:
        """The bytes of each token; joined they are the UTF-8 text, special tokens written out."""
        ...

    def special(self) -> Collection[int]:
        """Ids of the special tokens, such as the end of a sequence."""
        ...

    def weights(self) -> Sequence[str]:
        """Names of the weights that can go on from a token: ``base``, ``RUN``, ``RUN/step-40``."""
        ...

    def resample(
        self, rollout: int, position: int, weights: str, params: Mapping[str, Any]
    ) -> Sequence[SampledSequence]:
        """Continue a recorded rollout from one of its tokens.

        Args:
            rollout: its id in the store.
            position: tokens of the completion that stay, 0 to its length.
            weights: one of :meth:`weights`.
            params: ``n``, ``max_tokens``, ``temperature``, ``seed``, each optional.

        Returns:
            The tokens that follow the ones that stay, with logprobs, entropies and alternatives.

        Raises:
            LabError: nothing can be drawn, in words.
        """
        ...


class CheckpointCommands(Protocol):
    """What a browser of checkpoints may ask.  Calls may take seconds; any thread may make them.

    Checkpoints are named as in :meth:`xorl_lab.Lab.compare`: ``base``, ``RUN/step-40``.
    """

    def tree(self) -> Mapping[str, Any]:
        """All checkpoints, their lineage and the disk, as JSON values; cheap.

        ``checkpoints``: a list of ``name``, ``run``, ``step``, ``kind``, ``parent`` (name or None),
        ``megabytes``, ``created`` and ``expires`` (seconds since the epoch, or None), ``metrics``
        at the time, ``settings``, ``held`` (why it cannot be deleted now, or "").
        ``runs``: a list of ``name``, ``kind``, ``state``, ``parent`` (checkpoint's name or None),
        ``model``.
        ``disk``: ``used`` and ``budget`` in bytes; ``budget`` may be None.
        """
        ...

    def load(self, checkpoint: str) -> str:
        """Make a training client with these weights; how to come by it, in words."""
        ...

    def branch(self, checkpoint: str, changes: Mapping[str, Any]) -> str:
        """Begin a run from it; the run's name."""
        ...

    def sample(
        self, checkpoint: str, prompt: str, params: Mapping[str, Any]
    ) -> Sequence[SampledSequence]:
        """Completions of one prompt; ``params`` as of :meth:`InspectorCommands.resample`."""
        ...

    def compare(
        self, left: str, right: str, prompts: Sequence[str], params: Mapping[str, Any]
    ) -> Sequence[Mapping[str, Any]]:
        """The same prompts with the same seeds under both.

        Per prompt ``prompt`` and for ``left`` and ``right`` a mapping of ``pieces`` (text of each
        token), ``logprobs`` under itself and ``other`` (the same tokens under the other weights),
        nats; and ``divergence``: position of the first token that differs, None if none does.
        """
        ...

    def delete(self, checkpoint: str) -> None:
        """Delete it from the disk; what was branched off it stays."""
        ...

    def export(self, checkpoint: str, folder: str, form: str) -> str:
        """Write it as ``peft`` adapter or ``merged`` Hugging Face model; the path."""
        ...


class LossCommands(Protocol):
    """What an explorer of losses may ask.  Calls take milliseconds; any thread may make them."""

    def forms(self) -> Sequence[Mapping[str, Any]]:
        """The losses and what each can be told, as JSON values.

        Per loss ``name``, ``about`` (one line), ``formula`` (text) and ``params``: of each
        ``name``, ``kind`` (``number``, ``flag`` or ``choice``), ``default``, and of a number
        ``low``, ``high``, ``step`` (of its slider; more may be valid) and ``on`` (the value with
        which it is switched on, None if it cannot be off), of a choice ``choices``.
        """
        ...

    def curve(
        self, loss: str, params: Mapping[str, Any], token: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """One token under a loss, at every ratio and at one, as JSON values.

        Args:
            loss: its name.
            params: of the loss; those left out have their defaults.
            token: ``ratio``, ``advantage``, ``old_logprob``, ``rollout_gap``, ``ref_gap`` (nats),
                each optional.

        Returns:
            ``loss``, ``params`` and ``token``, filled in; ``needs``: names of its inputs;
            ``ratios``, ``values``, ``gradients``: the curve; ``regions``: a list of ``kind``
            (``clipped`` or ``masked``), ``low`` and ``high`` (ratios); ``mark``: value, gradient
            and terms at the token's ratio; ``metrics``: of a batch of this token alone.

        Raises:
            LabError: something is out of its range, in words.
        """
        ...
