"""The life of a request: batches, timeouts, cancelling, failures, versions, and bad input."""

import math

import pytest

import xorl_lab as xl
from tests.samplers.support import (
    PATIENCE,
    Clock,
    Counter,
    datum,
    engine_of,
    held,
    ids,
    params,
    sampler_of,
    sequences,
    update,
)
from xorl_lab.engine import engine as engines
from xorl_lab.errors import CancelledError, ConfigError, DataError, LabError, SamplerError
from xorl_lab.samplers import embedded
from xorl_lab.samplers.networks import LeanNetwork

PROMPT = tuple(b"once upon")
LONG = params(max_tokens=60, temperature=0.0)
"""Greedy, and known to run on for more than 30 tokens from the prompt "AB"."""


def works(client: xl.SamplingClient) -> bool:
    """The client answers the next call."""
    return bool(client.sample(ids(*PROMPT), params()).result(PATIENCE).tokens)


class TestBatches:
    def test_completed_prompts_come_in_order(self, base):
        prompts = [ids(*range(1, n)) for n in (30, 2, 9, 3, 50)]
        result = base.sample_batch(prompts, params(), 2).result()
        assert [i for i, _ in result.completed] == [0, 1, 2, 3, 4]
        assert (result.failed, result.cancelled) == ([], [])
        for index, response in result.completed:
            assert response.meta_info["prompt_tokens"] == prompts[index].length

    def test_a_batch_without_prompts_is_complete(self, base):
        result = base.sample_batch([], params()).result()
        assert (result.completed, result.failed, result.cancelled) == ([], [], [])

    def test_a_bad_prompt_fails_alone(self, base):
        prompts = [ids(1, 2), ids(), ids(3), ids(999), ids(*[5] * 600)]
        result = base.sample_batch(prompts, params()).result()
        assert [i for i, _ in result.completed] == [0, 2]
        assert [i for i, _ in result.failed] == [1, 3, 4]
        assert all(isinstance(error, DataError) for _, error in result.failed)
        assert [str(error).split(":")[0] for _, error in result.failed] == [
            "the prompt has no tokens",
            "the prompt has token id 999, but this model's ids are 0 to 258",
            "the prompt has 600 tokens and max_tokens is 12, together 612, but the model's "
            "context holds 512",
        ]

    def test_prompts_pending_at_the_timeout_are_cancelled(
        self, base, clock: Clock, counter: Counter
    ):
        def late(step: int) -> None:
            clock.now += 100.0 if step == 8 else 0.0

        counter.before_step = late
        short = [ids(*PROMPT, i) for i in range(3)]
        quick = base.sample_batch(short, params(max_tokens=3), timeout=50.0)
        slow = base.sample_batch([ids(65, 66), ids()], LONG, timeout=50.0)
        assert [i for i, _ in quick.result(PATIENCE).completed] == [0, 1, 2]
        result = slow.result(PATIENCE)
        assert result.cancelled == [0]
        assert result.completed == []
        assert [i for i, _ in result.failed] == [1]

    def test_a_prompt_that_is_in_time_is_completed_beside_one_that_is_not(
        self, base, clock: Clock, counter: Counter
    ):
        eos = base.sample(ids(65, 66), params(temperature=0.0, max_tokens=1)).result().tokens[0]
        counter.steps.clear()

        def late(step: int) -> None:
            clock.now += 100.0 if step == 8 else 0.0

        counter.before_step = late
        settings = params(max_tokens=60, temperature=0.0, stop_token_ids=[eos])
        result = base.sample_batch([ids(65, 66), ids(70, 71, 72)], settings, timeout=50.0).result()
        assert [i for i, _ in result.completed] == [0]
        assert result.cancelled == [1]

    def test_a_timeout_is_seen_between_the_micro_batches_of_a_training_call(
        self, base, trainer, clock: Clock
    ):
        data = [datum([(i * k) % 251 for i in range(400)]) for k in range(1, 9)]
        seen: list[bool] = []

        def watch(*_: object) -> None:
            seen.append(batch.done())
            clock.now += 100.0

        trunk = trainer._session.trained.model.get_decoder()
        trunk.register_forward_pre_hook(watch)
        with held(base):
            training = trainer.forward(data)
            batch = base.sample_batch([ids(65, 66)], LONG, timeout=50.0)
        training.result(PATIENCE)
        assert len(seen) > 2
        assert seen[0] is False
        assert seen[2] is True
        assert batch.result(PATIENCE).cancelled == [0]

    def test_a_timeout_of_a_batch_is_not_a_failure(self, base):
        result = base.sample_batch([ids(1), ids(2)], params(), timeout=0.0).result(PATIENCE)
        assert result.cancelled == [0, 1]
        assert result.failed == []

    def test_cancelling_a_batch_raises_for_who_waits(self, base):
        with held(base):
            batch = base.sample_batch([ids(1, 2), ids(3)], params())
            assert batch.cancel()
        with pytest.raises(CancelledError):
            batch.result(PATIENCE)
        assert works(base)


