import pytest

from xorl_lab.errors import ConfigError
from xorl_lab.recipes import tasks
from xorl_lab.recipes.calculator import calculator
from xorl_lab.recipes.environments import Environment, Turn, judge_of
from xorl_lab.recipes.evaluate import SOLVED
from xorl_lab.types import SampledSequence


def _pairs(rows):
    return {(row["a"], row["b"]) for row in rows}


@pytest.mark.parametrize("digits", [1, 2])
@pytest.mark.parametrize("seed", [0, 1, 2, 17])
def test_addition_holds_pairs_out_either_way_round(digits, seed):
    task = tasks.addition(digits, seed)
    training, held_out = _pairs(task.training), _pairs(task.held_out)
    shown = set(tasks.FEW_SHOT[digits]) | {(b, a) for a, b in tasks.FEW_SHOT[digits]}
    assert not training & held_out
    assert not {(b, a) for a, b in training} & held_out
    assert not shown & (training | held_out)
    assert training == {(b, a) for a, b in training}
    operands = tasks.OPERANDS[digits]
    assert training | held_out | shown == {(a, b) for a in operands for b in operands}
    assert len(held_out) >= 20


def test_addition_prompt_and_answer():
    row = next(r for r in tasks.addition().training + tasks.addition().held_out if r["a"] == 9)
    assert row == {"prompt": "2+3=5\n4+4=8\n1+6=7\n9+0=", "answer": "9", "a": 9, "b": 0}
    two = tasks.addition(2).training[0]
    assert two["prompt"].startswith("12+25=37\n31+17=48\n24+42=66\n")
    assert int(two["answer"]) == two["a"] + two["b"]


def test_seed_decides_the_split():
    assert tasks.addition(seed=3) == tasks.addition(seed=3)
    assert tasks.addition(seed=3).held_out != tasks.addition(seed=4).held_out


def test_exact_match_takes_nothing_but_the_answer():
    assert tasks.exact_match("12", "12") == 1
    for wrong in ("1", "123", " 12", "12 ", "", "twelve"):
        assert tasks.exact_match(wrong, "12") == 0


def test_happy_words_are_whole_words_and_capped():
    assert tasks.happy_words("Joy! a HAPPY, unhappy dog") == pytest.approx(2 / 3)
    assert tasks.happy_words("joy joy joy joy") == 1
    assert tasks.happy_words("") == 0
    topics = [{r["topic"] for r in rows} for rows in _both(tasks.happy_sentences())]
    assert topics[0] & topics[1] == set()
    assert topics[0] | topics[1] == set(tasks.TOPICS)


def _both(task):
    return task.training, task.held_out


def test_password_conversations_end_in_the_answer():
    task = tasks.password()
    asked = [{r["prompt"][0]["content"] for r in rows} for rows in _both(task)]
    assert asked[0] & asked[1] == set()
    assert [len(a) for a in asked] == [4, 4]
    for conversation in task.conversations():
        assert [m["role"] for m in conversation] == ["user", "assistant"]
        assert tasks.contains_secret(conversation[-1]["content"], tasks.SECRET) == 1
    with pytest.raises(ConfigError, match="task addition has text prompts"):
        tasks.addition().conversations()


@pytest.mark.parametrize("name", sorted(tasks.TASKS))
def test_every_task_is_solvable_and_its_reward_fits_its_rows(name):
    task = tasks.get(name, seed=1)
    assert task.name == name
    row = {k: v for k, v in task.held_out[0].items() if k != "prompt"}
    best = row.get("answer", "joy happy love")
    judge = judge_of(task.reward, row)

    def score(text):
        if isinstance(judge, Environment):
            return judge.begin(task.held_out[0]["prompt"], row)(Turn(text)).score
        return judge(task.held_out[0]["prompt"], row, SampledSequence([1], text=text))

    assert score(best).total == SOLVED
    assert score("").total == 0


def test_multiplication_has_a_calculator_and_its_parts_share_no_question():
    task = tasks.multiplication()
    train, held = ({(r["a"], r["b"]) for r in rows} for rows in _both(task))
    assert (len(train), len(held), train & held) == (256, 32, set())
    assert all(int(r["answer"]) == r["a"] * r["b"] for r in task.training)
    assert tasks.multiplication(1).training != task.training


@pytest.mark.parametrize(
    ("written", "shown", "reward"),
    [
        (["calc: 34*27", "A: 918"], ["= 918\n"], 1.0),
        (["A: 918"], [], 1.0),
        (["A: 908"], [], 0.0),
        (["calc: 34*", "calc: 34 * 27", " 918 "], ["= error\n", "= 918\n"], 1.0),
        (["calc: 34+27", "A: 61"], ["= 61\n"], 0.0),
        (["calc: __import__('os')", ""], ["= error\n"], 0.0),
        (["calc: 1*1"] * 3, ["= 1\n"] * 2, 0.0),
        (["calc:34-61", "calc: 9999999*9"], ["= -27\n", "= error\n"], None),
    ],
)
def test_what_the_calculator_shows(written, shown, reward):
    play = Environment(calculator, ["answer"]).begin("", {"answer": "918"})
    replies = [play(Turn(t, number=i, last=i == 3)) for i, t in enumerate(written, start=1)]
    assert [r.observation for r in replies if r.score is None] == shown
    assert (None if reward is None else replies[-1].score.total) == reward


def test_a_call_that_was_cut_off_is_not_worked_out():
    play = Environment(calculator, ["answer"]).begin("", {"answer": "4"})
    assert play(Turn("calc: 2*2", stop_reason="length")).score.total == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tasks.addition(3), "digits is 3: pass 1 or 2"),
        (lambda: tasks.addition(seed=-1), "seed is -1: pass an integer >= 0"),
        (
            lambda: tasks.get("chess"),
            "unknown task 'chess': choose from addition, addition-2, happy, multiplication, "
            "password",
        ),
    ],
)
def test_wrong_arguments(make, message):
    with pytest.raises(ConfigError) as caught:
        make()
    assert str(caught.value) == message
