"""Each cause that keeps a run from learning is provoked, and named in words."""

import pytest

from tests.lab.support import EXAMPLES, SUPERVISED, grpo
from xorl_lab.errors import ConfigError, DataError
from xorl_lab.lab import Lab
from xorl_lab.lab.preflight import check_rate
from xorl_lab.recipes import tasks

HEALTHY = {"steps": 1, "preflight": True, "max_tokens": 12, "stop": list("abcdefghijklmnop")}
"""A random model comes to one of these letters soon."""


def score(completion, wanted):
    return float(len(completion) % 3)


def warned(lab, **settings):
    """What the preflight says."""
    run = grpo(lab, **{**HEALTHY, "reward": score, **settings})
    return [e.text for e in run.reader.events(kinds=["warning"]) if e.step is None]


def test_a_healthy_setting_raises_none(lab):
    assert warned(lab) == []


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"stop": None, "max_tokens": 2}, "all 16 completions of a trial were cut off at max_tok"),
        (
            {"stop": "never", "max_tokens": 3},
            "all 16 completions of a trial ran into max_tokens=3, and none came to the stop string "
            "'never': check it, or raise max_tokens",
        ),
        (
            {"reward": lambda completion: 1.0},
            "all 16 completions of a trial got the same reward, 1: without differences there is "
            "nothing to learn from; make it harder",
        ),
        (
            {"reward": lambda completion: 0},
            "all 16 completions of a trial got the same reward, 0: without differences there is "
            "nothing to learn from; make the task easier, or give partial credit",
        ),
        (
            {"reward": lambda prompt: float(prompt[0])},
            "the 4 completions of each prompt of a trial got the same reward, and only those of "
            "one prompt are compared",
        ),
        ({"learning_rate": 1e-9}, "learning_rate is 1e-09, so little will change: usual for an ad"),
        ({"learning_rate": 0.5}, "learning_rate is 0.5, and the model may break: usual for an ada"),
        ({"group_size": 1}, "group_size is 1: with nothing to compare with, no completion teaches"),
    ],
    ids=["cut", "stop", "equal", "zero", "per-prompt", "slow", "fast", "alone"],
)
def test_a_cause_is_named(lab, settings, sentence):
    found = warned(lab, **settings)
    assert [text for text in found if text.startswith(sentence)], found
    assert len(found) == 1


def test_a_reward_that_always_fails_is_named_before_the_first_step(lab):
    def broken(completion):
        return completion.lenght

    with pytest.raises(DataError):
        grpo(lab, **{**HEALTHY, "reward": broken})
    (said,) = [e.text for e in lab.run("grpo-1").reader.events(kinds=["warning"])]
    assert said.startswith("the reward failed for all 16 completions of a trial: AttributeError")


def test_a_reward_that_fails_now_and_then_is_named(lab):
    def odd(completion):
        seen.append(completion)
        if len(seen) == 3:
            raise ValueError("third")
        return float(len(seen))

    seen = []
    (said,) = warned(lab, reward=odd)
    assert said.startswith("the reward failed for 1 of 16: ValueError: third")


def test_a_prompt_over_the_context_is_an_error_and_nothing_is_begun(lab):
    with pytest.raises(ConfigError, match="prompt 1 has 600 tokens, which with max_tokens=12 make"):
        grpo(lab, **{**HEALTHY, "prompts": ["a", "b" * 600], "reward": lambda completion: 0})
    assert lab.runs().empty


def test_a_stop_that_is_reached_now_and_then_is_none(lab):
    assert warned(lab, stop=["e"], max_tokens=40) == []


def test_supervised_runs_are_warned_of_the_rate(lab):
    run = lab.sft(EXAMPLES, **{**SUPERVISED, "steps": 1, "learning_rate": 0.9})
    assert run.warnings[0].startswith("learning_rate is 0.9")


def test_the_rates_of_full_weights_are_others():
    assert check_rate(1e-5, lora=False) == check_rate(1e-4, lora=True) == []
    assert "full weights" in check_rate(5e-3, lora=False)[0]


def test_a_preflight_changes_nothing_of_what_follows(lab):
    runs = [grpo(lab, steps=2, preflight=tried) for tried in (True, False)]
    for step in (1, 2):
        one, other = ([g.rollouts for g in run.reader.groups(step)] for run in runs)
        assert one == other


def test_it_is_left_out_when_asked_and_when_a_run_goes_on(lab):
    assert warned(lab, preflight=False, learning_rate=0.5) == []
    run = grpo(lab, steps=1, preflight=True, learning_rate=1e-9)
    before = len(run.reader.events(kinds=["warning"]))
    again = run.resume(steps=2, learning_rate=0.5)
    assert not [e for e in again.reader.events(kinds=["warning"])[before:] if e.step is None]


def test_warnings_are_printed_where_there_is_no_notebook(lab, capsys):
    grpo(lab, steps=1, preflight=True, learning_rate=0.5, quiet=False)
    assert "learning_rate is 0.5" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("digits", [1, 2])
def test_the_addition_task_on_a_real_model_raises_none(tmp_path, digits):
    task = tasks.addition(digits)
    lab = Lab("SmolLM2-135M-Instruct", rank=16, folder=tmp_path, device="cpu")
    settings = {**task.settings, "steps": 1}
    run = lab.grpo(task.training, task.reward, quiet=True, **settings)
    assert [e.text for e in run.reader.events(kinds=["warning"]) if e.step is None] == []
