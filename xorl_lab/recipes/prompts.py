"""Turn what a person passes as prompts into token ids."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from xorl_lab.errors import ConfigError, DataError
from xorl_lab.types import ModelInput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
"""One turn of a conversation: ``{"role": "user", "content": "Hello"}``."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, ready to be sampled from."""

    given: object
    """As the person passed it: a string, or the messages of a conversation."""
    text: str
    """What the model is shown."""
    tokens: list[int]
    """``text`` as token ids."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """The other columns of its row."""

    @property
    def input(self) -> ModelInput:
        """What a sampler is given."""
        return ModelInput.from_ints(self.tokens)


def encode_prompts(prompts: object, tokenizer: "PreTrainedTokenizerBase") -> list[Prompt]:
    """Read prompts in any of their forms.

    Args:
        prompts: a list of prompts, or a pandas DataFrame or list of dicts with a column ``prompt``.
            A prompt is a string, used as it is, or a list of messages, written out by the
            tokenizer's chat template with the opening of an assistant turn.
        tokenizer: of the model that is to be prompted.

    Raises:
        DataError: there are none, or one is empty or of another type.
    """
    rows = _rows(prompts)
    if not rows:
        raise DataError("there are no prompts: pass at least one")
    return [_encode(i, row, tokenizer) for i, row in enumerate(rows)]


def columns(prompts: Sequence[Prompt]) -> set[str]:
    """Names of the columns that every prompt has beside ``prompt``."""
    return set.intersection(*(set(p.row) for p in prompts))


def check_lengths(prompts: Sequence[Prompt], max_tokens: int, context_length: int) -> None:
    """Raise a ConfigError if a prompt and its completion may not fit into the model's context.

    Args:
        prompts: the prompts.
        max_tokens: longest completion, in tokens.
        context_length: longest sequence of the model, in tokens.
    """
    longest = max(range(len(prompts)), key=lambda i: len(prompts[i].tokens))
    length = len(prompts[longest].tokens)
    if length + max_tokens > context_length:
        raise ConfigError(
            f"prompt {longest} has {length} tokens, which with max_tokens={max_tokens} makes "
            f"{length + max_tokens}, over the context of {context_length} tokens: shorten the "
            "prompt or lower max_tokens"
        )


def chat_text(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], *, generate: bool
) -> str:
    """Write a conversation out in the model's own format.

    Args:
        tokenizer: of the model.
        messages: the turns.
        generate: end with the opening of an assistant turn, to be continued by the model.

    Returns:
        The text, with a default system prompt where the template has one, to be encoded without
        special tokens.

    Raises:
        DataError: a message is malformed, or the template refuses the conversation.
    """
    plain = [_plain(i, m) for i, m in enumerate(messages)]
    try:
        text = tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=generate)
    except Exception as error:  # Jinja errors, ValueError where there is no template, ...
        raise DataError(
            f"the tokenizer's chat template refuses the conversation: {error}. Change the roles or "
            "their order, or pass text instead of messages"
        ) from error
    return str(text)


def _rows(prompts: object) -> list[object]:
    """One entry per prompt; a DataFrame becomes a list of dicts."""
    to_dict = getattr(prompts, "to_dict", None)
    if callable(to_dict) and hasattr(prompts, "columns"):
        return cast("list[object]", to_dict("records"))
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Iterable):
        kind = type(prompts).__name__
        raise DataError(f"prompts is a {kind}: pass a list of prompts or a DataFrame")
    return list(cast("Iterable[object]", prompts))


def _encode(index: int, entry: object, tokenizer: "PreTrainedTokenizerBase") -> Prompt:
    row: dict[str, Any] = {}
    given: object = entry
    if isinstance(entry, Mapping):
        row = {str(k): v for k, v in cast("Mapping[object, Any]", entry).items()}
        if "prompt" not in row:
            hint = "wrap the conversation in a list" if "role" in row else "name one of them prompt"
            raise DataError(f"row {index} has columns {sorted(row)} but no 'prompt': {hint}")
        given = row.pop("prompt")
    if isinstance(given, str):
        text = given
    elif isinstance(given, Sequence) and given:
        text = chat_text(tokenizer, cast("Sequence[Message]", given), generate=True)
    else:
        raise DataError(f"prompt {index} is {given!r:.80}: pass a string or a list of messages")
    tokens = tokenizer.encode(text, add_special_tokens=False)
    if not tokens:
        raise DataError(f"prompt {index} is empty: pass at least one token")
    return Prompt(given, text, tokens, row)


def _plain(index: int, message: object) -> dict[str, str]:
    """Check one message and copy its role and content."""
    if isinstance(message, Mapping):
        fields = cast("Mapping[str, object]", message)
        role, content = fields.get("role"), fields.get("content")
        if isinstance(role, str) and isinstance(content, str):
            return {"role": role, "content": content}
    raise DataError(
        f"message {index} is {message!r:.80}: pass a dict with the strings 'role' and 'content'"
    )
