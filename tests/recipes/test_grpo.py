import dataclasses
import itertools

import numpy as np
import pandas as pd
import pytest

from tests.recipes.fakes import BASE, SAMPLER, FakeClient, sequence, trainer_logprob
from xorl_lab import losses
from xorl_lab.errors import ConfigError, DataError
from xorl_lab.recipes.evaluate import evaluate
from xorl_lab.recipes.grpo import GrpoSettings, grpo

ROWS = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(4)]
SETTINGS = {"steps": 1, "max_tokens": 3, "learning_rate": 1e-3, "prompts_per_step": 2}
SETTINGS |= {"group_size": 4}


def by_index(text, params, index):
    """Two of four are right, of unequal length."""
    right = str(int(text[0]) + 1)
    return [sequence(right), sequence("xy"), sequence(right), sequence("xyz", "length")][index % 4]


def right(completion, answer):
    return float(completion == answer)


def run(client, reward=right, prompts=ROWS, held_out=None, **changes):
    return list(grpo(client, prompts, reward, held_out=held_out, **{**SETTINGS, **changes}))


def test_a_step_trains_the_sampled_ids_on_the_completion_alone():
    client = FakeClient(by_index)
    (record,) = run(client)
    (call,) = client.named("forward_backward")
    assert call.loss_fn == "policy_loss"
    assert len(call.data) == 8
    datum, rollout = call.data[1], record.groups[0].rollouts[1]
    prompt = record.groups[0].prompt_tokens
    tokens = prompt + rollout.tokens
    assert datum.model_input.to_ints() == tokens[:-1]
    assert datum.loss_fn_inputs["target_tokens"].tolist() == tokens[1:]
    count, before = len(rollout.tokens), len(prompt) - 1
    assert datum.loss_fn_inputs["weights"].tolist() == [0] * before + [1] * count
    assert datum.loss_fn_inputs["logprobs"].tolist() == [0] * before + [SAMPLER] * count
    assert datum.loss_fn_inputs["advantages"].tolist() == [0] * before + [-1] * count


def test_metrics_of_a_step():
    (record,) = run(FakeClient(by_index))
    metrics = record.metrics
    assert record.step == 1
    assert metrics["reward"] == 0.5
    assert metrics["reward:std"] == 0.5
    assert (metrics["reward:min"], metrics["reward:max"]) == (0, 1)
    assert metrics["truncated"] == 0.25
    assert metrics["completion_tokens"] == (2 + 3 + 2 + 3) / 4
    assert metrics["kl_sampler_abs"] == 0
    assert metrics["kl_sampler"] == 0
    assert metrics["groups_without_signal"] == 0
    assert metrics["rewards_failed"] == 0
    assert metrics["version"] == 1
    assert metrics["grad_norm"] == 1
    wanted = {f"seconds:{n}" for n in ("sample", "score", "train", "sync", "total")}
    assert wanted | {"tokens_per_second", "loss:mean"} <= set(metrics)
    assert record.warnings == []
    assert [g.row for g in record.groups] == [
        {"answer": str(int(g.prompt[0]) + 1)} for g in record.groups
    ]


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [("group", [1, -1, 1, -1]), ("mean", [0.5, -0.5] * 2), ("leave_one_out", [2 / 3, -2 / 3] * 2)],
)
def test_advantages(advantage, expected):
    (record,) = run(FakeClient(by_index), advantage=advantage)
    for group in record.groups:
        assert [r.advantage for r in group.rollouts] == pytest.approx(expected)


def test_seeds_differ_between_prompts_and_steps_and_repeat_with_the_run():
    def draws(seed):
        client = FakeClient(by_index)
        run(client, steps=3, seed=seed)
        return [(tokens, params.seed) for tokens, params, _, _ in client.sampled]

    assert draws(1) == draws(1)
    seeds = [seed for _, seed in draws(1)]
    assert len(set(seeds)) == len(seeds) == 6
    assert draws(2) != draws(1)


def test_each_step_samples_from_the_newest_weights():
    client = FakeClient(by_index)
    records = run(client, steps=3)
    assert [version for *_, version in client.sampled] == [0, 0, 1, 1, 2, 2]
    assert [r.groups[0].rollouts[0].version for r in records] == [0, 1, 2]


def test_every_prompt_comes_once_before_any_comes_again():
    records = run(FakeClient(by_index), steps=4)
    prompts = [g.prompt for r in records for g in r.groups]
    assert sorted(prompts[:4]) == sorted(prompts[4:]) == sorted(r["prompt"] for r in ROWS)


