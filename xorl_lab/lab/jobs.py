"""What a run does: a recipe with its data and settings, ready to be begun at any step."""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, cast

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
_LENGTHS = ("steps", "epochs")


@dataclass(frozen=True, slots=True)
class Task:
    """A recipe with its data."""

    kind: str
    """``grpo`` or ``sft``."""
    recipe: type[GrpoSettings] | type[SftSettings]
    """Its settings."""
    begin: Begin
    """The recipe, bound to its data."""
    examine: Callable[["TrainingClient", Settings], list[str]]
    """What stands in the way of learning, in sentences."""
    data: str
    """Fingerprint of the data, so that a run is not resumed on others."""
    examples: int
    """Number of prompts or examples."""
    prompts: object = None
    """What is to be answered, as it was given; None where nothing is sampled."""

    def job(self, before: Mapping[str, Any], chosen: Mapping[str, Any]) -> "Job":
        """The task with its settings.

        Args:
            before: settings of the run that it comes from.
            chosen: those that the caller names.

        Raises:
            ConfigError: a setting is unknown, missing or out of range.
        """
        # A length in steps takes the place of one in epochs, and the other way round.
        anew = {k: None for k in _LENGTHS if k in before and set(_LENGTHS) & set(chosen)}
        return Job(self, build(self.recipe, {**before, **anew, **chosen}))


@dataclass(frozen=True, slots=True)
class Job:
    """One recipe with everything that it needs but the model."""

    task: Task
    """What is to be done, with which data."""
    settings: Settings
    """How; checked already."""

    @property
    def total(self) -> int:
        """Number of steps."""
        if isinstance(self.settings, SftSettings):
            return self.settings.step_count(self.task.examples)
        return self.settings.steps

    def steps(
        self,
        client: "TrainingClient",
        done: int = 0,
        live: Callable[[Settings], Settings] | None = None,
    ) -> Iterator[StepRecord]:
        """Begin behind ``done`` steps; arguments are checked before this returns."""
        return self.task.begin(client, done=done, live=live, **_shallow(self.settings))

    def check(self, tokenizer: object, context_length: int) -> None:
        """Check data and settings against a model, without one to train.

        Raises:
            ConfigError, DataError: they do not fit.
        """
        self.steps(cast("TrainingClient", _Measures(tokenizer, context_length)))

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

    def described(self) -> dict[str, Any]:
        """What the store keeps of it."""
        return {
            "recipe": asdict(self.settings),
            "data": self.task.data,
            "examples": self.task.examples,
        }


@dataclass(frozen=True, slots=True)
class _Measures:
    """What a recipe asks of a client before its first step."""

    tokenizer: object
    context_length: int

    def get_tokenizer(self) -> object:
        return self.tokenizer


def grpo_task(prompts: object, reward: RewardFunction, held_out: object) -> Task:
    """Reinforcement learning; see :func:`xorl_lab.recipes.grpo.grpo`."""
    given, unseen = _kept(prompts), _kept(held_out)

    def begin(client: "TrainingClient", **further: Any) -> Iterator[StepRecord]:  # noqa: ANN401
        return grpo(client, given, reward, held_out=unseen, **further)

    def examine(client: "TrainingClient", chosen: Settings) -> list[str]:
        assert isinstance(chosen, GrpoSettings)
        return preflight.check_grpo(client, given, reward, chosen)

    return Task("grpo", GrpoSettings, begin, examine, *_marked(given), given)


def sft_task(examples: Any, held_out: Any) -> Task:  # noqa: ANN401 (the recipe checks them)
    """Supervised fine-tuning; see :func:`xorl_lab.recipes.sft.sft`."""
    given, unseen = _kept(examples), _kept(held_out)

    def begin(client: "TrainingClient", **further: Any) -> Iterator[StepRecord]:  # noqa: ANN401
        return sft(client, given, held_out=unseen, **further)

    def examine(client: "TrainingClient", chosen: Settings) -> list[str]:
        return preflight.check_rate(chosen.learning_rate, lora=client.lora is not None)

    return Task("sft", SftSettings, begin, examine, *_marked(given))


def _shallow(settings: Settings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in settings.__dataclass_fields__}


def _kept(data: Any) -> Any:  # noqa: ANN401 (whatever the recipe takes, which checks it)
    """The data as rows of our own, which a later change, or reading them twice, does not touch."""
    if hasattr(data, "to_dict") and hasattr(data, "columns"):
        return data.to_dict("records")
    if data is None or isinstance(data, str | bytes | Mapping) or not hasattr(data, "__iter__"):
        return data
    return list(data)


def _marked(rows: Any) -> tuple[str, int]:  # noqa: ANN401
    """Fingerprint and number of rows."""
    digest = hashlib.blake2b(_text(rows).encode(errors="replace"), digest_size=8)
    return digest.hexdigest(), len(rows) if isinstance(rows, list) else 0


def _text(value: object) -> str:
    """The same for the same value, in another process too."""
    if isinstance(value, Mapping):
        pairs = sorted(
            (str(k), _text(v)) for k, v in cast("Mapping[object, object]", value).items()
        )
        return f"{{{pairs}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, cast('Sequence[object]', value)))}]"
    if callable(getattr(value, "tolist", None)):  # of numpy, torch or pandas
        return _text(cast("Any", value).tolist())
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
