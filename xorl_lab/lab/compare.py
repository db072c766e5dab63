"""Completions to look at: of one set of weights, or of several side by side."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xorl_lab.errors import ConfigError
from xorl_lab.recipes.order import derive_seed
from xorl_lab.recipes.prompts import Prompt, encode_prompts
from xorl_lab.recipes.rollouts import sample as draw
from xorl_lab.recipes.settings import suggest
from xorl_lab.types import SampledSequence, SamplingParams

if TYPE_CHECKING:
    import pandas as pd

    from xorl_lab.client import SamplingClient

DEFAULTS: Mapping[str, Any] = {"max_tokens": 64, "seed": 0}
KNOWN = ("max_tokens", "temperature", "top_p", "top_k", "stop", "seed")
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

    def frame(self) -> "pd.DataFrame":
        """One row per prompt, one column per set of weights."""
        import pandas as pd  # noqa: PLC0415 (takes a second)

        columns = {name: [s.text or "" for s in found] for name, found in self.answers.items()}
        return pd.DataFrame({"prompt": self.prompts, **columns})

    def __repr__(self) -> str:
        lines: list[str] = []
        for i, prompt in enumerate(self.prompts):
            lines.append(repr(prompt))
            lines += [f"  {name}: {found[i].text!r}" for name, found in self.answers.items()]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        heads = "".join(f"<th>{html.escape(n)}</th>" for n in ("prompt", *self.answers))
        rows = "".join(
            f'<tr><td style="{_STYLE}">{html.escape(prompt)}</td>'
            f"{''.join(_cell(found[i]) for found in self.answers.values())}</tr>"
            for i, prompt in enumerate(self.prompts)
        )
        return f"<table><tr>{heads}</tr>{rows}</table>"


def sample(client: "SamplingClient", prompt: object, n: int, params: Mapping[str, Any]) -> Samples:
    """Draw completions of one prompt.

    Args:
        client: the weights.
        prompt: a string, or a list of messages.
        n: completions.
        params: fields of :class:`~xorl_lab.types.SamplingParams`, of those in :data:`KNOWN`.

    Raises:
        ConfigError: a parameter is unknown or out of range.
        DataError: the prompt is empty or malformed.
    """
    (encoded,) = encode_prompts([prompt], client.get_tokenizer())
    (response,) = draw(client, [encoded], [_params({**DEFAULTS, **params})], n)
    return Samples(encoded.text, response.sequences)


def compare(
    clients: Mapping[str, "SamplingClient"], prompts: object, params: Mapping[str, Any]
) -> Comparison:
    """Answer the same prompts with each set of weights, with the same random numbers.

    Args:
        clients: by name.
        prompts: in any form that recipes take.
        params: as for :func:`sample`; greedy by default.

    Raises:
        ConfigError, DataError: as for :func:`sample`, or there are no weights.
    """
    if not clients:
        raise ConfigError("there is nothing to compare: pass names, such as ['base', 'step-40']")
    settings = {**DEFAULTS, "temperature": 0.0, **params}
    seed = int(settings.pop("seed"))
    answers: dict[str, list[SampledSequence]] = {}
    shown: Sequence[Prompt] = []
    for name, client in clients.items():
        shown = encode_prompts(prompts, client.get_tokenizer())
        each = [_params({**settings, "seed": derive_seed(seed, i)}) for i in range(len(shown))]
        answers[name] = [r.sequences[0] for r in draw(client, shown, each, 1)]
    return Comparison([p.text for p in shown], answers)


def _params(settings: Mapping[str, Any]) -> SamplingParams:
    for name in settings:
        if name not in KNOWN:
            raise ConfigError(f"unknown parameter {name!r}{suggest(name, KNOWN)}")
    return SamplingParams(**settings)


def _cell(sequence: SampledSequence) -> str:
    cut = " <i>(cut off)</i>" if sequence.stop_reason == "length" else ""
    return f'<td style="{_STYLE}">{html.escape(sequence.text or "")}{cut}</td>'
