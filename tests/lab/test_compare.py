import math

import pytest

from tests.closeness import assert_close
from tests.lab.support import PROMPTS, grpo, share
from tests.lab.test_resample import trainer_logprobs
from xorl_lab.client import SamplingClient
from xorl_lab.errors import ConfigError
from xorl_lab.lab import compare as module
from xorl_lab.lab.compare import Comparison, Samples
from xorl_lab.lab.judging import divergence, judge
from xorl_lab.recipes.rewards import Score
from xorl_lab.types import SampledSequence

EVIL = "<script>alert(1)</script>&\"'"


def test_the_same_prompts_by_several_weights(lab):
    grpo(lab, steps=6, learning_rate=5e-2, save_every=3)
    found = lab.compare(["base", "grpo-1", "grpo-1/step-3", "step-3"], PROMPTS[:3], max_tokens=5)
    assert found.prompts == [row["prompt"] for row in PROMPTS[:3]]
    assert list(found.answers) == ["base", "grpo-1", "grpo-1/step-3", "step-3"]
    tokens = {name: [s.tokens for s in answers] for name, answers in found.answers.items()}
    assert tokens["step-3"] == tokens["grpo-1/step-3"]
    assert tokens["base"] != tokens["grpo-1"]
    frame = found.frame()
    assert frame.columns.tolist() == ["prompt", *found.answers]
    assert len(frame) == 3


def test_it_is_greedy_and_repeats_and_draws_the_same_numbers(lab):
    one, other = (lab.compare(["base"], PROMPTS[:2], max_tokens=5) for _ in range(2))
    assert one == other
    warm = {"max_tokens": 5, "temperature": 1.5, "seed": 3}
    drawn = lab.compare(["base"], PROMPTS[:2], **warm)
    assert drawn == lab.compare(["base"], PROMPTS[:2], **warm)
    assert drawn != one


def test_samples(lab):
    found = lab.sample("a", n=3, max_tokens=4)
    assert len(found.texts) == len(found.sequences) == 3
    assert lab.sample("a", n=3, max_tokens=4) == found
    assert lab.sample("a", n=3, max_tokens=4, seed=1) != found
    chat = lab.sample([{"role": "user", "content": "Hello"}], max_tokens=4)
    assert "Hello" in chat.prompt
    assert repr(found).startswith("[0] '")
    assert repr(found).count("\n") == 2


def sequence(text, why="stop"):
    return SampledSequence([1], stop_reason=why, text=text)


@pytest.mark.parametrize(
    "shown",
    [
        Samples(EVIL, [sequence(EVIL, "length")]),
        Comparison([EVIL], {EVIL: [sequence(EVIL)], "base": [sequence(EVIL)]}),
    ],
    ids=["samples", "comparison"],
)
def test_html_is_escaped(shown):
    html = shown._repr_html_()
    assert "<script" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&amp;&quot;&#x27;" in html
    assert EVIL in repr(shown).replace("\\'", "'")


def test_what_was_cut_off_is_marked():
    assert "(cut off)" in Samples("a", [sequence("b", "length")])._repr_html_()
    assert "(cut off)" not in Samples("a", [sequence("b")])._repr_html_()


# Token by token.


def test_answers_are_judged_by_all_weights_and_prompts_encoded_once(lab, monkeypatch):
    grpo(lab, steps=4, learning_rate=5e-2, save_every=2)
    names = ["base", "grpo-1/step-2", "grpo-1"]
    calls = []
    encode = module.encode_prompts

    def counted(prompts, tokenizer):
        calls.append(prompts)
        return encode(prompts, tokenizer)

    monkeypatch.setattr(module, "encode_prompts", counted)
    found = lab.compare(names, PROMPTS[:2], max_tokens=4)
    assert len(calls) == 1
    tokenizer = lab.load("base").get_tokenizer()
    for judge_ in names:
        client = lab.load(judge_)
        for author in names:
            for i, answer in enumerate(found.answers[author]):
                prompt = tokenizer.encode(found.prompts[i], add_special_tokens=False)
                wanted = trainer_logprobs(client, [*prompt, *answer.tokens], len(answer.tokens))
                assert_close(found.logprobs[judge_][author][i], wanted, rtol=0, atol=1e-4)
    assert found.logprobs["base"]["base"] == [s.logprobs for s in found.answers["base"]]
    for name in names:
        for pieces, answer in zip(found.pieces[name], found.answers[name], strict=True):
            assert len(pieces) == len(answer.tokens)


