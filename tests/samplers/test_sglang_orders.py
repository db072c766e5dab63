"""A real SGLang obeys: adapters, weights from tensors and from disk, and what it cannot take."""

import time

import pytest
import torch
from safetensors.torch import load_file

import xorl_lab as xl
from tests.samplers.support import update
from xorl_lab.checkpoints import Address
from xorl_lab.client.remote_sampling import RemoteSource
from xorl_lab.engine import engine as engines
from xorl_lab.errors import ConfigError, SamplerError
from xorl_lab.samplers.sglang.controls import INCOMPLETE, SGLang

TEXT = [5, 6, 7, 100, 33, 248]
NEAR = 1e-4
"""Nats."""


def near(ours, theirs) -> bool:
    return all(abs(a - b) <= NEAR for a, b in zip(ours, theirs, strict=True))


@pytest.fixture(scope="module")
def server(sglang_server) -> SGLang:
    client = SGLang(sglang_server.url, timeout=120.0)
    yield client
    client.close()


@pytest.fixture(scope="module")
def base() -> dict[str, torch.Tensor]:
    """The weights of ``tiny`` by name; the head is the embedding."""
    model = engines.get("tiny", "cpu", "float32").base
    return {k: v.detach() for k, v in model.state_dict().items() if k != "lm_head.weight"}


@pytest.fixture
def restored(server, base):
    """The server has its own weights again afterwards."""
    yield
    server.update_from_tensors(base.items(), "default")
    server.flush_cache()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A client with an adapter, and the folder of it in PEFT's form."""
    home = tmp_path_factory.mktemp("orders")
    service = xl.ServiceClient(home=home, device="cpu", dtype="float32")
    client = service.create_lora_training_client("tiny", rank=4, seed=1)
    update(client, 3)
    path = client.save_weights_for_sampler("x").result().path
    return client, Address.parse(path).folder(home / "checkpoints")


def said(client: xl.TrainingClient) -> list[float]:
    """The trainer's logprobs."""
    datum = xl.Datum(xl.ModelInput.from_ints(TEXT), {"labels": TEXT})
    return client.forward([datum]).result().loss_fn_outputs[0].logprobs.tolist()


def test_the_facts(server):
    facts = server.require(vocab_size=259, model="tiny", rank=32, context_length=512)
    assert (facts.vocab_size, facts.context_length, facts.room) == (259, 512, 510)
    assert (facts.dp_size, facts.tp_size, facts.lora, facts.max_lora_rank) == (1, 1, True, 32)
    assert (facts.dtype, facts.device) == ("float32", "cpu")
    assert facts.weight_version == server.weight_version()
    with pytest.raises(ConfigError, match=r"has 259 token ids.*up to rank 32, but yours has 64"):
        server.require(vocab_size=49152, model="SmolLM2", rank=64)


def test_an_adapter_is_told_from_the_base(server, trained):
    client, folder = trained
    before = server.score(TEXT)
    server.load_adapter("orders-1", folder)
    try:
        assert near(server.score(TEXT, "orders-1"), said(client))
        assert near(server.score(TEXT), before)
        assert not near(before, said(client))
        stranger = SGLang(server.url)
        with pytest.raises(SamplerError, match="did not load adapter 'orders-1'"):
            stranger.load_adapter("orders-1", folder)
        stranger.close()
    finally:
        server.unload_adapter("orders-1")
    with pytest.raises(ConfigError, match="loaded before"):
        server.load_adapter("orders-1", folder)
    with pytest.raises(SamplerError, match="did not unload adapter 'nobody'"):
        server.unload_adapter("nobody")


def test_an_adapter_that_is_sent_along(sglang_server, trained):
    """As to a server that does not see our folders."""
    client, folder = trained
    server = SGLang(sglang_server.url)
    assert server.here
    server.here = False
    server.load_adapter("orders-3", folder)
    try:
        assert near(server.score(TEXT, "orders-3"), said(client))
    finally:
        server.unload_adapter("orders-3")
        server.close()


