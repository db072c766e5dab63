"""This package's client against a real server, and against servers that lose or refuse things."""

import dataclasses
import itertools
import json
import math
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import numpy as np
import pytest

import xorl_lab as xl
from tests.server.conftest import Live
from xorl_lab.client import transport
from xorl_lab.client.remote import RemoteService
from xorl_lab.client.remote_sampling import RemoteSource, SampleTimeoutError
from xorl_lab.client.transport import AnswerTimeoutError, HTTPError, Sequence
from xorl_lab.errors import (
    CancelledError,
    CheckpointError,
    ConfigError,
    DataError,
    EngineError,
    SamplerError,
)
from xorl_lab.futures import APIFuture
from xorl_lab.server import ServerSettings

PROMPT = xl.ModelInput.from_ints([1, 2, 3])
TOKENS = (1, 2, 3, 4)
BIG = {"learning_rate": 0.5}


def serve(home, **settings) -> Live:
    given = {"port": 0, "sampler_port": 0, "poll_seconds": 2.0, "gap_seconds": 0.5}
    return Live(ServerSettings(model="tiny", home=home, **{**given, **settings}))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server of LoRA adapters; each test has models of its own."""
    running = serve(tmp_path_factory.mktemp("home"))
    yield running
    running.stop()


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """A server of full weights."""
    running = serve(tmp_path_factory.mktemp("full"), full=True)
    yield running
    running.stop()


@pytest.fixture
def connect():
    """Make a service for a URL; its connections are closed after the test."""
    opened = []

    def build(url, **settings) -> xl.ServiceClient:
        opened.append(xl.ServiceClient(base_url=url, **settings))
        return opened[-1]

    yield build
    for service in opened:
        service._service.close()


@pytest.fixture
def service(server, connect) -> xl.ServiceClient:
    return connect(server.url)


def datum(tokens=TOKENS, **inputs) -> xl.Datum:
    return xl.Datum(xl.ModelInput.from_ints(tokens), {"labels": tokens, **inputs})


def step(client, tokens=TOKENS):
    client.forward_backward([datum(tokens)])
    return client.optim_step(BIG).result()


def trained(client) -> list[float]:
    """The trainer's logprobs, position by position."""
    return client.forward([datum()]).result().loss_fn_outputs[0].logprobs.tolist()


def sampled(sampler) -> list[float]:
    """The sampler's logprobs of the same tokens."""
    params = xl.SamplingParams(max_tokens=1)
    prompt = xl.ModelInput.from_ints(TOKENS)
    return sampler.sample(prompt, params, prompt_logprobs=True).result().prompt_logprobs[1:]


def near(values):
    return pytest.approx(values, abs=1e-4)


