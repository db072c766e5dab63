import pytest

from tests.lab.support import PROMPTS, grpo
from xorl_lab.lab.compare import Comparison, Samples
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
