"""The same prompt with another beginning or template: what a sampler may have been sent instead."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from xorl_lab.errors import DataError
from xorl_lab.lab.diagnosis.recorded import Case
from xorl_lab.lab.diagnosis.reevaluate import Passage
from xorl_lab.recipes.prompts import chat_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK = "\x1fcontent\x1f"


WAYS = (
    "BOS doubled",
    "BOS missing",
    "BOS added",
    "chat template added",
    "chat template missing",
    "opening of the answer missing",
    "encoded with special tokens",
    "encoded again",
)
"""What may have become of a prompt."""


class Rewording:
    """Prompts changed in one of :data:`WAYS`, with one tokenizer.

    Args:
        tokenizer: of the model.
        context: longest sequence of the model, in tokens.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", context: int) -> None:
        self._words = _Words(tokenizer)
        self._context = context

    def ways(self, cases: Sequence[Case]) -> list[str]:
        """Those that change something here, each in a way of its own, and fit the context."""
        seen = [[c.passage for c in cases]]
        found: list[str] = []
        for way in WAYS:
            passages = self.passages(way, cases)
            if passages in seen or max(len(p.read) for p in passages) > self._context:
                continue
            seen.append(passages)
            found.append(way)
        return found

    def passages(self, way: str, cases: Sequence[Case]) -> list[Passage]:
        """The cases with changed prompts; one to which the change does not apply stays."""
        change: Callable[[Case], list[int] | None] = {
            "BOS doubled": self._words.doubled,
            "BOS missing": self._words.without_bos,
            "BOS added": self._words.with_bos,
            "chat template added": self._words.templated,
            "chat template missing": self._words.bare,
            "opening of the answer missing": self._words.unopened,
            "encoded with special tokens": self._words.with_special,
            "encoded again": self._words.again,
        }[way]
        return [Passage(tuple(change(c) or c.passage.prompt), c.passage.completion) for c in cases]


class _Words:
    """Prompts with one tokenizer; None where a change does not apply."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        bos: Any = tokenizer.bos_token_id
        self._bos = int(bos) if isinstance(bos, int) else None
        self._before, self._behind, self._opening = self._template()

    def doubled(self, case: Case) -> list[int] | None:
        prompt = case.passage.prompt
        return [prompt[0], *prompt] if prompt[0] == self._bos else None

    def without_bos(self, case: Case) -> list[int] | None:
        prompt = case.passage.prompt
        return [*prompt[1:]] if prompt[0] == self._bos and len(prompt) > 1 else None

    def with_bos(self, case: Case) -> list[int] | None:
        prompt = case.passage.prompt
        if self._bos is None or prompt[0] == self._bos:
            return None
        return [self._bos, *prompt]

    def templated(self, case: Case) -> list[int] | None:
        if not self._behind or case.text.endswith(self._opening):
            return None
        return self._encoded(self._before + case.text + self._behind)

    def bare(self, case: Case) -> list[int] | None:
        """What the last turn says, alone."""
        if not self._behind or not case.text.endswith(self._behind):
            return None
        inside = case.text.removesuffix(self._behind)
        if inside.startswith(self._before):
            return self._encoded(inside.removeprefix(self._before))
        return None

    def unopened(self, case: Case) -> list[int] | None:
        if not self._opening or not case.text.endswith(self._opening):
            return None
        return self._encoded(case.text.removesuffix(self._opening))

    def with_special(self, case: Case) -> list[int] | None:
        return self._encoded(case.text, special=True)

    def again(self, case: Case) -> list[int] | None:
        return self._encoded(case.text)

    def _encoded(self, text: str, *, special: bool = False) -> list[int] | None:
        return list(self._tokenizer.encode(text, add_special_tokens=special)) or None

    def _template(self) -> tuple[str, str, str]:
        """What the chat template puts before and behind a message, and the opening in that."""
        message = [{"role": "user", "content": _MARK}]
        try:
            opened = chat_text(self._tokenizer, message, generate=True)
            closed = chat_text(self._tokenizer, message, generate=False)
        except DataError:
            return "", "", ""
        before, found, behind = opened.partition(_MARK)
        if not found:
            return "", "", ""
        return before, behind, opened.removeprefix(closed) if opened.startswith(closed) else ""
