"""Each cause is planted by computing what it does, and must be found; what is well must be left."""

import copy
import dataclasses
import math
import time

import numpy as np
import pytest
import torch

import xorl_lab as xl
from tests.closeness import assert_close
from tests.lab.planting import (
    BOS,
    TEXTS,
    Plan,
    datum,
    diagnosed_without_weights,
    distributions,
    examined,
    forward,
    planted,
    row,
    sampled,
    shelf_of,
    spread,
)
from tests.lab.support import grpo, until
from xorl_lab.errors import ConfigError
from xorl_lab.lab.diagnosis import causes
from xorl_lab.lab.diagnosis.recorded import temperature_at
from xorl_lab.lab.diagnosis.result import COLUMNS, Diagnosis, Evidence
from xorl_lab.types import Group, Rollout

SEEDS = pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
"""Each plant is planted twice, the second time in `make accept`."""
EXACT = 1e-4


def chat(loop, *, opened=True):
    return [
        loop.tokenizer.encode(
            loop.tokenizer.apply_chat_template(
                [{"role": "user", "content": t}], tokenize=False, add_generation_prompt=opened
            )
        )
        for t in TEXTS
    ]


def warm(degree):
    """Draws at another temperature than the record says."""
    return lambda loop, p, s: sampled(loop.samplers[-1], p, s, temperature=degree)


def named(found, cause, value, side):
    """The cause is this one alone, and it explains next to everything, as nothing else does."""
    assert found.cause == cause, repr(found)
    best = row(found, cause)
    assert (best.value, best.side) == (value, side)
    assert best.mean <= EXACT < found.mean / 10
    assert best.share > 0.99
    assert value in found.sentence
    assert best == max(
        (e for e in found.evidence if not math.isnan(e.share)), key=lambda e: e.share
    )
    others = {e.hypothesis for e in found.evidence} - {"as recorded", "evaluated again"}
    assert others == set(causes.CAUSES)


# What is well.


def test_a_run_of_the_recipe_is_healthy(lab):
    run = grpo(lab, steps=4, save_every=1, learning_rate=2e-2)
    found = examined(lab, run)
    assert found.cause == "healthy"
    assert found.healthy
    assert found.step == 4
    assert 0 < found.mean <= EXACT
    assert found.tokens == 8 * 4
    assert "nothing to do" in found.sentence


def test_the_temperature_is_that_of_the_recipe_and_of_its_knob(lab):
    run = grpo(lab, steps=2, save_every=1, temperature=0.7, background=True, paused=True)
    assert temperature_at(run.reader, 1) == 0.7
    run.step()
    until(lambda: run.status.step == 1)
    run.set("temperature", 1.3)
    run.resume()
    run.wait(60)
    assert [temperature_at(run.reader, step) for step in (1, 2, 3)] == [0.7, 1.3, 1.3]
    assert examined(lab, run).healthy


def test_a_bfloat16_run_is_healthy_with_the_gap_that_rounding_makes(tmp_path):
    lab = xl.Lab("tiny", folder=tmp_path, device="cpu", dtype="bfloat16", rank=4)
    run = grpo(lab, steps=3, save_every=1, learning_rate=2e-2)
    found = examined(lab, run, dtype="bfloat16")
    assert found.healthy
    assert EXACT < found.mean <= 0.08
    assert "within the 0.08" in found.sentence


def test_without_the_trainers_numbers_they_are_evaluated_again(lab):
    nothing = lambda loop, groups: [[math.nan] * len(r.tokens) for g in groups for r in g.rollouts]  # noqa: E731
    found = examined(lab, planted(lab, "untold", Plan(judge=nothing)))
    assert found.healthy
    assert "evaluated again" in found.sentence
    hot = Plan(judge=nothing, draw=warm(0.7))
    named(examined(lab, planted(lab, "untold-hot", hot)), "temperature", "0.7", "sampler")


# Temperature and truncation.


@SEEDS
@pytest.mark.parametrize("degree", [0.7, 1.4])
def test_temperature_of_the_sampler(lab, seed, degree):
    plan = Plan(seed, draw=warm(degree))
    named(examined(lab, planted(lab, "hot", plan)), "temperature", f"{degree:g}", "sampler")


