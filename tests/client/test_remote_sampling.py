"""Sampling from a server with ``/generate`` that goes wrong, and what is asked of it."""

import threading
import time

import pytest

import xorl_lab as xl
from tests.client import faulty
from tests.client.faulty import LOGPROBS, TOKENS, Faulty, changed, says
from xorl_lab.client import remote_sampling, workers
from xorl_lab.client.remote_sampling import RemoteSource, SampleTimeoutError
from xorl_lab.errors import CancelledError, ConfigError, DataError, SamplerError

PROMPT = xl.ModelInput.from_ints([1, 2, 3])
TWO = xl.SamplingParams(max_tokens=2)
WAIT = 20


def left() -> list[str]:
    """Threads of the clients that live, after a while at most."""
    end = time.monotonic() + 10
    names = [""]
    while names and time.monotonic() < end:
        time.sleep(0.01)
        names = [t.name for t in threading.enumerate() if is_a_clients(t)]
    return names


def is_a_clients(thread: threading.Thread) -> bool:
    named = thread.name.startswith(("xorl-lab sample", "xorl-lab abort"))
    return named or type(thread) is threading.Timer


@pytest.fixture
def server():
    running = Faulty()
    yield running
    running.stop()


@pytest.fixture
def connect(monkeypatch):
    """Make a client; none of its threads is left when the test is over."""
    monkeypatch.setattr(workers, "IDLE_SECONDS", 0.05)
    sources = []

    def build(url: str, timeout: float = 5.0) -> xl.SamplingClient:
        sources.append(RemoteSource(url, "", None, timeout))
        return xl.SamplingClient.of(sources[-1])

    yield build
    for source in sources:
        source.close()
    assert left() == []


def works(client: xl.SamplingClient, **keywords) -> xl.SampleResponse:
    response = client.sample(PROMPT, TWO, **keywords).result(WAIT)
    assert response.tokens == TOKENS
    assert response.logprobs == LOGPROBS
    return response


def meta(**fields):
    return changed(lambda value: value["meta_info"].update(fields))


