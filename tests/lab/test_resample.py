"""Going on from a token of a recorded rollout: what is drawn, and what is said if it cannot be."""

import numpy as np
import pytest

from tests.closeness import assert_close
from tests.lab.support import PROMPTS, Gate, checkpoint, grpo, lab_in, until
from xorl_lab.errors import CheckpointError, ConfigError, DataError, StoreError
from xorl_lab.lab import Run
from xorl_lab.lab.resample import TOP, Resampled
from xorl_lab.types import Datum, ModelInput, SamplingParams
from xorl_lab.types.commands import InspectorCommands

EVIL = "<script>alert(1)</script>&\"'"


@pytest.fixture
def run(lab):
    return grpo(lab, steps=4, save_every=2, learning_rate=5e-2, max_tokens=6)


def first(run) -> int:
    return int(run.rollouts(where=[("length", "=", 6)], limit=1).index[0])


def trainer_logprobs(client, tokens, count):
    """A forward pass of the trainer, as far as possible from the sampler's own path."""
    datum = Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})
    output = client.forward([datum], "cross_entropy").result()
    return np.asarray(output.loss_fn_outputs[0].logprobs.data)[-count:]


def test_what_follows_is_what_the_model_draws_behind_the_tokens_that_stay(lab, run):
    number = first(run)
    recorded = run.reader.rollout(number)
    found = run.resample(number, 2, "base", n=3, max_tokens=5, temperature=1.5, seed=7)
    tokens = [*recorded.prompt_tokens.tolist(), *recorded.tokens[:2].tolist()]
    params = SamplingParams(max_tokens=5, temperature=1.5, seed=7)
    base = lab.service.create_sampling_client(base_model="tiny")
    theirs = base.sample(ModelInput.from_ints(tokens), params, 3).result().sequences
    assert [s.tokens for s in found.sequences] == [s.tokens for s in theirs]
    assert (found.position, found.weights) == (2, "base")
    assert found.rollout.id == number
    assert len({tuple(s.tokens) for s in found.sequences}) > 1


def test_values_are_those_of_a_fresh_forward_pass(lab, run):
    number = first(run)
    recorded = run.reader.rollout(number)
    (drawn,) = run.resample(number, 3, "grpo-1/step-2", max_tokens=8, seed=1).sequences
    tokens = [*recorded.prompt_tokens.tolist(), *recorded.tokens[:3].tolist(), *drawn.tokens]
    client = lab.load("grpo-1/step-2")
    wanted = trainer_logprobs(client, tokens, len(drawn.tokens))
    assert_close(drawn.logprobs, wanted, rtol=0, atol=1e-4)
    present = trainer_logprobs(run.client, tokens, len(drawn.tokens))
    assert np.abs(present - wanted).max() > 1e-2, "the two checkpoints are told apart"
    assert [len(step) for step in drawn.top_logprobs] == [TOP] * len(drawn.tokens)
    assert len(drawn.entropies) == len(drawn.tokens)
    for step, entropy in zip(drawn.top_logprobs, drawn.entropies, strict=True):
        assert entropy > -sum(np.exp(v) * v for _, v in step) - 1e-4


@pytest.mark.parametrize("position", [0, 6])
def test_from_the_beginning_and_from_the_end(run, position):
    number = first(run)
    found = run.resample(number, position, max_tokens=3)
    whole = Resampled.__repr__(found)
    assert found.weights == "grpo-1"
    assert (found.kept == "") == (position == 0)
    assert (found.original == "") == (position == 6)
    assert whole.startswith(f"rollout {number}, {position} tokens kept: ")


def test_the_same_seed_draws_the_same(run):
    number = first(run)
    one, other = (run.resample(number, 1, n=2, seed=5, max_tokens=6) for _ in range(2))
    assert one.sequences == other.sequences
    assert one.sequences == run.resample(number, 1, n=2, max_tokens=6, seed=5).sequences
    assert one.sequences != run.resample(number, 1, n=2, seed=6, max_tokens=6).sequences


def test_unless_told_otherwise_it_draws_as_the_run_did(lab):
    run = grpo(lab, steps=1, max_tokens=6, temperature=0.7, stop="q")
    number = int(run.rollouts(where=[("length", ">=", 2)], limit=1).index[0])
    recorded = run.reader.rollout(number)
    tokens = [*recorded.prompt_tokens.tolist(), *recorded.tokens[:2].tolist()]
    params = SamplingParams(max_tokens=4, temperature=0.7, stop="q", seed=0)
    present = run.client.save_weights_and_get_sampling_client()
    theirs = present.sample(ModelInput.from_ints(tokens), params, 4).result().sequences
    found = run.resample(number, 2, n=4).sequences
    assert [s.tokens for s in found] == [s.tokens for s in theirs]
    assert_close(found[0].logprobs, theirs[0].logprobs, rtol=0, atol=1e-6)


def test_a_continuation_ends_with_the_context(lab):
    run = grpo(lab, steps=1, prompts=["a" * 505], reward=lambda completion: len(set(completion)))
    number = int(run.rollouts(limit=1).index[0])
    length = len(run.reader.rollout(number).tokens)
    (drawn,) = run.resample(number, length).sequences
    assert len(drawn.tokens) == 1
    run = grpo(lab, steps=1, prompts=["a" * 508], reward=lambda completion: len(set(completion)))
    number = int(run.rollouts(where=[("length", "=", 4)], limit=1).index[0])
    message = "prompt and kept tokens are 512, and the model's context holds 512: keep fewer"
    with pytest.raises(ConfigError, match=message):
        run.resample(number, 4)
    with pytest.raises(DataError, match="but the model's context holds 512"):
        run.resample(number, 2, max_tokens=10)


