"""The controls of a SGLang server, against sockets that go wrong."""

import base64
import itertools
import pickle
import threading

import pytest
import torch
from safetensors.torch import save_file

from tests.client import faulty
from tests.client.faulty import Faulty, says
from tests.closeness import assert_close
from tests.server.conftest import Live
from xorl_lab.errors import CheckpointError, ConfigError, DataError, SamplerError
from xorl_lab.samplers.sglang import controls as sglang
from xorl_lab.samplers.sglang.controls import INCOMPLETE, SGLang
from xorl_lab.samplers.sglang.named_tensors import buckets, by_value
from xorl_lab.server import ServerSettings

BUSY = says("400 Bad Request", b"Cache not flushed because there are pending requests.\n")
TENSORS = [(f"t{i}", torch.full((4,), float(i))) for i in range(5)]
FITTING = {"vocab_size": 259, "model": "tiny", "rank": 8}


@pytest.fixture
def server():
    running = Faulty()
    running.pages["/health"] = {}
    yield running
    running.stop()


@pytest.fixture
def connect():
    """Make a client for a URL."""
    made = []

    def build(url: str, timeout: float = 5.0, **keywords) -> SGLang:
        made.append(SGLang(url, timeout=timeout, **keywords))
        return made[-1]

    yield build
    for client in made:
        client.close()


@pytest.fixture
def client(server, connect) -> SGLang:
    return connect(server.url)


class TestConnecting:
    def test_the_facts(self, client, server):
        facts = client.connect()
        assert (facts.url, facts.model_path, facts.vocab_size) == (server.url, "tiny", 259)
        assert (facts.context_length, facts.room, facts.version) == (512, 510, "0.5.23")
        assert (facts.dp_size, facts.tp_size, facts.lora, facts.max_lora_rank) == (1, 1, True, 8)
        assert (facts.dtype, facts.device, facts.weight_version) == ("float32", "cpu", "default")
        asked = len(server.asked)
        assert client.facts is client.facts
        assert len(server.asked) == asked, "they are known"

    def test_a_url_that_is_none(self):
        with pytest.raises(ConfigError, match="base_url is 'localhost:3'"):
            SGLang("localhost:3")

    def test_nothing_there(self, connect):
        gone = Faulty()
        gone.stop()
        with pytest.raises(SamplerError, match=r"did not answer .*once its model is loaded") as e:
            connect(gone.url).connect()
        assert e.value.retryable

    def test_our_own_server(self, tmp_path, connect):
        ours = Live(ServerSettings(model="tiny", home=tmp_path, port=0, sampler_port=0))
        try:
            with pytest.raises(ConfigError, match="is `xorl-lab serve`, not SGLang: use Service"):
                connect(ours.url).connect()
        finally:
            ours.stop()

    @pytest.mark.parametrize(
        ("path", "fault", "words"),
        [
            ("/model_info", faulty.page, "no SGLang .*answered 200: '<!DOCTYPE html>"),
            ("/model_info", says("404 Not Found"), "no SGLang .*answered 404.*check host and port"),
            ("/model_info", says("200 OK", ["x"]), "no SGLang"),
            ("/model_info", says("200 OK", {"x": 1}), "has no model_path"),
            ("/model_info", faulty.redirect, "a redirect to 'http://example.invalid/login'"),
            (
                "/model_info",
                says("401 Unauthorized"),
                "answered 401: pass the key that the server was",
            ),
            ("/server_info", says("200 OK", {}), "has the version None"),
            ("/server_info", says("200 OK", {"version": "main"}), "has the version 'main'"),
            (
                "/server_info",
                says("200 OK", {"version": "0.4.9.post2"}),
                r"is SGLang 0\.4\.9\.post2, but 0\.5\.23 or newer is needed: upgrade",
            ),
            ("/v1/models", says("200 OK", {"data": []}), "names no max_model_len"),
            ("/generate", says("200 OK", {"text": ""}), "does not say its vocabulary"),
        ],
    )
    def test_something_else_there(self, client, server, path, fault, words):
        server.faults[path].append(fault)
        with pytest.raises(ConfigError, match=words):
            client.connect()
        assert client.connect().vocab_size == 259

    @pytest.mark.parametrize(
        ("path", "words"),
        [("/model_info", "is starting or stopping"), ("/health", "not ready .*still starting")],
    )
    def test_a_server_that_is_not_ready(self, client, server, path, words):
        server.faults[path].append(says("503 Service Unavailable"))
        with pytest.raises(SamplerError, match=words) as caught:
            client.connect()
        assert caught.value.retryable
        assert client.connect().vocab_size == 259

    def test_a_health_that_is_broken(self, client, server):
        server.faults["/health"].append(says("500 Internal Server Error", b"dead"))
        with pytest.raises(SamplerError, match=r"did not say that it is well: .*500: dead"):
            client.connect()

    def test_the_key_is_sent(self, server, connect):
        connect(server.url, api_key="secret").connect()
        assert {heads[b"authorization"] for heads in server.heads} == {b"Bearer secret"}