@SEEDS
def test_temperature_of_the_trainer(lab, seed):
    def judge(loop, groups):
        data = [datum(g.prompt_tokens, r) for g in groups for r in g.rollouts]
        outputs = loop.client.forward(data).result().loss_fn_outputs
        lengths = [len(r.tokens) for g in groups for r in g.rollouts]
        return [
            [float(x) for x in o.logprobs.data[-n:]] for o, n in zip(outputs, lengths, strict=True)
        ]

    found = examined(lab, planted(lab, "cool", Plan(seed, temperature=0.6, judge=judge)))
    named(found, "temperature", "1", "trainer")
    assert "while the run says 0.6" in found.sentence


def cut(loop, prompt, seed, *, top_p=1.0, top_k=-1):
    """Drawn from a truncated distribution, whose probabilities are reported as they were scaled."""
    network, found = loop.network(), []
    for tokens, _ in sampled(loop.samplers[-1], prompt, seed, top_p=top_p, top_k=top_k):
        logprobs = []
        for token, table in zip(tokens, distributions(network, prompt, tokens), strict=True):
            chances = sorted(table.exp().tolist(), reverse=True)
            kept, mass = 0, 0.0
            while mass < top_p and kept < (top_k if top_k > 0 else len(chances)):
                mass += chances[kept]
                kept += 1
            logprobs.append(float(table[token]) - math.log(mass))
        found.append((tokens, logprobs))
    return found


@SEEDS
@pytest.mark.parametrize("share", [0.9, 0.55])
def test_top_p(lab, seed, share):
    plan = Plan(seed, draw=lambda loop, p, s: cut(loop, p, s, top_p=share))
    found = examined(lab, planted(lab, "nucleus", plan))
    assert found.cause == "top-p"
    low, _, high = row(found, "top-p").value.partition(" to ")
    assert float(low) - 0.01 <= share <= float(high or low) + 0.01
    assert float(high or low) - float(low) < 0.2
    named(found, "top-p", row(found, "top-p").value, "sampler")


@SEEDS
def test_top_k(lab, seed):
    plan = Plan(seed, draw=lambda loop, p, s: cut(loop, p, s, top_k=7))
    named(examined(lab, planted(lab, "few", plan)), "top-k", "7", "sampler")


def test_two_that_explain_it_equally_well_are_both_named(lab):
    # Greedy, reported as certain: the most likely token alone, by number or by share.
    def greedy(loop, prompt, seed):
        drawn = sampled(loop.samplers[-1], prompt, seed, temperature=0.0)
        return [(tokens, [0.0] * len(tokens)) for tokens, _ in drawn]

    found = examined(lab, planted(lab, "greedy", Plan(draw=greedy)))
    assert set(found.cause.split(" or ")) >= {"top-k", "top-p"}
    assert "Or, which fits as well" in found.sentence


# Weights.


@SEEDS
def test_stale_version(lab, seed):
    plan = Plan(seed, draw=lambda loop, p, s: sampled(loop.samplers[max(0, loop.step - 2)], p, s))
    found = examined(lab, planted(lab, "stale", plan))
    named(found, "stale version", "stale/stale-2, 1 step older", "sampler")


def test_a_sampler_that_stays_behind(lab):
    plan = Plan(draw=lambda loop, p, s: sampled(loop.samplers[min(loop.step, 2) - 1], p, s))
    found = examined(lab, planted(lab, "stuck", plan))
    named(found, "stale version", "stuck/stuck-1, 2 steps older", "sampler")


def test_a_trainer_that_judges_after_its_update(lab):
    # What is recorded as the trainer's is evaluated by the version that comes next.
    run = planted(lab, "late", Plan(steps=3))
    later = lab.service.create_training_client_from_state(
        "xorl://late/weights/late-3", model_id="x"
    )
    plan = Plan(steps=3)
    plan.judge = lambda loop, groups: (
        [forward_of(later, g.prompt_tokens, r) for g in groups for r in g.rollouts]
        if loop.step == 3
        else [[math.nan] * len(r.tokens) for g in groups for r in g.rollouts]
    )
    assert run.reader.status().step == 3
    found = examined(lab, planted(lab, "later", plan), step=3)
    # The two runs are the same, bit for bit, so the later version of either explains it.
    named(found, "stale version", "later/later-3, 1 step newer", "trainer")