def test_rewards_beside_the_answers(lab):
    found = lab.compare(["base"], PROMPTS[:3], rewards=share, max_tokens=4)
    frame = found.frame()
    assert frame.columns.tolist() == ["prompt", "base", "reward:base"]
    wanted = [share(t, PROMPTS[0]["wanted"]) for t in frame["base"]]
    assert_close(frame["reward:base"], wanted, rtol=1e-12)
    assert f"(reward {wanted[0]:g})" in repr(found)
    assert f"<small>reward {wanted[0]:g}</small>" in found._repr_html_()
    with pytest.raises(ConfigError, match="asks for 'nope'"):
        lab.compare(["base"], PROMPTS[:3], rewards=lambda nope: 0.0)
    broken = lab.compare(["base"], ["a"], rewards=lambda completion: "x", max_tokens=2)
    assert "instead of a number" in repr(broken)
    assert broken.frame()["reward:base"].isna().all()


def answered(tokens, text):
    return SampledSequence(tokens, text=text, logprobs=[-1.0] * len(tokens))


def test_the_first_difference_is_marked():
    found = Comparison(
        ["p", "q", "r"],
        {
            "a": [answered([1, 2, 3], "x<3"), answered([1], "x"), answered([1], "x")],
            "b": [answered([1, 4, 3], "xy3"), answered([1], "x"), answered([1, 2], "x<")],
        },
        {"a": [["x", "<", "3"], ["x"], ["x"]], "b": [["x", "y", "3"], ["x"], ["x", "<"]]},
        {
            "a": {
                "a": [[-1.0, -2.0, -3.0], [-1.0], [-1.0]],
                "b": [[math.nan] * 3, [-1.0], [0.0, -1]],
            }
        },
    )
    assert found.divergence("a", "b") == [1, None, 1]
    html = found._repr_html_()
    assert html.count("<mark>") == 3
    assert "x<mark>&lt;</mark>3" in html
    assert "x<mark>y</mark>3" in html
    assert "-2.000 nats per token under a" in html
    assert html.count("nats per token") == 5  # none of a value that is missing
    assert repr(found).splitlines() == [
        "'p'",
        "  a: 'x<3'",
        "  b: 'xy3'",
        "    differs from token 1 on: 'y'",
        "'q'",
        "  a: 'x'",
        "  b: 'x'",
        "'r'",
        "  a: 'x'",
        "  b: 'x<'",
        "    differs from token 1 on: '<'",
    ]


def test_a_difference_inside_of_a_character_marks_the_character(lab):
    pieces = ["a", "", "", "", "👍", "b"]
    assert module._marked(pieces, 2) == "a<mark>👍</mark>b"
    assert module._marked(pieces, 0) == "<mark>a</mark>👍b"
    assert module._marked(pieces, None) == "a👍b"
    assert module._marked(pieces, 6) == "a👍b"
    assert module._marked([EVIL], 0).count("<") == 2


def test_a_failed_reward_is_shown_and_escaped():
    found = Comparison(["p"], {"a": [answered([1], "x")]}, rewards={"a": [Score(None, error=EVIL)]})
    assert "<script" not in found._repr_html_()
    assert EVIL in repr(found)


def test_an_answer_that_fills_the_context_lacks_its_last_value(lab):
    client = lab.service.create_sampling_client(base_model="tiny")
    trained = lab.load("base")
    prompt = [65] * 500
    answers = [list(range(66, 78)), list(range(66, 76)), []]
    found = judge(client, [prompt] * 3, answers)
    assert [len(values) for values in found] == [12, 10, 0]
    assert math.isnan(found[0][-1])
    wanted = trainer_logprobs(trained, [*prompt, *answers[0]], 12)
    assert_close(found[0][:-1], wanted[:-1], rtol=0, atol=1e-4)
    assert_close(found[1], wanted[:10], rtol=0, atol=1e-4)


def test_judging_that_is_interrupted_leaves_no_work_behind(monkeypatch):
    from xorl_lab.futures import APIFuture

    futures = [APIFuture(lambda: True) for _ in range(2)]
    cancelled = []
    client = SamplingClient.__new__(SamplingClient)
    asked = iter(futures)
    monkeypatch.setattr(SamplingClient, "sample", lambda *_, **__: next(asked))
    monkeypatch.setattr(APIFuture, "cancel", lambda self: cancelled.append(self))
    futures[0].set_exception(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        judge(client, [[1], [1]], [[2], [3]])
    assert cancelled == futures


def test_where_two_answers_part():
    assert divergence([], []) is None
    assert divergence([1, 2], [1, 2]) is None
    assert divergence([1, 2], [1, 3]) == 1
    assert divergence([1, 2], [1]) == 1
    assert divergence([], [1]) == 0
