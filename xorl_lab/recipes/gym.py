"""Tasks of the package reasoning-gym: some hundred generators of questions that a program can mark.

prompts, reward = reasoning_gym("letter_counting", size=50, seed=1)
lab.grpo(prompts, reward, steps=20, max_tokens=6, learning_rate=1e-3)
"""

import difflib
import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from xorl_lab.errors import ConfigError
from xorl_lab.recipes.settings import check_integer

INSTALL = "pip install 'xorl-lab[tasks]'"
"""What brings the package."""


class Gym(NamedTuple):
    """Questions and what marks the answers."""

    prompts: list[dict[str, Any]]
    """Rows with ``prompt`` (a conversation), ``question``, ``answer``, and ``entry``, which is all
    that the generator knows."""
    reward: "Marker"
    """The reward function."""


def reasoning_gym(
    name: str,
    size: int = 100,
    seed: int = 0,
    *,
    system: str | None = None,
    partial_credit: bool = False,
    **config: Any,  # noqa: ANN401 (the generator checks it)
) -> Gym:
    """Questions of one generator, and a reward function for answers to them.

    Args:
        name: of the generator, such as ``letter_counting`` or ``syllogism``.
        size: number of questions.
        seed: chooses them; other questions for evaluation have another seed.
        system: what the system says before each question, such as ``Reply with one number.``
        partial_credit: pay what the generator's own marking gives to answers that are not right.
            Some give a hundredth to any answer: among equals that decides, whatever it is worth.
        config: of the generator, such as ``min_words=2``.

    Raises:
        ConfigError: the package is missing, there is no such generator, or the configuration does
            not fit it.

    Source: Stojanovski et al. 2025, "Reasoning Gym".
    """
    check_integer("size", size, 1)
    check_integer("seed", seed, 0)
    package = _package()
    known = _names(package)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"choose from {', '.join(known)}"
        raise ConfigError(f"reasoning-gym has no generator {name!r}: {hint}")
    try:
        dataset: Any = package.create_dataset(name, size=size, seed=seed, **config)
        entries: list[dict[str, Any]] = [dataset[i] for i in range(size)]
    except Exception as error:  # whatever its own checks raise
        raise ConfigError(
            f"the generator {name!r} does not take {config or 'this'}: {type(error).__name__}: "
            f"{error}"
        ) from error
    first = [] if system is None else [{"role": "system", "content": system}]
    rows = [
        {
            "prompt": [*first, {"role": "user", "content": str(entry["question"])}],
            "question": str(entry["question"]),
            "answer": str(entry["answer"]),
            "entry": entry,
        }
        for entry in entries
    ]
    return Gym(rows, Marker(dataset, partial_credit=partial_credit))


class Marker:
    """Marks answers as a generator of reasoning-gym does.

    Args:
        dataset: of the package.
        partial_credit: as of :func:`reasoning_gym`.
    """

    def __init__(self, dataset: Any, *, partial_credit: bool) -> None:  # noqa: ANN401
        self._dataset = dataset
        self._partial = partial_credit

    def __call__(self, completion: str, entry: Mapping[str, Any]) -> float:
        """0 to 1.

        Args:
            completion: the answer.
            entry: the question, as the generator made it.

        Raises:
            Exception: what the marking raises where it does so of the right answer too.
        """
        try:
            score = float(self._dataset.score_answer(completion.strip(), entry))
        except Exception:  # noqa: BLE001 (whatever it raises)
            # Some fail on an answer of the wrong form, which is a wrong answer, and no fault.
            self._dataset.score_answer(str(entry["answer"]), entry)
            return 0.0
        return score if self._partial or score >= 1 else 0.0


def _package() -> Any:  # noqa: ANN401 (a module)
    try:
        return importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise ConfigError(
            f"reasoning-gym is not installed ({error}): {INSTALL}, and restart the kernel"
        ) from error


def _names(package: Any) -> list[str]:  # noqa: ANN401
    """Names of all generators."""
    return sorted(package.factory.DATASETS)
