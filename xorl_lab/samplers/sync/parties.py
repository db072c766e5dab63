"""The two sides of a weight sync, as far as it knows them."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from xorl_lab.engine.versions import WeightsVersion
    from xorl_lab.samplers.sglang.controls import PauseMode, ServerFacts


class Server(Protocol):
    """What is asked of a server; see :class:`xorl_lab.samplers.sglang.controls.SGLang`."""

    url: str

    def require(  # noqa: D102 (as are all below)
        self, *, vocab_size: int, model: str, rank: int | None, context_length: int | None = None
    ) -> "ServerFacts": ...
    def weight_version(self) -> str: ...  # noqa: D102
    def name_weights(self, version: str) -> None: ...  # noqa: D102
    def load_adapter(self, name: str, folder: Path, *, again: bool = ...) -> None: ...  # noqa: D102
    def unload_adapter(self, name: str) -> None: ...  # noqa: D102
    def update_from_disk(self, folder: Path, version: str) -> None: ...  # noqa: D102
    def update_from_tensors(  # noqa: D102
        self,
        tensors: "Iterable[tuple[str, torch.Tensor]]",
        version: str,
        bucket_bytes: int = ...,
    ) -> int: ...
    def pause(self, mode: "PauseMode" = ...) -> None: ...  # noqa: D102
    def resume(self) -> None: ...  # noqa: D102
    def flush_cache(self, patience: float = ...) -> None: ...  # noqa: D102
    def score(self, tokens: Sequence[int], adapter: str | None = None) -> list[float]: ...  # noqa: D102
    def close(self) -> None: ...  # noqa: D102


class Trainer(Protocol):
    """What is asked of the trainer; see :class:`xorl_lab.samplers.sync.handover.Handover`."""

    @property
    def text(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def vocab_size(self) -> int: ...  # noqa: D102
    @property
    def dtype(self) -> str: ...  # noqa: D102
    @property
    def base(self) -> "WeightsVersion": ...  # noqa: D102
    def score(self, version: "WeightsVersion") -> list[float]: ...  # noqa: D102
    def write_adapter(self, version: "WeightsVersion", folder: Path) -> int: ...  # noqa: D102
    def write_model(self, version: "WeightsVersion", folder: Path) -> int: ...  # noqa: D102
    def tensors(self, version: "WeightsVersion") -> "Iterable[tuple[str, torch.Tensor]]": ...  # noqa: D102