def forward_of(client, prompt, rollout):
    output = client.forward([datum(prompt, rollout)]).result().loss_fn_outputs[0]
    return [float(x) for x in output.logprobs.data[-len(rollout.tokens) :]]


def test_at_the_second_step_the_first_weights_are_stale_and_without_adapter(lab):
    plan = Plan(steps=2, draw=lambda loop, p, s: sampled(loop.samplers[0], p, s))
    found = examined(lab, planted(lab, "second", plan))
    assert set(found.cause.split(" or ")) == {"stale version", "wrong adapter"}


def test_the_present_weights_are_tried_too(lab):
    run = planted(lab, "live", Plan(steps=3, save_every=2))
    client = lab.service.create_training_client_from_state(
        "xorl://live/weights/live-3", model_id="y"
    )
    present = forward_rollouts(client, run, 3)
    plan = Plan(steps=3, save_every=2)
    plan.judge = lambda loop, groups: (
        present if loop.step == 3 else [r.logprobs for g in groups for r in g.rollouts]
    )
    again = planted(lab, "alive", plan)
    lab.service.create_rest_client("alive").delete_checkpoint("weights/alive-3").result()
    lab.service.create_rest_client("live").delete_checkpoint("weights/live-3").result()
    assert examined(lab, again, step=3).cause == "unexplained"
    found = examined(lab, again, step=3, client=client)
    named(found, "stale version", f"version {client.version}, the present one", "trainer")


def forward_rollouts(client, run, step):
    return [
        forward_of(client, g.prompt_tokens, r) for g in run.reader.groups(step) for r in g.rollouts
    ]


@SEEDS
def test_the_base_model_answers(lab, seed):
    base = lab.service.create_sampling_client(base_model="tiny")
    plan = Plan(seed, draw=lambda loop, p, s: sampled(base, p, s))
    found = examined(lab, planted(lab, "unadapted", plan))
    named(found, "wrong adapter", "none: the base model", "sampler")


@SEEDS
def test_another_runs_adapter_answers(lab, seed):
    planted(lab, "other", Plan(seed + 10, steps=2))
    wrong = lab.service.create_sampling_client(model_path="xorl://other/weights/other-2")
    plan = Plan(seed, draw=lambda loop, p, s: sampled(wrong, p, s))
    found = examined(lab, planted(lab, "mine", plan))
    named(found, "wrong adapter", "other/other-2", "sampler")


# What the model is given.


def drawn_by(loop, prompt, seed, judge):
    """Drawn as is right, with logprobs by another computation."""
    drawn = sampled(loop.samplers[-1], prompt, seed)
    return [(tokens, judge(tokens)) for tokens, _ in drawn]


@SEEDS
@pytest.mark.parametrize("shift", [3, -1])
def test_position_mismatch(lab, seed, shift):
    def draw(loop, prompt, number):
        network = loop.network()

        def judge(tokens):
            behind = range(len(prompt) + shift, len(prompt) + shift + len(tokens))
            return forward(network, prompt, tokens, [*range(len(prompt)), *behind])

        return drawn_by(loop, prompt, number, judge)

    found = examined(lab, planted(lab, "shifted", Plan(seed, draw=draw)))
    named(found, "position mismatch", f"completion moved by {shift:+d}", "sampler")


@SEEDS
def test_padding_counted_as_positions(lab, seed):
    longest = max(len(t.encode()) for t in TEXTS)

    def draw(loop, prompt, number):
        network = loop.network()
        where = [*range(len(prompt)), *range(longest, longest + 12)]

        def judge(tokens):
            return forward(network, prompt, tokens, where[: len(prompt) + len(tokens)])

        return drawn_by(loop, prompt, number, judge)

    found = examined(lab, planted(lab, "counted", Plan(seed, draw=draw)))
    value = "completion moved by the padding of its prompt"
    named(found, "position mismatch", value, "sampler")


@SEEDS
@pytest.mark.parametrize("way", ["BOS doubled", "BOS missing", "opening of the answer missing"])
def test_template_mismatch_of_conversations(lab, seed, way):
    def draw(loop, prompt, number):
        opening = loop.tokenizer.encode("<|bos|>assistant\n")
        assert prompt[0] == BOS
        assert prompt[-len(opening) :] == opening
        sent = {
            "BOS doubled": [BOS, *prompt],
            "BOS missing": prompt[1:],
            "opening of the answer missing": prompt[: -len(opening)],
        }[way]
        return sampled(loop.samplers[-1], sent, number)

    found = examined(lab, planted(lab, "words", Plan(seed, prompts=chat, draw=draw)))
    named(found, "template mismatch", way, "sampler")


