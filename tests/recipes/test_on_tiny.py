"""The recipes on the model ``tiny``, with nothing in place of the engine."""

import string

import pytest

from xorl_lab.client import ServiceClient
from xorl_lab.errors import DataError
from xorl_lab.recipes.evaluate import evaluate
from xorl_lab.recipes.grpo import grpo
from xorl_lab.recipes.sft import render, sft
from xorl_lab.types import ModelInput, SamplingParams

PROMPTS = [
    {"prompt": f"{a}+{b}=", "wanted": string.ascii_lowercase + string.digits}
    for a in range(3)
    for b in range(3)
]


def share(completion, wanted):
    """A reward that a random model can raise: the share of wanted characters."""
    return sum(c in wanted for c in completion) / 4


@pytest.fixture
def client(tmp_path):
    service = ServiceClient(home=tmp_path, device="cpu")
    return service.create_lora_training_client("tiny", 8, alpha=16.0, seed=0)


def run(client, **changes):
    settings = {"steps": 3, "max_tokens": 4, "learning_rate": 5e-3, "seed": 1, **changes}
    return list(grpo(client, PROMPTS, share, **settings))


def stable(records):
    """Everything but time."""
    timed = ("seconds:", "tokens_per_second")
    kept = [{k: v for k, v in r.metrics.items() if not k.startswith(timed)} for r in records]
    return kept, [r.groups for r in records]


def test_reward_rises(client):
    records = run(client, steps=25, held_out=PROMPTS[:3])
    first, last = (
        sum(r.metrics["reward"] for r in part) / 5 for part in (records[:5], records[-5:])
    )
    assert last > first + 0.2
    assert records[-1].metrics["held_out:reward"] > 0.5


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.7},
        {"loss_fn": "importance_sampling", "advantage": "leave_one_out"},
        {"kl_coef": 0.1, "kl_type": "k2", "temperature": 1.3},
        {"updates_per_batch": 2, "loss_fn_params": {"use_tis": True, "eps_clip": 0.1}},
    ],
)
def test_sampler_and_trainer_agree_at_every_step(client, changes):
    for record in run(client, **changes):
        assert record.metrics["kl_sampler_abs"] < 1e-4
        assert record.metrics["ratio_min"] <= 1 <= record.metrics["ratio_max"]


def test_ratios_are_one_on_policy(client):
    for record in run(client, temperature=0.7):
        assert abs(record.metrics["ratio_min"] - 1) < 1e-3
        assert abs(record.metrics["ratio_max"] - 1) < 1e-3
        assert record.metrics["pg_clipfrac"] == 0


def in_two_turns(wanted):
    """Pays for wanted characters in both turns, of which the second answers the first."""
    turn = yield
    first = share(turn.text, wanted)
    turn = yield f"{first:.2f}?\n"
    return {"first": first / 2, "second": share(turn.text, wanted) / 2}


@pytest.mark.parametrize("chat", [False, True])
def test_episodes_of_two_turns_are_learned_and_trainer_and_sampler_agree(client, chat):
    rows = [{**p, "prompt": [{"role": "user", "content": p["prompt"]}]} for p in PROMPTS]
    settings = {"steps": 20, "max_tokens": 4, "learning_rate": 5e-3, "seed": 1}
    records = list(
        grpo(client, rows if chat else PROMPTS, in_two_turns, held_out=rows[:3], **settings)
    )
    first, last = (
        sum(r.metrics["reward"] for r in part) / 4 for part in (records[:4], records[-4:])
    )
    assert last > first + 0.15
    trained = [r for r in records if "kl_sampler_abs" in r.metrics]
    assert len(trained) > 8  # until nothing is left to learn
    for record in trained:
        assert record.metrics["kl_sampler_abs"] < 1e-4
        assert abs(record.metrics["ratio_max"] - 1) < 1e-3
        assert record.metrics["turns"] == 2
        assert record.metrics["valid_tokens"] == sum(r.drawn for g in record.groups
                                                     for r in g.rollouts)  # fmt: skip


def test_the_divergence_from_the_base_model_starts_at_nothing_and_grows(client):
    records = run(client, report_base_kl=True)
    assert records[0].metrics["kl_base"] < 1e-8
    assert records[-1].metrics["kl_base"] > 1e-4


def test_a_strong_penalty_keeps_the_model_near_its_base(tmp_path):
    ends = []
    for coefficient in (0.0, 5.0):
        service = ServiceClient(home=tmp_path, device="cpu")
        client = service.create_lora_training_client("tiny", 8, alpha=16.0, seed=0)
        records = run(client, steps=8, kl_coef=coefficient, report_base_kl=True)
        ends.append(records[-1].metrics["kl_base"])
    assert ends[1] < 0.5 * ends[0]


def test_the_same_seed_gives_the_same_run_and_another_seed_another(tmp_path):
    def once(seed):
        service = ServiceClient(home=tmp_path, device="cpu")
        client = service.create_lora_training_client("tiny", 8, alpha=16.0, seed=0)
        return stable(run(client, seed=seed, updates_per_batch=2, kl_coef=0.01))

    first = once(1)
    assert once(1) == first
    assert once(2)[1] != first[1]


def test_after_a_step_that_failed_the_client_goes_on(client):
    def broken(completion):
        raise ValueError("no")

    with pytest.raises(DataError, match=r"failed for all 64 completions .*ValueError: no"):
        list(grpo(client, PROMPTS, broken, steps=1, max_tokens=2, learning_rate=1e-3))
    assert client.version == 0
    assert len(run(client, steps=1)) == 1
    assert client.version == 1


def test_nothing_to_learn_changes_nothing(client):
    settings = {"steps": 2, "max_tokens": 2, "learning_rate": 1e-3}
    records = list(grpo(client, PROMPTS, lambda: 1.0, **settings))
    assert client.version == 0
    assert len(records) == 2


def test_evaluation_is_greedy_and_repeats(client):
    first, again = (evaluate(client, PROMPTS, share, max_tokens=4) for _ in range(2))
    assert [g.rollouts[0].tokens for g in first.groups] == [
        g.rollouts[0].tokens for g in again.groups
    ]
    greedy = client.save_weights_and_get_sampling_client().sample(
        PROMPTS[2]["prompt"], SamplingParams(max_tokens=4, temperature=0)
    )
    assert greedy.result().text == first.groups[2].rollouts[0].text


def test_sft_learns_a_conversation_and_where_it_ends(client):
    conversation = [
        {"role": "user", "content": "Password?"},
        {"role": "assistant", "content": "violet"},
    ]
    records = list(
        sft(
            client,
            [conversation],
            held_out=[conversation],
            learning_rate=1e-2,
            steps=40,
            batch_size=1,
        )
    )
    assert records[-1].metrics["loss:mean"] < 0.1 < records[0].metrics["loss:mean"]
    assert records[-1].metrics["held_out:loss"] < 0.1
    rendered = render(conversation, client.get_tokenizer())
    prompt = rendered.tokens[: rendered.weights.index(1.0)]
    answer = client.save_weights_and_get_sampling_client().sample(
        ModelInput.from_ints(prompt), SamplingParams(max_tokens=20, temperature=0)
    )
    assert answer.result().text == "violet"
    assert answer.result().sequences[0].stop_reason == "stop"
