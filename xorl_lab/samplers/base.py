"""What a sampler is asked for, whichever sampler it is."""

import hashlib
import secrets
from dataclasses import dataclass

from xorl_lab.errors import ConfigError, DataError
from xorl_lab.types import SamplingParams

MAX_SAMPLES = 4096
"""Most completions of one prompt in one call."""
MAX_TOP = 64
"""Most alternatives reported per token."""


@dataclass(frozen=True, slots=True, eq=False)
class SampleRequest:
    """One prompt and what is wanted of it, validated."""

    prompt: tuple[int, ...]
    """Token ids, at least one."""
    params: SamplingParams
    """How to draw."""
    num_samples: int
    """Completions wanted."""
    seed: int
    """With the prompt, the sample's index and the position it fixes every random number."""
    return_logprobs: bool = True
    """Report the logprob of each drawn token."""
    prompt_logprobs: bool = False
    """Report the logprob of each prompt token (temperature 1)."""
    top_logprobs: int = 0
    """Alternatives reported per drawn token."""
    entropies: bool = False
    """Report the entropy of the distribution of each drawn token, where the sampler can."""
    deadline: float | None = None
    """``time.monotonic()`` at which to give up."""
    keep_partial: bool = False
    """At the deadline answer with what has been drawn (``abort``) instead of cancelling."""
    lora_path: str | None = None
    """Adapter to sample from in place of the source's own; understood by servers."""


def check_prompt(prompt: tuple[int, ...], max_tokens: int, vocab_size: int, context: int) -> None:
    """Make sure that a prompt can be sampled from.

    Raises:
        DataError: it is empty, has an id outside the vocabulary, or is too long for the context.
    """
    if not prompt:
        raise DataError("the prompt has no tokens: pass at least one")
    outside = [t for t in prompt if not 0 <= t < vocab_size]
    if outside:
        raise DataError(
            f"the prompt has token id {outside[0]}, but this model's ids are 0 to "
            f"{vocab_size - 1}: encode the text with this model's tokenizer"
        )
    if len(prompt) + max_tokens > context:
        raise DataError(
            f"the prompt has {len(prompt)} tokens and max_tokens is {max_tokens}, together "
            f"{len(prompt) + max_tokens}, but the model's context holds {context}: shorten the "
            "prompt or lower max_tokens"
        )


def check_request(num_samples: object, top_logprobs: object) -> None:
    """Make sure that the counts of a request are sensible.

    Raises:
        ConfigError: a count is no integer or out of range.
    """
    counts = {
        "num_samples": (num_samples, 1, MAX_SAMPLES),
        "top_logprobs": (top_logprobs, 0, MAX_TOP),
    }
    for name, (value, low, high) in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ConfigError(f"{name} is {value!r}: pass an integer from {low} to {high}")


def draw_seed(params: SamplingParams) -> int:
    """The seed that was asked for, or a fresh one."""
    wanted = params.effective_seed
    return secrets.randbits(63) if wanted is None else wanted


def repeat_seed(seed: int, times: int) -> int:
    """The seed for a prompt that came ``times`` times before in the same batch.

    >>> repeat_seed(7, 0), repeat_seed(7, 1) == repeat_seed(7, 1) != repeat_seed(7, 2)
    (7, True)
    """
    if times == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{times}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
