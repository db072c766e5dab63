"""This package's own client against the server: the same answers as in this process."""

import math

import httpx
import pytest

from tests.closeness import assert_close
from tests.server.support import ADAM, weights
from xorl_lab.client import ServiceClient
from xorl_lab.errors import DataError
from xorl_lab.recipes.grpo import grpo
from xorl_lab.types import Datum, ModelInput, SamplingParams


@pytest.fixture
def closed(monkeypatch):
    """Close the connections that the client under test opens, before the server stops."""
    opened = []
    original = httpx.Client.__init__

    def noted(self, *args, **keywords):
        original(self, *args, **keywords)
        opened.append(self)

    monkeypatch.setattr(httpx.Client, "__init__", noted)
    yield
    for client in opened:
        client.close()


TOKENS = [(1, 2, 3, 4), (9, 8, 7)]


def drive(service):
    """A short run; its answers and the path of its checkpoint."""
    client = service.create_lora_training_client("tiny", 4, seed=7)
    data = [Datum(ModelInput.from_ints(t), {"labels": t}) for t in TOKENS]
    out = client.forward_backward(data, "causallm_loss")
    step = client.optim_step(ADAM).result()
    with pytest.raises(DataError, match="9999"):
        client.forward([Datum(ModelInput.from_ints([1, 9999]), {"labels": [1, 9999]})]).result()
    after = client.forward(data).result()
    path = client.save_state("end").result().path
    sampler = client.save_weights_for_sampler("s").result().path
    logprobs = [
        o.logprobs.tolist() for o in (*out.result().loss_fn_outputs, *after.loss_fn_outputs)
    ]
    return logprobs, step.metrics, path, sampler


@pytest.mark.usefixtures("closed")
def test_over_http_as_in_process(live, tmp_path):
    server = live()
    own = tmp_path / "own"
    here = drive(ServiceClient(home=own))
    remote = ServiceClient(base_url=server.url)
    there = drive(remote)
    assert there[:3] == here[:3]
    assert weights(tmp_path, there[2]) == weights(own, here[2])
    params = SamplingParams(max_tokens=4, seed=5)
    prompt = ModelInput.from_ints([1, 2, 3])
    sampler = remote.create_sampling_client(base_url=server.url, model_path=there[3])
    drawn = [sampler.sample(prompt, params).result()]
    sampler = ServiceClient(home=own).create_sampling_client(model_path=here[3])
    drawn.append(sampler.sample(prompt, params).result())
    assert drawn[0].tokens == drawn[1].tokens
    assert drawn[0].logprobs == pytest.approx(drawn[1].logprobs, abs=1e-9)


@pytest.mark.usefixtures("closed")
def test_over_http_a_recipe_records_all_but_entropies(live, tmp_path):
    def once(service):
        client = service.create_lora_training_client("tiny", 4, seed=7)
        (record,) = grpo(
            client, ["once", "upon"], lambda completion: sum(map(ord, completion)) % 7, steps=1,
            max_tokens=5, learning_rate=1e-2, prompts_per_step=2, group_size=3,
        )  # fmt: skip
        return [r for g in record.groups for r in g.rollouts], record.metrics

    here, own = once(ServiceClient(home=tmp_path / "own"))
    there, metrics = once(ServiceClient(base_url=live().url))
    assert "entropy" in own
    assert "entropy" not in metrics
    for one, other in zip(here, there, strict=True):
        assert one.tokens == other.tokens
        assert set(one.streams) - set(other.streams) == {"entropies"}
        assert one.streams["flags"] == other.streams["flags"]
        assert_close(other.streams["ratio"], one.streams["ratio"], rtol=1e-4)
        assert one.top_logprobs.ids.tolist() == other.top_logprobs.ids.tolist()
        assert_close(other.top_logprobs.logprobs, one.top_logprobs.logprobs, rtol=0, atol=1e-4)


@pytest.mark.usefixtures("closed")
def test_over_http_episodes_of_several_turns_are_the_same(live, tmp_path):
    def environment():
        turn = yield
        turn = yield f"{len(turn.tokens)} 🙂"
        return sum(map(ord, turn.text)) % 7

    def once(service):
        client = service.create_lora_training_client("tiny", 4, seed=7)
        prompts = [[{"role": "user", "content": text}] for text in ("once", "upon")]
        (record,) = grpo(
            client, prompts, environment, steps=1, max_tokens=5, learning_rate=1e-2,
            prompts_per_step=2, group_size=3,
        )  # fmt: skip
        return [r for g in record.groups for r in g.rollouts], record.metrics

    here, own = once(ServiceClient(home=tmp_path / "own"))
    there, metrics = once(ServiceClient(base_url=live().url))
    assert own["turns"] == metrics["turns"] == 2
    assert metrics["kl_sampler_abs"] < 1e-4
    for one, other in zip(here, there, strict=True):
        assert (one.tokens, one.weights, one.reward) == (other.tokens, other.weights, other.reward)
        drawn = [w == 1 for w in one.weights]
        assert [math.isnan(x) for x in other.logprobs] == [not d for d in drawn]
        got, wanted = (
            [x for x, d in zip(r.logprobs, drawn, strict=True) if d] for r in (other, one)
        )
        assert_close(got, wanted, rtol=0, atol=1e-4)