class TestTimeouts:
    def test_a_sample_out_of_time_answers_with_what_there_is(
        self, base, clock: Clock, counter: Counter
    ):
        full = base.sample(ids(65, 66), LONG).result()
        counter.steps.clear()

        def late(step: int) -> None:
            clock.now += 100.0 if step == 9 else 0.0

        counter.before_step = late
        sequence = base.sample(ids(65, 66), LONG, timeout=50.0).result(PATIENCE).sequences[0]
        assert sequence.stop_reason == "abort"
        assert 9 <= len(sequence.tokens) < 9 + 2 * embedded.QUANTUM
        assert sequence.tokens == full.tokens[: len(sequence.tokens)]
        assert len(sequence.logprobs) == len(sequence.tokens)
        assert sequence.text == base.get_tokenizer().decode(sequence.tokens)

    def test_samples_that_have_ended_keep_their_reason(self, base, clock: Clock, counter: Counter):
        reasons = [
            (len(s.tokens), s.stop_reason)
            for s in base.sample(ids(*PROMPT), params(max_tokens=99), 40).result().sequences
        ]
        counter.steps.clear()

        def late(step: int) -> None:
            clock.now += 100.0 if step == 60 else 0.0

        counter.before_step = late
        response = base.sample(ids(*PROMPT), params(max_tokens=99), 40, timeout=50.0).result()
        got = [(len(s.tokens), s.stop_reason) for s in response.sequences]
        assert {"stop", "abort"} == {reason for _, reason in got}
        for before, after in zip(reasons, got, strict=True):
            assert after == before or (after[1] == "abort" and after[0] < before[0])

    def test_samples_that_never_began_are_aborted_and_empty(
        self, base, clock: Clock, counter: Counter, monkeypatch
    ):
        monkeypatch.setattr(embedded, "MAX_ROWS", 2)

        def late(step: int) -> None:
            clock.now += 100.0 if step == 6 else 0.0

        counter.before_step = late
        response = base.sample(ids(65, 66), LONG, num_samples=5, timeout=50.0).result(PATIENCE)
        assert [s.stop_reason for s in response.sequences] == ["abort"] * 5
        assert [bool(s.tokens) for s in response.sequences] == [True] * 2 + [False] * 3
        assert [s.logprobs for s in response.sequences[2:]] == [[]] * 3
        assert response.sequences[4].text == ""

    def test_no_time_at_all_gives_an_empty_answer(self, base):
        response = base.sample(ids(*PROMPT), params(), timeout=0.0).result(PATIENCE)
        assert response.sequences[0].stop_reason == "abort"
        assert response.tokens == []

    def test_a_request_in_time_is_not_touched(self, base, clock: Clock):
        response = base.sample(ids(*PROMPT), params(), timeout=50.0).result(PATIENCE)
        assert response.tokens == base.sample(ids(*PROMPT), params()).result().tokens

    def test_waiting_with_a_timeout_leaves_the_sample_running(self, base):
        with held(base):
            future = base.sample(ids(*PROMPT), params())
            with pytest.raises(TimeoutError):
                future.result(timeout=0.01)
        assert future.result(PATIENCE).tokens


