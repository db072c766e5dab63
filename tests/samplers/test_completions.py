"""What a completion consists of: tokens, logprobs, text, and the reason why it ended."""

import math
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import xorl_lab as xl
from tests.closeness import assert_close
from tests.samplers.support import Counter, datum, engine_of, held, ids, params, sequences
from xorl_lab.engine.logprobs import run_packed
from xorl_lab.engine.packing import pack

EOS = 257
PROMPT = tuple(b"once upon")


def all_logprobs(client: xl.SamplingClient, tokens: list[int], temperature: float) -> torch.Tensor:
    """(N, V) log-probabilities after each of N tokens, by the model's own full pass."""
    model = engine_of(client).base
    with torch.no_grad():
        hidden = run_packed(model, pack([tokens])[0])
        logits = model.get_output_embeddings()(hidden).double()
    return torch.log_softmax(logits / temperature, -1)


def stopped_at(client: xl.SamplingClient, stop: str | list[str], **more: object):
    """The first sample that one of the stop strings ends, of many."""
    response = client.sample(
        ids(*PROMPT), params(stop=stop, max_tokens=60, **more), num_samples=64
    ).result()
    found = [s for s in response.sequences if s.stop_reason == "stop" and s.tokens[-1] != EOS]
    assert found, "no sample met a stop string: the test needs other seeds"
    return found


def test_tokens_are_within_the_limit_and_the_vocabulary(base):
    for sequence in base.sample(ids(*PROMPT), params(), num_samples=20).result().sequences:
        assert 1 <= len(sequence.tokens) <= 12
        assert all(0 <= t < 259 for t in sequence.tokens)


@settings(max_examples=40)
@given(
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([-1, 1, 7]),
    top_p=st.sampled_from([1.0, 0.8, 0.05]),
    max_tokens=st.integers(1, 30),
    stop=st.sampled_from([None, "e", ["a", "\n"], "\u20ac"]),
    stop_ids=st.sampled_from([None, [101], list(range(0, 256, 3))]),
    seed=st.integers(0, 1000),
    num_samples=st.integers(1, 4),
    top=st.sampled_from([0, 3]),
    entropies=st.booleans(),
)
def test_ids_logprobs_alternatives_and_entropies_are_equally_long(
    service, temperature, top_k, top_p, max_tokens, stop, stop_ids, seed, num_samples, top,
    entropies,
):  # fmt: skip
    settings_ = xl.SamplingParams(
        max_tokens, temperature, top_p, top_k, stop, stop_token_ids=stop_ids, seed=seed
    )
    client = service.create_sampling_client(base_model="tiny")
    response = client.sample(
        ids(*PROMPT), settings_, num_samples, top_logprobs=top, entropies=entropies
    ).result()
    assert len(response.sequences) == num_samples
    for sequence in response.sequences:
        assert 1 <= len(sequence.tokens) == len(sequence.logprobs) <= max_tokens
        assert all(x <= 1e-6 for x in sequence.logprobs)
        if top:
            assert [len(entry) for entry in sequence.top_logprobs] == [top] * len(sequence.tokens)
        else:
            assert sequence.top_logprobs is None
        if entropies:
            assert len(sequence.entropies) == len(sequence.tokens)
            assert all(0 <= x <= math.log(259) + 1e-6 for x in sequence.entropies)
        else:
            assert sequence.entropies is None
        ended = sequence.tokens[-1] in {EOS, *(stop_ids or [])}
        if ended:
            assert sequence.stop_reason == "stop"
        if sequence.stop_reason == "length":
            assert len(sequence.tokens) == max_tokens
        assert not {EOS, *(stop_ids or [])} & set(sequence.tokens[:-1])


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
def test_logprobs_are_those_of_a_full_pass_at_the_temperature(base, temperature):
    response = base.sample(
        ids(*PROMPT), params(temperature=temperature, max_tokens=30, top_k=20), 4
    ).result()
    for sequence in response.sequences:
        table = all_logprobs(base, [*PROMPT, *sequence.tokens], temperature)
        rows = table[len(PROMPT) - 1 : -1]
        expected = rows.gather(1, torch.tensor(sequence.tokens)[:, None])[:, 0]
        assert_close(sequence.logprobs, expected, rtol=0, atol=1e-4)