@SEEDS
def test_template_missing_and_added(lab, seed):
    def bare(loop, prompt, number):
        index = chat(loop).index(prompt)
        return sampled(loop.samplers[-1], list(TEXTS[index].encode()), number)

    found = examined(lab, planted(lab, "bare", Plan(seed, prompts=chat, draw=bare)))
    named(found, "template mismatch", "chat template missing", "sampler")

    def dressed(loop, prompt, number):
        index = [list(t.encode()) for t in TEXTS].index(prompt)
        return sampled(loop.samplers[-1], chat(loop)[index], number)

    found = examined(lab, planted(lab, "dressed", Plan(seed, draw=dressed)))
    named(found, "template mismatch", "chat template added", "sampler")


@SEEDS
def test_padding_read_as_text(lab, seed):
    longest = max(len(t.encode()) for t in TEXTS)

    def draw(loop, prompt, number):
        network = loop.network()
        pads = [network.config.pad_token_id] * (longest - len(prompt))
        return drawn_by(
            loop, prompt, number, lambda tokens: forward(network, [*pads, *prompt], tokens)
        )

    found = examined(lab, planted(lab, "padded", Plan(seed, draw=draw)))
    named(found, "batch shape", "padding before prompts read as text", "sampler")


# Rounding and chance.


@SEEDS
def test_a_bfloat16_sampler_beside_a_float32_trainer(lab, seed):
    coarse = xl.ServiceClient(home=lab.folder, device="cpu", dtype="bfloat16")

    def draw(loop, prompt, number):
        return sampled(coarse.create_sampling_client(model_path=loop.saved()), prompt, number)

    run = planted(lab, "coarse", Plan(seed, draw=draw))
    found = examined(lab, run)
    assert found.cause == "dtype", repr(found)
    assert EXACT < found.mean < 0.2
    best = row(found, "dtype")
    assert (best.value, best.side) == ("bfloat16", "sampler")
    assert best.share > 0.5
    expected = examined(lab, run, sampler_dtype="bfloat16")
    assert expected.cause == ("healthy" if found.mean <= 0.08 else "dtype")


def by_another_kernel(loop, dtype):
    """The present weights in another precision, by transformers alone."""
    network = copy.deepcopy(loop.network())
    for parameter in network.parameters():
        parameter.data = parameter.data.to(dtype)
    return network


@SEEDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_rounding_by_other_kernels_is_known_by_its_size_and_pattern(lab, seed, dtype):
    def draw(loop, prompt, number):
        network = by_another_kernel(loop, dtype)
        return drawn_by(loop, prompt, number, lambda tokens: forward(network, prompt, tokens))

    found = examined(lab, planted(lab, "kernels", Plan(seed, draw=draw)))
    assert found.cause == "dtype", repr(found)
    assert row(found, "dtype").value == str(dtype).removeprefix("torch.")


@SEEDS
def test_dropout_left_on(lab, seed):
    run = planted(lab, "loose", Plan(seed, adapter={"dropout": 0.2}, steps=5))
    found = examined(lab, run)
    assert found.cause == "dropout", repr(found)
    best = row(found, "dropout")
    assert (best.value, best.side) == ("dropout=0.2", "trainer")
    assert best.share > 0.5
    # The sampler's numbers are those of the weights: it is the trainer's that are random.
    again = {e.side: e.mean for e in found.evidence if e.hypothesis == "evaluated again"}
    assert again["sampler"] <= EXACT < again["trainer"]


@SEEDS
def test_noise_without_a_cause_is_not_given_one(lab, seed):
    draws = np.random.default_rng(seed)

    def draw(loop, prompt, number):
        drawn = sampled(loop.samplers[-1], prompt, number)
        return [(t, (np.asarray(v) + draws.normal(0, 0.02, len(v))).tolist()) for t, v in drawn]

    found = examined(lab, planted(lab, "noise", Plan(seed, draw=draw)))
    assert found.cause == "unexplained", repr(found)
    assert "None of the hypotheses" in found.sentence
    assert found.mean == pytest.approx(0.016, rel=0.2)
    assert all(not e.share > 0.5 or e.note for e in found.evidence)


