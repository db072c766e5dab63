"""A run in an environment of several turns: recorded, scored again, gone on with, diagnosed."""

import math

import numpy as np
import pytest

from tests.closeness import assert_close
from tests.lab.support import SETTINGS, lab_in, same
from xorl_lab.errors import ConfigError
from xorl_lab.recipes.rollouts import Sample, datum
from xorl_lab.widgets.datum_source import datum_source
from xorl_lab.widgets.tokens import Spelling, rollout_answer

WANTED = "abcdefghij0123456789"
PROMPTS = [{"prompt": f"{a}+{b}=", "wanted": WANTED} for a in range(2) for b in "xy"]
CHAT = [{"prompt": [{"role": "user", "content": p["prompt"]}], "wanted": "a"} for p in PROMPTS]
TURNS = {"steps": 2, "max_tokens": 4, "max_turns": 3}


def asks_twice(wanted):
    """Sees two turns, and fails now and then."""
    turn = yield
    first = sum(map(ord, turn.text)) % 7
    turn = yield "go on, please 🙂\n"
    if first == 6:
        raise ValueError("six")
    return {"first": first / 7, "second": sum(c in wanted for c in turn.text) / 4}


def begin(lab, **changes):
    prompts = changes.pop("prompts", PROMPTS)
    return lab.grpo(prompts, asks_twice, **{**SETTINGS, **TURNS, **changes})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return begin(lab_in(tmp_path_factory.mktemp("several")))


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return begin(lab_in(tmp_path_factory.mktemp("chat")), prompts=CHAT)


def every(run):
    return [run.reader.rollout(i) for i in run.rollouts().index.tolist()]


def test_the_record_has_every_token_and_whose_it_is(run):
    said = list("go on, please 🙂\n".encode())
    for rollout in every(run):
        (start, end), (again, last) = rollout.turns
        assert (start, last) == (0, len(rollout.tokens))
        assert rollout.tokens[end:again].tolist() == said
        assert rollout.weights.tolist() == [1.0] * end + [0.0] * len(said) + [1.0] * (last - again)
        holes = rollout.weights == 0
        assert np.array_equal(np.isnan(rollout.logprobs), holes)
        assert np.array_equal(np.isnan(rollout.streams["entropies"]), holes)
        assert np.array_equal((rollout.top_ids == -1).all(1), holes)
        if rollout.error is None:
            for name in ("trainer_logprobs", "ratio", "flags"):
                assert np.array_equal(np.isnan(rollout.streams[name]), holes), name
            assert_close(
                rollout.streams["trainer_logprobs"][~holes],
                rollout.logprobs[~holes],
                rtol=0,
                atol=1e-4,
            )
    assert {r.error is None for r in every(run)} == {True, False}


def test_it_is_read_as_it_was_written(run):
    for group in run.reader.groups(1):
        for rollout in group.rollouts:
            assert "weights" not in rollout.streams
            assert set(rollout.weights) == {0.0, 1.0}
            assert rollout.drawn == sum(w != 0 for w in rollout.weights)


def test_metrics_and_tables_count_what_was_drawn(run):
    assert (run.metrics["turns"] == 2).all()
    assert (run.metrics["completion_tokens"] <= 8).all()
    table = run.rollouts()
    assert (table["mean:weights"] < 1).all()
    assert table["mean:logprobs"].notna().all()
    assert table["text"].str.contains("go on, please").all()
    assert run.metrics["kl_sampler_abs"].max() < 1e-4


def test_the_same_settings_give_the_same_episodes(run, tmp_path):
    same(run, begin(lab_in(tmp_path)))


def test_the_datum_of_the_inspector_is_the_one_that_is_trained_on(run):
    for rollout in every(run)[:4]:
        scope = {}
        exec(datum_source(rollout), scope)
        prompt = rollout.prompt_tokens.tolist()
        wanted = datum(Sample(prompt, rollout.rollout()), {})
        found = scope["datum"].loss_fn_inputs
        assert scope["datum"].model_input.to_ints() == wanted.model_input.to_ints()
        for name, values in wanted.loss_fn_inputs.items():
            assert_close(found[name].to_numpy(), values.to_numpy(), rtol=1e-6, atol=1e-7)
        assert set(wanted.loss_fn_inputs) <= set(found)