class TestFitting:
    def test_what_fits(self, client):
        assert client.require(**FITTING).vocab_size == 259
        assert client.require(**{**FITTING, "rank": None}, context_length=512)

    @pytest.mark.parametrize(
        ("said", "needed", "words"),
        [
            ({}, {"vocab_size": 49152, "model": "M"}, "'tiny' has 259 token ids, but 'M'.* 49152"),
            ({}, {"rank": 16}, "up to rank 8, but yours has 16: .*--max-lora-rank 16"),
            ({"enable_lora": False}, {}, "no LoRA adapters: start it with --enable-lora"),
            ({"dp_size": 2}, {"rank": None}, "2 replicas.*--dp-size 1"),
            ({}, {"context_length": 1024}, "holds 512 tokens, but 1024 .*--context-length 1024"),
        ],
    )
    def test_what_does_not(self, client, server, said, needed, words):
        server.pages["/server_info"] = {**faulty.SERVER, **said}
        with pytest.raises(ConfigError, match=words):
            client.require(**{**FITTING, **needed})

    def test_all_that_does_not_is_said_at_once(self, client, server):
        server.pages["/server_info"] = {**faulty.SERVER, "dp_size": 3, "enable_lora": False}
        with pytest.raises(ConfigError, match=r"token ids.*; it runs 3 replicas.*; it takes no"):
            client.require(vocab_size=1, model="m", rank=1)


class TestTryingAgain:
    @pytest.mark.parametrize("fault", [faulty.reset_before, faulty.reset_within, faulty.cut_off])
    def test_a_question_is_asked_again(self, client, server, fault):
        server.faults["/server_info"] += [fault, fault]
        assert client.connect().version == "0.5.23"
        assert server.count("/server_info") == 3

    def test_but_not_for_ever(self, client, server):
        server.faults["/server_info"] += [faulty.reset_before] * 9
        with pytest.raises(SamplerError, match="did not answer"):
            client.connect()
        assert server.count("/server_info") == 3

    @pytest.mark.parametrize("fault", [faulty.reset_before, faulty.reset_within])
    def test_an_order_is_not_given_twice(self, client, server, fault, tmp_path):
        server.faults["/load_lora_adapter"].append(fault)
        with pytest.raises(SamplerError, match="did not answer") as caught:
            client.load_adapter("a", tmp_path)
        assert caught.value.retryable
        assert server.count("/load_lora_adapter") == 1

    def test_a_hung_server(self, server, connect):
        client = connect(server.url, 0.4)
        server.faults["/pause_generation"].append(faulty.hang)
        with pytest.raises(SamplerError, match=r"within 0\.4 s: look whether"):
            client.pause()
        client.resume()

    def test_a_flush_waits_while_the_server_is_busy(self, client, server):
        server.faults["/flush_cache"] += [BUSY, BUSY]
        client.flush_cache()
        assert server.count("/flush_cache") == 3

    def test_but_not_for_longer_than_it_may(self, client, server):
        server.faults["/flush_cache"] += [BUSY] * 99
        with pytest.raises(SamplerError, match=r"within 0\.1 s, as requests were under way") as e:
            client.flush_cache(0.1)
        assert e.value.retryable
        with pytest.raises(SamplerError, match="within 0 s"):
            client.flush_cache(0.0)

    def test_a_flush_that_fails_otherwise(self, client, server):
        server.faults["/flush_cache"].append(says("500 Internal Server Error", b"oops"))
        with pytest.raises(SamplerError, match=r"did not flush its cache: .*500: oops"):
            client.flush_cache()