def test_data_frame():
    (record,) = run(FakeClient(by_index), prompts=pd.DataFrame(ROWS))
    assert record.metrics["reward"] == 0.5


def test_temperature_reaches_sampler_loss_and_reference():
    client = FakeClient(by_index)
    run(client, temperature=0.7, kl_coef=0.1)
    assert client.sampled[0][1].temperature == 0.7
    assert client.named("forward_backward")[0].params["logprob_temperature"] == 0.7
    assert client.named("forward_base")[0].params["logprob_temperature"] == 0.7


def test_several_updates_keep_the_logprobs_of_the_sampler():
    client = FakeClient(by_index)
    (record,) = run(client, updates_per_batch=3)
    calls = client.named("forward_backward")
    assert [c.version for c in calls] == [0, 1, 2]
    assert [_completion(c.data[0], "logprobs") for c in calls] == [[SAMPLER] * 2] * 3
    assert client.named("forward") == []
    assert record.metrics["ratio_min"] == -1.0  # the least of 1, 0 and -1
    assert record.metrics["ratio_max"] == 2.0
    assert record.metrics["grad_norm"] == 2.0  # the mean of 1, 2 and 3
    assert record.metrics["version"] == 3


def test_tis_takes_old_logprobs_from_the_last_train_step():
    client = FakeClient(by_index)
    client.version = 1  # so that trainer and sampler differ from the start
    run(client, updates_per_batch=3, loss_fn_params={"use_tis": True})
    assert [c.version for c in client.named("forward")] == [1]
    calls = client.named("forward_backward")
    old = [_completion(c.data[0], "logprobs") for c in calls]
    # Before the first update that is the trainer as it is; then, the trainer as of the step before.
    assert old == [[trainer_logprob(v)] * 2 for v in (1, 1, 2)]
    assert [_completion(c.data[0], "rollout_logprobs") for c in calls] == [[SAMPLER] * 2] * 3


def test_gap_between_sampler_and_trainer():
    client = FakeClient(by_index)
    client.version = 2
    (record,) = run(client)
    assert record.metrics["kl_sampler_abs"] == 0.25
    assert record.metrics["kl_sampler"] == pytest.approx(np.exp(0.25) - 1 - 0.25)


def test_kl_penalty_sends_the_logprobs_of_the_base_model():
    client = FakeClient(by_index)
    (record,) = run(client, kl_coef=0.1, kl_type="k2")
    (call,) = client.named("forward_backward")
    assert _completion(call.data[0], "ref_logprobs") == [BASE] * 2
    assert (call.params["kl_coef"], call.params["kl_type"]) == (0.1, "k2")
    d = BASE - SAMPLER
    assert record.metrics["kl_base"] == pytest.approx(np.exp(d) - 1 - d)


def test_divergence_from_the_base_model_without_a_penalty():
    client = FakeClient(by_index)
    (record,) = run(client, report_base_kl=True)
    assert "kl_base" in record.metrics
    assert "ref_logprobs" not in client.named("forward_backward")[0].data[0].loss_fn_inputs


def _completion(datum, name):
    values = datum.loss_fn_inputs[name].tolist()
    weights = datum.loss_fn_inputs["weights"].tolist()
    assert all(v == 0 for v, w in zip(values, weights, strict=True) if not w)
    return [v for v, w in zip(values, weights, strict=True) if w]


# Rewards that fail, or say nothing.


def test_a_failed_reward_is_kept_marked_and_left_out():
    counter = itertools.count()

    def reward(completion, answer):
        if next(counter) % 4 == 0:
            raise ValueError("no parse")
        return float(completion == answer)

    client = FakeClient(by_index)
    (record,) = run(client, reward)
    failed = [r for g in record.groups for r in g.rollouts if r.reward is None]
    assert len(failed) == 2
    assert failed[0].error.startswith("ValueError: no parse (line ")
    assert [r.advantage for r in record.groups[0].rollouts] == pytest.approx(
        [0, -(0.5**0.5), 2**0.5, -(0.5**0.5)]
    )
    assert len(client.named("forward_backward")[0].data) == 6
    assert record.metrics["rewards_failed"] == 2
    assert record.metrics["reward"] == pytest.approx(1 / 3)
    assert record.warnings[0].startswith(
        "2 of 8 rewards failed and were left out of the training; the first: ValueError: no parse"
    )


def test_all_rewards_failed():
    def reward(completion):
        return completion.nonsense

    client = FakeClient(by_index)
    with pytest.raises(DataError, match=r"for all 8 completions .*'str' object has no attribute"):
        run(client, reward)
    assert client.calls == []