class TestCancelling:
    def test_a_waiting_sample_is_cancelled(self, base, counter: Counter):
        with held(base):
            future = base.sample(ids(*PROMPT), params())
            assert future.cancel()
        with pytest.raises(CancelledError, match="sampling was cancelled"):
            future.result(PATIENCE)
        assert works(base)
        assert len(counter.prefills) == 1

    def test_a_running_sample_is_cancelled_and_leaves_the_others(self, base, counter: Counter):
        expected = base.sample(ids(*PROMPT), params(max_tokens=30), 2).result()
        counter.steps.clear()
        doomed: list[xl.APIFuture[xl.SampleResponse]] = []
        counter.before_step = lambda step: doomed[0].cancel() if step == 5 else None
        with held(base):
            doomed.append(base.sample(ids(65, 66), LONG, 3))
            other = base.sample(ids(*PROMPT), params(max_tokens=30), 2)
        assert sequences(other.result(PATIENCE)) == sequences(expected)
        with pytest.raises(CancelledError):
            doomed[0].result(PATIENCE)
        assert max(counter.steps[:6]) == 5
        assert max(counter.steps[7:]) <= 2

    def test_a_finished_sample_cannot_be_cancelled(self, base):
        future = base.sample(ids(*PROMPT), params())
        future.result()
        assert not future.cancel()
        assert future.result().tokens

    def test_nothing_is_left_behind(self, base):
        with held(base):
            futures = [base.sample(ids(*PROMPT, i), LONG, 4) for i in range(5)]
            for future in futures[::2]:
                future.cancel()
        for future in futures[1::2]:
            future.result(PATIENCE)
        assert works(base)
        with held(base):
            assert not sampler_of(base)._waiting
            assert not sampler_of(base)._lanes


class TestFailures:
    def fail_on(self, monkeypatch, name: str, when) -> None:
        real = getattr(LeanNetwork, name)

        def flaky(network, *rest: object) -> object:
            if when(network):
                raise RuntimeError("out of memory, say")
            return real(network, *rest)

        monkeypatch.setattr(LeanNetwork, name, flaky)

    @pytest.mark.parametrize("name", ["prefill", "step"])
    def test_an_error_of_the_model_fails_its_own_lane_only(self, base, trainer, monkeypatch, name):
        update(trainer)
        adapted = trainer.save_weights_and_get_sampling_client()
        expected = base.sample(ids(*PROMPT), params(max_tokens=30), 2).result()
        self.fail_on(monkeypatch, name, lambda network: bool(network.deltas))
        with held(base):
            futures = [adapted.sample(ids(*PROMPT, i), params()) for i in range(3)]
            other = base.sample(ids(*PROMPT), params(max_tokens=30), 2)
        assert sequences(other.result(PATIENCE)) == sequences(expected)
        for future in futures:
            with pytest.raises(SamplerError) as caught:
                future.result(PATIENCE)
            assert str(caught.value) == "sampling failed (RuntimeError: out of memory, say)"
            assert caught.value.retryable

    @pytest.mark.parametrize("name", ["prefill", "step"])
    def test_the_next_call_works_after_an_error(self, base, trainer, monkeypatch, name):
        adapted = trainer.save_weights_and_get_sampling_client()
        with monkeypatch.context() as patch:
            self.fail_on(patch, name, lambda _: True)
            for client in (base, adapted):
                with pytest.raises(SamplerError, match="out of memory, say"):
                    client.sample(ids(*PROMPT), params(), 3).result(PATIENCE)
        assert works(base)
        assert works(adapted)

    def test_a_batch_reports_an_error_of_the_model_as_failed(self, base, monkeypatch):
        self.fail_on(monkeypatch, "step", lambda _: True)
        result = base.sample_batch([ids(1, 2), ids(3)], params()).result(PATIENCE)
        assert [i for i, _ in result.failed] == [0, 1]
        assert all(isinstance(e, SamplerError) for _, e in result.failed)

    def test_weights_that_have_diverged_are_named_as_the_cause(self, service):
        full = service.create_training_client("tiny", model_id="diverged")
        client = full.save_weights_and_get_sampling_client()
        with held(client):
            next(iter(full._session.trained.weights().values())).fill_(math.nan)
        with pytest.raises(SamplerError, match="logits are not finite"):
            client.sample(ids(*PROMPT), params()).result(PATIENCE)

    def test_sampling_after_the_engine_was_closed_fails_at_once(self, tmp_path, monkeypatch):
        monkeypatch.setattr(engines, "_engines", {})
        client = xl.ServiceClient(
            home=tmp_path, device="cpu", dtype="float32"
        ).create_sampling_client(base_model="tiny")
        assert works(client)
        engines.close_all()
        with pytest.raises(LabError, match="the engine was closed"):
            client.sample(ids(*PROMPT), params()).result(PATIENCE)

    def test_closing_the_engine_ends_what_is_under_way(self, tmp_path, monkeypatch):
        monkeypatch.setattr(engines, "_engines", {})
        client = xl.ServiceClient(
            home=tmp_path, device="cpu", dtype="float32"
        ).create_sampling_client(base_model="tiny")
        with held(client):
            future = client.sample(ids(*PROMPT), params(max_tokens=400), 50)
            engine_of(client).scheduler._closing = LabError("the engine was closed")
        with pytest.raises(LabError, match="the engine was closed"):
            future.result(PATIENCE)