def test_the_inspector_is_told_whose_tokens_they_are(run):
    buffers = []
    number = int(run.rollouts().index[0])
    answer = rollout_answer(run.reader, number, Spelling(None), buffers)
    names = [name for name, _ in answer["arrays"]]
    sent = np.frombuffer(buffers[names.index("value:weights")], "<f4")
    assert sent.tolist() == run.reader.rollout(number).weights.tolist()


# Scored again.


@pytest.mark.parametrize("which", ["run", "chat"])
def test_the_same_environment_says_the_same(which, request):
    run = request.getfixturevalue(which)
    frame = run.rescore(asks_twice, quiet=True).frame()
    recorded = run.rollouts()
    assert frame["new"].equals(recorded["reward"].rename("new"))
    assert frame["error"].notna().equals(recorded["error"].notna().rename("error"))


def test_another_end_is_paid_otherwise(run):
    def meaner(wanted):
        turn = yield
        turn = yield "go on, please 🙂\n"
        return -float(len(turn.tokens))

    frame = run.rescore(meaner, quiet=True).frame()
    lengths = [-float(r.turns[1][1] - r.turns[1][0]) for r in every(run)]
    assert frame["new"].tolist() == lengths


def test_another_answer_is_refused_in_words(run):
    def other():
        yield
        yield "stop"

    frame = run.rescore(other, quiet=True).frame()
    assert frame["new"].isna().all()
    assert frame["error"].str.startswith("after turn 1 it said 'stop', which is not what was").all()


def test_a_function_of_one_completion_gets_the_whole_text(run):
    frame = run.rescore(lambda completion: "go on, please 🙂" in completion, quiet=True).frame()
    assert (frame["new"] == 1).all()


def test_a_turn_ends_where_the_run_ended_it(tmp_path):
    """Stop strings are in the tokens and not in the text that the environment hears."""
    heard = []

    def listens(wanted):
        turn = yield
        turn = yield "more"
        heard.append((turn.text, turn.stop_reason, turn.tokens, turn.last))
        return float(len(heard))

    run = begin_with(lab_in(tmp_path), listens, stop=["a", "e"], max_turns=2)
    before, heard[:] = list(heard), []
    run.rescore(listens, quiet=True)
    assert heard == before
    assert {reason for _, reason, _, _ in heard} == {"stop", "length"}


def begin_with(lab, environment, **changes):
    return lab.grpo(PROMPTS, environment, **{**SETTINGS, **TURNS, **changes})


# Gone on with, diagnosed, exported.


def test_the_models_turns_are_gone_on_with_and_no_others(run):
    number = int(run.rollouts().index[0])
    rollout = run.reader.rollout(number)
    (_, end), (again, last) = rollout.turns
    drawn = run.resample(number, again + 1, checkpoint="base", n=2)
    assert all(len(s.tokens) <= 4 - 1 for s in drawn.sequences)
    assert "go on" in drawn.kept
    run.resample(number, last, max_tokens=2)
    for position in (end, again - 1):
        inside = f"one of the model's turns, 0 to {end - 1} and {again} to {last - 1}"
        with pytest.raises(ConfigError, match=f"token {position} of .* environment.*{inside}"):
            run.resample(number, position)


def test_trainer_and_sampler_are_compared_where_the_model_wrote(run):
    found = run.diagnose(rollouts=4, quiet=True)
    assert found.cause == "healthy"
    assert "not finite" not in str(found)


def test_exports_have_them(run, tmp_path):
    import pyarrow.parquet

    paths = run.reader.to_parquet(tmp_path)
    table = pyarrow.parquet.read_table(next(p for p in paths if p.name == "rollouts.parquet"))
    weights = table["stream:weights"].to_pylist()
    assert weights == [r.weights.tolist() for r in every(run)]
    nan = [[math.isnan(x) for x in row] for row in table["logprobs"].to_pylist()]
    assert nan == [[w == 0 for w in row] for row in weights]


def test_a_preflight_plays_along(lab):
    def endless():
        yield
        while True:
            yield "more"

    with pytest.raises(Exception, match="after max_turns=3 turns"):
        lab.grpo(PROMPTS, endless, **{**SETTINGS, **TURNS, "preflight": True})
    (said,) = [e.text for e in lab.run("grpo-1").reader.events(kinds=["warning"])]
    assert said.startswith("the reward failed for all 16 completions of a trial: it was still goin")


def test_answers_side_by_side_have_no_environment(lab):
    with pytest.raises(ConfigError, match="it is an environment, which plays along"):
        lab.compare(["base"], PROMPTS, rewards=asks_twice, max_tokens=2)