@SEEDS
def test_a_version_that_was_not_saved_is_not_taken_for_something_else(lab, seed):
    # Drawn by the weights behind step 2, of which only those behind 4 are saved.
    plan = Plan(seed, steps=5, save_every=4, rate=2e-3)
    plan.draw = lambda loop, p, s: sampled(loop.samplers[min(loop.step, 3) - 1], p, s)
    found = examined(lab, planted(lab, "lost", plan), step=5)
    assert found.cause in ("unexplained", "stale version"), repr(found)


# A model that is not the same in every batch.


def test_a_model_that_depends_on_what_it_is_computed_with(tmp_path):
    from xorl_lab.engine import engine, models

    loaded = models.load("tiny", "cpu", "float32")
    folder = tmp_path / "model"
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    lab = xl.Lab(str(folder), folder=tmp_path / "lab", device="cpu", dtype="float32", rank=4)
    base = engine.get(str(folder), "cpu", "float32").base
    # A layer whose output depends on how many tokens its row has, which nothing hides.
    base.model.layers[0].register_forward_hook(
        lambda _, __, output: output * (1 + 0.002 * output.shape[1])
    )
    run = planted(lab, "rows", Plan())
    found = examined(lab, run)
    assert found.cause == "batch shape", repr(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cause", "draw"),
    [
        ("healthy", None),
        ("temperature", warm(0.7)),
        ("stale version", lambda loop, p, s: sampled(loop.samplers[max(0, loop.step - 2)], p, s)),
    ],
    ids=["healthy", "temperature", "stale version"],
)
def test_on_a_model_of_use(tmp_path, cause, draw):
    lab = xl.Lab("SmolLM2-135M-Instruct", folder=tmp_path, device="cpu", dtype="float32", rank=8)
    run = planted(lab, "real", Plan(draw=draw, steps=3, rate=1e-3))
    before = time.monotonic()
    found = examined(lab, run)
    print(f"\n{time.monotonic() - before:.1f} s", found, sep="\n")  # noqa: T201
    assert found.cause == cause, repr(found)
    assert (found.mean <= EXACT) == (cause == "healthy")
    if cause != "healthy":
        value = "0.7" if cause == "temperature" else "real/real-1, 1 step older"
        named(found, cause, value, "sampler")


# What cannot be measured.


def record(lab, name, groups, steps=1):
    store = lab._store
    with store.create(name=name, kind="custom", model="tiny") as writer:
        for number in range(1, steps + 1):
            writer.step(xl.types.StepRecord(number, {"reward": 0.0}, groups))
    return name


def one(tokens, logprobs, trainer=None):
    streams = {} if trainer is None else {"trainer_logprobs": trainer}
    return Rollout(tokens, logprobs, "", "length", 0, 1.0, streams=streams)


def test_nothing_to_compare(lab):
    found = examined(lab, record(lab, "empty", []))
    assert (found.cause, found.step, found.tokens) == ("not measured", None, 0)
    silent = [Group("a", [97], [one([1, 2], [])])]
    found = examined(lab, record(lab, "silent", silent))
    assert found.cause == "not measured"
    assert "reported no logprobs" in found.sentence
    found = examined(lab, record(lab, "wordless", [Group("a", [97], [one([], [])])]))
    assert found.cause == "not measured"


def test_numbers_that_are_none(lab):
    nan, inf = math.nan, math.inf
    broken = [Group("a", [97], [one([1, 2], [nan, -inf], [-1.0, -1.0])])]
    found = examined(lab, record(lab, "nan", broken))
    assert found.cause == "not measured"
    assert "2 recorded logprobs are not finite" in found.sentence
    base = lab.service.create_sampling_client(base_model="tiny")
    (tokens, values), *_ = sampled(base, [97], 0)
    holed = [nan, *values[1:]]
    found = examined(lab, record(lab, "holed", [Group("a", [97], [one(tokens, holed, values)])]))
    assert found.healthy
    assert found.tokens == len(values) - 1
    assert "1 recorded logprobs are not finite" in found.sentence


