import numpy as np
import pandas as pd
import pytest

from tests.lab.support import EXAMPLES, PROMPTS, SETTINGS, share
from xorl_lab.errors import ConfigError
from xorl_lab.lab.jobs import grpo_task, sft_task
from xorl_lab.recipes.settings import build

GIVEN = {k: v for k, v in SETTINGS.items() if k not in ("preflight", "quiet")} | {"steps": 3}


def mark(rows):
    return grpo_task(rows, share, None).data


def test_the_fingerprint_tells_data_apart_and_does_not_depend_on_their_form():
    assert (
        mark(PROMPTS) == mark(tuple(PROMPTS)) == mark(iter(PROMPTS)) == mark(pd.DataFrame(PROMPTS))
    )
    assert mark(PROMPTS) == mark([dict(reversed(row.items())) for row in PROMPTS])
    assert mark(PROMPTS) != mark(PROMPTS[::-1])
    assert mark(["a", "b"]) != mark(["ab"]) != mark(["a", "c"])
    assert mark([{"prompt": "a", "n": np.array([1, 2])}]) == mark([{"prompt": "a", "n": [1, 2]}])


class Thing:
    pass


def test_odd_rows_have_a_fingerprint_that_lasts():
    rows = lambda: [{"prompt": "a", 1: "mixed", "thing": Thing(), "text": "\ud800"}]  # noqa: E731
    assert mark(rows()) == mark(rows())


def test_a_large_array_is_read_whole():
    one, other = np.zeros(5000), np.zeros(5000)
    other[2500] = 1
    assert mark([{"prompt": "a", "x": one}]) != mark([{"prompt": "a", "x": other}])


def test_totals_and_lengths():
    task = sft_task(EXAMPLES, None)
    job = task.job({}, {"learning_rate": 1e-3, "epochs": 2})
    assert job.total == 3
    before = job.described()["recipe"]
    assert task.job(before, {"steps": 7}).total == 7
    assert task.job(before, {"batch_size": 5}).total == 2
    again = task.job(task.job(before, {"steps": 7}).described()["recipe"], {"epochs": 4})
    assert again.total == 5
    assert grpo_task(PROMPTS, share, None).job(GIVEN, {"steps": 9}).total == 9


def test_knobs():
    job = grpo_task(PROMPTS, share, None).job({}, GIVEN)
    assert set(job.knobs()) == {
        "learning_rate", "grad_clip_norm", "weight_decay", "temperature", "kl_coef",
    }  # fmt: skip
    assert job.with_knobs({"learning_rate": 2.0}).learning_rate == 2.0
    with pytest.raises(ConfigError, match="weight_decay"):
        job.with_knobs({"weight_decay": -1.0})
    assert (
        "temperature"
        not in sft_task(EXAMPLES, None).job({}, {"steps": 1, "learning_rate": 1.0}).knobs()
    )


def test_what_is_kept_makes_the_same_settings_again():
    job = grpo_task(PROMPTS, share, None).job({}, {**GIVEN, "loss_fn_params": {"eps_clip": 0.1}})
    assert build(job.task.recipe, job.described()["recipe"]) == job.settings
