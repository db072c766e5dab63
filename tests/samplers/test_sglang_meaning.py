"""What a real SGLang answers means what the embedded sampler's answers mean."""

import threading
import time

import pytest

import xorl_lab as xl
from xorl_lab.client.remote_sampling import RemoteSource
from xorl_lab.errors import DataError
from xorl_lab.samplers.sglang.controls import SGLang

WAIT = 120
NEAR = 1e-4
"""Nats."""
PROMPT = xl.ModelInput.from_ints([5, 6, 7, 100, 33])
EOS = 257
"""Of ``tiny``."""


@pytest.fixture(scope="module")
def embedded(tmp_path_factory) -> xl.SamplingClient:
    home = tmp_path_factory.mktemp("meaning")
    return xl.ServiceClient(home=home, device="cpu", dtype="float32").create_sampling_client(
        base_model="tiny"
    )


@pytest.fixture(scope="module")
def outside(sglang_server) -> xl.SamplingClient:
    source = RemoteSource(sglang_server.url, "", None, 300.0)
    yield xl.SamplingClient.of(source)
    source.close()


@pytest.fixture
def ask(embedded, outside):
    """Ask both; their answers."""

    def both(prompt=PROMPT, max_tokens=8, count=1, temperature=0, asked=None, **settings):
        params = xl.SamplingParams(max_tokens, temperature, **settings)
        futures = [c.sample(prompt, params, count, **(asked or {})) for c in (embedded, outside)]
        return [future.result(WAIT) for future in futures]

    return both


def near(ours, theirs) -> bool:
    assert len(ours) == len(theirs)
    return all(abs(a - b) <= NEAR for a, b in zip(ours, theirs, strict=True))


def alike(ours: xl.SampleResponse, theirs: xl.SampleResponse) -> xl.SampledSequence:
    """Both have drawn the same; the first completion."""
    assert len(ours.sequences) == len(theirs.sequences)
    for a, b in zip(ours.sequences, theirs.sequences, strict=True):
        assert (a.tokens, a.stop_reason, a.text) == (b.tokens, b.stop_reason, b.text)
        assert near(a.logprobs, b.logprobs)
    return theirs.sequences[0]


def test_greedy(ask):
    """At T = 0 both report logprobs at T = 1."""
    drawn = alike(*ask())
    assert (len(drawn.tokens), drawn.stop_reason) == (8, "length")
    assert drawn.logprobs[0] < -0.1, "not the certainty of T = 0"


def test_a_low_temperature_is_not_greedy_in_its_logprobs(ask):
    ours, theirs = ask(temperature=0.01)
    assert near(ours.logprobs[:1], theirs.logprobs[:1])
    assert theirs.logprobs[0] > -0.01


def test_a_stop_token_is_among_the_tokens_and_not_in_the_text(ask):
    free = alike(*ask())
    at = next(i for i, t in enumerate(free.tokens) if free.tokens.index(t) == i and i > 1)
    drawn = alike(*ask(stop_token_ids=[free.tokens[at]]))
    assert drawn.tokens == free.tokens[: at + 1]
    assert drawn.stop_reason == "stop"
    assert len(drawn.text) < len(free.text)


def test_a_stop_token_as_the_last_that_is_allowed_is_a_stop(ask):
    free = alike(*ask())
    at = next(i for i, t in enumerate(free.tokens) if free.tokens.index(t) == i and i > 1)
    drawn = alike(*ask(max_tokens=at + 1, stop_token_ids=[free.tokens[at]]))
    assert (drawn.tokens, drawn.stop_reason) == (free.tokens[: at + 1], "stop")


def test_a_stop_string_is_among_the_tokens_and_not_in_the_text(ask):
    free = alike(*ask())
    letter = next(c for c in free.text if c.isascii() and c.isprintable())
    drawn = alike(*ask(stop=["never said", letter]))
    assert ord(letter) == drawn.tokens[-1]
    assert drawn.stop_reason == "stop"
    assert letter not in drawn.text


def test_the_end_of_the_model_ends_it(embedded, outside):
    """A prompt whose greedy completion ends by itself."""
    params = xl.SamplingParams(max_tokens=60, temperature=0)
    prompts = [xl.ModelInput.from_ints([i, i + 1, 100]) for i in range(40)]
    ours, theirs = (c.sample_batch(prompts, params).result(WAIT) for c in (embedded, outside))
    ended = 0
    for (_, a), (_, b) in zip(ours.completed, theirs.completed, strict=True):
        assert a.tokens == b.tokens
        assert a.sequences[0].stop_reason == b.sequences[0].stop_reason
        ended += b.tokens[-1] == EOS
    assert ended > 0


def test_the_most_likely_at_each_position(ask):
    ours, theirs = ask(asked={"top_logprobs": 4})
    alike(ours, theirs)
    for a, b in zip(ours.sequences[0].top_logprobs, theirs.sequences[0].top_logprobs, strict=True):
        assert [token for token, _ in a] == [token for token, _ in b]
        assert near([logprob for _, logprob in a], [logprob for _, logprob in b])
    assert [len(step) for step in theirs.sequences[0].top_logprobs] == [4] * 8


