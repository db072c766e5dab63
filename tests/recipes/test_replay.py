"""Chosen experts in recipes: replayed in the update, then dropped; how much they matter."""

import numpy as np
import pytest

import xorl_lab as xl
from tests.engine.support import exactly
from xorl_lab.errors import ConfigError, DataError
from xorl_lab.recipes.episodes import _experts
from xorl_lab.recipes.grpo import GrpoSettings, grpo
from xorl_lab.recipes.routes import Routes, routes

PROMPTS = ["A router", "decides"]
SETTINGS = {
    "steps": 2,
    "group_size": 4,
    "prompts_per_step": 2,
    "max_tokens": 8,
    "learning_rate": 1e-3,
    "seed": 3,
}


def spaces(completion):
    return completion.count(" ") + 0.01 * len(completion)


def service(home, dtype: str = "float32") -> xl.ServiceClient:
    return xl.ServiceClient(home=home, device="cpu", dtype=dtype)


def sent(client, monkeypatch) -> list[xl.Datum]:
    """All datums that the client is asked to train on, from now on."""
    seen: list[xl.Datum] = []
    original = client.forward_backward

    def noted(data, *args, **keywords):
        seen.extend(data)
        return original(data, *args, **keywords)

    monkeypatch.setattr(client, "forward_backward", noted)
    return seen


@pytest.mark.parametrize("replay", [False, True])
def test_the_experts_of_each_rollout_are_replayed_and_not_kept(tmp_path, monkeypatch, replay):
    client = service(tmp_path).create_lora_training_client("tiny-moe", rank=4, seed=1)
    seen = sent(client, monkeypatch)
    for record in grpo(client, PROMPTS, spaces, replay_experts=replay, **SETTINGS):
        rollouts = [r for g in record.groups for r in g.rollouts]
        assert all(r.routed_experts is None for r in rollouts)
        assert record.metrics["kl_sampler_abs"] < 1e-4
    assert len(seen) == 16
    for datum in seen:
        if replay:
            assert datum.routed_experts.shape == (datum.model_input.length, 4, 2)
        else:
            assert datum.routed_experts is None


def test_replay_changes_nothing_where_sampler_and_trainer_agree(tmp_path):
    def run(name: str, *, replay: bool) -> list[dict[str, float]]:
        made = service(tmp_path).create_lora_training_client("tiny-moe", 4, seed=1, model_id=name)
        steps = grpo(made, PROMPTS, spaces, replay_experts=replay, **SETTINGS)
        return [s.metrics for s in steps]

    free, replayed = run("free", replay=False), run("replayed", replay=True)
    for one, other in zip(free, replayed, strict=True):
        assert other["reward"] == one["reward"]
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)


def test_in_bfloat16_replay_closes_the_gap(tmp_path):
    def gap(name: str, *, replay: bool) -> float:
        made = service(tmp_path, "bfloat16").create_lora_training_client(
            "tiny-moe", 8, seed=1, model_id=name
        )
        wide = SETTINGS | {"max_tokens": 32, "group_size": 8}
        steps = grpo(made, PROMPTS, spaces, replay_experts=replay, **wide)
        return float(np.mean([s.metrics["kl_sampler_abs"] for s in steps]))

    assert gap("replayed", replay=True) < 0.7 * gap("free", replay=False)


def test_a_model_without_experts_says_so_before_anything_is_trained(tmp_path):
    client = service(tmp_path).create_lora_training_client("tiny", rank=4, seed=1)
    steps = grpo(client, PROMPTS, spaces, replay_experts=True, **SETTINGS)
    message = (
        "return_routed_experts is set, but of 'tiny' nothing can be returned: this model has no "
        "experts (LlamaForCausalLM is dense); leave it out (in a recipe: replay_experts)"
    )
    with pytest.raises(ConfigError, match=exactly(message)):
        next(steps)
    assert client.version == 0