class TestAdapters:
    def two(self, service, ids):
        clients = [service.create_lora_training_client("tiny", 4, model_id=i) for i in ids]
        for client, tokens in zip(clients, [(1, 2, 3, 4), (9, 8, 7, 6)], strict=True):
            step(client, tokens)
        return clients

    def test_two_models_that_save_under_one_name_are_kept_apart(self, service, server):
        clients = self.two(service, ("one", "two"))
        paths = [c.save_weights_for_sampler("same").result().path for c in clients]
        samplers = [service.create_sampling_client(server.url, path) for path in paths]
        samplers += [
            client.create_sampling_client(path) for client, path in zip(clients, paths, strict=True)
        ]
        expected = [trained(client) for client in clients]
        assert expected[0] != near(expected[1])
        assert [sampled(s) for s in samplers] == [near(e) for e in expected * 2]

    def test_a_client_keeps_its_version_when_the_name_is_saved_again(self, service, server):
        client = service.create_lora_training_client("tiny", 4, model_id="again")
        makers = [
            lambda path: client.save_weights_and_get_sampling_client("policy"),
            client.create_sampling_client,
            lambda path: service.create_sampling_client(server.url, path),
            lambda path: xl.SamplingClient(server.url, path),
        ]
        samplers, expected = [], []
        for _ in range(2):
            step(client)
            path = client.save_weights_for_sampler("policy").result().path
            samplers.append([make(path) for make in makers])
            expected.append(trained(client))
        assert expected[0] != near(expected[1])
        for group, logprobs in zip(samplers, expected, strict=True):
            assert [sampled(s) for s in group] == [near(logprobs)] * len(makers)
        samplers[0][3]._source.close()
        samplers[1][3]._source.close()

    def test_the_bare_name_means_what_was_registered_last(self, service, server):
        one, two = self.two(service, ("bare1", "bare2"))
        body = {"input_ids": list(TOKENS), "sampling_params": {"max_new_tokens": 1}}
        body |= {"return_logprob": True, "logprob_start_len": 1, "lora_path": "bare"}
        for client in (one, two):
            path = client.save_weights_for_sampler("bare").result().path
            with httpx.Client(base_url=server.url, trust_env=False) as http:
                made = http.post("/api/v1/create_sampling_session", json={"model_path": path})
                assert made.json()["lora_name"] == "bare"
                meta = http.post("/generate", json=body).json()["meta_info"]
            assert [row[0] for row in meta["input_token_logprobs"]] == near(trained(client))

    def test_weights_that_are_held_are_not_loaded_again(self, service, server):
        client = service.create_lora_training_client("tiny", 4, model_id="held")
        path = client.save_weights_for_sampler("held").result().path
        before = len(server.lab.inference._adapters)
        for _ in range(3):
            client.create_sampling_client(path)
        assert len(server.lab.inference._adapters) == before + 1

    def test_a_checkpoint_that_is_missing_says_so(self, service, server):
        with pytest.raises(CheckpointError, match=r"checkpoint\.not_found"):
            service.create_sampling_client(server.url, "xorl://none/sampler_weights/none")
        with pytest.raises(CheckpointError, match=r"checkpoint\.not_found"):
            xl.SamplingClient(server.url, "xorl://none/sampler_weights/none")


class TestResume:
    @pytest.mark.parametrize("optimizer", [False, True])
    def test_the_whole_shape_comes_back(self, service, optimizer):
        shape = {"alpha": 8.0, "train_mlp": False, "target_modules": ["q_proj"], "seed": 3}
        name = f"shape{optimizer}"
        client = service.create_lora_training_client("tiny", 2, model_id=name, **shape)
        step(client)
        path = client.save_state("end").result().path
        if optimizer:
            resume = service.create_training_client_from_state_with_optimizer
        else:
            resume = service.create_training_client_from_state
        resumed = resume(path, model_id=f"{name}-resumed")
        assert resumed.lora == client.lora
        assert trained(resumed) == trained(client)

    def test_into_a_model_that_is_held_with_another_seed(self, service):
        one = service.create_lora_training_client("tiny", 2, model_id="seed1", seed=1)
        service.create_lora_training_client("tiny", 2, model_id="seed2", seed=2)
        step(one)
        path = one.save_state("end").result().path
        resumed = service.create_training_client_from_state(path, model_id="seed2")
        assert trained(resumed) == trained(one)

    def test_a_checkpoint_of_another_shape_is_refused_with_all_that_differs(self, service):
        one = service.create_lora_training_client("tiny", 4, model_id="a16", alpha=16)
        path = one.save_state("end").result().path
        two = service.create_lora_training_client("tiny", 4, model_id="a32", train_mlp=False)
        before = trained(two)
        with pytest.raises(CheckpointError) as caught:
            two.load_state(path).result()
        assert caught.value.code == "validation.checkpoint_config_mismatch"
        assert "alpha" in str(caught.value)
        assert "train_mlp" in str(caught.value)
        assert trained(two) == before

    def test_what_a_queued_save_writes_can_be_loaded_at_once(self, service):
        client = service.create_lora_training_client("tiny", 4, model_id="queued")
        saved = client.save_state("now")
        loaded = client.load_state("xorl://queued/weights/now")
        assert saved.result().path == "xorl://queued/weights/now"
        assert loaded.result() == {}

    def test_another_base_model_is_refused_as_in_process(self, service):
        client = service.create_lora_training_client("tiny", 4, model_id="base")
        path = client.save_state("end").result().path
        with pytest.raises(CheckpointError, match="checkpoint_config_mismatch"):
            service.create_training_client_from_state(path, "other", model_id="base2")


