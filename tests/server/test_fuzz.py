"""Bodies that are almost right: never a 500, never a hang, and the server works on."""

import copy
import json
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.server.support import ADAM, datum, gradient

RL = datum(logprobs=[0, -1, -1], advantages=[0, 0, 1, 1])
FORWARD = {"data": [RL], "loss_fn": "policy_loss", "loss_fn_params": {"eps_clip": 0.2}}
GENERATE = {
    "input_ids": [1, 2],
    "sampling_params": {"max_new_tokens": 2, "n": 2, "temperature": 1.0, "top_p": 0.9, "stop": "a"},
    "return_logprob": True,
    "logprob_start_len": 0,
    "top_logprobs_num": 1,
    "lora_path": None,
    "rid": "r",
}
ENDPOINT = {"host": "localhost", "port": 30000, "worker_port": 30000, "world_size": 1}
VALID = {
    "/api/v1/create_model": {"base_model": "tiny", "lora_config": {"rank": 4, "dropout": 0.0}},
    "/api/v1/unload_model": {"model_id": "default"},
    "/api/v1/forward": {"seq_id": 1, "forward_input": FORWARD},
    "/api/v1/forward_backward": {"forward_backward_input": gradient()},
    "/api/v1/optim_step": {"adam_params": ADAM},
    "/api/v1/save_weights": {"path": None, "ttl_seconds": 60, "overwrite": True},
    "/api/v1/load_weights": {"path": "xorl://default/weights/a", "optimizer": True},
    "/api/v1/save_weights_for_sampler": {"name": "s"},
    "/api/v1/retrieve_future": {"request_id": "req-x"},
    "/api/v1/list_checkpoints": {"model_id": "default"},
    "/api/v1/delete_checkpoint": {"checkpoint_id": "weights/a"},
    "/api/v1/weights_info": {"xorl_path": "xorl://default/weights/a"},
    "/api/v1/kill_session": {"model_id": "default", "save_checkpoint": False},
    "/api/v1/abort_gradient_epoch": {"model_id": "default"},
    "/api/v1/get_info": {"model_id": "default"},
    "/api/v1/create_session": {},
    "/api/v1/session_heartbeat": {"session_id": "x"},
    "/api/v1/session_info": {"session_id": "x"},
    "/api/v1/create_sampling_session": {"model_path": "xorl://default/sampler_weights/s"},
    "/api/v1/sync_inference_weights": {"model_id": None},
    "/api/v1/add_inference_endpoint": ENDPOINT,
    "/api/v1/remove_inference_endpoint": {"host": "localhost", "port": 30000},
    "/api/v1/sleep": {},
    "/api/v1/wake_up": {},
    "/sync_inference_weights": {},
    "/add_inference_endpoint": {**ENDPOINT, "sync_weights": True},
    "/remove_inference_endpoint": {"host": "localhost", "port": 30000},
    "/sleep": {},
    "/wake_up": {},
    "/generate": GENERATE,
    "/abort_request": {"rid": "x", "abort_all": False},
}
HASTY = {"poll_seconds": 0.5, "gap_seconds": 0.05}

values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.sampled_from([0, 1, -1, 2**31, 2**63, 1e308, float("nan"), float("inf"), -0.0]),
        st.floats(),
        st.text(max_size=8),
        st.sampled_from(["", "..", "a/b", "\0", "\ud800", "xorl://", "default", "weights/../x"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["data", "n", "rank", "x", "model_id"]), inner, max_size=3),
    ),
    max_leaves=6,
)


def places(value, here=()):
    """Paths of all parts of a JSON value."""
    yield here
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    for key, entry in items:
        yield from places(entry, (*here, key))


@st.composite
def bodies(draw, valid):
    """A valid body in which something was replaced, left out or added."""
    body = copy.deepcopy(valid)
    for _ in range(draw(st.integers(0, 2))):
        where = draw(st.sampled_from(list(places(body))))
        if not where:
            if draw(st.integers(0, 9)) == 0:
                return draw(values)
            body[draw(st.sampled_from(["model_id", "seq_id", "x"]))] = draw(values)
            continue
        parent = body
        for key in where[:-1]:
            parent = parent[key]
        if draw(st.booleans()):
            parent[where[-1]] = draw(values)
        else:
            del parent[where[-1]]
    return body


def test_every_route_is_fuzzed(api):
    paths = api.http.get("/openapi.json").json()["paths"]
    assert {path for path, methods in paths.items() if "post" in methods} == set(VALID)


def fuzz(api, path, count):
    limits = settings(
        max_examples=count,
        suppress_health_check=list(HealthCheck),
        database=None,
    )

    @limits
    @given(bodies(VALID[path]))
    def check(body):
        text = json.dumps(body)
        headers = {"Content-Type": "application/json"}
        answer = api.http.post(path, content=text, headers=headers)
        assert answer.status_code in (200, 400, 404, 409), (answer.status_code, text, answer.text)
        result = answer.json()
        if isinstance(result, dict) and "request_id" in result and answer.status_code == 200:
            final = api.fetch(result["request_id"])
            assert final.get("category") != "unknown", (final, text)

    check()


@pytest.mark.parametrize("path", sorted(VALID))
def test_bodies_that_are_almost_right(start, path):
    api = start(**HASTY)
    fuzz(api, path, 15)
    assert_it_works(api)


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(VALID))
def test_many_bodies_that_are_almost_right(start, path):
    api = start(**HASTY)
    fuzz(api, path, 400)
    assert_it_works(api)


def assert_it_works(api):
    api.call("unload_model", model_id="default")
    api.create()
    api.call("forward_backward", seq_id=1, forward_backward_input=gradient())
    assert api.call("optim_step", seq_id=2, adam_params=ADAM)["metrics"]["step"] == 1
    assert api.ask("/generate", **GENERATE)


def test_queries_and_unknown_routes(api):
    for query in ("limit=-1", "limit=x", "offset=1e9", f"limit={'9' * 400}", quote("\0")):
        assert api.http.get(f"/api/v1/training_runs?{query}").status_code in (200, 400)
    for path in ("/api/v1/nothing", "/../etc/passwd", "/%2e%2e/x", "/docs"):
        assert api.http.get(path).status_code == 404
    assert api.http.get("/generate").status_code == 405
