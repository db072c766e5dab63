"""Continuous batching: what is computed once, what runs together, and what that must not change."""

import threading

import xorl_lab as xl
from tests.closeness import assert_close
from tests.samplers.support import PATIENCE, Counter, engine_of, held, ids, params, sequences
from xorl_lab.samplers import embedded
from xorl_lab.samplers.cache import GRAIN

PROMPT = tuple(b"once upon")


def logprobs(response: xl.SampleResponse) -> list[float]:
    return [x for s in response.sequences for x in s.logprobs]


def test_samples_of_one_prompt_share_one_prefill(base, counter: Counter):
    base.sample(ids(*PROMPT), params(), 10).result()
    assert counter.prefills == [len(PROMPT)]


def test_prompts_with_a_common_header_compute_it_once(base, counter: Counter):
    header = list(b"Question: what is ")
    prompts = [ids(*header, *b"one"), ids(*header, *b"two"), ids(*header, *b"six?")]
    base.sample_batch(prompts, params(), 3).result()
    # "two" shares its t with nothing, "one" and "six?" share nothing.
    assert sum(counter.prefills) == len(header) + 3 + 3 + 4


def test_equal_prompts_of_different_calls_share_one_prefill(base, counter: Counter):
    with held(base):
        futures = [base.sample(ids(*PROMPT), params(seed=i)) for i in range(5)]
    assert all(f.result().tokens for f in futures)
    assert counter.prefills == [len(PROMPT)]


def test_all_samples_advance_together(base, counter: Counter):
    responses = base.sample(ids(*PROMPT), params(max_tokens=9), 8).result()
    lengths = [len(t) for t in sequences(responses)]
    assert len(counter.steps) == max(lengths) - 1
    # At decode step k, those are left that have more than k + 1 tokens: finished rows leave.
    assert counter.steps == [sum(n > k + 1 for n in lengths) for k in range(max(lengths) - 1)]


def test_finished_rows_leave_the_batch(base, counter: Counter):
    with held(base):
        short = base.sample(ids(*PROMPT), params(max_tokens=3), 4)
        long = base.sample(ids(65, 66), params(max_tokens=30, temperature=0.0), 2)
    lengths = [len(t) for t in sequences(short.result()) + sequences(long.result())]
    assert max(lengths) > 10
    assert counter.steps == [sum(n > k + 1 for n in lengths) for k in range(max(lengths) - 1)]


def test_calls_of_several_threads_join_one_batch(base, counter: Counter):
    barrier = threading.Barrier(6)
    futures: list[xl.APIFuture[xl.SampleResponse]] = []

    def call(index: int) -> None:
        barrier.wait(PATIENCE)
        futures.append(base.sample(ids(*PROMPT, index), params(max_tokens=10)))

    threads = [threading.Thread(target=call, args=(i,)) for i in range(6)]
    with held(base):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
    lengths = [len(f.result(PATIENCE).tokens) for f in futures]
    assert len(counter.prefills) == 1
    assert counter.steps[0] == sum(n > 1 for n in lengths)
    assert len(counter.steps) == max(lengths) - 1


def test_a_request_joins_a_batch_that_is_running(base, counter: Counter):
    late: list[xl.APIFuture[xl.SampleResponse]] = []

    def submit(step: int) -> None:
        if step == 5:
            late.append(base.sample(ids(70, 71, 72), params(max_tokens=20, temperature=0.0)))

    counter.before_step = submit
    first = base.sample(ids(65, 66), params(max_tokens=60, temperature=0.0)).result()
    joined = late[0].result()
    assert len(first.tokens) > 30
    assert counter.steps[:5] == [1] * 5
    assert 2 in counter.steps[5 : 5 + 2 * embedded.QUANTUM]
    counter.before_step = lambda _: None
    alone = base.sample(ids(70, 71, 72), params(max_tokens=20, temperature=0.0)).result()
    assert joined.tokens == alone.tokens


def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(base):
    alone = base.sample(ids(*PROMPT), params(max_tokens=30), 3).result()
    with held(base):
        others = [
            base.sample(ids(*range(10 + i)), params(seed=50 + i, max_tokens=5 + i), 2)
            for i in range(1, 5)
        ]
        batched = base.sample(ids(*PROMPT), params(max_tokens=30), 3)
        others += [base.sample(ids(*PROMPT), params(seed=9, temperature=0.3, top_p=0.9), 4)]
    assert sequences(batched.result()) == sequences(alone)
    assert_close(logprobs(batched.result()), logprobs(alone), rtol=0, atol=1e-4)
    assert all(f.result().tokens for f in others)


