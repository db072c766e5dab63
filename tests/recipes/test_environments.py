"""Environments: what an author writes, and what becomes of each of its mistakes."""

import functools

import pytest

from xorl_lab.errors import ConfigError
from xorl_lab.recipes.environments import Environment, Turn, judge_of, replay
from xorl_lab.recipes.limit import Limit
from xorl_lab.recipes.rewards import Scorer


def twice(answer):
    turn = yield
    if turn.text != answer:
        turn = yield f"no, not {turn.text}"
    return {"right": float(turn.text == answer), "speed": 1 / turn.number}


def play(function, *texts, row=None, prompt="2+2="):
    row = row or {}
    playing = Environment(function, row).begin(prompt, row)
    return [playing(Turn(text, number=i)) for i, text in enumerate(texts, start=1)]


def test_it_hears_each_turn_and_its_parts_add_up():
    first, second = play(twice, "5", "4", row={"answer": "4"})
    assert (first.observation, first.score) == ("no, not 5", None)
    assert second.score.parts == {"right": 1.0, "speed": 0.5}
    assert second.score.total == 1.5


def test_it_sees_all_of_a_turn():
    seen = []

    def look():
        seen.append((yield))
        return 1

    turn = Turn("a", [7, 8], "length", 3, last=True)
    Environment(look, []).begin("", {})(turn)
    assert seen == [turn]


def test_it_gets_by_name_what_it_asks_for():
    def asks(prompt, level, missing="default"):
        yield
        return {"prompt": prompt == "2+2=", "level": level, "missing": missing == "default"}

    (reply,) = play(asks, "4", row={"level": 3, "answer": "4"})
    assert reply.score.parts == {"prompt": 1.0, "level": 3.0, "missing": 1.0}


class Stateful:
    def __call__(self, answer):
        return (yield from twice(answer))


@pytest.mark.parametrize(
    "function", [Stateful(), Stateful().__call__, functools.partial(twice), twice]
)
def test_whatever_yields_is_an_environment(function):
    judge = judge_of(function, ["answer"])
    assert isinstance(judge, Environment)
    assert judge.begin("", {"answer": "4"})(Turn("4")).score.total == 2.0


def test_whatever_returns_is_a_reward():
    assert isinstance(judge_of(lambda completion: 1, []), Scorer)
    assert isinstance(judge_of(functools.partial(lambda completion: 1), []), Scorer)


def test_what_it_cannot_ask_for_is_said_with_the_way_out():
    def asks(completion):
        yield

    with pytest.raises(ConfigError, match=r"asks for 'completion', .* from its yield: turn = yiel"):
        Environment(asks, [])


def test_where_a_reward_is_wanted_an_environment_is_refused():
    with pytest.raises(ConfigError, match="it is an environment, which plays along"):
        Scorer(twice, ["answer"])


async def unawaited():
    yield


def test_it_cannot_be_async():
    with pytest.raises(ConfigError, match="the reward function is async"):
        judge_of(unawaited, [])


def early():
    if True:
        return 1
    yield


def opening():
    yield "welcome"
    return 1


def nothing():
    yield


def text():
    yield
    return "good"


def stops():
    yield
    raise StopIteration(3)


def breaks():
    turn = yield
    return float(turn.text)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (early, "DataError: the environment ended before the model's first turn: begin with turn"),
        (opening, "DataError: the environment's first yield gives 'welcome', but the model reads"),
        (nothing, "it returned None instead of a number (is a return missing?)"),
        (text, "it returned 'good', a str instead of a number"),
        (stops, "RuntimeError: generator raised StopIteration"),
        (breaks, "ValueError: could not convert string to float: 'x' (line "),
    ],
)
def test_its_mistakes_are_shown_and_fail_the_episode(function, said):
    (reply,) = play(function, "x")
    assert reply.score.total is None
    assert reply.score.error.startswith(said) or reply.score.error == said
    if "line " in said:
        assert f" of {function.__name__}: " in reply.score.error


def test_each_call_has_a_time_limit_and_a_hung_one_is_not_closed():
    def hangs():
        yield
        while True:
            pass

    playing = Environment(hangs, [], Limit(0.1)).begin("", {})
    reply = playing(Turn("x"))
    assert reply.score.error.startswith("it took longer than reward_timeout=0.1 s and was cut off")
    assert " of hangs: " in reply.score.error
    assert playing.end("over").score.error == "over"


def test_an_episode_that_is_ended_is_closed():
    closed = []

    def tidy():
        try:
            yield
            yield "more"
        finally:
            closed.append(True)

    playing = Environment(tidy, []).begin("", {})
    assert playing(Turn("x")).observation == "more"
    assert playing.end("too long").score.error == "too long"
    assert closed == [True]


def test_a_recorded_episode_is_played_again():
    turns = [Turn("5", number=1), Turn("4", number=2)]
    row = {"answer": "4"}

    def again(function, same=lambda index, said: said == "no, not 5", given=turns):
        return replay(Environment(function, row), "2+2=", row, given, same)

    def meaner(answer):
        turn = yield
        turn = yield f"no, not {turn.text}"
        return -1.0 if turn.text == answer else 0.0

    def shorter():
        yield
        return 0.5

    def longer():
        while True:
            turn = yield
            turn = yield f"no, not {turn.text}"

    def other():
        yield
        yield "no"

    assert again(twice).total == 1.5
    assert again(meaner).total == -1.0
    assert again(shorter).error == "it ended after turn 1, and 2 were recorded"
    assert again(longer).error == "it went on after turn 2, the last that was recorded"
    assert again(other).error.startswith("after turn 1 it said 'no', which is not what was recorde")
    assert again(twice, given=[]).error == "the model wrote nothing"