class TestOrders:
    def test_what_is_sent(self, client, server, tmp_path):
        client.load_adapter("a-1", tmp_path)
        client.unload_adapter("a-1")
        client.pause("retract")
        client.resume()
        client.abort_all()
        client.release_memory()
        client.resume_memory()
        client.name_weights("v1")
        client.update_from_disk(tmp_path, "v2")
        assert server.asked == [
            (
                "/load_lora_adapter",
                {"lora_name": "a-1", "lora_path": str(tmp_path), "pinned": False},
            ),
            ("/unload_lora_adapter", {"lora_name": "a-1"}),
            ("/pause_generation", {"mode": "retract"}),
            ("/continue_generation", {}),
            ("/abort_request", {"abort_all": True}),
            ("/release_memory_occupation", {}),
            ("/resume_memory_occupation", {}),
            ("/update_weight_version", {"new_version": "v1", "abort_all_requests": False}),
            (
                "/update_weights_from_disk",
                {"model_path": str(tmp_path), "weight_version": "v2", "flush_cache": False},
            ),
            ("/flush_cache", {}),
        ]

    def test_an_adapter_is_sent_along_to_another_machine(self, client, server, tmp_path):
        (tmp_path / "adapter_config.json").write_text('{"r": 4}')
        save_file(dict(TENSORS), tmp_path / "adapter_model.safetensors")
        assert client.here
        client.here = False
        client.load_adapter("a", tmp_path)
        (body,) = server.bodies("/load_lora_adapter_from_tensors")
        assert (body["lora_name"], body["config_dict"]) == ("a", {"r": 4})
        (content,) = body["serialized_named_tensors"]
        got = pickle.loads(base64.b64decode(content))
        assert isinstance(got, dict), "SGLang refuses a list here"
        assert got.keys() == dict(TENSORS).keys()
        with pytest.raises(CheckpointError, match="holds no adapter in PEFT's form"):
            client.load_adapter("b", tmp_path / "none")

    def test_which_servers_are_here(self):
        for host, here in {"localhost": True, "127.0.0.1": True, "gpu7": False}.items():
            client = SGLang(f"http://{host}:30000")
            assert client.here is here
            client.close()

    def test_a_name_is_not_used_twice(self, client, tmp_path):
        client.load_adapter("a", tmp_path)
        client.unload_adapter("a")
        with pytest.raises(ConfigError, match=r"'a' was loaded before.*pass a new one"):
            client.load_adapter("a", tmp_path)

    @pytest.mark.parametrize(
        "fault",
        [
            says("400 Bad Request", {"success": False, "error_message": "no such folder"}),
            says("200 OK", {"success": False, "message": "no such folder"}),
            says("400 Bad Request", {"error": {"message": "no such folder"}}),
        ],
    )
    def test_a_refusal_says_why(self, client, server, fault, tmp_path):
        server.faults["/load_lora_adapter"].append(fault)
        with pytest.raises(SamplerError, match=r"did not load adapter 'a' .*no such folder") as e:
            client.load_adapter("a", tmp_path)
        assert not e.value.retryable
        client.load_adapter("a", tmp_path)


