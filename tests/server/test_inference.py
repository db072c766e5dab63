"""Endpoints: the embedded sampler, outside servers, and what is refused."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tests.server.support import ADAM, gradient
from xorl_lab.errors import SamplerError
from xorl_lab.samplers.sync.canary import Canary
from xorl_lab.samplers.sync.sync import SyncError, SyncReport
from xorl_lab.server.endpoints import MAX_LOADED
from xorl_lab.types.checkpoints import InferenceEndpoint


@pytest.fixture
def keys():
    """What the other server was sent as keys, but for ``/health``, which needs none."""
    return []


@pytest.fixture
def outside(keys):
    """Another server that is healthy; yields its port."""

    class Healthy(BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path != "/health":
                keys.append(self.headers["Authorization"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Healthy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def add(api, host="localhost", port=30000, **more):
    return api.ask("/add_inference_endpoint", host=host, port=port, **more)


def test_the_key_of_the_samplers_is_sent_to_them(start, outside, keys):
    assert not add(start(sampler_key="secret"), port=outside)["success"]
    assert set(keys) == {"Bearer secret"}


def test_the_embedded_sampler_is_an_endpoint(api):
    added = add(api, worker_port=30000, world_size=1)
    assert added["success"]
    endpoint = added["endpoint"]
    assert (endpoint["host"], endpoint["port"], endpoint["healthy"]) == ("localhost", 30000, True)
    assert endpoint["server_info"]["enable_lora"]
    assert not added["weights_synced"]
    add(api)
    listed = api.http.get("/list_inference_endpoints").json()
    assert (listed["count"], len(listed["endpoints"])) == (1, 1)
    synced = api.ask("/sync_inference_weights")
    assert [(e["host"], e["success"]) for e in synced["endpoints_synced"]] == [("localhost", True)]
    assert api.ask("/remove_inference_endpoint", host="localhost", port=30000)["success"]
    assert not api.ask("/remove_inference_endpoint", host="localhost", port=30000)["success"]
    assert api.http.get("/list_inference_endpoints").json()["count"] == 0


def test_weights_can_be_synced_when_an_endpoint_is_added(api):
    assert add(api, sync_weights=True)["weights_synced"]


def test_an_outside_server_that_is_no_sglang_is_not_added(api, outside):
    added = add(api, port=outside)
    assert not added["success"]
    assert "no SGLang server" in added["message"]
    assert api.http.get("/list_inference_endpoints").json()["count"] == 0


class Stub:
    """Stands for the sync with a server elsewhere; writes down what it is sent."""

    def __init__(self, error=None):
        self.error, self.sent, self.closed = error, [], False
        self.adapters = {}

    def publish(self, version):
        return self.load(version, "")

    def load(self, version, name):
        if self.error is not None:
            raise self.error
        self.sent.append((version.number, name))
        self.adapters[name] = version
        canary = Canary("agrees", 0.001, 0.5, 1e-5)
        place = "http://localhost:7"
        return SyncReport(version.model_id, version.number, name, 0.5, 100, canary, url=place)

    def release(self, name):
        del self.adapters[name]

    def close(self):
        self.closed = True


@pytest.fixture
def elsewhere(api):
    """Put a stub in the place of a server that is registered."""

    def build(error=None):
        endpoints, place, stub = api.lab.inference.endpoints, ("localhost", 7), Stub(error)
        endpoints._known[place] = InferenceEndpoint(*place, 7)
        endpoints._syncs[place] = stub
        return stub

    return build


def test_an_outside_server_is_sent_the_weights_with_proof(api, elsewhere):
    stub = elsewhere()
    api.create()
    api.call("forward_backward", seq_id=1, forward_backward_input=gradient())
    api.call("optim_step", seq_id=2, adam_params=ADAM)
    synced = api.ask("/sync_inference_weights")
    assert synced["success"]
    assert "agrees" in synced["message"]
    assert synced["total_bytes"] == 100
    (endpoint,) = synced["endpoints_synced"]
    assert (endpoint["host"], endpoint["port"], endpoint["success"]) == ("localhost", 7, True)
    assert endpoint["sync"]["verdict"] == "agrees"
    assert (endpoint["sync"]["gap"], endpoint["sync"]["change"]) == (0.001, 0.5)
    assert stub.sent == [(1, "")]


def test_weights_that_have_not_arrived_are_an_error(api, elsewhere):
    elsewhere(SyncError("it answers with other weights than it was sent"))
    response = api.post("/sync_inference_weights")
    assert response.status_code == 409
    assert "other weights than it was sent" in response.json()["detail"]


def test_a_server_that_did_not_take_them_is_named(api, elsewhere):
    elsewhere(SamplerError("it is gone", retryable=True))
    synced = api.ask("/sync_inference_weights")
    assert not synced["success"]
    assert "localhost:7: it is gone" in synced["message"]


def test_a_saved_adapter_is_loaded_there_under_the_checkpoints_name(api, elsewhere):
    stub = elsewhere()
    api.create()
    path = api.call("save_weights_for_sampler", seq_id=1, name="step_100")["path"]
    answer = api.ask("/api/v1/create_sampling_session", model_path=path)
    assert answer["success"]
    assert answer["lora_name"] == "step_100"
    assert stub.sent == [(0, "step_100")]


def test_an_adapter_that_was_not_loaded_there_is_no_success(api, elsewhere):
    elsewhere(SamplerError("it is gone"))
    api.create()
    path = api.call("save_weights_for_sampler", seq_id=1, name="step_100")["path"]
    answer = api.ask("/api/v1/create_sampling_session", model_path=path)
    assert not answer["success"]
    assert "it is gone" in answer["message"]


def test_only_the_newest_adapters_stay_loaded_there(api, elsewhere):
    stub = elsewhere()
    api.create()
    for number in range(MAX_LOADED + 2):
        path = api.call("save_weights_for_sampler", seq_id=number + 1, name=f"s{number}")["path"]
        assert api.ask("/api/v1/create_sampling_session", model_path=path)["success"]
    assert list(stub.adapters) == [f"s{n}" for n in range(2, MAX_LOADED + 2)]


def test_full_weights_cannot_be_loaded_there_by_name(start):
    api = start(full=True)
    endpoints, stub = api.lab.inference.endpoints, Stub()
    endpoints._known["localhost", 7] = InferenceEndpoint("localhost", 7, 7)
    endpoints._syncs["localhost", 7] = stub
    api.call("create_model", model_id="default", base_model="tiny")
    path = api.call("save_weights_for_sampler", seq_id=1, name="whole")["path"]
    answer = api.ask("/api/v1/create_sampling_session", model_path=path)
    assert not answer["success"]
    assert "sync_inference_weights" in answer["message"]
    assert stub.sent == []


def test_what_was_loaded_there_is_unloaded_when_it_is_removed(api, elsewhere):
    stub = elsewhere()
    assert api.ask("/remove_inference_endpoint", host="localhost", port=7)["success"]
    assert stub.closed


def test_a_server_that_does_not_answer_is_not_added(api):
    added = add(api, port=1)
    assert not added["success"]
    assert "does not answer GET /health" in added["message"]
    assert added["endpoint"] is None


@pytest.mark.parametrize("host", ["example.com", "169.254.169.254", "10.0.0.1"])
def test_other_machines_are_reached_only_with_a_token(api, host):
    added = add(api, host=host, port=80)
    assert not added["success"]
    assert "--token" in added["message"]


@pytest.mark.parametrize("host", ["a b", "x/../y", "user@localhost", "localhost:1/", "", "é"])
def test_what_is_no_host_is_refused(api, host):
    assert "no host name" in add(api, host=host)["message"]