@pytest.mark.parametrize("count", [1, 3])
def test_the_logprobs_of_the_prompt(ask, count):
    """At T = 1 whatever the temperature."""
    ours, theirs = ask(temperature=0.5, count=count, asked={"prompt_logprobs": True})
    assert theirs.prompt_logprobs[0] is None
    assert near(ours.prompt_logprobs[1:], theirs.prompt_logprobs[1:])


def test_several_completions_differ(ask):
    ours, theirs = ask(count=8, temperature=1.0, max_tokens=20)
    assert len({tuple(s.tokens) for s in theirs.sequences}) == 8
    sent = theirs.meta_info["completion_tokens"]
    assert sent == sum(len(s.tokens) for s in theirs.sequences)
    assert set(theirs.meta_info) >= set(ours.meta_info) - {"model"}


def test_only_the_most_likely_are_drawn(ask):
    """The sets to choose from are the same; each of 64 draws lies in them."""
    for settings in ({"top_k": 3}, {"top_p": 0.3}):
        ours, theirs = (
            {s.tokens[0] for s in answer.sequences}
            for answer in ask(count=64, temperature=1.0, max_tokens=1, **settings)
        )
        assert len(theirs) > 1
        both = alike_sets(settings, ask)
        assert ours <= both
        assert theirs <= both


def alike_sets(settings, ask) -> set[int]:
    """The tokens that may be drawn, from the logprobs."""
    _, theirs = ask(max_tokens=1, asked={"top_logprobs": 64})
    ranked = theirs.sequences[0].top_logprobs[0]
    if "top_k" in settings:
        return {token for token, _ in ranked[: settings["top_k"]]}
    allowed, mass = set(), 0.0
    for token, logprob in ranked:
        if mass >= settings["top_p"]:
            return allowed
        allowed.add(token)
        mass += 2.718281828459045**logprob
    raise AssertionError("more alternatives are needed")


def test_without_logprobs(ask):
    ours, theirs = ask(asked={"return_logprobs": False})
    assert ours.sequences[0].logprobs is theirs.sequences[0].logprobs is None
    assert ours.tokens == theirs.tokens


def test_entropies_are_not_known(outside):
    response = outside.sample(PROMPT, xl.SamplingParams(max_tokens=2), entropies=True).result(WAIT)
    assert response.sequences[0].entropies is None


def test_a_prompt_that_would_kill_the_server_is_not_sent(outside):
    with pytest.raises(DataError, match="ids are 0 to 258"):
        outside.sample(xl.ModelInput.from_ints([259]), xl.SamplingParams(max_tokens=1))
    with pytest.raises(DataError, match="context holds 510"):
        outside.sample(xl.ModelInput.from_ints([1] * 509), xl.SamplingParams(max_tokens=2))


def test_a_prompt_and_its_completion_fill_the_context(outside):
    params = xl.SamplingParams(max_tokens=10, temperature=0, stop_token_ids=None)
    response = outside.sample(xl.ModelInput.from_ints([1] * 500), params).result(WAIT)
    assert len(response.tokens) == 10 or response.tokens[-1] == EOS


def test_an_adapter_that_is_not_there(outside):
    with pytest.raises(DataError, match="never been loaded: nobody"):
        outside.sample(PROMPT, lora_path="nobody").result(WAIT)


class TestGivingUp:
    LONG = xl.SamplingParams(max_tokens=500)

    def idle(self, url: str) -> bool:
        """Nothing is under way, after a while at most."""
        server = SGLang(url)
        try:
            server.flush_cache(20.0)
        finally:
            server.close()
        return True

    @pytest.mark.parametrize("count", [1, 4])
    def test_at_its_deadline_a_sample_answers_with_what_there_is(self, outside, count):
        response = outside.sample(PROMPT, self.LONG, count, timeout=0.3).result(WAIT)
        assert len(response.sequences) == count
        for sequence in response.sequences:
            assert sequence.stop_reason in ("abort", "stop")
            assert len(sequence.tokens) == len(sequence.logprobs) < 500

    def test_stragglers_are_cancelled_and_ended_there(self, outside, sglang_server):
        short = xl.SamplingParams(max_tokens=1)
        each = [short, self.LONG, self.LONG, short]
        result = outside.sample_batch([PROMPT] * 4, each, 4, timeout=1.5).result(WAIT)
        assert {index for index, _ in result.completed} >= {0, 3}
        assert set(result.cancelled) <= {1, 2}
        assert result.failed == []
        assert self.idle(sglang_server.url)

    def test_what_is_cancelled_ends_there(self, outside, sglang_server):
        future = outside.sample(PROMPT, self.LONG, 4)
        time.sleep(0.3)
        future.cancel()
        assert self.idle(sglang_server.url)

    def test_a_pause_ends_what_is_under_way_and_holds_what_comes(self, outside, sglang_server):
        server = SGLang(sglang_server.url)
        first = outside.sample(PROMPT, self.LONG, 2)
        time.sleep(0.3)
        server.pause()
        try:
            assert {s.stop_reason for s in first.result(WAIT).sequences} <= {"abort", "stop"}
            later = outside.sample(PROMPT, xl.SamplingParams(max_tokens=2))
            done = threading.Event()
            later.add_done_callback(lambda _: done.set())
            assert not done.wait(0.5)
            server.flush_cache()
        finally:
            server.resume()
        assert len(later.result(WAIT).tokens) == 2
        server.close()