def test_temperature_zero_takes_the_most_likely_token_every_time(base):
    response = base.sample(ids(*PROMPT), params(temperature=0.0, max_tokens=25), 3).result()
    table = all_logprobs(base, [*PROMPT, *response.tokens], 1.0)[len(PROMPT) - 1 : -1]
    assert response.tokens == table.argmax(-1).tolist()
    assert sequences(response) == [response.tokens] * 3


def test_temperature_zero_reports_logprobs_at_temperature_one(base):
    response = base.sample(ids(*PROMPT), params(temperature=0.0, max_tokens=25)).result()
    table = all_logprobs(base, [*PROMPT, *response.tokens], 1.0)[len(PROMPT) - 1 : -1]
    assert_close(response.logprobs, table.amax(-1), rtol=0, atol=1e-4)


def test_alternatives_are_the_most_likely_tokens_best_first(base):
    response = base.sample(
        ids(*PROMPT), params(temperature=0.7), num_samples=2, top_logprobs=5
    ).result()
    for sequence in response.sequences:
        table = all_logprobs(base, [*PROMPT, *sequence.tokens], 0.7)[len(PROMPT) - 1 : -1]
        best = table.topk(5)
        assert [[i for i, _ in entry] for entry in sequence.top_logprobs] == best.indices.tolist()
        got = [[value for _, value in entry] for entry in sequence.top_logprobs]
        assert_close(got, best.values, rtol=0, atol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.6])
def test_entropies_are_those_of_a_full_pass_at_the_temperature(base, temperature):
    settings_ = params(temperature=temperature, max_tokens=30, top_k=20)
    response = base.sample(ids(*PROMPT), settings_, 3, entropies=True).result()
    for sequence in response.sequences:
        table = all_logprobs(base, [*PROMPT, *sequence.tokens], temperature or 1.0)
        rows = table[len(PROMPT) - 1 : -1]
        assert_close(sequence.entropies, -(rows.exp() * rows).sum(-1), rtol=0, atol=1e-4)


def test_what_one_request_wants_reported_its_neighbour_does_not_get(base):
    with held(base):
        wanted = [(0, False), (2, True), (6, False), (0, True)]
        futures = [
            base.sample(ids(*PROMPT), params(), top_logprobs=n, entropies=e) for n, e in wanted
        ]
    for (n, entropies), future in zip(wanted, futures, strict=True):
        (sequence,) = future.result().sequences
        entries = sequence.top_logprobs or []
        assert all(len(entry) == n for entry in entries)
        assert bool(entries) == (n > 0)
        assert (sequence.entropies is not None) == entropies


def test_a_batch_reports_what_single_requests_do(base):
    prompts = [ids(*PROMPT), ids(1, 2)]
    (_, first), (_, second) = base.sample_batch(
        prompts, params(), 2, top_logprobs=3, entropies=True
    ).result().completed  # fmt: skip
    for prompt, got in zip(prompts, (first, second), strict=True):
        alone = base.sample(prompt, params(), 2, top_logprobs=3, entropies=True).result()
        assert sequences(got) == sequences(alone)
        for one, other in zip(got.sequences, alone.sequences, strict=True):
            assert [[i for i, _ in t] for t in one.top_logprobs] == [
                [i for i, _ in t] for t in other.top_logprobs
            ]
            assert_close(one.entropies, other.entropies, rtol=0, atol=1e-4)


def test_logprobs_are_left_out_on_request(base):
    response = base.sample(ids(*PROMPT), params(), return_logprobs=False).result()
    assert response.logprobs is None
    assert response.tokens == base.sample(ids(*PROMPT), params()).result().tokens


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_prompt_logprobs_are_the_trainers_at_temperature_one(base, trainer, temperature):
    prompt = list(b"the quick brown fox jumps")
    response = base.sample(
        ids(*prompt), params(temperature=temperature), prompt_logprobs=True
    ).result()
    expected = trainer.forward([datum(prompt)]).result().loss_fn_outputs[0].logprobs
    assert response.prompt_logprobs[0] is None
    assert len(response.prompt_logprobs) == len(prompt)
    assert_close(response.prompt_logprobs[1:], expected.to_torch(), rtol=0, atol=1e-4)