class TestMode:
    def test_full_weights_of_a_server_of_adapters(self, service):
        with pytest.raises(ConfigError, match=r"xorl-lab serve --model tiny --full"):
            service.create_training_client("tiny", "full")

    def test_an_adapter_of_a_server_of_full_weights(self, full, connect):
        with pytest.raises(ConfigError, match=r"without --full"):
            connect(full.url).create_lora_training_client("tiny", 32)

    def test_full_weights(self, full, connect):
        service = connect(full.url)
        client = service.create_training_client("tiny", "full")
        step(client)
        assert sampled(client.save_weights_and_get_sampling_client()) == near(trained(client))
        path = client.save_state("end").result().path
        resumed = service.create_training_client_from_state(path, model_id="full2")
        assert resumed.lora is None
        assert trained(resumed) == trained(client)

    def test_another_base_model(self, service):
        with pytest.raises(ConfigError, match="serves 'tiny'"):
            service.create_lora_training_client("other", model_id="other")


class TestVersion:
    def test_steps_and_loads_raise_it(self, service):
        client = service.create_lora_training_client("tiny", 4, model_id="version")
        assert client.version == 0
        step(client)
        step(client)
        assert client.version == 2
        path = client.save_state("two").result().path
        client.load_state(path).result()
        assert client.version == 3
        step(client)
        assert client.version == 4
        assert service.create_lora_training_client("tiny", 4, model_id="version").version == 4

    def test_a_server_that_does_not_tell_is_counted_along(self):
        session = RemoteService("http://localhost:9", None, 1.0)
        from xorl_lab.client.remote_session import RemoteSession

        client = RemoteSession(session, "m", "tiny", None)
        for number in (1, 2):
            client._note_version(number, {"metrics": {}})
        assert client.version == 2
        client._note_version(4, {"info": {"version": 9}})
        client._note_version(3, {"info": {"version": 8}})
        assert client.version == 9
        session.close()


