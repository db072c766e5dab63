"""Training here, sampling elsewhere: what is sent when, and that answers belong to one version."""

import gc

import pytest

from tests.client.mirror import Mirror, Process, Watching
from xorl_lab.client import ServiceClient
from xorl_lab.client import outside as module
from xorl_lab.errors import ConfigError, SamplerError
from xorl_lab.samplers.sync.sync import SyncError
from xorl_lab.types import AdamParams, Datum, ModelInput, SamplingParams

DATA = [Datum(ModelInput.from_ints([5, 6, 7, 8]), {"labels": [5, 6, 7, 8]})]
GREEDY = SamplingParams(max_tokens=4, temperature=0)


class Place:
    """A service whose sampler is a mirror."""

    def __init__(self):
        self.mirror = Mirror()
        self.started = []
        self.processes = []

    def start(self, engine, rank):
        self.started.append((engine.loaded.name, rank))
        self.processes.append(Process())
        return self.processes[-1]

    def service(self, where="sglang"):
        return ServiceClient(device="cpu", dtype="float32", sampler=where)


@pytest.fixture
def place(empty_home, monkeypatch):
    here = Place()

    def watching(engine, sampler):
        here.mirror.trainer = Watching(engine, sampler)
        return here.mirror.trainer

    class SGLang(Mirror):
        """What the module takes the mirror for."""

    here.mirror.__class__ = SGLang
    monkeypatch.setattr(module, "Handover", watching)
    SGLang.__new__ = lambda *_, **__: here.mirror
    SGLang.__init__ = lambda *_, **__: None
    monkeypatch.setattr(module, "SGLang", SGLang)
    monkeypatch.setattr(module, "RemoteSource", lambda *_: here.mirror)
    monkeypatch.setattr(module, "started", here.start)
    yield here
    module.close_all()


def step(client, rate=1e-2):
    client.forward_backward(DATA).result()
    client.optim_step(AdamParams(learning_rate=rate)).result()


def test_nothing_is_started_before_it_is_needed(place):
    service = place.service()
    base = service.create_sampling_client(base_model="tiny")
    client = service.create_lora_training_client("tiny", rank=4)
    step(client)
    assert base.base_model == "tiny"
    assert base.get_tokenizer() is client.get_tokenizer()
    assert place.started == []
    base.sample("Hello", GREEDY).result()
    assert place.started == [("tiny", module.LEAST_RANK)]


def test_the_key_goes_to_the_server_at_the_url_and_to_no_other(place, monkeypatch):
    keys = []
    here, mirror = "http://127.0.0.1:9", place.mirror
    monkeypatch.setattr(
        type(mirror), "__new__", lambda _, url, key, *__: keys.append(key) or mirror
    )
    monkeypatch.setattr(module, "RemoteSource", lambda _, __, key, *___: keys.append(key) or mirror)

    def ask(**settings):
        keys.clear()
        service = ServiceClient(device="cpu", dtype="float32", **settings)
        service.create_sampling_client(base_model="tiny").sample("a", GREEDY).result()
        return list(keys)

    assert ask(sampler=here) == [None, None]
    assert ask(sampler=here, sampler_key="given") == ["given", "given"]
    monkeypatch.setenv("XORL_SAMPLER_KEY", "set")
    assert ask(sampler=here) == ["set", "set"]
    assert ask(sampler="sglang") == [None, None]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "sampler_key is for a SGLang server that runs already"),
        ({"sampler": "sglang"}, "sampler_key is for a SGLang server that runs already"),
        ({"base_url": "http://x"}, "sampler_key is set, but the server at http://x trains"),
        ({"sampler": 5}, "sampler is 5: pass 'embedded'"),
    ],
)
def test_a_key_for_a_sampler_that_takes_none(settings, words):
    with pytest.raises(ConfigError, match=words):
        ServiceClient(sampler_key="k", **settings)


def test_a_larger_rank_is_known_when_the_server_is_started(place):
    service = place.service()
    service.create_lora_training_client("tiny", rank=48).save_weights_and_get_sampling_client()
    assert place.started == [("tiny", 48)]


def test_services_of_one_model_share_the_server(place):
    for _ in range(2):
        place.service().create_sampling_client(base_model="tiny").sample("a", GREEDY).result()
    assert len(place.started) == 1


@pytest.mark.parametrize("full", [False, True])
def test_answers_are_those_of_the_version_and_have_the_embedded_samplers_form(place, full):
    here, there = ServiceClient(device="cpu", dtype="float32"), place.service()
    make = "create_training_client" if full else "create_lora_training_client"
    client = getattr(there, make)("tiny")
    step(client)
    sampler = client.save_weights_and_get_sampling_client()
    old = sampler.sample("Hello", GREEDY, 2).result()
    step(client)
    new = client.save_weights_and_get_sampling_client().sample("Hello", GREEDY).result()
    assert (old.meta_info["weight_version"], new.meta_info["weight_version"]) == (1, 2)
    assert (sampler.version, sampler.sync.version) == (1, 1)
    assert old.logprobs != new.logprobs
    again = sampler.sample("Hello", GREEDY, 2).result()
    assert again.logprobs == old.logprobs, "a client stays on its version"
    assert again.meta_info["weight_version"] == 1
    path = client.save_weights_for_sampler("w").result().path
    wanted = here.create_sampling_client(model_path=path).sample("Hello", GREEDY).result()
    assert new.logprobs == wanted.logprobs