def test_a_long_prompt_has_logprobs_for_all_of_its_tokens(base, trainer):
    # Longer than the chunk in which they are computed.
    prompt = [(7 * i * i) % 256 for i in range(400)]
    response = base.sample(ids(*prompt), params(max_tokens=1), prompt_logprobs=True).result()
    expected = trainer.forward([datum(prompt)]).result().loss_fn_outputs[0].logprobs
    assert_close(response.prompt_logprobs[1:], expected.to_torch(), rtol=0, atol=1e-4)


def test_a_prompt_of_one_token_has_no_logprob_to_report(base):
    assert base.sample(ids(65), params(), prompt_logprobs=True).result().prompt_logprobs == [None]


def test_prompt_logprobs_are_absent_unless_asked_for(base):
    assert base.sample(ids(*PROMPT), params()).result().prompt_logprobs is None


def test_prompt_logprobs_are_each_requests_own(base):
    asked = [
        base.sample(ids(*p), params(), prompt_logprobs=True) for p in (b"abc", b"abcdef", b"z")
    ]
    assert [len(future.result().prompt_logprobs) for future in asked] == [3, 6, 1]


def test_max_tokens_one_gives_one_token(base):
    for sequence in base.sample(ids(*PROMPT), params(max_tokens=1), 30).result().sequences:
        assert len(sequence.tokens) == len(sequence.logprobs) == 1
        assert sequence.stop_reason == ("stop" if sequence.tokens[0] == EOS else "length")


def test_max_tokens_one_needs_no_decode_step(base, counter: Counter):
    base.sample(ids(*PROMPT), params(max_tokens=1), 30).result()
    assert counter.steps == []


def test_the_whole_context_can_be_filled(base):
    prompt = [(3 * i) % 256 for i in range(500)]
    longest = 0
    for sequence in base.sample(ids(*prompt), params(max_tokens=12), 20).result().sequences:
        longest = max(longest, len(sequence.tokens))
        assert sequence.stop_reason in ("length", "stop")
    assert longest == 12


def test_a_stop_token_ends_the_sample_and_is_its_last_token(base):
    wanted = list(range(97, 123))
    response = base.sample(ids(*PROMPT), params(stop_token_ids=wanted, max_tokens=40), 40).result()
    stopped = [s for s in response.sequences if s.tokens[-1] in wanted]
    assert len(stopped) > 5
    for sequence in stopped:
        assert sequence.stop_reason == "stop"
        assert len(sequence.logprobs) == len(sequence.tokens)
        assert not set(sequence.tokens[:-1]) & set(wanted)


def test_the_stop_tokens_own_text_is_left_out(base):
    response = base.sample(ids(*PROMPT), params(stop_token_ids=[120], max_tokens=99), 80).result()
    stopped = [s for s in response.sequences if s.tokens[-1] == 120]
    assert stopped
    tokenizer = base.get_tokenizer()
    for sequence in stopped:
        assert sequence.text == tokenizer.decode(sequence.tokens[:-1], skip_special_tokens=True)


def test_the_models_own_end_of_sequence_stops_without_being_asked_for(base):
    response = base.sample(ids(*PROMPT), params(max_tokens=200), 60).result()
    ended = [s for s in response.sequences if EOS in s.tokens]
    assert ended
    for sequence in ended:
        assert sequence.stop_reason == "stop"
        assert sequence.tokens.index(EOS) == len(sequence.tokens) - 1
        assert "<|eos|>" not in sequence.text


def test_a_stop_string_cuts_the_text_and_keeps_the_tokens(base):
    for sequence in stopped_at(base, "e"):
        decoded = base.get_tokenizer().decode(sequence.tokens)
        assert decoded.endswith("e")
        assert sequence.text == decoded[:-1].replace("<|bos|>", "").replace("<|pad|>", "")
        assert "e" not in sequence.text
        assert len(sequence.logprobs) == len(sequence.tokens)


def test_of_several_stop_strings_the_first_to_come_ends_it(base):
    endings = {base.get_tokenizer().decode(s.tokens)[-1] for s in stopped_at(base, ["e", "t"])}
    assert endings == {"e", "t"}


def forced(monkeypatch, text: str) -> None:
    """Let every sample be the bytes of a text."""
    from xorl_lab.samplers import embedded

    script = list(text.encode())
    real = embedded.draw

    def scripted(*asked):
        drawn = real(*asked)
        at = len(scripted.drawn)
        drawn.tokens[:] = script[at]
        scripted.drawn.append(script[at])
        return drawn

    scripted.drawn = []
    monkeypatch.setattr(embedded, "draw", scripted)