class TestScoring:
    def test_a_text(self, client, server):
        assert client.score([4, 5, 6]) == [-1.0, -2.0]
        body = server.bodies("/generate")[-1]
        assert (body["input_ids"], body["logprob_start_len"]) == ([4, 5, 6], 0)
        assert "lora_path" not in body
        client.score([4, 5], "mine")
        assert server.bodies("/generate")[-1]["lora_path"] == "mine"

    @pytest.mark.parametrize("bad", [259, -1])
    def test_what_would_kill_the_server_is_not_sent(self, client, server, bad):
        with pytest.raises(DataError, match="ids are 0 to 258"):
            client.score([1, bad])
        assert server.count("/generate") == 1, "that for the vocabulary"

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda v: v.pop("meta_info"), "KeyError"),
            (lambda v: v["meta_info"].pop("input_token_logprobs"), "KeyError"),
            (lambda v: v["meta_info"]["input_token_logprobs"].pop(), "one .*was expected for each"),
            (lambda v: v["meta_info"]["input_token_logprobs"][1].__setitem__(0, None), "TypeError"),
            (lambda v: v["meta_info"]["input_token_logprobs"][1].__setitem__(0, 3.0), "no more"),
            (lambda v: v["meta_info"]["input_token_logprobs"][1].__setitem__(1, 9), "no more"),
        ],
    )
    def test_answers_are_checked(self, client, server, change, words):
        assert client.facts
        server.faults["/generate"].append(faulty.changed(change))
        with pytest.raises(SamplerError, match=words):
            client.score([4, 5, 6])
        assert client.score([4, 5, 6]) == [-1.0, -2.0]


def sent(server: Faulty) -> list[list[tuple[str, torch.Tensor]]]:
    """What came in the requests that carried weights."""
    bodies = server.bodies("/update_weights_from_tensor")
    return [pickle.loads(base64.b64decode(body["serialized_named_tensors"][0])) for body in bodies]


def paths(server: Faulty) -> list[str]:
    return [path for path, _ in server.asked if "weight" in path]


BEGIN, SEND, END = "/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"
NAME = "/update_weight_version"