def test_the_base_model_is_there_beside_full_weights(place):
    service = place.service()
    base = service.create_sampling_client(base_model="tiny")
    before = base.sample("Hello", GREEDY).result()
    client = service.create_training_client("tiny")
    step(client, 3e-2)
    client.save_weights_and_get_sampling_client().sample("Hello", GREEDY).result()
    assert base.sample("Hello", GREEDY).result().logprobs == before.logprobs


def test_adapters_that_nobody_samples_from_are_unloaded(place):
    client = place.service().create_lora_training_client("tiny")
    for _ in range(4):
        step(client)
        sampler = client.save_weights_and_get_sampling_client()
        gc.collect()
    assert len(place.mirror.adapters) <= 2
    assert sampler.sync.name in place.mirror.adapters


def test_a_skipped_sync_is_an_error(place):
    client = place.service().create_training_client("tiny")
    step(client)
    client.save_weights_and_get_sampling_client()
    step(client)
    place.mirror.skipped.add("update_from_tensors")
    with pytest.raises(SyncError, match="disagrees"):
        client.save_weights_and_get_sampling_client()
    place.mirror.skipped.clear()
    assert client.save_weights_and_get_sampling_client().sync.canary.verdict == "agrees"


def test_weights_that_were_replaced_meanwhile_are_not_passed_off(place):
    client = place.service().create_training_client("tiny")
    step(client)
    sampler = client.save_weights_and_get_sampling_client()
    submit = place.mirror.submit

    def replaced(requests):
        place.mirror.named = "somebody-elses"
        return submit(requests)

    place.mirror.submit = replaced
    with pytest.raises(SamplerError, match=r"somebody-elses.*mixes versions"):
        sampler.sample("Hello", GREEDY).result()
    place.mirror.submit = submit
    assert sampler.sample("Hello", GREEDY).result().meta_info["weight_version"] == 1


def test_a_server_that_died_is_started_again(place):
    client = place.service().create_lora_training_client("tiny")
    step(client)
    sampler = client.save_weights_and_get_sampling_client()
    first = sampler.sample("Hello", GREEDY).result()
    place.processes[0].alive = False
    place.mirror.adapters.clear()
    place.mirror.named = "default"
    again = sampler.sample("Hello", GREEDY).result()
    assert len(place.started) == 2
    assert again.logprobs == first.logprobs


def test_it_is_stopped_with_the_process(place):
    client = place.service().create_lora_training_client("tiny")
    client.save_weights_and_get_sampling_client()
    module.close_all()
    assert [p.stopped for p in place.processes] == [True]


def test_memory_of_a_shared_gpu_is_given_back_around_training(place):
    client = place.service().create_lora_training_client("tiny")
    drawing = client._session.drawing
    drawing.shares_gpu = True
    for _ in range(2):
        client.save_weights_and_get_sampling_client().sample("Hello", GREEDY).result()
        step(client)
    wanted = {"release_memory", "resume_memory", "submit", "load_adapter"}
    calls = [name for name in place.mirror.names if name in wanted]
    assert calls == [
        "load_adapter", "submit", "release_memory",
        "resume_memory", "load_adapter", "submit", "release_memory",
    ]  # fmt: skip


def test_memory_is_kept_while_requests_are_under_way(place):
    client = place.service().create_lora_training_client("tiny")
    drawing = client._session.drawing
    drawing.shares_gpu = True
    client.save_weights_and_get_sampling_client()
    sync, _ = drawing.awake()
    sync.traffic.begin(1)
    step(client)
    assert "release_memory" not in place.mirror.names
    sync.traffic.end()
    step(client)
    assert "release_memory" in place.mirror.names


def test_what_is_no_sampler_is_refused(empty_home):
    with pytest.raises(ConfigError, match="'embedded', 'sglang', or the URL"):
        ServiceClient(sampler="vllm")
    with pytest.raises(ConfigError, match="add_inference_endpoint"):
        ServiceClient("http://localhost:1", sampler="sglang")


def test_an_adapter_by_name_is_refused(place):
    sampler = place.service().create_sampling_client(base_model="tiny")
    with pytest.raises(ConfigError, match="lora_path"):
        sampler.sample("Hello", GREEDY, lora_path="x")


def test_embedded_is_the_default(empty_home):
    client = ServiceClient(device="cpu", dtype="float32").create_lora_training_client("tiny")
    sampler = client.save_weights_and_get_sampling_client()
    assert sampler.sync is None
    assert client.take_syncs() == []
