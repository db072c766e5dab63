"""Tokens that are there already, judged by some weights; and where two answers part."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from xorl_lab.errors import DataError
from xorl_lab.types import ModelInput, SamplingParams

if TYPE_CHECKING:
    from xorl_lab.client import SamplingClient
    from xorl_lab.futures import APIFuture
    from xorl_lab.types import SampleResponse


def judge(
    client: "SamplingClient", prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> list[list[float]]:
    """Logprobs of answers under some weights, in one pass each.

    Args:
        client: the weights.
        prompts: P prompts as token ids.
        answers: P answers as token ids.

    Returns:
        P lists, nats at temperature 1, one per token of the answer; NaN for a last token that fills
        the context.

    Raises:
        LabError: they cannot be judged.
    """
    asked = [
        _ask(client, [*prompt, *answer]) if answer else None
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    try:
        given = [None if future is None else future.result() for future in asked]
    except BaseException:  # an interrupt too: leave no work behind
        for future in asked:
            if future is not None:
                future.cancel()
        raise
    return [
        [] if response is None else _of_answer(response, len(prompt), len(answer))
        for response, prompt, answer in zip(given, prompts, answers, strict=True)
    ]


def divergence(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Position of the first token that differs, None if none does.

    >>> divergence([1, 2, 3], [1, 5]), divergence([1], [1, 2]), divergence([1], [1])
    (1, 1, None)
    """
    for i, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return i
    return None if len(left) == len(right) else min(len(left), len(right))


def _ask(client: "SamplingClient", tokens: list[int]) -> "APIFuture[SampleResponse]":
    """Ask for the tokens' own logprobs; one token is drawn too, as none cannot be."""
    params = SamplingParams(max_tokens=1, temperature=0.0, seed=0)
    try:
        return client.sample(ModelInput.from_ints(tokens), params, prompt_logprobs=True)
    except DataError:  # they fill the context, so that nothing can be drawn behind the last
        return client.sample(ModelInput.from_ints(tokens[:-1]), params, prompt_logprobs=True)


def _of_answer(response: "SampleResponse", prompt: int, answer: int) -> list[float]:
    every = response.prompt_logprobs or []
    values = [float("nan") if x is None else float(x) for x in every[prompt : prompt + answer]]
    return values + [float("nan")] * (answer - len(values))