@pytest.mark.parametrize(
    ("text", "stop", "kept", "drawn"),
    [
        ("hello END more", "END", "hello ", "hello END"),
        ("price: 5€ or so", "€", "price: 5", "price: 5€"),
        ("fine 👍🏽 then", "👍🏽", "fine ", "fine 👍🏽"),
        ("日本語です。次", "。", "日本語です", "日本語です。"),
        ("👍👍 stop", " st", "👍👍", "👍👍 st"),
        ("one\n\ntwo", ["###", "\n\n"], "one", "one\n\n"),
        ("abcab", ["bca", "ca", "abcabc"], "a", "abca"),
        ("END", "END", "", "END"),
        ("x" * 90 + "STOP", "STOP", "x" * 90, "x" * 90 + "STOP"),
        ("é" * 40 + "ü", "ü", "é" * 40, "é" * 40 + "ü"),
    ],
)
def test_a_stop_string_is_found_across_tokens_and_bytes(base, monkeypatch, text, stop, kept, drawn):
    forced(monkeypatch, text + "!")
    sequence = base.sample(ids(65), params(stop=stop, max_tokens=len(text.encode()) + 1)).result()
    assert sequence.text == kept
    assert sequence.tokens == list(drawn.encode())
    assert sequence.sequences[0].stop_reason == "stop"
    assert len(sequence.logprobs) == len(sequence.tokens)


def test_a_stop_string_that_begins_twice_is_still_found(base, monkeypatch):
    forced(monkeypatch, "aaab!")
    response = base.sample(ids(65), params(stop="aab", max_tokens=5)).result()
    assert (response.text, response.tokens) == ("a", list(b"aaab"))


def test_a_stop_string_in_the_prompt_does_not_count(base, monkeypatch):
    forced(monkeypatch, "xyz")
    response = base.sample("end", params(stop="dx", max_tokens=3)).result()
    assert (response.text, response.sequences[0].stop_reason) == ("xyz", "length")


def test_a_character_cut_by_the_limit_does_not_break_the_text(base, monkeypatch):
    forced(monkeypatch, "ok👍")
    response = base.sample(ids(65), params(max_tokens=4)).result()
    assert response.tokens == list("ok👍".encode())[:4]
    assert response.text.startswith("ok")


def test_text_and_token_prompts_give_the_same(base):
    by_text = base.sample("once upon", params(), 3).result()
    by_ids = base.sample(ids(*PROMPT), params(), 3).result()
    assert sequences(by_text) == sequences(by_ids)


def test_defaults_are_one_sample_of_at_most_128_tokens(base):
    response = base.sample(ids(*PROMPT)).result()
    assert len(response.sequences) == 1
    assert 1 <= len(response.tokens) <= 128


def test_the_answer_says_what_it_was_made_from(base):
    response = base.sample(ids(*PROMPT), params(seed=77), 3).result()
    total = sum(len(t) for t in sequences(response))
    assert response.meta_info == {
        "model": "tiny",
        "weight_version": 0,
        "seed": 77,
        "prompt_tokens": len(PROMPT),
        "completion_tokens": total,
    }


def test_a_seed_that_was_not_given_is_reported_and_repeats_the_sample(base):
    first = base.sample(ids(*PROMPT), xl.SamplingParams(max_tokens=20), 2).result()
    again = base.sample(
        ids(*PROMPT), xl.SamplingParams(max_tokens=20, seed=first.meta_info["seed"]), 2
    ).result()
    assert sequences(again) == sequences(first)


def test_sampling_does_not_use_the_trainers_logprob_function(base, trainer, monkeypatch):
    def broken(*_: object, **__: object) -> None:
        raise AssertionError("the sampler asked the trainer")

    for name, module in list(sys.modules.items()):
        if name.startswith("xorl_lab.") and "token_logprobs" in vars(module):
            monkeypatch.setattr(module, "token_logprobs", broken)
    with pytest.raises(AssertionError, match="asked the trainer"):
        trainer.forward([datum([1, 2, 3])]).result()
    adapted = trainer.save_weights_and_get_sampling_client()
    for client in (base, adapted):
        response = client.sample(ids(*PROMPT), params(), 3, prompt_logprobs=True).result()
        assert all(len(s.logprobs) == len(s.tokens) > 0 for s in response.sequences)
        assert len(response.prompt_logprobs) == len(PROMPT)