def test_groups_without_signal_are_counted():
    client = FakeClient(by_index)
    (record,) = run(
        client, lambda prompt, completion, answer: prompt[0] != "0" or completion == answer
    )
    quiet = sum(g.prompt[0] != "0" for g in record.groups)
    assert record.metrics["groups_without_signal"] == quiet


def test_no_signal_at_all_takes_no_optimizer_step():
    client = FakeClient(by_index)
    records = run(client, lambda: 1.0, steps=2)
    assert client.calls == []
    assert [r.metrics["groups_without_signal"] for r in records] == [2, 2]
    assert records[0].metrics["version"] == 0
    assert records[0].warnings == [
        "the rewards of each group are all equal: there was nothing to learn from, and the weights "
        "stay as they are"
    ]


def test_no_signal_with_a_penalty_still_trains():
    client = FakeClient(by_index)
    run(client, lambda: 1.0, kl_coef=0.1)
    assert len(client.named("optim_step")) == 1


def test_a_group_of_one_is_warned_of():
    (record,) = run(FakeClient(by_index), group_size=1)
    assert "group_size is 1, so every advantage is 0: use at least 2" in record.warnings


def test_truncation_of_everything_is_warned_of():
    client = FakeClient(lambda *_: sequence("xyz", "length"))
    (record,) = run(client)
    assert record.warnings[0] == (
        "every completion was cut off at max_tokens=3: raise it, or check stop"
    )
    assert record.metrics["truncated"] == 1


def test_named_parts_are_reported():
    client = FakeClient(by_index)
    (record,) = run(client, lambda completion, answer: {"right": completion == answer, "bonus": 1})
    assert record.metrics["reward:part:right"] == 0.5
    assert record.metrics["reward:part:bonus"] == 1
    assert record.metrics["reward"] == 1.5


def test_an_interrupt_cancels_what_is_under_way():
    cancelled = []

    class Future:
        def result(self):
            raise KeyboardInterrupt

        def cancel(self):
            cancelled.append(self)

    client = FakeClient(by_index)
    sampler = client.save_weights_and_get_sampling_client()
    under_way = Future()
    sampler.sample_batch = lambda *_, **__: under_way
    client.save_weights_and_get_sampling_client = lambda: sampler
    with pytest.raises(KeyboardInterrupt):
        run(client)
    assert cancelled == [under_way]


# Held-out evaluation.


def test_held_out_is_greedy_and_after_the_update():
    client = FakeClient(by_index)
    records = run(client, held_out=ROWS[:3], steps=5, evaluate_every=2)
    measured = [r.step for r in records if "held_out:accuracy" in r.metrics]
    assert measured == [2, 4, 5]
    greedy = [(n, version) for _, params, n, version in client.sampled if params.temperature == 0]
    assert greedy == [(1, 2)] * 3 + [(1, 4)] * 3 + [(1, 5)] * 3
    assert records[1].metrics["held_out:accuracy"] == 1
    assert records[1].metrics["held_out:reward"] == 1


def test_evaluate_counts_failures_as_not_solved():
    def reward(prompt):
        return {"0": 1, "1": 0.5}[prompt[0]]

    result = evaluate(FakeClient(by_index), ROWS[:3], reward, max_tokens=3)
    assert result.accuracy == pytest.approx(1 / 3)
    assert result.reward == 0.75
    assert result.groups[2].rollouts[0].error.startswith("KeyError: '2'")
    assert np.isnan(evaluate(FakeClient(by_index), ROWS[2:], reward, max_tokens=3).reward)


# Arguments are checked before anything runs.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_size": 0}, "group_size is 0: pass an integer >= 1"),
        ({"steps": 2.0}, "steps is 2.0: pass an integer >= 1"),
        ({"prompts_per_step": True}, "prompts_per_step is True: pass an integer >= 1"),
        ({"seed": -1}, "seed is -1: pass an integer >= 0"),
        (
            {"temperature": 0},
            "temperature is 0, so all completions of a group are equal: pass one > 0",
        ),
        ({"temperature": -1}, "temperature is -1: pass a number >= 0 (0 = greedy)"),
        ({"learning_rate": float("nan")}, "learning_rate is nan: pass a number > 0"),
        ({"advantage": "gae"}, "advantage is 'gae': choose from group, leave_one_out, mean"),
        ({"kl_coef": -1}, "kl_coef is -1: pass a number >= 0 (0 = no penalty)"),
        (
            {"loss_fn_params": {"kl_coef": 0.1}},
            "loss_fn_params has 'kl_coef': set kl_coef, kl_type or temperature instead",
        ),
        ({"learning_rat": 1}, "unknown setting 'learning_rat': did you mean learning_rate?"),
        (
            {"max_tokens": 509},
            "prompt 0 has 4 tokens, which with max_tokens=509 makes 513, over the context of 512 "
            "tokens: shorten the prompt or lower max_tokens",
        ),
        (
            {"reward": lambda solution: 1},
            "the reward function asks for 'solution', which is not there: it can ask for prompt, "
            "completion, tokens, stop_reason, answer",
        ),
        (
            {"held_out": [{"prompt": "9+1="}]},
            "the reward function asks for 'answer', which is not there: it can ask for prompt, "
            "completion, tokens, stop_reason",
        ),
    ],
)
def test_wrong_arguments(changes, message):
    client = FakeClient(by_index)
    arguments = {"held_out": None, "reward": right, **SETTINGS, **changes}
    with pytest.raises(ConfigError) as caught:
        grpo(client, ROWS, **arguments)
    assert str(caught.value) == message
    assert client.calls == client.sampled == []


