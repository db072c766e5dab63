"""What a recipe records of each token is what a plain forward pass of the same weights gives."""

import math
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.closeness import assert_close
from tests.recipes.fakes import FakeClient, sequence
from xorl_lab.checkpoints.names import Address
from xorl_lab.client import ServiceClient
from xorl_lab.engine import models, tiny
from xorl_lab.errors import ConfigError
from xorl_lab.recipes import rollouts
from xorl_lab.recipes.grpo import GrpoSettings, grpo
from xorl_lab.store import Store
from xorl_lab.types import ModelInput, Rollout, SamplingParams

SMOL = "SmolLM2-135M-Instruct"
PARITY = 1e-4
"""Nats, for every token: the project's bar in single precision."""
ROWS = [{"prompt": f"{a} and {b}"} for a in "abc" for b in "xy"]
TINY = {"steps": 3, "max_tokens": 6, "learning_rate": 2e-2, "prompts_per_step": 3, "seed": 2}
TINY |= {"group_size": 4, "advantage": "mean"}


def vowels(completion: str) -> float:
    """A reward that differs between almost all completions."""
    return sum(completion.count(c) for c in "aeiou") + len(completion) / 10 + hashed(completion)


def hashed(text: str) -> float:
    return sum(map(ord, text)) % 97 / 97


class Weights:
    """A model under training, and each of its versions as stock transformers and peft load it."""

    def __init__(self, home, name: str):
        self.name = name
        self.service = ServiceClient(home=home, device="cpu", dtype="float32")
        self.client = self.service.create_lora_training_client(name, 8, alpha=16.0, seed=0)
        self.folders = {}

    def keep(self) -> None:
        """Save the present version."""
        number = self.client.version
        path = self.client.save_weights_for_sampler(f"v{number}").result().path
        self.folders[number] = Address.parse(path).folder(self.service.root)

    def run(self, prompts, reward, **settings) -> Iterator:
        """Steps of a run, with every version kept."""
        steps = grpo(self.client, prompts, reward, **settings)
        while True:
            self.keep()
            try:
                yield next(steps)
            except StopIteration:
                return

    def network(self, version: int) -> torch.nn.Module:
        if self.name == "tiny":
            base = tiny.dense(torch.float32)
        else:
            folder = models.fetch(self.name)
            base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with warnings.catch_warnings():  # peft reads an attribute that transformers gives up
            warnings.simplefilter("ignore", FutureWarning)
            return PeftModel.from_pretrained(base, self.folders[version]).eval()


def table(network, prompt, tokens, temperature) -> torch.Tensor:
    """(C, V) log-probabilities before each of C tokens, by a plain forward pass."""
    with torch.no_grad():
        logits = network(torch.tensor([[*prompt, *tokens]])).logits[0].double()
    return torch.log_softmax(logits[len(prompt) - 1 : -1] / temperature, -1)


def check(values, prompt, network, temperature, *, top) -> None:
    """Compare all that was recorded of one completion, token for token.

    Args:
        values: has tokens, logprobs, streams, top_ids and top_logprobs, as the store reads them.
    """
    tokens = np.asarray(values.tokens).tolist()
    expected = table(network, prompt, tokens, temperature)
    drawn = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert_close(values.logprobs, drawn, rtol=0, atol=PARITY)
    entropies = -(expected.exp() * expected).nan_to_num(nan=0.0).sum(-1)
    assert_close(values.streams["entropies"], entropies, rtol=0, atol=PARITY)
    assert values.top_ids.shape == values.top_logprobs.shape == (len(tokens), top)
    # Each is what the model gives that id, and no other id is more likely than the last of them.
    ids = torch.from_numpy(values.top_ids).long()
    assert_close(values.top_logprobs, expected.gather(1, ids), rtol=0, atol=PARITY)
    assert all(len(set(row)) == top for row in values.top_ids.tolist())
    best = expected.topk(top).values
    assert_close(values.top_logprobs, best, rtol=0, atol=PARITY)
    sure = best[:, 0] - best[:, 1] > 2 * PARITY
    assert sure.any(), "no token of this completion can be told from the next best"
    assert ids[sure, 0].tolist() == expected.argmax(-1)[sure].tolist()
    for i, (token, row) in enumerate(zip(tokens, values.top_ids.tolist(), strict=True)):
        if token in row:
            assert values.top_logprobs[i, row.index(token)] == values.logprobs[i]
        else:
            assert values.logprobs[i] <= values.top_logprobs[i, -1]