def test_a_seed_gives_the_same_tokens_when_joining_a_running_batch(base, counter: Counter):
    alone = base.sample(ids(*PROMPT), params(max_tokens=30), 3).result()
    late: list[xl.APIFuture[xl.SampleResponse]] = []
    at = len(counter.steps) + 7

    def submit(step: int) -> None:
        if step == at:
            late.append(base.sample(ids(*PROMPT), params(max_tokens=30), 3))

    counter.before_step = submit
    base.sample(ids(65, 66), params(max_tokens=60, temperature=0.0)).result()
    assert sequences(late[0].result()) == sequences(alone)


def test_a_seed_gives_the_same_tokens_in_another_order(base):
    prompts = [ids(*PROMPT), ids(66), ids(*range(100, 150)), ids(67, 68)]
    forth = base.sample_batch(prompts, params(max_tokens=20), 2).result()
    back = base.sample_batch(prompts[::-1], params(max_tokens=20), 2).result()
    assert [sequences(r) for _, r in forth.completed] == [
        sequences(r) for _, r in back.completed[::-1]
    ]


def test_a_sample_does_not_depend_on_how_many_are_asked_for(base):
    many = base.sample(ids(*PROMPT), params(), 7).result()
    few = base.sample(ids(*PROMPT), params(), 2).result()
    assert sequences(few) == sequences(many)[:2]


def test_a_seed_gives_the_same_tokens_while_training_runs_between(base, trainer, counter: Counter):
    alone = base.sample(ids(*PROMPT), params(max_tokens=40, temperature=0.5), 3).result()
    client = trainer.save_weights_and_get_sampling_client()
    before = client.sample(ids(*PROMPT), params(max_tokens=40, temperature=0.5), 3).result()
    data = [xl.Datum(ids(*b"to be"), {"labels": list(b"to be")})]
    queued: list[xl.APIFuture[object]] = []
    begin = len(counter.steps)

    def train(step: int) -> None:
        if (step - begin) % 3 == 1:
            queued.append(trainer.forward_backward(data))
            queued.append(trainer.optim_step(xl.AdamParams(learning_rate=1e-2)))

    counter.before_step = train
    again = base.sample(ids(*PROMPT), params(max_tokens=40, temperature=0.5), 3)
    adapted = client.sample(ids(*PROMPT), params(max_tokens=40, temperature=0.5), 3)
    assert sequences(again.result()) == sequences(alone)
    assert sequences(adapted.result()) == sequences(before)
    counter.before_step = lambda _: None
    for future in queued:
        future.result()
    assert trainer.version > 3


def test_full_weights_that_move_on_during_a_sample_do_not_change_it(service, counter: Counter):
    full = service.create_training_client("tiny", model_id="moving")
    client = full.save_weights_and_get_sampling_client()
    still = client.sample(ids(*PROMPT), params(max_tokens=40), 3).result()
    data = [xl.Datum(ids(*b"to be"), {"labels": list(b"to be")})]
    begin = len(counter.steps)
    queued: list[xl.APIFuture[object]] = []

    def train(step: int) -> None:
        if (step - begin) % 8 == 3:
            queued.append(full.forward_backward(data))
            queued.append(full.optim_step(xl.AdamParams(learning_rate=1e-2)))

    counter.before_step = train
    moving = client.sample(ids(*PROMPT), params(max_tokens=40), 3).result()
    counter.before_step = lambda _: None
    for future in queued:
        future.result()
    assert sequences(moving) == sequences(still)
    assert logprobs(moving) == logprobs(still)
    assert full.version > 1


def test_another_seed_gives_other_tokens(base):
    a = base.sample(ids(*PROMPT), params(max_tokens=20), 4).result()
    b = base.sample(ids(*PROMPT), params(max_tokens=20, seed=2), 4).result()
    assert all(x != y for x, y in zip(sequences(a), sequences(b), strict=True))


def test_samples_of_one_call_differ(base):
    drawn = sequences(base.sample(ids(*PROMPT), params(max_tokens=20), 16).result())
    assert len({tuple(t) for t in drawn}) == 16


def test_without_a_seed_each_call_differs(base):
    settings = xl.SamplingParams(max_tokens=20)
    drawn = [base.sample(ids(*PROMPT), settings).result().tokens for _ in range(4)]
    assert len({tuple(t) for t in drawn}) == 4


def test_both_names_of_the_seed_give_the_same_tokens(base):
    a = base.sample(ids(*PROMPT), xl.SamplingParams(max_tokens=20, seed=6)).result()
    b = base.sample(ids(*PROMPT), xl.SamplingParams(max_tokens=20, sampling_seed=6)).result()
    assert a.tokens == b.tokens