class TestNumbers:
    def client(self, service, name):
        return service.create_lora_training_client("tiny", 4, model_id=name)

    @pytest.mark.parametrize(
        ("params", "message"),
        [
            ({"eps_clip": math.nan}, r"loss_fn_params\.eps_clip is nan"),
            ({"eps_clip": object()}, r"loss_fn_params\.eps_clip is a object"),
            ({"x": {"y": [0.0, np.float32("inf")]}}, r"loss_fn_params\.x\.y\[1\] is inf"),
        ],
    )
    def test_what_cannot_be_sent_takes_no_number(
        self, service, server, monkeypatch, params, message
    ):
        patient = dataclasses.replace(server.lab.models.settings, gap_seconds=20.0)
        monkeypatch.setattr(server.lab.models, "settings", patient)
        client = self.client(service, "unsent")
        with pytest.raises(DataError, match=message):
            client.forward_backward([datum()], "policy_loss", params)
        began = time.monotonic()
        assert trained(client)
        assert time.monotonic() - began < 10, "it waited for the one that was not sent"

    def test_numbers_of_the_data_are_named_by_their_place(self, service):
        client = self.client(service, "nan")
        bad = [datum(), datum(advantages=[0, 0, math.nan, 0])]
        with pytest.raises(DataError, match=r"^data\[1\]\.loss_fn_inputs\.advantages\.data\[2\]"):
            client.forward(bad, "policy_loss")
        assert trained(client)

    def test_numbers_of_numpy_are_sent(self, service):
        client = self.client(service, "numpy")
        params = {"logprob_temperature": np.float32(2.0), "return_terms": np.bool_(True)}
        assert client.forward([datum()], "cross_entropy", params).result().loss_fn_outputs
        client.forward_backward([datum()])
        adam = {"learning_rate": np.float64(1e-3)}
        assert client.optim_step(adam).result().metrics["grad_norm"] > 0

    def test_what_the_server_refuses_takes_no_number(self, tmp_path, connect):
        server = serve(tmp_path, max_body_bytes=4000, gap_seconds=20.0)
        try:
            client = self.client(connect(server.url), "refused")
            with pytest.raises(DataError, match="413"):
                client.forward([datum(range(1, 120), weights=[1.0] * 119)] * 8)
            with pytest.raises(DataError, match="400"):
                client.save_state("a", ttl_seconds="x")
            server.lab.models.closing = True
            with pytest.raises(EngineError, match="503"):
                client.forward([datum()])
            server.lab.models.closing = False
            began = time.monotonic()
            assert trained(client)
            assert time.monotonic() - began < 10
        finally:
            server.stop()

    def test_a_number_is_given_back_unless_the_server_has_it(self):
        numbers, errors = Sequence(), []

        def send(number):
            if errors:
                raise errors.pop(0)
            return number

        def run(*planned, known=True):
            errors[:] = planned
            return numbers.run(send, recognises=lambda: known)

        assert run() == 1
        for refused in (HTTPError("", 413), HTTPError("", 503), HTTPError("", sent=False)):
            with pytest.raises(HTTPError):
                run(refused)
        with pytest.raises(HTTPError):
            run(HTTPError("", 409))
        assert run() == 2
        with pytest.raises(HTTPError):
            run(HTTPError(""))  # lost, and it had not arrived
        assert run() == 3
        with pytest.raises(HTTPError):
            run(HTTPError(""))  # lost, and it had arrived: the server says so
        assert run(HTTPError("", 409)) == 5
        with pytest.raises(HTTPError):
            run(HTTPError(""), known=False)
        assert run() == 7

    def test_an_answer_that_is_lost_for_good_is_not_carried_out_twice(self, service, monkeypatch):
        client = self.client(service, "lost")
        step(client)
        monkeypatch.setattr(transport, "ATTEMPTS", 1)
        wire = client._session.service.transport._wire
        real = wire.exchange

        def lose(method, path, content, timeout):
            answer = real(method, path, content, timeout)
            if path.endswith("/optim_step"):
                raise httpx.ReadError("lost")
            return answer

        client.forward_backward([datum()]).result()
        monkeypatch.setattr(wire, "exchange", lose)
        with pytest.raises(EngineError, match="lost"):
            client.optim_step(BIG)
        monkeypatch.setattr(wire, "exchange", real)
        again = client.optim_step(BIG).result()
        assert again.metrics["step"] == 2, "the same call again is the same call"
        assert step(client).metrics["step"] == 3

    def test_an_answer_that_is_lost_does_not_stall_other_calls(self, service, monkeypatch):
        client = self.client(service, "lost2")
        monkeypatch.setattr(transport, "ATTEMPTS", 1)
        wire = client._session.service.transport._wire
        real = wire.exchange

        def lose(method, path, content, timeout):
            real(method, path, content, timeout)
            raise httpx.ReadError("lost")

        monkeypatch.setattr(wire, "exchange", lose)
        with pytest.raises(EngineError, match="lost"):
            client.forward_backward([datum()])
        monkeypatch.setattr(wire, "exchange", real)
        assert trained(client)
        assert client.optim_step(BIG).result().metrics["step"] == 1


