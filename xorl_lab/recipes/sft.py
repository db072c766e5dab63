"""Supervised fine-tuning: make the model's own words of someone else's.

The loss of a token is -log p(token | the tokens before it), on the tokens with weight 1: of a
conversation these are the assistant's turns, each with the token that ends it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from xorl_lab.errors import ConfigError, DataError, ShapeError
from xorl_lab.recipes.clock import Clock
from xorl_lab.recipes.order import endless
from xorl_lab.recipes.prompts import Message, chat_text
from xorl_lab.recipes.settings import Course, build, check_integer
from xorl_lab.types import AdamParams, Datum, ModelInput, StepRecord

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from xorl_lab.client import TrainingClient


@dataclass(frozen=True, slots=True)
class Rendered:
    """An example as the model sees it."""

    tokens: list[int]
    """Token ids."""
    weights: list[float]
    """One per token: 1 = trained, 0 = context."""
    text: str
    """What the tokens say, with whatever the chat template added, such as a system prompt."""

    def datum(self) -> Datum:
        """The example as it is sent to a loss: every token is the target of those before it."""
        inputs = {"target_tokens": self.tokens[1:], "weights": self.weights[1:]}
        return Datum(ModelInput.from_ints(self.tokens[:-1]), inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class SftSettings:
    """Settings of :func:`sft`; all are checked before anything runs."""

    learning_rate: float
    """Of AdamW, constant."""
    steps: int | None = None
    """Number of steps; give this or ``epochs``."""
    epochs: int | None = None
    """How often to go through the examples, in steps of ``batch_size``, rounded up."""
    batch_size: int = 4
    """Examples per step."""
    grad_clip_norm: float = 1.0
    """The gradient is scaled down to this norm; 0 = no clipping."""
    beta1: float = 0.9
    """Of AdamW."""
    beta2: float = 0.99
    """Of AdamW."""
    weight_decay: float = 0.0
    """Of AdamW."""
    evaluate_every: int = 0
    """Held-out loss after every so many steps; 0 = only after the last one."""
    seed: int = 0
    """Order of the examples."""

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise ConfigError(f"steps={self.steps} and epochs={self.epochs}: pass one of the two")
        lows = {"steps": 1, "epochs": 1, "batch_size": 1, "evaluate_every": 0, "seed": 0}
        for name, low in lows.items():
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), low)
        self.adam()

    def adam(self) -> AdamParams:
        """The optimizer's share of the settings."""
        return AdamParams(
            learning_rate=self.learning_rate,
            beta1=self.beta1,
            beta2=self.beta2,
            weight_decay=self.weight_decay,
            grad_clip_norm=self.grad_clip_norm,
        )

    def step_count(self, examples: int) -> int:
        """Number of steps with so many examples."""
        return self.steps or -(-examples * (self.epochs or 0) // self.batch_size)


def sft(
    client: "TrainingClient",
    examples: Sequence[object],
    *,
    held_out: Sequence[object] | None = None,
    done: int = 0,
    live: Callable[[SftSettings], SftSettings] | None = None,
    **settings: Any,  # noqa: ANN401 (SftSettings checks every one of them)
) -> Iterator[StepRecord]:
    """Fine-tune a model on examples, one step each time the result is advanced.

    Args:
        client: the model to train.
        examples: conversations (lists of messages, or dicts with ``messages``), or dicts with
            ``tokens`` and ``weights``, one weight per token.
        held_out: examples never trained on, whose loss is reported as ``held_out:loss``.
        done: steps that lie behind the client's weights; the next one is the one that would come.
        live: asked for the settings before each step, to change some on the way.
        settings: the fields of :class:`SftSettings`.

    Returns:
        An iterator of step records.  All arguments are checked before this function returns.

    Raises:
        ConfigError: a setting is unknown or out of range.
        DataError: there are no examples, or one is malformed or longer than the context.
        ShapeError: an example has another number of weights than of tokens.
    """
    chosen = build(SftSettings, settings)
    tokenizer = client.get_tokenizer()
    rendered = read_examples(examples, tokenizer, client.context_length)
    unseen = [] if held_out is None else read_examples(held_out, tokenizer, client.context_length)
    return _steps(client, rendered, unseen, Course(chosen, live, done))


def _steps(
    client: "TrainingClient",
    examples: Sequence[Rendered],
    held_out: Sequence[Rendered],
    course: Course[SftSettings],
) -> Iterator[StepRecord]:
    """The loop."""
    given = course.given
    order = endless(len(examples), given.seed)
    for _ in range(course.done * given.batch_size):
        next(order)
    last = given.step_count(len(examples))
    for step in range(course.done + 1, last + 1):
        settings = course.settings()
        clock = Clock()
        batch = [examples[next(order)] for _ in range(settings.batch_size)]
        forward = client.forward_backward([e.datum() for e in batch], "cross_entropy")
        optimize = client.optim_step(settings.adam())  # queued behind it, so the two are one wait
        output, optimized = forward.result(), optimize.result()
        metrics = output.metrics | optimized.metrics
        metrics.pop("step", None)  # the record's own number is that of the run
        clock.lap("train")

        every = settings.evaluate_every
        if held_out and (step == last or (every and step % every == 0)):
            unseen = client.forward([e.datum() for e in held_out], "cross_entropy").result()
            metrics["held_out:loss"] = unseen.metrics["loss:mean"]
            clock.lap("evaluate")
        metrics |= clock.metrics(sum(len(e.tokens) for e in batch))
        metrics["version"] = float(client.version)
        yield StepRecord(step, metrics, warnings=[str(w) for w in output.info.get("warnings", ())])


def read_examples(
    examples: Sequence[object], tokenizer: "PreTrainedTokenizerBase", context_length: int
) -> list[Rendered]:
    """Read examples in any of their forms and check that each can be trained on.

    Args:
        examples: as for :func:`sft`.
        tokenizer: of the model.
        context_length: longest sequence of the model, in tokens.

    Raises:
        DataError, ShapeError: as for :func:`sft`.
    """
    rendered = [_read(i, e, tokenizer) for i, e in enumerate(examples)]
    if not rendered:
        raise DataError("there are no examples: pass at least one")
    for i, example in enumerate(rendered):
        if len(example.tokens) > context_length:
            raise DataError(
                f"example {i} has {len(example.tokens)} tokens, over the context of "
                f"{context_length}: shorten it; cutting it would train the model to break off"
            )
        if not any(example.weights[1:]):
            raise DataError(
                f"example {i} has nothing to train: every weight behind the first token is 0"
            )
    return rendered


def render(conversation: Sequence[Message], tokenizer: "PreTrainedTokenizerBase") -> Rendered:
    """Write a conversation out and mark what to train: the assistant's words and their end.

    The prompt of each assistant turn is encoded exactly as it is when that turn is sampled.  What
    the template puts behind the token that ends a turn is not trained: sampling stops before it.

    Args:
        conversation: at least one user or system message before the first assistant message.
        tokenizer: of the model.

    Raises:
        DataError: no assistant turn, a malformed message, or a chat template under which an earlier
            part of the text changes as the conversation grows.
    """
    turns = [i for i, m in enumerate(conversation) if _role(m) == "assistant"]
    if not turns or turns[0] == 0:
        raise DataError(
            f"a conversation with roles {[_role(m) for m in conversation]} cannot be trained on: "
            "it needs an assistant message, and a message before the first of them"
        )
    pieces = _Pieces(tokenizer)
    for i in turns:
        prompt = chat_text(tokenizer, conversation[:i], generate=True)
        pieces.extend(prompt, trained=False, turn=i)
        answered = chat_text(tokenizer, conversation[: i + 1], generate=False)
        pieces.extend(answered, trained=True, turn=i)
    if turns[-1] < len(conversation) - 1:
        whole = chat_text(tokenizer, conversation, generate=False)
        pieces.extend(whole, trained=False, turn=len(conversation) - 1)
    return Rendered(pieces.tokens, pieces.weights, pieces.text)


class _Pieces:
    """A text that grows, with its tokens and weights."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.tokens: list[int] = []
        self.weights: list[float] = []
        self.text = ""
        self._tokenizer = tokenizer

    def extend(self, text: str, *, trained: bool, turn: int) -> None:
        """Grow to ``text``, which must begin with what is there already."""
        if not text.startswith(self.text):
            raise DataError(
                f"the chat template rewrites earlier text when message {turn} is added, so the "
                "tokens trained would not be those sampled: train on one turn at a time, or pass "
                "tokens and weights"
            )
        tokens = self._encode(text)
        if tokens[: len(self.tokens)] == self.tokens:
            new = tokens[len(self.tokens) :]
        else:  # a merge across the boundary, which sampling never makes
            new = self._encode(text[len(self.text) :])
        self.tokens += new
        self.weights += self._weights(new) if trained else [0.0] * len(new)
        self.text = text

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _weights(self, tokens: Sequence[int]) -> list[float]:
        """1 up to the last special token, the end of the turn; to the end where there is none."""
        special = set(self._tokenizer.all_special_ids)
        ends = [i for i, t in enumerate(tokens) if t in special]
        trained = ends[-1] + 1 if ends else len(tokens)
        return [1.0] * trained + [0.0] * (len(tokens) - trained)


def _role(message: object) -> object:
    return (
        cast("Mapping[str, object]", message).get("role") if isinstance(message, Mapping) else None
    )


def _read(index: int, example: object, tokenizer: "PreTrainedTokenizerBase") -> Rendered:
    """Read one example in whatever form it comes."""
    if isinstance(example, Mapping):
        given = cast("Mapping[str, Any]", example)
        if "tokens" in given and "weights" in given:
            return _from_tokens(index, given)
        example = given.get("messages", example)
    if isinstance(example, Sequence) and not isinstance(example, str):
        try:
            return render(cast("Sequence[Message]", example), tokenizer)
        except DataError as error:
            raise DataError(f"example {index}: {error}") from error
    raise DataError(
        f"example {index} is {example!r:.80}: pass a list of messages, as [{{'role': 'user', "
        "'content': …}, {'role': 'assistant', 'content': …}], or a dict with 'tokens' and 'weights'"
    )


def _from_tokens(index: int, given: Mapping[str, Any]) -> Rendered:
    tokens = ModelInput.from_ints(given["tokens"]).to_ints()
    weights = [float(w) for w in given["weights"]]
    if len(tokens) != len(weights):
        raise ShapeError(
            f"example {index} has {len(tokens)} tokens but {len(weights)} weights: pass one weight "
            "per token"
        )
    if len(tokens) < 2:
        raise DataError(f"example {index} has {len(tokens)} tokens: pass at least 2")
    return Rendered(tokens, weights, text="")