@pytest.mark.parametrize("position", [-1, 7, 1.5, True, None])
def test_a_position_out_of_range(run, position):
    with pytest.raises(ConfigError, match=r"has 6 tokens, so pass 0 to 6"):
        run.resample(first(run), position)


def test_what_is_not_there_is_named(lab, run):
    number = first(run)
    with pytest.raises(StoreError, match="has no rollout 10000"):
        run.resample(10_000, 0)
    with pytest.raises(CheckpointError, match="'grpo-1' has no checkpoint 'step-3'"):
        run.resample(number, 0, "grpo-1/step-3")
    with pytest.raises(ConfigError, match="unknown parameter 'temperatur': did you mean"):
        run.resample(number, 0, temperatur=1)
    with pytest.raises(ConfigError, match="num_samples is 0"):
        run.resample(number, 0, n=0)
    with pytest.raises(ConfigError, match=r"was not taken from a lab.*Lab\(...\).run\('grpo-1'\)"):
        Run(run.reader).resample(number, 0)
    lab.delete("grpo-1/step-2")
    with pytest.raises(CheckpointError, match="has no checkpoint 'step-2'"):
        run.resample(number, 0, "grpo-1/step-2")
    (checkpoint(lab, "grpo-1", "step-4") / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors: it is missing"):
        run.resample(number, 0, "grpo-1/step-4")


def test_a_run_of_another_model_is_refused(lab, run):
    lab._store.import_frame(run.metrics.reset_index(), name="other", model="tiny-moe")
    with pytest.raises(
        ConfigError, match=r"of 'tiny-moe', and this lab of 'tiny'.*Lab\('tiny-moe'"
    ):
        lab.run("other").resample(1, 0)


def test_while_the_run_goes_on_its_present_weights_are_taken(lab):
    gate = Gate()
    with gate.closed():
        run = grpo(lab, steps=3, reward=gate, background=True, save_every=0)
        assert gate.reached.wait(20)
    run.wait(20)
    number = int(run.rollouts(limit=1).index[0])
    now = run.client.save_weights_and_get_sampling_client()
    tokens = run.reader.rollout(number).prompt_tokens.tolist()
    theirs = now.sample(ModelInput.from_ints(tokens), SamplingParams(max_tokens=4, seed=0))
    assert run.resample(number, 0).sequences[0].tokens == theirs.result().tokens


def test_html_shows_the_original_beside_what_was_drawn_and_is_escaped(run):
    number = first(run)
    drawn = run.resample(number, 1, n=2)
    found = Resampled(run.reader.rollout(number), 1, EVIL, EVIL, EVIL, drawn.sequences, [EVIL])
    html = found._repr_html_()
    assert "<script" not in html
    assert html.count("&lt;script&gt;alert(1)&lt;/script&gt;&amp;&quot;&#x27;") == 2 + 2 + 1
    assert html.count("<tr>") == 2
    assert drawn._repr_html_().count("<tr>") == 3
    assert repr(drawn).count("\n") == 3


# What an inspector asks.


def inspector(lab, *runs) -> InspectorCommands:
    return lab._bench.inspector(*runs)


def test_an_inspector_asks_for_pieces_weights_and_continuations(lab, run):
    ask = inspector(lab, run)
    assert ask.pieces([104, 105, 257]) == [b"h", b"i", b"<|eos|>"]
    assert 257 in ask.special()
    assert ask.weights() == ["base", "grpo-1/step-4", "grpo-1/step-2"]
    number = first(run)
    found = ask.resample(number, 2, "grpo-1/step-2", {"n": 2, "max_tokens": 3, "seed": 4})
    assert found == run.resample(number, 2, "grpo-1/step-2", 2, max_tokens=3, seed=4).sequences
    for reference in ask.weights():
        assert ask.resample(number, 0, reference, {})


def test_an_inspector_of_several_runs_finds_the_one_that_a_rollout_is_of(lab, run):
    other = grpo(lab, steps=1, prompts=PROMPTS[:2])
    ask = inspector(lab, run, other)
    for one in (run, other):
        number = int(one.rollouts(limit=1).index[0])
        found = ask.resample(number, 1, "base", {"max_tokens": 3})
        assert found == one.resample(number, 1, "base", max_tokens=3).sequences
    with pytest.raises(StoreError, match="has no rollout 10000"):
        ask.resample(10_000, 0, "base", {})


def test_runs_under_way_here_can_be_drawn_from_and_those_of_other_models_cannot(lab, run):
    lab_in(lab.folder)
    from xorl_lab.lab import Lab

    Lab("tiny-moe", folder=lab.folder, rank=2, device="cpu", dtype="float32").load(
        "base"
    ).save_state("x").result()
    with Gate().closed() as gate:
        going = grpo(lab, steps=2, reward=gate, background=True)
        assert gate.reached.wait(20)
        assert inspector(lab, run).weights() == ["base", "grpo-2", "grpo-1/step-4", "grpo-1/step-2"]
        assert len(run.resample(first(run), 0, "grpo-2").sequences) == 1
    going.wait(20)
    until(lambda: "grpo-2" not in inspector(lab, run).weights())