def test_a_folder_that_is_none(server, tmp_path):
    with pytest.raises(SamplerError, match="did not load adapter 'orders-2'"):
        server.load_adapter("orders-2", tmp_path / "none")
    assert server.score(TEXT)


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("bucket", [60_000, 2**30])
def test_weights_from_tensors(server, base, bucket):
    before = server.score(TEXT)
    changed = {name: tensor * 1.05 for name, tensor in base.items()}
    size = sum(tensor.nbytes for tensor in base.values())
    assert server.update_from_tensors(changed.items(), "orders-v1", bucket) == size
    server.flush_cache()
    assert server.weight_version() == "orders-v1"
    after = server.score(TEXT)
    assert not near(before, after)
    server.update_from_tensors(base.items(), "orders-v2", bucket)
    server.flush_cache()
    assert near(server.score(TEXT), before)


@pytest.mark.usefixtures("restored")
def test_weights_from_disk(server, base, sglang_server, tmp_path):
    model = engines.get("tiny", "cpu", "float32").base
    before = server.score(TEXT)
    server.update_from_tensors([(n, t * 1.05) for n, t in base.items()], "orders-v3")
    server.flush_cache()
    model.save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == base.keys()
    server.update_from_disk(tmp_path, "orders-v4")
    assert server.weight_version() == "orders-v4"
    assert near(server.score(TEXT), before)
    with pytest.raises(SamplerError, match=r"did not load the weights in .*none"):
        server.update_from_disk(tmp_path / "none", "orders-v5")
    assert server.weight_version() == "orders-v4"
    assert near(server.score(TEXT), before)


@pytest.mark.usefixtures("restored")
def test_an_update_that_breaks_off_leaves_a_server_that_says_so(server, base):
    before = server.score(TEXT)

    def broken():
        for i, (name, tensor) in enumerate(base.items()):
            if i == 12:
                raise OSError("planted")
            yield name, tensor * 1.3

    with pytest.raises(SamplerError, match="undefined until weights are sent again"):
        server.update_from_tensors(broken(), "orders-v6", 40_000)
    assert server.weight_version() == INCOMPLETE
    source = RemoteSource(server.url, "", None, 60.0)
    sampler = xl.SamplingClient.of(source)
    params = xl.SamplingParams(max_tokens=2)
    with pytest.raises(SamplerError, match="weights are incomplete"):
        sampler.sample(xl.ModelInput.from_ints(TEXT), params).result(60)
    server.update_from_tensors(base.items(), "orders-v7")
    server.flush_cache()
    assert near(server.score(TEXT), before)
    response = sampler.sample(xl.ModelInput.from_ints(TEXT), params).result(60)
    assert response.meta_info["weight_version"] == "orders-v7"
    source.close()


@pytest.mark.usefixtures("restored")
def test_an_update_that_somebody_left_open(server, base):
    server._http.order("/begin_weight_update", {}, "begin")
    assert server.update_from_tensors(base.items(), "orders-v8")


@pytest.mark.usefixtures("restored")
def test_a_completion_of_two_versions_is_known(server, base):
    """Weights that change while it is drawn, at a pause that lets it go on."""
    source = RemoteSource(server.url, "", None, 120.0)
    prompt = xl.ModelInput.from_ints(TEXT)
    params = xl.SamplingParams(max_tokens=400)
    server.name_weights("orders-old")
    futures = [xl.SamplingClient.of(source).sample(prompt, params, 2) for _ in range(3)]
    time.sleep(0.4)
    server.pause("retract")
    server.flush_cache()
    server.update_from_tensors(base.items(), "orders-v9")
    server.resume()
    infos = [future.result(120).meta_info for future in futures]
    assert ["orders-old", "orders-v9"] in [info.get("weight_versions") for info in infos]
    source.close()