def test_one_token_is_healthy_or_too_little(lab):
    base = lab.service.create_sampling_client(base_model="tiny")
    (tokens, values), *_ = sampled(base, [97], 0)
    well = [Group("a", [97], [one(tokens[:1], values[:1], values[:1])])]
    assert examined(lab, record(lab, "one", well)).healthy
    off = [Group("a", [97], [one(tokens[:1], [values[0] / 2], values[:1])])]
    found = examined(lab, record(lab, "off", off))
    assert found.cause == "unexplained"
    assert "too few" in found.sentence


def test_without_weights_the_gap_alone_is_told(lab):
    plan = Plan(draw=warm(0.7))
    planted(lab, "gone", plan)
    rest = lab.service.create_rest_client("gone")
    for name in ("gone-1", "gone-2", "gone-3", "gone-4"):
        rest.delete_checkpoint(f"weights/{name}").result()
    found = examined(lab, "gone", step=4)
    assert found.cause == "not measured"
    assert "the weights behind step 3" in found.sentence
    assert found.mean > 0.1
    # The first step was drawn by the base model, which is always there.
    named(examined(lab, "gone"), "temperature", "0.7", "sampler")


def test_where_a_server_keeps_the_weights(lab):
    plan = Plan(steps=1, draw=warm(0.7))
    found = diagnosed_without_weights(planted(lab, "far", plan))
    assert found.cause == "not measured"
    assert "a server keeps the weights" in found.sentence
    assert diagnosed_without_weights(planted(lab, "near", Plan(steps=1))).healthy


def test_a_branch_finds_the_weights_that_it_began_with(lab):
    run = grpo(lab, steps=3, save_every=1, learning_rate=2e-2, name="trunk")
    child = run.branch("step-2", steps=4, name="twig")
    assert examined(lab, child, step=3).healthy
    assert shelf_of(lab, child).behind().keys() == {1, 2, 3, 4}


# The answer.


def test_the_gap_is_that_of_the_record(lab):
    plan = Plan(draw=warm(0.7))
    run = planted(lab, "hot", plan)
    found = examined(lab, run)
    rollouts = [r for g in run.reader.groups(found.step) for r in g.rollouts]
    apart = np.concatenate(
        [np.subtract(r.logprobs, r.streams["trainer_logprobs"]) for r in rollouts]
    )
    assert_close(found.mean, spread(apart), rtol=1e-6)
    assert_close(found.max, np.abs(apart).max(), rtol=1e-6)
    assert found.tokens == len(apart)


def test_it_tells_how_far_it_is_and_bounds_what_it_does(lab):
    plan = Plan(draw=warm(0.7))
    run = planted(lab, "hot", plan)
    told = []
    found = examined(lab, run, rollouts=2, progress=lambda *news: told.append(news))
    assert found.cause == "temperature"
    assert max(e.tokens for e in found.evidence if e.hypothesis != "as recorded") <= 2 * 12
    assert [done for done, _, _ in told] == list(range(len(told)))
    assert all(done < total for done, total, _ in told)
    assert {what for _, _, what in told} >= {"temperature", "stale version", "batch shape"}


@pytest.mark.parametrize(
    "wrong",
    [{"rollouts": 0}, {"step": 0}, {"temperature": 0}, {"sampler_dtype": "int8"}],
    ids=lambda w: next(iter(w)),
)
def test_questions_are_checked(lab, wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        examined(lab, record(lab, "any", []), **wrong)


def test_the_answer_is_readable_everywhere():
    evil = "<script>alert(1)</script>&\"'"
    rows = (Evidence(evil, evil, evil, 0.25, 1.0, 0.5, 7, evil), Evidence("dtype", note="no need"))
    found = Diagnosis(evil, evil, 3, 0.5, 2.0, 7, rows)
    html = found._repr_html_()
    assert "<script" not in html
    assert html.count("&lt;script&gt;alert(1)&lt;/script&gt;&amp;&quot;&#x27;") == 6
    assert "0.25" in repr(found)
    assert "50.0 %" in repr(found)
    frame = found.frame()
    assert frame.columns.tolist() == list(COLUMNS)
    assert frame["share"].tolist()[0] == 0.5
    assert frame["hypothesis"].tolist() == [evil, "dtype"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.cause = "x"