@pytest.fixture
def weights(tmp_path):
    return Weights(tmp_path / "home", "tiny")


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_what_the_store_has_is_what_a_plain_pass_gives(weights, tmp_path, temperature):
    store = Store(tmp_path / "store")
    with store.create(name="run", kind="grpo", model="tiny") as writer:
        for record in weights.run(ROWS, vowels, temperature=temperature, **TINY):
            writer.step(record)
    reader = store.run("run")
    seen = 0
    for number in reader.rollouts().index.tolist():
        stored = reader.rollout(number)
        assert stored.version == stored.step - 1
        prompt = stored.prompt_tokens.tolist()
        check(stored, prompt, weights.network(stored.version), temperature, top=5)
        trainer = stored.streams["trainer_logprobs"]
        assert_close(trainer, stored.logprobs, rtol=0, atol=PARITY)
        seen += len(stored.tokens)
    assert seen > 150
    before, after = (weights.network(n) for n in (0, 2))
    moved = table(before, prompt, stored.tokens.tolist(), 1.0)
    moved = (moved - table(after, prompt, stored.tokens.tolist(), 1.0)).abs().max()
    assert moved > 100 * PARITY, "the updates changed too little for the check to see a version"


def reported(sampler, prompts, temperature, tokens):
    """Completions with all that a sampler reports, shaped as the store has them."""
    params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=5)
    inputs = [ModelInput.from_ints(p) for p in prompts]
    batch = sampler.sample_batch(inputs, params, 2, top_logprobs=5, entropies=True).result()
    return [(prompts[i], s) for i, r in batch.completed for s in r.sequences]


class Shaped:
    """A sampled sequence under the names of a stored rollout."""

    def __init__(self, sequence):
        self.tokens = sequence.tokens
        self.logprobs = np.asarray(sequence.logprobs)
        self.streams = {"entropies": np.asarray(sequence.entropies)}
        self.top_ids = np.array([[i for i, _ in row] for row in sequence.top_logprobs])
        self.top_logprobs = np.array([[x for _, x in row] for row in sequence.top_logprobs])


def test_greedy_reports_are_those_of_a_plain_pass_at_temperature_one(weights):
    list(weights.run(ROWS, vowels, **TINY))
    sampler = weights.client.save_weights_and_get_sampling_client()
    network = weights.network(weights.client.version)
    prompts = [weights.client.get_tokenizer().encode(row["prompt"]) for row in ROWS]
    for prompt, drawn in reported(sampler, prompts, 0.0, 12):
        values = Shaped(drawn)
        check(values, prompt, network, 1.0, top=5)
        assert values.top_ids[:, 0].tolist() == drawn.tokens
        assert values.top_logprobs[:, 0].tolist() == drawn.logprobs


@pytest.mark.slow
def test_on_a_pretrained_model(tmp_path):
    weights = Weights(tmp_path / "home", SMOL)
    settings = {"max_tokens": 16, "group_size": 3, "prompts_per_step": 2, "learning_rate": 2e-4}
    prompts = ["Once upon a time", "The capital of France is", "2 + 2 ="]
    records = list(weights.run(prompts, vowels, steps=3, temperature=0.7, **settings))
    weights.keep()
    for record in records[1:]:
        network = weights.network(record.step - 1)
        for group in record.groups:
            for rollout in group.rollouts:
                check(as_stored(rollout), group.prompt_tokens, network, 0.7, top=5)
    sampler = weights.client.save_weights_and_get_sampling_client()
    encode = weights.client.get_tokenizer().encode
    network = weights.network(weights.client.version)
    for prompt, drawn in reported(sampler, [encode(p) for p in prompts], 0.0, 16):
        check(Shaped(drawn), prompt, network, 1.0, top=5)
        assert [row[0][0] for row in drawn.top_logprobs] == drawn.tokens