def test_only_who_wants_replay_asks_for_experts():
    needed = {"steps": 1, "max_tokens": 4, "learning_rate": 1e-3}
    assert not GrpoSettings(**needed).sampling(seed=0).return_routed_experts
    assert GrpoSettings(**needed, replay_experts=True).sampling(seed=0).return_routed_experts


def test_an_episode_keeps_the_experts_of_the_step_that_drew():
    """Each turn reads what came before anew; what was drawn keeps its own."""
    first = np.full((5, 2, 2), 1, np.int16)
    second = np.full((9, 2, 2), 2, np.int16)
    third = np.full((12, 2, 2), 3, np.int16)
    assert _experts([first]) is first
    assert _experts([first, second, third])[:, 0, 0].tolist() == [1] * 5 + [2] * 4 + [3] * 3
    assert _experts([first, None, third]) is None
    assert _experts([None, second]) is None


# How much of a gap is due to experts.


def drawn_by(client, **fields: object):
    asked = {"max_tokens": 40, "seed": 0, "return_routed_experts": True}
    params = xl.SamplingParams(**(asked | fields))
    ids = [list(p.encode()) for p in PROMPTS]
    batch = client.sample_batch([xl.ModelInput.from_ints(i) for i in ids], params, 4).result()
    return [(ids[i], s) for i, response in batch.completed for s in response.sequences]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_equal_weights_have_no_routes_of_their_own(tmp_path, temperature):
    client = service(tmp_path).create_training_client("tiny-moe")
    sampler = client.save_weights_and_get_sampling_client()
    found = routes(client, drawn_by(sampler, temperature=temperature), temperature)
    assert not found.moved.any()
    assert np.abs(found.own).max() < 1e-4
    assert np.abs(found.own - found.replayed).max() < 1e-6


def test_a_small_step_moves_a_few_tokens_which_carry_most_of_the_gap(tmp_path):
    client = service(tmp_path).create_training_client("tiny-moe")
    before = client.save_weights_and_get_sampling_client()
    lesson = list(b"To be, or not to be, that is the question.")
    client.forward_backward([xl.Datum(xl.ModelInput.from_ints(lesson), {"labels": lesson})])
    client.optim_step(xl.AdamParams(learning_rate=1e-4)).result()
    drawn = drawn_by(before)
    found = routes(client, drawn)
    count = sum(len(s.tokens) for _, s in drawn)
    assert found.own.shape == found.replayed.shape == found.elsewhere.shape == (count,)
    assert found.moved.shape == (count, 4)
    assert 0 < found.elsewhere.mean() < 0.2
    own, replayed = np.abs(found.own), np.abs(found.replayed)
    assert own[found.elsewhere].mean() > 3 * own[~found.elsewhere].mean()
    assert replayed.max() < own.max() / 2
    assert client.version == 1


def test_routes_are_shown_as_numbers_and_as_a_picture():
    moved = np.array([[False, False], [True, False], [False, False]])
    found = Routes(np.array([0.1, -2.0, 0.3]), np.array([0.1, 0.2, -0.3]), moved)
    assert (
        repr(found) == "Routes(3 tokens, 1 through other experts; mean gap 0.8 nats, replayed 0.2)"
    )
    frame = found.frame()
    assert frame["tokens"].tolist() == [3, 2, 1]
    assert frame.loc["other experts", "largest gap, own"] == 2.0
    assert frame.loc["same experts", "mean gap, replayed"] == pytest.approx(0.2)
    assert found._repr_png_().startswith(b"\x89PNG")


@pytest.mark.parametrize("empty", [True, False])
def test_completions_without_experts_have_no_routes(tmp_path, empty):
    client = service(tmp_path).create_training_client("tiny-moe")
    drawn = [] if empty else [([1, 2], xl.SampledSequence([3], logprobs=[-1.0]))]
    with pytest.raises(DataError, match="there are no completions with experts and logprobs"):
        routes(client, drawn)