WAYS = {
    "hangs": (faulty.hang, "did not answer within 0.6 s", True),
    "drips": (faulty.drip, "did not answer within 0.6 s", True),
    "resets before the answer": (faulty.reset_before, "did not answer .*Error", True),
    "resets within the answer": (faulty.reset_within, "did not answer .*Error", True),
    "ends within the answer": (faulty.cut_off, "did not answer .*complete", True),
    "truncates its JSON": (faulty.truncated, "not JSON", False),
    "sends a page": (faulty.page, "not JSON .*Jupyter.*check that base_url", False),
    "redirects": (faulty.redirect, "302, a redirect to 'http://example.invalid/login'", False),
    "fails": (says("500 Internal Server Error", {"detail": "oops"}), "answered 500: oops", False),
    "is not ready": (says("503 Service Unavailable"), "answered 503", True),
    "is behind a broken proxy": (says("502 Bad Gateway"), "answered 502", True),
    "is full": (says("429 Too Many Requests"), "answered 429", True),
    "sends null": (says("200 OK", b"null"), "lacks what was asked for", False),
    "sends an empty list": (says("200 OK", []), "0 completions of 1", False),
    "sends one too many": (
        lambda line, right: line.answer(b"[" + right + b"," + right + b"]"),
        "2 completions of 1",
        False,
    ),
    "has no ids": (changed(lambda v: v.pop("output_ids")), "lacks .*output_ids", False),
    "has no meta_info": (changed(lambda v: v.pop("meta_info")), "lacks .*meta_info", False),
    "lacks a logprob": (
        meta(output_token_logprobs=[[-0.5, 7, None]]),
        "2 tokens but 1 logprobs",
        False,
    ),
    "has logprobs of other tokens": (
        meta(output_token_logprobs=[[-0.5, 7, None], [-0.5, 9, None]]),
        "those of other tokens",
        False,
    ),
    "has a NaN": (
        lambda line, right: line.answer(right.replace(b"[-1.5, 8,", b"[NaN, 8,", 1)),
        "a logprob is nan",
        False,
    ),
    "has a null": (
        meta(output_token_logprobs=[[-0.5, 7, None], [None, 8, None]]),
        "a logprob is None",
        False,
    ),
    "is infinitely sure": (
        lambda line, right: line.answer(right.replace(b"[-1.5, 8,", b"[-Infinity, 8,", 1)),
        "a logprob is -inf",
        False,
    ),
    "draws what is no token": (
        changed(lambda v: v.update(output_ids=[7, 259])),
        "drew token 259, but ids are 0 to 258",
        False,
    ),
    "ends for no known reason": (
        meta(finish_reason={"type": "bored"}),
        "because of 'bored'",
        False,
    ),
    "ends for no reason": (meta(finish_reason=None), "because of None", False),
    "met NaN": (
        meta(finish_reason={"type": "stop", "matched": "NaN happened"}),
        "logits are NaN",
        False,
    ),
    "draws too much": (
        changed(
            lambda v: (
                v.update(output_ids=[7, 8, 8]),
                v["meta_info"].update(output_token_logprobs=[[-1, 7], [-1, 8], [-1, 8]]),
            )
        ),
        "drew 3 tokens, but 2 were allowed",
        False,
    ),
    "draws too little": (
        changed(
            lambda v: (
                v.update(output_ids=[7]),
                v["meta_info"].update(output_token_logprobs=[[-1, 7]]),
            )
        ),
        "ended at 1 tokens, though 2 were allowed: there is no room",
        False,
    ),
    "has half of its weights": (meta(weight_version="incomplete"), "weights are incomplete", True),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_server_that_goes_wrong_is_named_and_asked_again(server, connect, way):
    fault, words, retryable = WAYS[way]
    client = connect(server.url, 0.6)
    works(client)
    server.faults["/generate"].append(fault)
    future = client.sample(PROMPT, TWO)
    with pytest.raises(SamplerError, match=words) as caught:
        future.result(WAIT)
    assert caught.value.retryable is retryable
    assert server.count("/generate") == 3, "one for the vocabulary, and none was sent twice"
    works(client)


@pytest.mark.parametrize("fault", [faulty.hang, faulty.drip])
def test_what_takes_too_long_is_given_up_on_the_server_too(server, connect, fault):
    client = connect(server.url, 0.6)
    works(client)
    server.faults["/generate"].append(fault)
    with pytest.raises(SampleTimeoutError):
        client.sample(PROMPT, TWO).result(WAIT)
    end = time.monotonic() + 5
    while not server.count("/abort_request") and time.monotonic() < end:
        time.sleep(0.01)
    assert server.bodies("/abort_request")[0] == {"rid": server.bodies("/generate")[-1]["rid"]}


@pytest.mark.parametrize(
    ("asked", "fault", "words"),
    [
        (
            {"top_logprobs": 2},
            meta(output_top_logprobs=[[[-1.0, 7, None]]]),
            "2 tokens but alternatives to 1",
        ),
        (
            {"top_logprobs": 2},
            meta(output_top_logprobs=[[[-1.0, 7, None]], [[None, 8, None]]]),
            "a logprob is None",
        ),
        ({"prompt_logprobs": True}, meta(input_token_logprobs=[]), "3 tokens, but .* of 0"),
        (
            {"prompt_logprobs": True},
            meta(input_token_logprobs=[[None, 1], [-1.0, 2], [-1.0, 4]]),
            "of others",
        ),
        ({"num_samples": 2}, says("200 OK", []), "0 completions of 2"),
    ],
)
def test_what_was_asked_for_beside_is_checked_too(server, connect, asked, fault, words):
    client = connect(server.url)
    server.faults["/generate"] += [lambda line, right: line.answer(right), fault]
    with pytest.raises(SamplerError, match=words):
        client.sample(PROMPT, TWO, **asked).result(WAIT)
    works(client, **asked)


def test_in_a_batch_only_what_failed_fails(server, connect):
    client = connect(server.url)
    works(client)
    server.faults["/generate"] += [faulty.reset_before, faulty.truncated]
    result = client.sample_batch([PROMPT] * 5, TWO).result(WAIT)
    assert len(result.completed) == 3
    assert [type(error) for _, error in result.failed] == [SamplerError] * 2
    assert result.cancelled == []
    assert sorted(index for index, _ in [*result.completed, *result.failed]) == list(range(5))
    assert len(client.sample_batch([PROMPT] * 5, TWO).result(WAIT).completed) == 5


def test_a_server_that_is_gone_and_comes_back(connect):
    first = Faulty()
    client = connect(first.url)
    works(client)
    first.stop()
    with pytest.raises(SamplerError, match=r"ConnectError.*check that the server runs") as caught:
        client.sample(PROMPT, TWO).result(WAIT)
    assert caught.value.retryable
    second = Faulty(first.port)
    works(client)
    second.stop()


def test_a_server_that_comes_back_at_once_is_not_noticed(connect):
    first = Faulty()
    client = connect(first.url)
    works(client)
    first.stop()
    later = client.sample(PROMPT, TWO)
    second = Faulty(first.port)
    assert later.result(WAIT).tokens == TOKENS
    second.stop()


def test_a_server_that_does_not_answer_from_the_start(connect):
    server = Faulty()
    server.stop()
    client = connect(server.url)
    with pytest.raises(SamplerError, match="did not answer"):
        client.sample(PROMPT, TWO)


def test_an_old_sglang_is_refused_before_anything_is_sent(server, connect):
    server.pages["/server_info"] = {**faulty.SERVER, "version": "0.4.9"}
    with pytest.raises(ConfigError, match=r"is SGLang 0\.4\.9, but 0\.5\.23 or newer"):
        connect(server.url).sample(PROMPT, TWO)
    assert server.count("/generate") == 0


def test_a_server_of_another_kind_is_taken_at_its_word(server, connect):
    server.pages["/server_info"] = {"what": "no SGLang"}
    client = connect(server.url)
    works(client, num_samples=1)
    assert client.sample(xl.ModelInput.from_ints([10**6]), TWO).result(WAIT).tokens == TOKENS


@pytest.mark.parametrize(
    ("prompt", "length", "words"),
    [
        ([1, 259], 2, "token id 259, but this model's ids are 0 to 258"),
        ([1, -1], 2, "token id -1"),
        ([], 2, "no tokens"),
        ([1] * 509, 2, "together 511, but the model's context holds 510"),
    ],
)
def test_prompts_are_checked_before_they_are_sent(server, connect, prompt, length, words):
    client = connect(server.url)
    with pytest.raises(DataError, match=words):
        client.sample(xl.ModelInput.from_ints(prompt), xl.SamplingParams(max_tokens=length))
    result = client.sample_batch([PROMPT, xl.ModelInput.from_ints(prompt)], TWO).result(WAIT)
    assert [index for index, _ in result.completed] == [0]
    assert [index for index, _ in result.failed] == [1] if len(prompt) < 500 else [[]]
    assert server.count("/generate") == 2, "one for the vocabulary, one that is fine"


class TestWhatIsSent:
    def test_settings_that_a_server_might_have_others_of(self, server, connect):
        params = xl.SamplingParams(
            max_tokens=2, temperature=0.0, top_p=0.9, top_k=5, stop="x", stop_token_ids=[9], seed=4
        )
        connect(server.url).sample(PROMPT, params, top_logprobs=2).result(WAIT)
        body = server.bodies("/generate")[-1]
        assert body["sampling_params"] == {
            "frequency_penalty": 0.0,
            "ignore_eos": False,
            "max_new_tokens": 2,
            "min_new_tokens": 0,
            "min_p": 0.0,
            "n": 1,
            "no_stop_trim": False,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "sampling_seed": 4,
            "skip_special_tokens": True,
            "stop": ["x"],
            "stop_token_ids": [9],
            "temperature": 0.0,
            "top_k": 5,
            "top_p": 0.9,
        }
        assert (body["input_ids"], body["logprob_start_len"]) == ([1, 2, 3], -1)
        assert (body["return_logprob"], body["top_logprobs_num"]) == (True, 2)

    def test_each_completion_has_an_id_and_a_seed_of_its_own(self, server, connect):
        params = xl.SamplingParams(max_tokens=2, seed=2**70)
        response = connect(server.url).sample(PROMPT, params, 3, prompt_logprobs=True).result(WAIT)
        body = server.bodies("/generate")[-1]
        assert body["input_ids"] == [[1, 2, 3]] * 3
        assert len(set(body["rid"])) == 3
        seeds = [settings["sampling_seed"] for settings in body["sampling_params"]]
        assert len(set(seeds)) == 3
        assert all(-(2**63) <= seed < 2**63 for seed in seeds), "SGLang refuses larger ones"
        assert all("n" not in settings for settings in body["sampling_params"])
        assert body["logprob_start_len"] == [0, -1, -1], "one pass over the prompt tells them"
        assert response.prompt_logprobs == [None, -1.0, -2.0]
        assert len(response.sequences) == 3
        assert response.meta_info["completion_tokens"] == 6
        assert response.meta_info["prompt_tokens"] == 3
        assert response.meta_info["seed"] == 2**70

    def test_the_answer_has_no_values_per_token_beside_their_places(self, server, connect):
        info = works(connect(server.url), top_logprobs=2, prompt_logprobs=True).meta_info
        assert not [key for key in info if "logprobs" in key]
        assert info["weight_version"] == "default"
        assert "weight_versions" not in info

    def test_a_completion_of_two_versions_says_so(self, server, connect):
        client = connect(server.url)
        works(client)
        spans = [
            {"version": "a", "start": 0, "end": 1},
            {"version": "b", "start": 1, "end": 2},
        ]
        server.faults["/generate"].append(meta(weight_version="b", weight_versions=spans))
        info = works(client).meta_info
        assert (info["weight_version"], info["weight_versions"]) == ("b", ["a", "b"])

    def test_completions_of_two_versions_say_so(self, server, connect):
        client = connect(server.url)
        works(client)

        def change(value):
            value[1]["meta_info"].update(weight_version="b", weight_versions=None)

        server.faults["/generate"].append(changed(change))
        assert works(client, num_samples=2).meta_info["weight_versions"] == ["default", "b"]


def until_aborted(server: Faulty):
    """An answer that comes, as aborted, once all ids of its request were given up."""

    def fault(line: faulty.Line, right: bytes) -> None:
        body = server.bodies("/generate")[-1]
        wanted = {body["rid"]} if isinstance(body["rid"], str) else set(body["rid"])
        end = time.monotonic() + WAIT
        while time.monotonic() < end:
            if wanted <= {b["rid"] for b in server.bodies("/abort_request")}:
                return line.answer(right.replace(b'"length"', b'"abort"'))
            time.sleep(0.01)
        return line.reset()

    return fault


class TestGivingUp:
    @pytest.mark.parametrize("count", [1, 3])
    def test_at_its_deadline_a_sample_answers_with_what_there_is(self, server, connect, count):
        client = connect(server.url)
        works(client)
        server.faults["/generate"].append(until_aborted(server))
        response = client.sample(PROMPT, TWO, count, timeout=0.2).result(WAIT)
        assert [s.stop_reason for s in response.sequences] == ["abort"] * count
        assert server.count("/abort_request") == count

    @pytest.mark.parametrize("count", [1, 3])
    def test_a_future_that_is_cancelled_ends_the_request(self, server, connect, count):
        client = connect(server.url)
        works(client)
        server.faults["/generate"].append(until_aborted(server))
        future = client.sample(PROMPT, TWO, count)
        while server.count("/generate") < 3:
            time.sleep(0.01)
        assert future.cancel()
        with pytest.raises(CancelledError):
            future.result(WAIT)
        end = time.monotonic() + 10
        while server.count("/abort_request") < count and time.monotonic() < end:
            time.sleep(0.01)
        assert server.count("/abort_request") == count

    def test_stragglers_of_a_batch_are_cancelled_there_too(self, server, connect):
        client = connect(server.url)
        works(client)
        server.faults["/generate"] += [until_aborted(server)]
        result = client.sample_batch([PROMPT] * 6, TWO, timeout=1.0).result(WAIT)
        assert (len(result.completed), len(result.cancelled), result.failed) == (5, 1, [])
        end = time.monotonic() + 10
        while not server.count("/abort_request") and time.monotonic() < end:
            time.sleep(0.01)
        assert server.count("/abort_request") == 1

    def test_a_batch_has_one_timer(self, server, connect):
        client = connect(server.url)
        works(client)
        server.faults["/generate"] += [faulty.hang] * 8
        future = client.sample_batch([PROMPT] * 8, TWO, timeout=60.0)
        assert [type(t) for t in threading.enumerate()].count(threading.Timer) == 1
        assert future.cancel()
        server.release.set()

    def test_what_overtook_its_request_is_given_up_again(self, server, connect, monkeypatch):
        monkeypatch.setattr(remote_sampling, "AGAIN_SECONDS", 0.05)
        client = connect(server.url)
        works(client)

        def deaf_once(line, right):
            end = time.monotonic() + WAIT
            while server.count("/abort_request") < 2 and time.monotonic() < end:
                time.sleep(0.01)
            line.answer(right.replace(b'"length"', b'"abort"'))

        server.faults["/generate"].append(deaf_once)
        response = client.sample(PROMPT, TWO, timeout=0.1).result(WAIT)
        assert response.sequences[0].stop_reason == "abort"
        assert 2 <= server.count("/abort_request") <= remote_sampling.GIVE_UPS

    def test_a_server_that_no_longer_hears_is_not_asked_for_ever(
        self, server, connect, monkeypatch
    ):
        monkeypatch.setattr(remote_sampling, "AGAIN_SECONDS", 0.01)
        client = connect(server.url, 3.0)
        works(client)
        server.faults["/generate"].append(faulty.hang)
        future = client.sample(PROMPT, TWO, timeout=0.05)
        with pytest.raises(SampleTimeoutError):
            future.result(WAIT)
        asked = server.count("/abort_request")
        assert 1 <= asked <= remote_sampling.GIVE_UPS + 1

    def test_an_aborted_answer_before_its_first_token(self, server, connect):
        client = connect(server.url)
        works(client)
        info = {"id": "r", "finish_reason": {"type": "abort", "message": "in the queue"}}
        value = {"text": "", "output_ids": [], "meta_info": info}
        server.faults["/generate"].append(says("200 OK", value))
        response = client.sample(PROMPT, TWO, prompt_logprobs=True, top_logprobs=2).result(WAIT)
        (sequence,) = response.sequences
        assert (sequence.tokens, sequence.logprobs, sequence.top_logprobs) == ([], [], [])
        assert (sequence.stop_reason, response.prompt_logprobs) == ("abort", None)


def test_closing_ends_the_threads_that_wait(server, connect):
    client = connect(server.url, 600.0)
    works(client)
    server.faults["/generate"] += [faulty.hang] * 3
    futures = [client.sample(PROMPT, TWO) for _ in range(3)]
    while server.count("/generate") < 5:
        time.sleep(0.01)
    client._source.close()
    for future in futures:
        with pytest.raises(CancelledError, match="closed"):
            future.result(WAIT)
    assert left() == []