def as_stored(rollout: Rollout):
    """A rollout of a recipe under the names of a stored one."""

    class Values:
        tokens = rollout.tokens
        logprobs = np.asarray(rollout.logprobs)
        streams = rollout.streams
        top_ids = rollout.top_logprobs.ids
        top_logprobs = rollout.top_logprobs.logprobs

    # The sampler's logprobs are float64, those of alternatives float32.
    Values.logprobs = Values.logprobs.astype(np.float32)
    return Values


class Watched:
    """Stands before a client and notes the data and the answers of its updates."""

    def __init__(self, client):
        self._client = client
        self.updates = []

    def __getattr__(self, name):
        return getattr(self._client, name)

    def forward_backward(self, data, *rest):
        future = self._client.forward_backward(data, *rest)
        self.updates.append((data, future))
        return future


LOSSES = {
    "policy_loss": ({}, 0.2, 0.2),
    "narrow clip": ({"eps_clip": 0.02, "eps_clip_high": 0.03}, 0.02, 0.03),
    "masked": ({"icepop_beta": 1.05}, 0.2, 0.2),
    # Before any update the trainer is the sampler: a bound above 1 cuts every weight.
    "weights cut": ({"use_tis": True, "tis_clip_low": 1.1, "eps_clip": 0.05}, 0.05, 0.2),
}


@pytest.mark.parametrize("name", LOSSES)
def test_ratio_and_flags_are_those_of_the_formula_at_the_last_update(weights, name):
    params, low, high = LOSSES[name]
    client = Watched(weights.client)
    settings = {**TINY, "updates_per_batch": 3, "loss_fn_params": params, "steps": 2}
    records = list(grpo(client, ROWS, vowels, temperature=0.7, **settings))
    assert len(client.updates) == 6
    seen = set()
    for record, (data, future) in zip(records, client.updates[2::3], strict=True):
        drawn = [r for g in record.groups for r in g.rollouts if r.tokens]
        for rollout, datum, out in zip(drawn, data, future.result().loss_fn_outputs, strict=True):
            count = len(rollout.tokens)
            new = np.asarray(out.logprobs.tolist()[-count:])
            old = np.asarray(datum.loss_fn_inputs["logprobs"].tolist()[-count:])
            if "use_tis" not in params:
                assert_close(old, rollout.logprobs, rtol=1e-6, atol=1e-7)
            sampler = np.asarray(rollout.logprobs)
            wanted, exact = formula(new, old, sampler, rollout.advantage, (low, high), params)
            assert_close(rollout.streams["ratio"], np.exp(new - old), rtol=1e-5)
            assert len(rollout.streams["flags"]) == count
            got = np.asarray(rollout.streams["flags"])
            assert got[exact].tolist() == wanted[exact].tolist()
            assert exact.mean() > 0.5
            seen |= set(got[exact].tolist())
    if name == "policy_loss":
        assert 1.0 in seen
    else:
        assert seen & {"narrow clip": {1.0}, "masked": {2.0, 3.0}, "weights cut": {4.0}}[name]


def formula(new, old, sampler, advantage, clip, params):
    """Flags in float64, and where no ratio is so near to a bound that rounding decides."""
    ratio, weight = np.exp(new - old), np.exp(old - sampler)
    low, high = 1 - clip[0], 1 + clip[1]
    clipped = (ratio > high) if advantage > 0 else (ratio < low)
    flags = 1.0 * (clipped & (advantage != 0))
    bounds = [low, high]
    if beta := params.get("icepop_beta"):
        flags += 2.0 * ((ratio < 1 / beta) | (ratio > beta))
        bounds += [1 / beta, beta]
    sure = np.all([np.abs(ratio - b) > 1e-5 for b in bounds], axis=0)
    if params.get("use_tis"):
        floor, ceiling = params["tis_clip_low"], 2.0
        flags += 4.0 * ((weight < floor) | (weight > ceiling))
        sure &= (np.abs(weight - floor) > 1e-5) & (np.abs(weight - ceiling) > 1e-5)
    return flags, sure


