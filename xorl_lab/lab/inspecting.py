"""What an inspector of rollouts may ask of a lab."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from xorl_lab.errors import StoreError
from xorl_lab.lab import active
from xorl_lab.lab.weights import BASE
from xorl_lab.store import Reader
from xorl_lab.types import SampledSequence

if TYPE_CHECKING:
    from xorl_lab.lab.bench import Bench


class Inspector:
    """Answers an inspector of some runs; an :class:`~xorl_lab.types.commands.InspectorCommands`.

    Args:
        readers: of the runs, all of one store.
        bench: of the lab.
    """

    def __init__(self, readers: Sequence[Reader], bench: "Bench") -> None:
        self._readers = list(readers)
        self._bench = bench

    def pieces(self, tokens: Sequence[int]) -> Sequence[bytes]:
        """The bytes of each token; joined they are the text."""
        return self._bench.pieces(tokens)

    def special(self) -> Collection[int]:
        """Ids of the special tokens."""
        return self._bench.pieces.special

    def weights(self) -> Sequence[str]:
        """The base model, runs under way here, and what is saved, the newest first."""
        weights, model = self._bench.weights, self._bench.model
        store = weights.store
        models = {info.name: info.model for info in store.runs()}
        going = [run.name for run in active.others(store.path) if run.info.model == model]
        saved = [
            s.reference
            for s in reversed(weights.everything())
            if (s.state.get("base_model") or models.get(s.run)) == model
        ]
        return [BASE, *sorted(going), *saved]

    def resample(
        self, rollout: int, position: int, weights: str, params: Mapping[str, Any]
    ) -> Sequence[SampledSequence]:
        """Continue a recorded rollout; see :class:`~xorl_lab.types.commands.InspectorCommands`."""
        reader = self._reader_of(rollout)
        return self._bench.resample(reader, rollout, position, weights, params).sequences

    def _reader_of(self, rollout: int) -> Reader:
        """The run of a rollout; ids are those of the store, so that only one has it."""
        for reader in self._readers[:-1]:
            with suppress(StoreError):
                reader.rollout(rollout)
                return reader
        return self._readers[-1]
