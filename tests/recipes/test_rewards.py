import functools
import math

import numpy as np
import pytest
import torch

from tests.recipes.fakes import sequence
from xorl_lab.errors import ConfigError, DataError
from xorl_lab.recipes.rewards import Scorer, require_some_reward
from xorl_lab.types import Group, Rollout


def score(reward, row=None, done=None, prompt="2+2="):
    row = row or {}
    return Scorer(reward, row)(prompt, row, done or sequence("4"))


def test_only_what_is_asked_for_is_passed_by_name():
    seen = {}

    def reward(stop_reason, answer, completion, missing="default"):
        seen.update(locals())
        return completion == answer

    assert score(reward, {"answer": "4", "level": 1}).total == 1.0
    del seen["seen"]
    assert seen == {"stop_reason": "stop", "answer": "4", "completion": "4", "missing": "default"}


def test_tokens_and_prompt_and_keywords():
    def everything(**given):
        return len(given)

    assert score(everything, {"answer": "4"}).total == 5
    assert score(lambda tokens: len(tokens)).total == 2
    conversation = [{"role": "user", "content": "Hi"}]
    assert score(lambda prompt: prompt is conversation, prompt=conversation).total == 1


def test_a_reward_may_not_change_the_rollout():
    done = sequence("4")
    score(lambda tokens: tokens.clear() or 1, done=done)
    assert len(done.tokens) == 2


class Callable:
    def __call__(self, completion):
        return 2


def test_callables_that_are_no_functions():
    assert score(Callable()).total == 2
    assert score(functools.partial(lambda completion, factor: factor, factor=3)).total == 3


@pytest.mark.parametrize(
    "value",
    [1, 1.0, True, np.float32(1), np.int64(1), np.bool_(True), np.array(1.0), torch.tensor(1)],
)
def test_every_kind_of_number(value):
    result = score(lambda: value)
    assert result.total == 1.0
    assert type(result.total) is float


def test_named_parts_add_up():
    result = score(lambda: {"right": 1, "short": 0.5})
    assert (result.total, result.parts) == (1.5, {"right": 1.0, "short": 0.5})


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (None, "it returned None instead of a number (is a return missing?)"),
        (math.nan, "it returned nan, which is not a finite number"),
        (math.inf, "it returned inf, which is not a finite number"),
        ("1", "it returned '1', a str instead of a number"),
        ([1], "it returned [1], a list instead of a number"),
        ({}, "it returned an empty dict: return a number or a dict of numbers"),
        ({"a": 1, "b": None}, "part 'b' is None instead of a number (is a return missing?)"),
        ({"a": math.nan}, "part 'a' is nan, which is not a finite number"),
        (1 + 2j, "it returned (1+2j), a complex instead of a number"),
    ],
)
def test_what_is_no_number_is_a_failed_reward(value, error):
    result = score(lambda: value)
    assert result.total is None
    assert result.error == error


def test_an_exception_is_described_with_the_line_of_the_function():
    def reward(completion):
        return helper(completion)

    def helper(completion):
        return 1 / int(completion)

    result = score(reward, done=sequence("0"))
    assert result.total is None
    line = reward.__code__.co_firstlineno + 1
    assert result.error == (
        f"ZeroDivisionError: division by zero (line {line} of reward: return helper(completion))"
    )


def test_an_interrupt_is_not_swallowed():
    def reward():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(reward)


def test_an_aborted_completion_is_not_scored():
    result = score(lambda: pytest.fail("called"), done=sequence("4", "abort"))
    assert result.error == "the completion was aborted before it ended"


async def coroutine(completion):
    return 1


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (
            lambda answr: 1,
            "the reward function asks for 'answr', which is not there: it can ask for prompt, "
            "completion, tokens, stop_reason, answer",
        ),
        (3, "reward is a int: pass a function"),
        (coroutine, "the reward function is async: pass one that returns the reward itself"),
        (
            eval("lambda completion, /: 1"),
            "the reward function takes 'completion' by position only: remove the '/'",
        ),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_before_anything_runs(reward, message):
    with pytest.raises(ConfigError) as caught:
        Scorer(reward, ["answer"])
    assert str(caught.value) == message


def test_a_column_may_not_hide_the_completion():
    with pytest.raises(ConfigError, match="a column named 'completion'"):
        Scorer(lambda completion: 1, ["completion"])


def _group(*rewards):
    return Group("p", [1], [
        Rollout([2], [-1.0], "text", "stop", 0, r, error=None if r is not None else "ValueError: x")
        for r in rewards
    ])  # fmt: skip


def test_one_reward_is_enough():
    require_some_reward([_group(None, None), _group(None, 0.0)])
    require_some_reward([])


def test_all_rewards_failed():
    with pytest.raises(DataError) as caught:
        require_some_reward([_group(None), _group(None, None)])
    assert str(caught.value) == (
        "the reward function failed for all 3 completions of this step; the first was 'text', and "
        "the reason: ValueError: x. Call the function by hand with that completion, and mend it; "
        "where it works by hand: it is called in a thread of its own, or in the run's with "
        "reward_timeout=None"
    )