def test_what_is_recorded_does_not_change_the_run(tmp_path):
    def once(home, **changes):
        weights = Weights(tmp_path / home, "tiny")
        records = list(grpo(weights.client, ROWS, vowels, **TINY, **changes))
        return [[(r.tokens, r.logprobs, r.reward) for g in x.groups for r in g.rollouts]
                for x in records], [x.metrics["loss:mean"] for x in records]  # fmt: skip

    assert once("with") == once("without", record_top=0)


def test_without_recording_there_are_no_alternatives(weights):
    (record,) = grpo(weights.client, ROWS, vowels, **{**TINY, "steps": 1, "record_top": 0})
    assert all(r.top_logprobs is None for g in record.groups for r in g.rollouts)


def test_the_metric_is_the_mean_over_all_tokens(weights):
    for record in grpo(weights.client, ROWS, vowels, **TINY):
        values = [x for g in record.groups for r in g.rollouts for x in r.streams["entropies"]]
        assert len(values) == sum(len(r.tokens) for g in record.groups for r in g.rollouts)
        assert_close(record.metrics["entropy"], math.fsum(values) / len(values), rtol=1e-12)
        assert 0 < record.metrics["entropy"] < math.log(259)


def test_a_failed_reward_and_a_step_without_signal_have_no_values_of_an_update(weights):
    def broken(completion):
        if hashed(completion) < 0.4:
            raise ValueError("no")
        return vowels(completion)

    updated = {"trainer_logprobs", "ratio", "flags"}
    (record,) = grpo(weights.client, ROWS, broken, **{**TINY, "steps": 1})
    drawn = [r for g in record.groups for r in g.rollouts]
    assert {r.error is None for r in drawn} == {True, False}
    for rollout in drawn:
        wanted = updated if rollout.error is None else set()
        assert set(rollout.streams) == {"entropies"} | wanted
    (still,) = grpo(weights.client, ROWS, lambda: 1.0, **{**TINY, "steps": 1})
    assert all(set(r.streams) == {"entropies"} for g in still.groups for r in g.rollouts)
    assert all(r.top_logprobs is not None for g in still.groups for r in g.rollouts)


def test_a_sampler_and_a_server_that_know_none_of_it():
    def answer(text, params, index):
        return sequence("ab"[index % 2] * (index + 1))

    (record,) = grpo(
        FakeClient(answer), ["1"], lambda completion: len(completion), steps=1, max_tokens=5,
        learning_rate=1e-3, prompts_per_step=1, group_size=4,
    )  # fmt: skip
    assert "entropy" not in record.metrics
    for rollout in record.groups[0].rollouts:
        assert rollout.top_logprobs is None
        assert "entropies" not in rollout.streams
        assert len(rollout.streams["trainer_logprobs"]) == len(rollout.tokens)


def test_alternatives_that_are_fewer_at_some_positions_have_no_value_there():
    given = sequence("ab", "length")
    ragged = [[(5, -0.5), (6, -1.5)], [(7, -0.25)]]
    found = rollouts.alternatives(type(given)(given.tokens, "length", None, None, ragged))
    assert found.ids.tolist() == [[5, 6], [7, -1]]
    assert found.logprobs[0].tolist() == [-0.5, -1.5]
    assert found.logprobs[1, 0] == -0.25
    assert math.isnan(found.logprobs[1, 1])


@pytest.mark.parametrize("bad", [-1, 65, 2.0, True, None])
def test_how_many_alternatives_is_checked_before_anything_runs(bad):
    with pytest.raises(ConfigError, match="record_top is"):
        GrpoSettings(steps=1, max_tokens=1, learning_rate=1e-3, record_top=bad)