class TestVersions:
    def test_clients_of_different_versions_run_at_the_same_time(self, base, trainer):
        clients = [base]
        for _ in range(3):
            clients.append(trainer.save_weights_and_get_sampling_client())
            update(trainer, rate=3e-2)
        alone = [c.sample(ids(*PROMPT), params(max_tokens=20), 2).result() for c in clients]
        with held(base):
            futures = [c.sample(ids(*PROMPT), params(max_tokens=20), 2) for c in clients]
        together = [f.result(PATIENCE) for f in futures]
        assert [sequences(r) for r in together] == [sequences(r) for r in alone]
        assert [r.meta_info["weight_version"] for r in together] == [0, 0, 1, 2]
        assert sequences(together[0]) == sequences(together[1])
        assert len({tuple(sequences(r)[0]) for r in together}) == 3

    def test_a_client_stays_on_its_version(self, trainer):
        client = trainer.save_weights_and_get_sampling_client()
        before = client.sample(ids(*PROMPT), params(), 3).result()
        update(trainer, 2, rate=3e-2)
        assert client.sample(ids(*PROMPT), params(), 3).result().sequences == before.sequences
        assert (client.version, trainer.version) == (0, 2)

    def test_a_client_of_full_weights_stays_on_its_version(self, service):
        full = service.create_training_client("tiny", model_id="staying")
        client = full.save_weights_and_get_sampling_client()
        before = client.sample(ids(*PROMPT), params(), 3).result()
        update(full, 2, rate=1e-2)
        newer = full.save_weights_and_get_sampling_client()
        assert client.sample(ids(*PROMPT), params(), 3).result().sequences == before.sequences
        assert sequences(newer.sample(ids(*PROMPT), params(), 3).result()) != sequences(before)
        assert (client.version, newer.version) == (0, 2)

    def test_adapters_of_two_models_do_not_meet(self, service):
        one = service.create_lora_training_client("tiny", rank=2, model_id="one", seed=1)
        other = service.create_lora_training_client(
            "tiny", rank=8, model_id="other", seed=1, train_mlp=False
        )
        update(one, 2, rate=3e-2)
        update(other, 1, rate=3e-2)
        clients = [c.save_weights_and_get_sampling_client() for c in (one, other)]
        alone = [sequences(c.sample(ids(*PROMPT), params(), 2).result()) for c in clients]
        # One merged copy serves both in turn: nothing of the other may be left in it.
        for _ in range(2):
            again = [sequences(c.sample(ids(*PROMPT), params(), 2).result()) for c in clients]
            assert again == alone
        assert alone[0] != alone[1]

    def test_sampling_does_not_touch_the_base_model(self, base, trainer):
        before = {n: p.clone() for n, p in engine_of(base).base.state_dict().items()}
        update(trainer, 2, rate=3e-2)
        works(trainer.save_weights_and_get_sampling_client())
        after = engine_of(base).base.state_dict()
        assert all(bool((before[n] == after[n]).all()) for n in before)