def test_sampling_draws_nothing_from_the_shared_generators(base):
    import numpy as np
    import torch

    states = torch.get_rng_state(), np.random.get_state()[1].tolist()  # noqa: NPY002
    base.sample(ids(*PROMPT), xl.SamplingParams(max_tokens=5), 3).result()
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.random.get_state()[1].tolist() == states[1]  # noqa: NPY002


def test_more_samples_than_rows_all_complete(base, counter: Counter, monkeypatch):
    expected = base.sample(ids(*PROMPT), params(max_tokens=6), 20).result()
    monkeypatch.setattr(embedded, "MAX_ROWS", 3)
    counter.steps.clear()
    got = base.sample(ids(*PROMPT), params(max_tokens=6), 20).result()
    assert sequences(got) == sequences(expected)
    assert max(counter.steps) == 3


def test_more_prompts_than_rows_all_complete(base, counter: Counter, monkeypatch):
    prompts = [ids(*range(1, n + 2)) for n in range(9)]
    expected = base.sample_batch(prompts, params(), 2).result()
    monkeypatch.setattr(embedded, "MAX_ROWS", 5)
    counter.steps.clear()
    got = base.sample_batch(prompts, params(), 2).result()
    assert [sequences(r) for _, r in got.completed] == [sequences(r) for _, r in expected.completed]
    assert max(counter.steps) <= 5


def test_a_row_that_leaves_makes_room_for_a_waiting_one(base, counter: Counter, monkeypatch):
    monkeypatch.setattr(embedded, "MAX_ROWS", 4)
    lengths = [
        len(t) for t in sequences(base.sample(ids(*PROMPT), params(max_tokens=40), 16).result())
    ]
    in_waves = sum(max(lengths[i : i + 4]) for i in range(0, 16, 4))
    assert len(counter.steps) <= in_waves + embedded.QUANTUM


def test_a_small_cache_still_serves_everything(base, counter: Counter, monkeypatch):
    expected = base.sample(ids(*PROMPT), params(), 6).result()
    monkeypatch.setattr(embedded, "CACHE_BYTES", 1)
    counter.steps.clear()
    got = base.sample(ids(*PROMPT), params(), 6).result()
    assert sequences(got) == sequences(expected)
    assert max(counter.steps) == 1


def test_one_long_prompt_does_not_blow_up_the_cache(base, counter: Counter, monkeypatch):
    # Every row of a batch is as wide as the widest, so one long row makes the short ones costly.
    budget = 20 * 256 * base_bytes(base)
    monkeypatch.setattr(embedded, "CACHE_BYTES", budget)
    long = tuple((11 * i) % 256 for i in range(400))
    with held(base):
        short = [base.sample(ids(*PROMPT), params(max_tokens=30, seed=i), 10) for i in range(3)]
        wide = base.sample(ids(*long), params(max_tokens=20), 2)
        short += [base.sample(ids(66), params(max_tokens=30, seed=i), 10) for i in range(3)]
    assert all(len(f.result().sequences) == 10 for f in short)
    assert len(wide.result().sequences) == 2
    assert max(counter.cache_bytes) <= budget


def base_bytes(client: xl.SamplingClient) -> int:
    """Bytes of the keys and values of one position."""
    config = engine_of(client).base.config
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4


def test_rows_of_very_different_lengths_grow_the_cache_unharmed(base):
    lengths = (1, GRAIN - 2, GRAIN - 1, GRAIN, GRAIN + 1, 2 * GRAIN + 3)
    prompts = [ids(*((5 * i) % 250 for i in range(n))) for n in lengths]
    settings = params(max_tokens=GRAIN + 5, temperature=0.8)
    together = base.sample_batch(prompts, settings).result()
    assert len(together.completed) == len(lengths)
    for index, response in together.completed:
        alone = base.sample(prompts[index], settings).result()
        assert sequences(response) == sequences(alone)
        assert_close(logprobs(response), logprobs(alone), rtol=0, atol=1e-4)


def test_memory_is_given_back_when_the_longest_row_leaves(base, counter: Counter):
    long = tuple((11 * i) % 256 for i in range(400))
    with held(base):
        wide = base.sample(ids(*long), params(max_tokens=4, temperature=0.0))
        narrow = base.sample(ids(65, 66), params(max_tokens=40, temperature=0.0))
    assert len(wide.result().tokens) == 4
    assert len(narrow.result().tokens) > 10
    assert counter.steps[:4] == [2, 2, 2, 1]
    assert counter.cache_bytes[0] >= 2 * 400 * base_bytes(base)
    assert counter.cache_bytes[4] == GRAIN * base_bytes(base)
