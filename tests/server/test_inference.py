"""Endpoints: the embedded sampler, outside servers, and what is refused."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest


@pytest.fixture
def outside():
    """Another server that is healthy; yields its port."""

    class Healthy(BaseHTTPRequestHandler):
        def do_GET(self):
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


def test_an_outside_server_is_listed_but_gets_no_weights(api, outside):
    added = add(api, port=outside)
    assert added["success"]
    assert "gets no weights" in added["message"]
    (endpoint,) = api.http.get("/list_inference_endpoints").json()["endpoints"]
    assert endpoint["healthy"]
    synced = api.ask("/sync_inference_weights")
    assert not synced["success"]
    assert "not supported yet" in synced["message"]


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