class TestBadInput:
    @pytest.mark.parametrize(
        ("prompt", "message"),
        [
            (ids(), "the prompt has no tokens: pass at least one"),
            ("", "the prompt has no tokens: pass at least one"),
            (
                ids(1, 259),
                "the prompt has token id 259, but this model's ids are 0 to 258: encode the text "
                "with this model's tokenizer",
            ),
            (
                ids(-1),
                "the prompt has token id -1, but this model's ids are 0 to 258: encode the text "
                "with this model's tokenizer",
            ),
            (
                ids(*[1] * 501),
                "the prompt has 501 tokens and max_tokens is 12, together 513, but the model's "
                "context holds 512: shorten the prompt or lower max_tokens",
            ),
            (
                [1, 2],
                "the prompt is a list: pass text or ModelInput.from_ints(token_ids)",
            ),
            (None, "the prompt is a NoneType: pass text or ModelInput.from_ints(token_ids)"),
        ],
    )
    def test_a_prompt_that_cannot_be_used(self, base, prompt, message):
        with pytest.raises(DataError) as caught:
            base.sample(prompt, params())
        assert str(caught.value) == message
        assert works(base)

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"top_p": 0}, "top_p is 0: pass a number in (0, 1]"),
            ({"top_p": 1.01}, "top_p is 1.01: pass a number in (0, 1]"),
            ({"top_p": None}, "top_p is None: pass a number in (0, 1]"),
            ({"top_k": 0}, "top_k is 0: pass an integer >= 1, or -1 for all"),
            ({"top_k": 2.0}, "top_k is 2.0: pass an integer >= 1, or -1 for all"),
            ({"temperature": math.nan}, "temperature is nan: pass a number >= 0 (0 = greedy)"),
            ({"temperature": math.inf}, "temperature is inf: pass a number >= 0 (0 = greedy)"),
            ({"temperature": -0.1}, "temperature is -0.1: pass a number >= 0 (0 = greedy)"),
            ({"temperature": "hot"}, "temperature is 'hot': pass a number >= 0 (0 = greedy)"),
            ({"max_tokens": 0}, "max_tokens is 0: pass an integer >= 1"),
            ({"max_tokens": 2.5}, "max_tokens is 2.5: pass an integer >= 1"),
            ({"max_tokens": True}, "max_tokens is True: pass an integer >= 1"),
            ({"stop": ""}, "stop is '': pass a non-empty string or a list of them"),
            ({"stop": ["a", ""]}, "stop is ['a', '']: pass a non-empty string or a list of them"),
            ({"stop": 5}, "stop is 5: pass a non-empty string or a list of them"),
            ({"stop": [5]}, "stop is [5]: pass a non-empty string or a list of them"),
            (
                {"stop_token_ids": 5},
                "stop_token_ids is 5: pass a list of token ids, integers >= 0",
            ),
            (
                {"stop_token_ids": ["a"]},
                "stop_token_ids is ['a']: pass a list of token ids, integers >= 0",
            ),
            ({"seed": 1.5}, "seed is 1.5: pass an integer or None"),
            (
                {"seed": 1, "sampling_seed": 2},
                "seed=1 and sampling_seed=2 are two names of one setting: pass one of them",
            ),
        ],
    )
    def test_a_setting_that_is_out_of_range(self, fields, message):
        with pytest.raises(ConfigError) as caught:
            xl.SamplingParams(**fields)
        assert str(caught.value) == message

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"num_samples": 0}, "num_samples is 0: pass an integer from 1 to 4096"),
            ({"num_samples": 4097}, "num_samples is 4097: pass an integer from 1 to 4096"),
            ({"num_samples": 1.0}, "num_samples is 1.0: pass an integer from 1 to 4096"),
            ({"num_samples": True}, "num_samples is True: pass an integer from 1 to 4096"),
            ({"top_logprobs": -1}, "top_logprobs is -1: pass an integer from 0 to 64"),
            ({"top_logprobs": 65}, "top_logprobs is 65: pass an integer from 0 to 64"),
            (
                {"sampling_params": {"max_tokens": 3}},
                "sampling_params is a dict: pass SamplingParams(...)",
            ),
            (
                {"sampling_params": xl.SamplingParams(return_routed_experts=True)},
                "return_routed_experts is set, but of 'tiny' nothing can be returned: this model "
                "has no experts (LlamaForCausalLM is dense); leave it out (in a recipe: "
                "replay_experts)",
            ),
        ],
    )
    def test_an_argument_that_is_out_of_range(self, base, arguments, message):
        with pytest.raises(ConfigError) as caught:
            base.sample(ids(*PROMPT), **arguments)
        assert str(caught.value) == message
        assert works(base)

    @pytest.mark.parametrize("timeout", [math.nan, "soon", -1.0])
    def test_a_timeout_that_is_no_time(self, base, timeout):
        with pytest.raises(ConfigError) as caught:
            base.sample(ids(*PROMPT), params(), timeout=timeout)
        assert str(caught.value) == f"timeout is {timeout!r}: pass seconds >= 0, or None"

    @pytest.mark.parametrize("prompts", ["once upon", xl.ModelInput.from_ints([1, 2])])
    def test_one_prompt_where_a_list_of_prompts_belongs(self, base, prompts):
        with pytest.raises(DataError) as caught:
            base.sample_batch(prompts, params())
        kind = type(prompts).__name__
        assert str(caught.value) == (
            f"prompts is a {kind}: pass a list of prompts, each text or "
            "ModelInput.from_ints(token_ids)"
        )

    def test_a_bad_setting_of_a_batch_is_an_error_of_the_call(self, base):
        with pytest.raises(ConfigError, match="num_samples is 0"):
            base.sample_batch([ids(1)], params(), num_samples=0)

    def test_token_ids_that_are_no_integers(self):
        with pytest.raises(DataError, match="token ids must be integers"):
            xl.ModelInput.from_ints([1.5])
