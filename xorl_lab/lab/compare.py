"""Completions to look at: of one set of weights, or of several side by side."""

import html
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from xorl_lab.errors import ConfigError
from xorl_lab.lab.judging import divergence, judge
from xorl_lab.lab.pieces import Pieces
from xorl_lab.recipes.limit import SECONDS, Limit
from xorl_lab.recipes.order import derive_seed
from xorl_lab.recipes.prompts import Prompt, columns, encode_prompts
from xorl_lab.recipes.rewards import RewardFunction, Score, Scorer
from xorl_lab.recipes.rollouts import sample as draw
from xorl_lab.recipes.settings import suggest
from xorl_lab.types import SampledSequence, SamplingParams

if TYPE_CHECKING:
    import pandas as pd

    from xorl_lab.client import SamplingClient

DEFAULTS: Mapping[str, Any] = {"max_tokens": 64, "seed": 0}
SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "stop", "seed")
"""Parameters of sampling that can be named."""
_STYLE = "white-space:pre-wrap;text-align:left;vertical-align:top"


@dataclass(frozen=True, slots=True)
class Samples:
    """Completions of one prompt."""

    prompt: str
    """As the model saw it."""
    sequences: list[SampledSequence]
    """With tokens, logprobs and the reason for the end."""

    @property
    def texts(self) -> list[str]:
        """The completions."""
        return [s.text or "" for s in self.sequences]

    def __repr__(self) -> str:
        return "\n".join(f"[{i}] {text!r}" for i, text in enumerate(self.texts))

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr>{_cell(s)}</tr>" for s in self.sequences)
        return f"<table><tr><th>{html.escape(self.prompt)}</th></tr>{rows}</table>"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same prompts, answered by several sets of weights."""

    prompts: list[str]
    """P prompts, as the models saw them."""
    answers: dict[str, list[SampledSequence]]
    """By name of the weights, P answers."""
    pieces: dict[str, list[list[str]]] = field(default_factory=dict)
    """By name of the weights, P lists with the text of each token of the answer."""
    logprobs: dict[str, dict[str, list[list[float]]]] = field(default_factory=dict)
    """``logprobs[judge][author]``: P lists, nats at temperature 1, of the author's tokens under the
    judge's weights; NaN for a last token that fills the context.
    """
    rewards: dict[str, list[Score]] = field(default_factory=dict)
    """By name of the weights, P rewards, if a function was given."""

    def divergence(self, left: str, right: str) -> list[int | None]:
        """Per prompt the position of the first token that differs, None if none does."""
        pairs = zip(self.answers[left], self.answers[right], strict=True)
        return [divergence(one.tokens, other.tokens) for one, other in pairs]

    def frame(self) -> "pd.DataFrame":
        """One row per prompt, one column per set of weights, and one for its rewards if any."""
        import pandas as pd  # noqa: PLC0415 (takes a second)

        texts = {name: [s.text or "" for s in found] for name, found in self.answers.items()}
        scores = {f"reward:{n}": [s.total for s in found] for n, found in self.rewards.items()}
        return pd.DataFrame({"prompt": self.prompts, **texts, **scores})

    def __repr__(self) -> str:
        lines: list[str] = []
        parts = self._parts()
        for i, prompt in enumerate(self.prompts):
            lines.append(repr(prompt))
            for name, found in self.answers.items():
                lines.append(f"  {name}: {found[i].text!r}{self._score(name, i)}")
                at = parts[name][i]
                if at is not None and name != next(iter(self.answers)):
                    lines.append(f"    differs from token {at} on: {self._piece(name, i, at)}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        heads = "".join(f"<th>{html.escape(n)}</th>" for n in ("prompt", *self.answers))
        parts = self._parts()
        rows = "".join(
            f'<tr><td style="{_STYLE}">{html.escape(prompt)}</td>'
            f"{''.join(self._cell(name, i, parts[name][i]) for name in self.answers)}</tr>"
            for i, prompt in enumerate(self.prompts)
        )
        return f"<table><tr>{heads}</tr>{rows}</table>"

    def _parts(self) -> dict[str, list[int | None]]:
        """Where each leaves the first, and the first the earliest to leave it."""
        first, *others = self.answers
        found = {name: self.divergence(first, name) for name in others}
        each = zip(*found.values(), strict=True) if found else ((),) * len(self.prompts)
        return {first: [min((x for x in e if x is not None), default=None) for e in each]} | found

    def _piece(self, name: str, prompt: int, token: int) -> str:
        pieces = self.pieces.get(name, [[]] * len(self.prompts))[prompt]
        return repr(pieces[token]) if token < len(pieces) else "the end"

    def _score(self, name: str, prompt: int) -> str:
        if name not in self.rewards:
            return ""
        score = self.rewards[name][prompt]
        return f" (reward {score.total:g})" if score.total is not None else f" ({score.error})"

    def _cell(self, name: str, prompt: int, at: int | None) -> str:
        answer = self.answers[name][prompt]
        text = html.escape(answer.text or "")
        pieces = self.pieces.get(name, [[]] * len(self.prompts))[prompt]
        if pieces:
            text = _marked(pieces, at)
        notes = [self._score(name, prompt).strip(" ()")] if name in self.rewards else []
        for judge_, authors in self.logprobs.items():
            mean = _mean(authors[name][prompt]) if name in authors else math.nan
            if mean == mean:
                notes.append(f"{mean:.3f} nats per token under {judge_}")
        cut = " <i>(cut off)</i>" if answer.stop_reason == "length" else ""
        small = "".join(f"<br><small>{html.escape(note)}</small>" for note in notes)
        return f'<td style="{_STYLE}">{text}{cut}{small}</td>'


def sample(client: "SamplingClient", prompt: object, n: int, params: Mapping[str, Any]) -> Samples:
    """Draw completions of one prompt.

    Args:
        client: the weights.
        prompt: a string, or a list of messages.
        n: completions.
        params: fields of :class:`~xorl_lab.types.SamplingParams`, of those in :data:`SAMPLING`.

    Raises:
        ConfigError: a parameter is unknown or out of range.
        DataError: the prompt is empty or malformed.
    """
    (encoded,) = encode_prompts([prompt], client.get_tokenizer())
    (response,) = draw(client, [encoded.input], [settings_of({**DEFAULTS, **params}, SAMPLING)], n)
    return Samples(encoded.text, response.sequences)


def compare(
    clients: Mapping[str, "SamplingClient"],
    prompts: object,
    params: Mapping[str, Any],
    rewards: RewardFunction | None = None,
) -> Comparison:
    """Answer the same prompts with each set of weights, with the same random numbers.

    Args:
        clients: by name.
        prompts: in any form that recipes take.
        params: as for :func:`sample`; greedy by default.
        rewards: called for every answer, as in training.

    Raises:
        ConfigError, DataError: as for :func:`sample`, or there are no weights.
    """
    if not clients:
        raise ConfigError("there is nothing to compare: pass names, such as ['base', 'step-40']")
    settings = {**DEFAULTS, "temperature": 0.0, **params}
    seed = int(settings.pop("seed"))
    models = {name: client.base_model for name, client in clients.items()}
    shown: dict[str, list[Prompt]] = {}
    pieces: dict[str, Pieces] = {}
    for name, client in clients.items():  # those of one base model share tokenizer and prompts
        if models[name] not in shown:
            tokenizer = client.get_tokenizer()
            shown[models[name]] = encode_prompts(prompts, tokenizer)
            pieces[models[name]] = Pieces(tokenizer)
    first = shown[models[next(iter(clients))]]
    scorer = None if rewards is None else Scorer(rewards, columns(first), Limit(SECONDS))
    each = [
        settings_of({**settings, "seed": derive_seed(seed, i)}, SAMPLING) for i in range(len(first))
    ]
    inputs = {model: [p.input for p in encoded] for model, encoded in shown.items()}
    answers = {
        name: [r.sequences[0] for r in draw(client, inputs[models[name]], each, 1)]
        for name, client in clients.items()
    }
    return Comparison(
        [p.text for p in first],
        answers,
        {n: [pieces[models[n]].texts(s.tokens) for s in found] for n, found in answers.items()},
        _judged(clients, shown, answers, exact=each[0].temperature in (0, 1)),
        {}
        if scorer is None
        else {
            name: [scorer(p.given, p.row, s) for p, s in zip(first, found, strict=True)]
            for name, found in answers.items()
        },
    )


def settings_of(settings: Mapping[str, Any], known: Collection[str]) -> SamplingParams:
    """Parameters of sampling by name.

    Raises:
        ConfigError: one is unknown (names the nearest) or out of range.
    """
    for name in settings:
        if name not in known:
            raise ConfigError(f"unknown parameter {name!r}{suggest(name, known)}")
    return SamplingParams(**settings)


def _judged(
    clients: Mapping[str, "SamplingClient"],
    shown: Mapping[str, Sequence[Prompt]],
    answers: Mapping[str, Sequence[SampledSequence]],
    *,
    exact: bool,
) -> dict[str, dict[str, list[list[float]]]]:
    """Every answer under all weights of its base model.

    Args:
        clients: the weights.
        shown: the prompts by base model.
        answers: by name of the weights.
        exact: the sampler's own logprobs are at temperature 1 already.
    """
    found: dict[str, dict[str, list[list[float]]]] = {}
    for name, client in clients.items():
        model = client.base_model
        prompts = [p.tokens for p in shown[model]]
        own = {n: a for n, a in answers.items() if clients[n].base_model == model}
        found[name] = {
            author: [list(s.logprobs or []) for s in given]
            if author == name and exact
            else judge(client, prompts, [s.tokens for s in given])
            for author, given in own.items()
        }
    return found


def _marked(pieces: Sequence[str], at: int | None) -> str:
    """Escaped text with one token marked, or the character that it is a part of."""
    start = end = len(pieces) if at is None else at
    while end < len(pieces) and not "".join(pieces[start:end]):
        end += 1
    parts = (pieces[:start], pieces[start:end], pieces[end:])
    before, there, behind = (html.escape("".join(part)) for part in parts)
    return f"{before}<mark>{there}</mark>{behind}" if there else before + behind


def _mean(values: Sequence[float]) -> float:
    there = [value for value in values if not math.isnan(value)]
    return math.fsum(there) / len(there) if there else math.nan


def _cell(sequence: SampledSequence) -> str:
    cut = " <i>(cut off)</i>" if sequence.stop_reason == "length" else ""
    return f'<td style="{_STYLE}">{html.escape(sequence.text or "")}{cut}</td>'
