"""The calls of the seed's page on losses run as they are written."""

import numpy as np
import pytest

import xorl_lab as xl
from tests.closeness import assert_close
from tests.seeds.cut import change, cut, run

PAGE = "loss-functions.txt"

TOKENS = list(b"2+2=4 so it is")
PROMPT = 4
N = len(TOKENS)


@pytest.fixture
def client(empty_home) -> xl.TrainingClient:
    return xl.ServiceClient().create_lora_training_client("tiny", rank=4, seed=1)


@pytest.fixture
def numbers(client) -> dict[str, list[float]]:
    """Per-token numbers of length N; the prompt holds zeros, as in the seed's RL loop."""
    rng = np.random.default_rng(0)
    datum = xl.Datum(xl.ModelInput.from_ints(TOKENS), {"labels": TOKENS})
    now = client.forward([datum]).result().loss_fn_outputs[0].logprobs.to_numpy()
    completion = np.arange(N) >= PROMPT
    old = np.r_[0.0, now] + rng.normal(0, 0.8, N)
    rollout = old + rng.normal(0, 0.8, N)
    return {
        "logprobs_at_last_train_step": (old * completion).tolist(),
        "logprobs_at_rollout": (rollout * completion).tolist(),
        "advantages": (rng.normal(0, 1, N) * completion).tolist(),
    }


def datum(numbers: dict[str, list[float]]) -> xl.Datum:
    return xl.Datum(
        xl.ModelInput.from_ints(TOKENS),
        {
            "labels": TOKENS,
            "logprobs": numbers["logprobs_at_last_train_step"],
            "advantages": numbers["advantages"],
        },
    )


def call(documents, heading: str, client: xl.TrainingClient, data: list[xl.Datum]):
    """Run the forward_backward call of a section."""
    code = cut(documents / PAGE, heading, "fwd = client.forward_backward", "})")
    names = run(change(code, [], heading), {"client": client, "data": data})
    return names["fwd"].result()


def step(client: xl.TrainingClient) -> None:
    """What was accumulated can be applied."""
    version = client.version
    client.optim_step(xl.AdamParams()).result()
    assert client.version == version + 1


def test_causallm_loss(documents, client):
    code = cut(
        documents / PAGE,
        "Causal LM Loss (causallm_loss)",
        "fwd = client.forward_backward",
        'fwd = client.forward_backward(data, loss_fn="causallm_loss")',
    )
    data = [xl.Datum(xl.ModelInput.from_ints(TOKENS), {"labels": TOKENS})]
    output = run(change(code, [], "causallm_loss"), {"client": client, "data": data})
    result = output["fwd"].result()
    assert result.loss_fn_output_type == "causallm_loss"
    logprobs = result.loss_fn_outputs[0].logprobs.to_numpy()
    assert_close(result.metrics["loss:mean"], -logprobs.mean(), rtol=1e-6)
    step(client)


def test_policy_loss_with_dual_clip(documents, client, numbers):
    result = call(documents, "PPO Policy Loss (policy_loss)", client, [datum(numbers)])
    named = {
        "pg_clipfrac",
        "kl_sample_train_k3",
        "entropy_sample",
        "ratio_mean",
        "ratio_min",
        "ratio_max",
    }
    assert named <= result.metrics.keys()
    assert result.metrics["valid_tokens"] == N - PROMPT
    assert 0 < result.metrics["pg_clipfrac"] < 1
    step(client)


def test_importance_sampling(documents, client, numbers):
    heading = "GRPO / Importance Sampling (importance_sampling)"
    result = call(documents, heading, client, [datum(numbers)])
    new = result.loss_fn_outputs[0].logprobs.to_numpy()[PROMPT - 1 :]
    old = np.asarray(numbers["logprobs_at_last_train_step"])[PROMPT:]
    advantages = np.asarray(numbers["advantages"])[PROMPT:]
    assert_close(result.metrics["loss:mean"], -(np.exp(new - old) * advantages).mean(), rtol=1e-5)
    step(client)


def test_icepop(documents, client, numbers):
    far = dict(numbers)
    old = list(numbers["logprobs_at_last_train_step"])
    old[PROMPT] -= 4.0
    old[PROMPT + 2] += 4.0
    far["logprobs_at_last_train_step"] = old
    near = call(documents, "IcePop", client, [datum(numbers)])
    result = call(documents, "IcePop", client, [datum(far)])
    assert result.metrics["icepop_maskfrac"] > near.metrics["icepop_maskfrac"]
    assert result.metrics["valid_tokens"] == N - PROMPT
    step(client)


def test_temporal_importance_sampling(documents, client, numbers):
    heading = "TIS — Temporal Importance Sampling"
    code = cut(documents / PAGE, heading, "datum = xorl_client.Datum", "})")
    names = {"client": client, "xorl_client": xl, "token_ids": TOKENS, **numbers}
    corrected = run(change(code, [], heading), dict(names))["fwd"].result()
    plain = client.forward_backward([datum(numbers)], loss_fn="policy_loss").result()
    old = np.asarray(numbers["logprobs_at_last_train_step"])[PROMPT:]
    rollout = np.asarray(numbers["logprobs_at_rollout"])[PROMPT:]
    weights = np.clip(np.exp(old - rollout), 0.1, 2.0)
    terms = plain.loss_fn_outputs[0].elementwise_loss.to_numpy()[PROMPT - 1 :]
    assert_close(
        corrected.loss_fn_outputs[0].elementwise_loss.to_numpy()[PROMPT - 1 :],
        weights * terms,
        rtol=1e-5,
        atol=1e-7,
    )
    step(client)
