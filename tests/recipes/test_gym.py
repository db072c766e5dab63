"""The adapter of reasoning-gym; with the package itself where it is installed."""

import importlib
import types
import warnings

import pytest

from xorl_lab.errors import ConfigError
from xorl_lab.recipes import gym
from xorl_lab.recipes.gym import reasoning_gym
from xorl_lab.recipes.rewards import Scorer
from xorl_lab.types import SampledSequence


class Sums:
    """A generator as the package has them."""

    def __init__(self, size, seed, most=9):
        self.size, self.seed, self.most = size, seed, most

    def __getitem__(self, i):
        a, b = (self.seed + i) % self.most, i
        return {"question": f"{a}+{b}?", "answer": str(a + b), "metadata": {"a": a}}

    def score_answer(self, answer, entry):
        if int(answer) == int(entry["answer"]):
            return 1.0
        return 0.01


class Broken(Sums):
    def score_answer(self, answer, entry):
        raise RuntimeError("out of order")


@pytest.fixture
def package(monkeypatch):
    kinds = {"sums": Sums, "broken": Broken}
    found = types.ModuleType("reasoning_gym")
    found.factory = types.SimpleNamespace(DATASETS=kinds)
    found.create_dataset = lambda name, **config: kinds[name](**config)
    monkeypatch.setattr(gym, "_package", lambda: found)


def test_rows_have_a_conversation_and_all_that_marks_it(package):
    prompts, reward = reasoning_gym("sums", 2, seed=3, system="Reply with one number.")
    assert prompts[1] == {
        "prompt": [
            {"role": "system", "content": "Reply with one number."},
            {"role": "user", "content": "4+1?"},
        ],
        "question": "4+1?",
        "answer": "5",
        "entry": {"question": "4+1?", "answer": "5", "metadata": {"a": 4}},
    }
    assert len(prompts) == 2
    assert [m["role"] for m in reasoning_gym("sums", 1).prompts[0]["prompt"]] == ["user"]
    assert Scorer(reward, prompts[0])("", prompts[0], SampledSequence([1], text=" 3\n")).total == 1


def test_an_answer_of_the_wrong_form_is_wrong_and_a_hundredth_is_nothing(package):
    prompts, reward = reasoning_gym("sums", 1, seed=3)
    entry = prompts[0]["entry"]
    assert [reward(text, entry) for text in ("3", "4", "three")] == [1.0, 0.0, 0.0]
    _, generous = reasoning_gym("sums", 1, seed=3, partial_credit=True)
    assert [generous(text, entry) for text in ("3", "4", "three")] == [1.0, 0.01, 0.0]


def test_marking_that_always_fails_is_shown(package):
    prompts, reward = reasoning_gym("broken", 1)
    with pytest.raises(RuntimeError, match="out of order"):
        reward("1", prompts[0]["entry"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "sum"}, r"no generator 'sum': did you mean sums\?"),
        ({"name": "xyz"}, "no generator 'xyz': choose from broken, sums"),
        ({"size": 0}, "size is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"words": 3}, r"'sums' does not take \{'words': 3\}: TypeError"),
    ],
)
def test_what_does_not_fit_is_an_error(package, changes, said):
    with pytest.raises(ConfigError, match=said):
        reasoning_gym(**{"name": "sums", **changes})


def test_without_the_package_the_way_to_it_is_named(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"not installed .*: pip install 'xorl-lab\[tasks\]'"):
        reasoning_gym("letter_counting")


@pytest.fixture(scope="module")
def real():
    with warnings.catch_warnings():  # of packages that it imports
        warnings.simplefilter("ignore")
        found = pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
        yield found


@pytest.mark.parametrize("name", ["letter_counting", "syllogism", "basic_arithmetic", "countdown"])
def test_of_the_package_the_right_answer_is_right_and_junk_is_none(real, name):
    prompts, reward = reasoning_gym(name, 3, seed=1)
    assert [reward(row["answer"], row["entry"]) for row in prompts] == [1.0] * 3
    for junk in ("", "�", "(((", "nan", "-1e999", "?" * 2000):
        assert [reward(junk, row["entry"]) for row in prompts] == [0.0] * 3
    again = reasoning_gym(name, 3, seed=1).prompts
    assert [row["question"] for row in again] == [row["question"] for row in prompts]
    other = reasoning_gym(name, 3, seed=2).prompts
    assert [row["question"] for row in other] != [row["question"] for row in prompts]


def test_its_configuration_is_passed_on(real):
    prompts, _ = reasoning_gym("letter_counting", 5, min_words=2, max_words=2)
    assert {len(row["entry"]["metadata"]["span"]) for row in prompts} == {2}