def test_loss_parameters_are_checked_at_once():
    with pytest.raises(ConfigError, match="eps_clipp"):
        grpo(FakeClient(by_index), ROWS, right, **SETTINGS, loss_fn_params={"eps_clipp": 0.1})


def test_a_loss_without_advantages_is_refused():
    with pytest.raises(ConfigError, match=r"loss_fn is 'cross_entropy': choose from .*policy_loss"):
        grpo(FakeClient(by_index), ROWS, right, **SETTINGS, loss_fn="cross_entropy")


def _with_advantages():
    return [n for n in losses.names() if "advantages" in losses.get(n).required]


@pytest.mark.parametrize("loss_fn", _with_advantages())
def test_every_loss_with_advantages_can_be_chosen(loss_fn):
    client = FakeClient(by_index)
    run(client, loss_fn=loss_fn)
    (call,) = client.named("forward_backward")
    assert call.loss_fn == loss_fn
    losses.check_params(loss_fn, call.params)


def test_a_missing_setting_is_named():
    with pytest.raises(ConfigError) as caught:
        grpo(FakeClient(by_index), ROWS, right, steps=1)
    assert str(caught.value) == (
        "missing settings max_tokens, learning_rate: pass max_tokens=64, learning_rate=1e-4, or "
        "whatever suits"
    )


def test_settings_have_the_defaults_of_the_demo():
    settings = GrpoSettings(steps=1, max_tokens=1, learning_rate=1e-3)
    assert settings.adam().beta2 == 0.99
    assert settings.adam().grad_clip_norm == 1.0


def drawn_from(client):
    return [(prompt, params.seed) for prompt, params, _, _ in client.sampled]


def test_a_run_taken_up_behind_some_steps_draws_what_would_have_come():
    whole, rest = FakeClient(by_index), FakeClient(by_index)
    run(whole, steps=5)
    records = run(rest, steps=5, done=3)
    assert [r.step for r in records] == [4, 5]
    assert drawn_from(rest) == drawn_from(whole)[3 * SETTINGS["prompts_per_step"] :]


def test_a_run_with_no_steps_left_is_empty_and_its_last_step_is_evaluated():
    assert run(FakeClient(by_index), steps=3, done=3) == []
    (record,) = run(FakeClient(by_index), steps=3, done=2, held_out=ROWS[:1])
    assert "held_out:reward" in record.metrics


@pytest.mark.parametrize("done", [-1, 1.5, True, None])
def test_done_is_checked_before_anything_runs(done):
    with pytest.raises(ConfigError, match=r"done is .*: pass an integer >= 0"):
        grpo(FakeClient(by_index), ROWS, right, done=done, **SETTINGS)


def test_settings_are_asked_for_before_each_step_and_made_of_those_that_were_given():
    client, asked = FakeClient(by_index), []

    def live(given):
        asked.append(given)
        rate = given.learning_rate / len(asked)
        return dataclasses.replace(given, learning_rate=rate, temperature=0.5 * len(asked))

    steps = grpo(client, ROWS, right, live=live, **{**SETTINGS, "steps": 3})
    assert asked == []
    for count, _ in enumerate(steps, 1):
        assert len(asked) == count
    assert len(set(map(id, asked))) == 1
    assert [c.params["learning_rate"] for c in client.named("optim_step")] == [1e-3, 5e-4, 1e-3 / 3]
    assert [p.temperature for _, p, _, _ in client.sampled[::2]] == [0.5, 1.0, 1.5]
    losses_seen = client.named("forward_backward")
    assert [c.params["logprob_temperature"] for c in losses_seen] == [0.5, 1.0, 1.5]
