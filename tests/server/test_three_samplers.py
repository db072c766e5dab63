"""The same code with the embedded sampler, over HTTP and with a real SGLang: the same answers."""

import pytest

from tests.closeness import assert_close
from xorl_lab.client import outside
from xorl_lab.lab import Lab

CHATS = [
    [{"role": "user", "content": word}, {"role": "assistant", "content": word.upper()}]
    for word in ("one", "two", "three", "four")
]


def notebook(lab):
    """What somebody types: try, train, try again."""
    prompts = ["Hello", "1, 2, 3"]
    greedy = {"max_tokens": 8, "temperature": 0}
    before = [lab.sample(prompt, **greedy) for prompt in prompts]
    run = lab.sft(
        CHATS, steps=3, batch_size=2, learning_rate=3e-2, preflight=False, quiet=True, seed=1
    )
    after = [lab.sample(prompt, checkpoint=run.name, **greedy) for prompt in prompts]
    return [answer for samples in (*before, *after) for answer in samples.sequences]


@pytest.fixture
def answers(empty_home, live, sglang_server, tmp_path):
    served = live(dtype="float32", device="cpu")
    settings = {"rank": 8, "seed": 5, "device": "cpu", "dtype": "float32"}
    labs = {
        "embedded": Lab("tiny", folder=tmp_path / "a", **settings),
        "served": Lab("tiny", folder=tmp_path / "b", base_url=served.url, **settings),
        "sglang": Lab("tiny", folder=tmp_path / "c", sampler=sglang_server.url, **settings),
    }
    yield {name: notebook(lab) for name, lab in labs.items()}
    labs["served"].service.close()
    for used in list(outside._known.values()):
        sync, _ = used.awake()
        sync.push(sync.trainer.base)
        sync.server.name_weights("default")
    outside.close_all()


@pytest.mark.parametrize("other", ["served", "sglang"])
def test_greedy_completions_are_the_same(answers, other):
    for mine, wanted in zip(answers[other], answers["embedded"], strict=True):
        assert mine.tokens == wanted.tokens
        assert mine.text == wanted.text
        assert mine.stop_reason == wanted.stop_reason
        assert_close(mine.logprobs, wanted.logprobs, rtol=0, atol=1e-3)
    trained = [a.tokens for a in answers[other][2:]]
    assert trained != [a.tokens for a in answers[other][:2]], "training changes them"
