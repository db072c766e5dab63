"""What a run does: a recipe with its data and settings, ready to be begun at any step."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from xorl_lab.errors import ConfigError
from xorl_lab.lab import preflight
from xorl_lab.recipes.grpo import GrpoSettings, grpo
from xorl_lab.recipes.rewards import RewardFunction
from xorl_lab.recipes.settings import build
from xorl_lab.recipes.sft import SftSettings, sft
from xorl_lab.types import StepRecord

if TYPE_CHECKING:
    from xorl_lab.client import TrainingClient

Settings = GrpoSettings | SftSettings
Begin = Callable[..., Iterator[StepRecord]]
"""Called with client, ``done``, ``live`` and the settings by name."""
KNOBS = ("learning_rate", "grad_clip_norm", "weight_decay", "temperature", "kl_coef")
"""Settings that may change while a run goes on, where the recipe has them."""


@dataclass(frozen=True, slots=True)
class Job:
    """One recipe with everything that it needs but the model."""

    kind: str
    """``grpo`` or ``sft``."""
    settings: Settings
    """Checked already."""
    begin: Begin
    """The recipe, bound to its data."""
    examine: Callable[["TrainingClient", Settings], list[str]]
    """What stands in the way of learning, in sentences."""
    data: str
    """Fingerprint of the data, so that a run is not resumed on others."""
    examples: int
    """Number of prompts or examples."""

    @property
    def total(self) -> int:
        """Number of steps."""
        if isinstance(self.settings, SftSettings):
            return self.settings.step_count(self.examples)
        return self.settings.steps

    def steps(
        self, client: "TrainingClient", done: int, live: Callable[[Settings], Settings]
    ) -> Iterator[StepRecord]:
        """Begin behind ``done`` steps; arguments are checked before this returns."""
        return self.begin(client, done=done, live=live, **_shallow(self.settings))

    def knobs(self) -> dict[str, float]:
        """What may change on the way, and its value."""
        mine = _shallow(self.settings)
        return {k: float(mine[k]) for k in KNOBS if k in mine}

    def with_knobs(self, knobs: Mapping[str, float]) -> Settings:
        """The settings with some of them changed.

        Raises:
            ConfigError: a value is out of range.
        """
        return replace(self.settings, **knobs)

    def changed(self, changes: Mapping[str, Any]) -> "Job":
        """The same on the same data with other settings.

        Raises:
            ConfigError: a setting is unknown or out of range.
        """
        if not changes:
            return self
        settings = build(type(self.settings), {**_shallow(self.settings), **changes})
        return replace(self, settings=settings)

    def described(self) -> dict[str, Any]:
        """What the store keeps of it."""
        return {"recipe": asdict(self.settings), "data": self.data, "examples": self.examples}


def grpo_job(
    prompts: object,
    reward: RewardFunction,
    held_out: object,
    settings: Mapping[str, Any],
) -> Job:
    """Reinforcement learning; see :func:`xorl_lab.recipes.grpo.grpo`.

    Raises:
        ConfigError: a setting is unknown or out of range.
    """

    def begin(client: "TrainingClient", **further: Any) -> Iterator[StepRecord]:  # noqa: ANN401
        return grpo(client, prompts, reward, held_out=held_out, **further)

    def examine(client: "TrainingClient", chosen: Settings) -> list[str]:
        assert isinstance(chosen, GrpoSettings)
        return preflight.check_grpo(client, prompts, reward, chosen)

    rows = _rows(prompts)
    return Job("grpo", build(GrpoSettings, settings), begin, examine, _mark(rows), len(rows))


def sft_job(
    examples: Sequence[object], held_out: Sequence[object] | None, settings: Mapping[str, Any]
) -> Job:
    """Supervised fine-tuning; see :func:`xorl_lab.recipes.sft.sft`.

    Raises:
        ConfigError: a setting is unknown or out of range.
    """

    def begin(client: "TrainingClient", **further: Any) -> Iterator[StepRecord]:  # noqa: ANN401
        return sft(client, rows, held_out=held_out, **further)

    def examine(client: "TrainingClient", chosen: Settings) -> list[str]:
        return preflight.check_rate(chosen.learning_rate, lora=client.lora is not None)

    rows = _rows(examples)
    return Job("sft", build(SftSettings, settings), begin, examine, _mark(rows), len(rows))


def require_same_data(job: Job, stored: Mapping[str, Any], name: str) -> None:
    """Raise a ConfigError if a run that is to be resumed was begun on other data."""
    if stored.get("data") not in (None, job.data):
        raise ConfigError(
            f"run {name!r} was begun on other data ({stored.get('examples')} examples, now "
            f"{job.examples}): pass the same to resume it, or branch from one of its checkpoints"
        )


def _shallow(settings: Settings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in settings.__dataclass_fields__}


def _rows(data: Any) -> list[Any]:  # noqa: ANN401 (whatever the recipe takes, which checks it)
    if hasattr(data, "to_dict") and hasattr(data, "columns"):
        return data.to_dict("records")
    return list(data) if not isinstance(data, str | Mapping) and hasattr(data, "__iter__") else []


def _mark(rows: Sequence[Any]) -> str:
    text = json.dumps(rows, sort_keys=True, default=repr)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
