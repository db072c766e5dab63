"""What stands between two turns of the model, as token ids, with nothing before it encoded anew.

A chat template may rewrite earlier turns, and a tokenizer may split their text otherwise than the
model drew it.  So only what follows the model's turn is taken from the template: the end of the
turn where the model did not draw it itself, what was said to it, and the opening of its next one.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

from xorl_lab.errors import DataError
from xorl_lab.recipes.prompts import Message, Prompt, chat_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK = "THETURNOFTHEMODEL"


class Conversation:
    """One prompt and the turns behind it.

    Args:
        prompt: text, which observations follow as they are, or messages, which they go on.
        tokenizer: of the model.
    """

    def __init__(self, prompt: Prompt, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self._messages: list[Message] | None = None
        if not isinstance(prompt.given, str):
            self._messages = list(cast("Sequence[Message]", prompt.given))

    def reply(self, turn: str, tokens: Sequence[int], observation: object) -> tuple[str, list[int]]:
        """Answer a turn of the model.

        Args:
            turn: its text.
            tokens: its ids, as they were drawn.
            observation: what is said to the model: text; in a conversation also a message or
                several, where text alone is what the user says.

        Returns:
            What stands between this turn and the next one as text, and its ids, to be put behind
            ``tokens``.

        Raises:
            DataError: it is of another type, or the chat template refuses it.
        """
        if self._messages is None:
            return self._text(observation)
        said = _messages(observation)
        mark = _unused([*self._messages, *said])
        asked = [*self._messages, {"role": "assistant", "content": mark}, *said]
        text = chat_text(self._tokenizer, asked, generate=True)
        if text.count(mark) != 1:
            raise DataError(
                f"the chat template shows a turn of the model {text.count(mark)} times in what "
                "follows it: use a prompt of text, or another template"
            )
        self._messages += [{"role": "assistant", "content": turn}, *said]
        behind = text.partition(mark)[2]
        return behind, self._behind(behind, tokens)

    def _behind(self, text: str, tokens: Sequence[int]) -> list[int]:
        """Ids of what follows a turn, without the end of turn that the model drew itself."""
        last = tokens[-1] if tokens else -1
        if last in self._specials():
            end = cast("str", self._tokenizer.decode([last], skip_special_tokens=False))
            if end and text.lstrip().startswith(end):
                rest = text.lstrip().removeprefix(end)
                # Encoded behind it, as a tokenizer may treat the beginning of a text otherwise.
                ids = self._encode(end + rest)
                return ids[1:] if ids[0] == last else self._encode(rest)
        return self._encode(text)

    def _text(self, observation: object) -> tuple[str, list[int]]:
        if not isinstance(observation, str):
            raise DataError(
                f"the environment yielded {observation!r:.80}, a {type(observation).__name__}: "
                "behind a prompt of text yield text"
            )
        ids = self._encode(observation)
        if not ids:
            raise DataError("the environment yielded an empty text: yield at least one character")
        return observation, ids

    def _encode(self, text: str) -> list[int]:
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=False))
        except (TypeError, ValueError) as error:  # halves of surrogate pairs
            raise DataError(
                f"{text!r:.80} cannot be encoded ({error}): yield text of whole characters"
            ) from error

    def _specials(self) -> set[int]:
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        return {*self._tokenizer.all_special_ids, *added}


def _messages(observation: object) -> list[Message]:
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    if isinstance(observation, Mapping):
        return [cast("Message", observation)]
    if isinstance(observation, Sequence) and observation:
        return list(cast("Sequence[Message]", observation))
    raise DataError(
        f"the environment yielded {observation!r:.80}, a {type(observation).__name__}: yield text, "
        "a message, or a list of messages"
    )


def _unused(messages: Sequence[Message]) -> str:
    """A word that no message has."""
    every = "".join(str(m.get("content")) for m in messages if isinstance(m, Mapping))
    mark = _MARK
    while mark in every:
        mark += "X"
    return mark