class TestSendingWeights:
    def test_all_of_them_in_buckets(self, client, server):
        assert client.update_from_tensors(iter(TENSORS), "v1", 32) == 80
        assert paths(server) == [BEGIN, SEND, SEND, SEND, END]
        assert [[name for name, _ in b] for b in sent(server)] == [
            ["t0", "t1"],
            ["t2", "t3"],
            ["t4"],
        ]
        for (_, got), (_, wanted) in zip(itertools.chain(*sent(server)), TENSORS, strict=True):
            assert torch.equal(got, wanted)
        bodies = server.bodies(SEND)
        assert [b["weight_version"] for b in bodies] == [INCOMPLETE, INCOMPLETE, "v1"]
        assert [b["flush_cache"] for b in bodies] == [False] * 3

    def test_a_copy_for_each_gpu(self, client, server):
        server.pages["/server_info"] = {**faulty.SERVER, "tp_size": 2}
        client.update_from_tensors(TENSORS, "v1")
        one, two = server.bodies(SEND)[0]["serialized_named_tensors"]
        assert one == two

    def test_in_the_dtype_of_the_server(self, client, server):
        server.pages["/server_info"] = {**faulty.SERVER, "dtype": "bfloat16"}
        third = torch.tensor([1 / 3])
        client.update_from_tensors([("a", third), ("b", torch.tensor([3]))], "v1")
        ((_, a), (_, b)) = sent(server)[0]
        assert (a.dtype, b.dtype) == (torch.bfloat16, torch.int64)
        assert_close(a.float(), third.bfloat16().float(), rtol=0)

    def test_only_the_part_that_a_view_shows(self):
        whole = torch.arange(100_000.0)
        assert len(by_value([("a", whole[10:14])], "float32")) < 2000
        ((_, tensor),) = pickle.loads(base64.b64decode(by_value([("a", whole[10:14])], "auto")))
        assert tensor.tolist() == [10.0, 11.0, 12.0, 13.0]

    def test_a_tensor_that_is_larger_than_a_bucket_goes_alone(self):
        three = [("a", torch.zeros(1)), ("b", torch.zeros(9)), ("c", torch.zeros(1))]
        found = [([n for n, _ in group], last) for group, last in buckets(three, 8)]
        assert found == [(["a"], False), (["b"], False), (["c"], True)]
        assert list(buckets([], 8)) == []

    @pytest.mark.parametrize("at", range(5))
    def test_tensors_that_fail_at_any_point(self, client, server, at):
        def broken():
            yield from TENSORS[:at]
            raise OSError("planted")

        carried = (at - 1) // 2 if at else 0
        with pytest.raises(SamplerError if carried else OSError) as caught:
            client.update_from_tensors(broken(), "v1", 32)
        assert paths(server) == [BEGIN, *[SEND] * carried, END, *[NAME] * bool(carried)]
        if carried:
            assert f"only {32 * carried} bytes of version 'v1' had arrived" in str(caught.value)
            assert "undefined until weights are sent again" in str(caught.value)
            assert isinstance(caught.value.__cause__, OSError)
            assert server.bodies(NAME)[-1] == {"new_version": INCOMPLETE}
        assert client.update_from_tensors(TENSORS, "v2") == 80
        assert server.bodies(SEND)[-1]["weight_version"] == "v2"

    @pytest.mark.parametrize(
        "fault",
        [
            faulty.reset_before,
            faulty.reset_within,
            says("400 Bad Request", {"success": False, "message": "shape"}),
            says("500 Internal Server Error", b"oops"),
            faulty.hang,
        ],
    )
    @pytest.mark.parametrize("bucket", [0, 1, 2])
    def test_a_request_that_fails(self, server, connect, fault, bucket):
        client = connect(server.url, 0.5)
        server.faults[SEND] += [lambda line, right: line.answer(right)] * bucket + [fault]
        with pytest.raises(SamplerError, match="undefined until weights are sent again") as caught:
            client.update_from_tensors(TENSORS, "v1", 32)
        assert caught.value.retryable
        assert paths(server) == [BEGIN, *[SEND] * (bucket + 1), END, NAME]
        assert client.update_from_tensors(TENSORS, "v2") == 80

    def test_a_beginning_that_fails_leaves_the_weights_alone(self, client, server):
        server.faults[BEGIN].append(faulty.reset_before)
        with pytest.raises(SamplerError, match="did not answer"):
            client.update_from_tensors(TENSORS, "v1")
        assert paths(server) == [BEGIN, END], "it may have arrived"

    def test_an_update_that_somebody_left_open_is_closed(self, client, server):
        text = "a weight-update session is already open; call end_weight_update() first"
        server.faults[BEGIN].append(says("400 Bad Request", {"success": False, "message": text}))
        assert client.update_from_tensors(TENSORS, "v1") == 80
        assert paths(server) == [BEGIN, END, BEGIN, SEND, END]

    def test_an_end_that_fails_is_said(self, client, server):
        server.faults[END].append(faulty.reset_before)
        with pytest.raises(SamplerError, match="did not answer"):
            client.update_from_tensors(TENSORS, "v1")
        assert client.update_from_tensors(TENSORS, "v2") == 80

    def test_an_interrupt_closes_the_update_and_goes_on(self, client, server):
        def broken():
            yield from TENSORS[:3]
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            client.update_from_tensors(broken(), "v1", 32)
        assert paths(server) == [BEGIN, SEND, END, NAME]

    def test_a_server_that_is_gone(self, connect):
        server = Faulty()
        client = connect(server.url, 2.0)
        assert client.facts

        def tensors():
            yield from TENSORS[:3]
            server.stop()
            yield from TENSORS[3:]

        with pytest.raises(SamplerError, match=r"only 32 bytes of .*undefined until") as caught:
            client.update_from_tensors(tensors(), "v1", 32)
        assert caught.value.retryable
        again = Faulty(server.port)
        assert client.update_from_tensors(TENSORS, "v1", 32) == 80
        again.stop()

    def test_two_updates_do_not_mix(self, client, server):
        threads = [
            threading.Thread(target=client.update_from_tensors, args=(TENSORS, f"v{i}", 16))
            for i in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert paths(server) == [BEGIN, *[SEND] * 5, END] * 4
        assert sglang.BUCKET_BYTES > 2**20
