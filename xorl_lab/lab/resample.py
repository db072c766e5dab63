"""Going on from a token of a recorded rollout, under any weights."""

import html
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xorl_lab.errors import ConfigError
from xorl_lab.lab.compare import SAMPLING, settings_of
from xorl_lab.lab.pieces import Pieces
from xorl_lab.store import Reader, StoredRollout
from xorl_lab.types import ModelInput, SampledSequence, SamplingParams

if TYPE_CHECKING:
    from xorl_lab.client import SamplingClient

TOP = 8
"""Alternatives that are reported per token."""
MAX_TOKENS = 64
"""Longest continuation where the run does not say."""
_STYLE = "white-space:pre-wrap;text-align:left;vertical-align:top"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be drawn."""

    rollout: StoredRollout
    """The recorded one."""
    position: int
    """Tokens of its completion that stay."""
    params: SamplingParams
    """How to draw."""
    n: int
    """Continuations."""

    @property
    def prompt(self) -> list[int]:
        """What the model is shown: the prompt and the tokens that stay."""
        kept = self.rollout.tokens[: self.position].tolist()
        return [*self.rollout.prompt_tokens.tolist(), *kept]


@dataclass(frozen=True, slots=True)
class Resampled:
    """Continuations of a recorded rollout beside what it was."""

    rollout: StoredRollout
    """The recorded one."""
    position: int
    """Tokens of its completion that stayed."""
    weights: str
    """What the continuations were drawn from."""
    kept: str
    """Text of the tokens that stayed."""
    original: str
    """Text of those that followed them."""
    sequences: list[SampledSequence]
    """The continuations, with logprobs, entropies and alternatives."""
    texts: list[str]
    """Of the continuations, special tokens written out."""

    def __repr__(self) -> str:
        lines = [f"rollout {self.rollout.id}, {self.position} tokens kept: {self.kept!r}"]
        lines.append(f"  as it was: {self.original!r}")
        lines += [f"  {self.weights} [{i}]: {text!r}" for i, text in enumerate(self.texts)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        kept = f"<small>{html.escape(self.kept)}</small>"
        named = {"as it was": self.original}
        named |= {f"{self.weights} [{i}]": text for i, text in enumerate(self.texts)}
        rows = "".join(
            f'<tr><th style="{_STYLE}">{html.escape(name)}</th>'
            f'<td style="{_STYLE}">{kept}<mark>{html.escape(text)}</mark></td></tr>'
            for name, text in named.items()
        )
        return f"<table>{rows}</table>"


def plan(
    reader: Reader,
    rollout: int,
    position: int,
    params: Mapping[str, Any],
    context: int | None,
    model: str,
) -> Plan:
    """Read the rollout, and settle how to go on from it.

    Args:
        reader: of its run.
        rollout: its id.
        position: tokens of the completion that stay; of an episode the turn that the next one is in
            is gone on with, to its end.
        params: as of :meth:`xorl_lab.lab.run.Run.resample`.
        context: longest sequence of the model in tokens, if it is known.
        model: name of the base model at hand.

    Raises:
        ConfigError: something is out of range, the context is full, or the run is of another model.
        StoreError: the run has no such rollout.
    """
    info = reader.info
    if info.model and info.model != model:
        raise ConfigError(
            f"run {info.name!r} is of {info.model!r}, and this lab of {model!r}, whose tokens are "
            f"others: make Lab({info.model!r})"
        )
    recorded = reader.rollout(rollout)
    length = len(recorded.tokens)
    if isinstance(position, bool) or not isinstance(position, int) or not 0 <= position <= length:
        raise ConfigError(
            f"position is {position!r}: rollout {rollout} has {length} tokens, so pass 0 to "
            f"{length}"
        )
    turns = recorded.turns
    turn = next((t for t in turns if t[0] <= position < t[1]), None)
    if turn is None and position < length:
        inside = " and ".join(f"{start} to {end - 1}" for start, end in turns)
        raise ConfigError(
            f"token {position} of rollout {rollout} was written by the environment, whose part the "
            f"model does not take: pass a position in one of the model's turns, {inside}"
        )
    chosen = dict(params)
    n = chosen.pop("n", 1)
    before = len(recorded.prompt_tokens) + position
    kept = position - (turn or turns[-1])[0] if turns else position
    return Plan(recorded, position, _settings(info.settings, chosen, kept, before, context), n)


def resampled(planned: Plan, client: "SamplingClient", reference: str, pieces: Pieces) -> Resampled:
    """Draw the continuations.

    Args:
        planned: what to draw.
        client: the weights.
        reference: what they are called.
        pieces: of the model's tokenizer.

    Raises:
        LabError: they cannot be drawn.
    """
    prompt = ModelInput.from_ints(planned.prompt)
    future = client.sample(prompt, planned.params, planned.n, top_logprobs=TOP, entropies=True)
    try:
        drawn = future.result().sequences
    except BaseException:  # an interrupt too: leave no work behind
        future.cancel()
        raise
    tokens = planned.rollout.tokens.tolist()
    return Resampled(
        planned.rollout,
        planned.position,
        reference,
        pieces.text(tokens[: planned.position]),
        pieces.text(tokens[planned.position :]),
        drawn,
        [pieces.text(sequence.tokens) for sequence in drawn],
    )


def _settings(
    settings: Mapping[str, Any],
    chosen: Mapping[str, Any],
    kept: int,
    before: int,
    context: int | None,
) -> SamplingParams:
    """How the run drew, but for what is chosen; no longer than the context unless that is chosen.

    Args:
        settings: of the run.
        chosen: by the caller.
        kept: tokens of the turn that stay.
        before: tokens of the prompt and of all that stays.
        context: longest sequence of the model in tokens, if it is known.

    Raises:
        ConfigError: a parameter is unknown or out of range, or nothing more fits.
    """
    recipe = settings.get("recipe", {})
    own = {k: recipe[k] for k in ("temperature", "stop") if recipe.get(k) is not None}
    room = MAX_TOKENS if "max_tokens" not in recipe else max(recipe["max_tokens"] - kept, 1)
    if context is not None and before >= context:
        raise ConfigError(
            f"prompt and kept tokens are {before}, and the model's context holds {context}: keep "
            "fewer"
        )
    if context is not None:
        room = min(room, context - before)
    return settings_of({"seed": 0, "max_tokens": room, **own, **chosen}, SAMPLING)