class Foreign(BaseHTTPRequestHandler):
    """A server that is not ours: takes requests, and loses or delays the answers."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.answer({"status": "healthy", "model_path": "tiny"})

    def do_POST(self):
        length = int(self.headers["Content-Length"])
        body = json.loads(self.rfile.read(length))
        name = self.path.rsplit("/", 1)[-1]
        self.server.seen.append((name, body))
        if name in self.server.lose:
            self.close_connection = True
            return
        if name in self.server.slow:
            self.server.release.wait(120)
        if name == "retrieve_future":
            self.answer(self.server.results.get(body["request_id"], {}))
        elif name == "weights_info":
            self.answer({"base_model": "tiny", "is_lora": True, "lora_rank": 8})
        elif name == "create_sampling_session":
            self.answer({"success": True, "lora_name": "theirs"})
        else:
            self.answer({"request_id": name, "model_id": body.get("model_id")})

    def answer(self, value):
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        try:
            self.wfile.write(content)
        except OSError:
            self.close_connection = True

    def log_message(self, *_):
        pass


@pytest.fixture
def foreign():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Foreign)
    server.daemon_threads = True
    server.handle_error = lambda *_: None
    server.seen, server.lose, server.slow, server.results = [], set(), set(), {}
    server.release = threading.Event()
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield server
    server.release.set()
    server.shutdown()
    thread.join()
    server.server_close()


class TestForeignServer:
    def test_a_lost_answer_says_that_nobody_knows(self, foreign, connect):
        client = connect(foreign.url).create_lora_training_client("tiny", 4)
        foreign.lose.add("forward_backward")
        with pytest.raises(EngineError, match=r"taken forward_backward is not known.*twice"):
            client.forward_backward([datum()])
        assert [name for name, _ in foreign.seen].count("forward_backward") == 1
        client.optim_step(BIG).result()
        assert foreign.seen[-2][1]["seq_id"] == 2

    def test_resume_uses_the_rank(self, foreign, connect):
        path = "xorl://default/weights/a"
        client = connect(foreign.url).create_training_client_from_state(path)
        assert client.lora.rank == 8
        asked = next(body for name, body in foreign.seen if name == "create_model")
        assert asked["lora_config"]["rank"] == 8

    def test_its_adapters_go_by_the_name_that_it_gives(self, foreign, connect):
        client = connect(foreign.url).create_lora_training_client("tiny", 4)
        sampler = client.create_sampling_client("xorl://default/sampler_weights/ours")
        with pytest.raises(SamplerError, match="lacks what was asked for"):
            sampler.sample(PROMPT).result()
        name, body = foreign.seen[-1]
        assert (name, body["lora_path"]) == ("generate", "theirs")
        made = next(body for name, body in foreign.seen if name == "create_sampling_session")
        assert made == {"model_path": "xorl://default/sampler_weights/ours"}

    def test_its_adapters_go_by_their_last_part(self, foreign):
        source = RemoteSource(foreign.url, "xorl://default/sampler_weights/ours", None, 5.0)
        assert source.adapter() == "ours"
        source.close()


class TestEnding:
    def test_the_timeout_is_kept(self, foreign, connect):
        client = connect(foreign.url, timeout=1.0).create_lora_training_client("tiny", 4)
        foreign.results["forward"] = {"type": "try_again"}
        began = time.monotonic()
        with pytest.raises(AnswerTimeoutError, match="within 1 s") as caught:
            client.forward([datum()]).result()
        assert isinstance(caught.value, TimeoutError | EngineError)
        assert 0.9 < time.monotonic() - began < 3
        foreign.slow.add("retrieve_future")
        with pytest.raises(TimeoutError, match="within 1 s"):
            client.forward([datum()]).result()

    def test_the_timeout_of_the_sampler_is_kept(self, foreign):
        foreign.slow.add("generate")
        source = RemoteSource(foreign.url, "", None, 0.5)
        sampler = xl.SamplingClient.of(source)
        began = time.monotonic()
        with pytest.raises(SampleTimeoutError, match=r"within 0\.5 s") as caught:
            sampler.sample(PROMPT).result()
        assert caught.value.retryable
        assert time.monotonic() - began < 3
        source.close()

    def test_close_cancels_what_is_awaited(self, foreign, connect):
        service = connect(foreign.url)
        client = service.create_lora_training_client("tiny", 4)
        foreign.slow |= {"generate", "retrieve_future"}
        sampler = client.create_sampling_client("xorl://default/sampler_weights/a")
        pending = [client.forward([datum()]), sampler.sample(PROMPT)]
        time.sleep(0.1)
        service._service.close()
        for future in pending:
            with pytest.raises(CancelledError, match="closed"):
                future.result(5)
        with pytest.raises(CancelledError, match="closed"):
            client.forward([datum()])

    def test_a_script_with_a_pending_answer_ends(self, foreign, root):
        foreign.slow.add("generate")
        script = (
            "import sys, time, xorl_lab as xl\n"
            "client = xl.ServiceClient(base_url=sys.argv[1]).create_lora_training_client('tiny')\n"
            "client.forward([xl.Datum(xl.ModelInput.from_ints([1, 2]), {'labels': [1, 2]})])\n"
            "xl.SamplingClient(sys.argv[1]).sample(xl.ModelInput.from_ints([1]))\n"
            "time.sleep(0.3); print('end')\n"
        )
        foreign.results["forward"] = {"type": "try_again"}
        done = subprocess.run(
            [sys.executable, "-c", script, foreign.url],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == "end\n"
        assert "Error" not in done.stderr

    def test_as_many_connections_as_requests_at_a_time(self):
        source = RemoteSource("http://localhost:9", "", None, 1.0)
        assert source._wire._lines._pool._max_connections == 68
        source.close()

    def test_threads_end_by_themselves(self, foreign, monkeypatch):
        from xorl_lab.client import workers

        monkeypatch.setattr(workers, "IDLE_SECONDS", 0.05)
        pool = workers.Workers(3, "short")
        counted = []
        for i in range(20):
            pool.submit(lambda i=i: counted.append(i))
        names = lambda: [t.name for t in threading.enumerate()].count("short")  # noqa: E731
        end = time.monotonic() + 5
        while names() and time.monotonic() < end:
            time.sleep(0.02)
        assert sorted(counted) == list(range(20))
        assert names() == 0
        pool.submit(lambda: counted.append(20))
        while len(counted) < 21 and time.monotonic() < end:
            time.sleep(0.02)
        assert counted[-1] == 20


def test_all_of_many_calls_are_answered_when_fetched_late(service, server, monkeypatch):
    monkeypatch.setattr(server.lab.requests, "_kept", 16)
    client = service.create_lora_training_client("tiny", 4, model_id="many")
    session = client._session
    tickets = []
    real = session.service.transport._pollers.submit
    monkeypatch.setattr(session.service.transport._pollers, "submit", tickets.append)
    held = server.lab.models.find("many").live
    counted = itertools.count()

    def forward(*_):
        return APIFuture.completed(xl.ForwardBackwardOutput([], {"n": float(next(counted))}))

    monkeypatch.setattr(held, "forward", forward)
    futures = [client.forward([datum()]) for _ in range(300)]
    while server.lab.requests.active:
        time.sleep(0.02)
    monkeypatch.setattr(session.service.transport._pollers, "submit", real)
    for ticket in tickets:
        real(ticket)
    assert [future.result(30).metrics["n"] for future in futures] == list(range(300))


def test_limits_of_the_model_are_known_before_anything_is_sent(service):
    client = service.create_lora_training_client("tiny", 4, model_id="limits")
    assert (client.vocab_size, client.context_length) == (259, 256) or client.vocab_size < 10_000
    sampler = client.save_weights_and_get_sampling_client()
    with pytest.raises(DataError, match="ids are 0 to"):
        sampler.sample(xl.ModelInput.from_ints([10**6]))
