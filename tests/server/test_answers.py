"""Answers: always valid JSON, errors in the protocol's words, waiting that ends."""

import json
import math
import pickle
import time

from tests.server.support import ADAM, gradient
from xorl_lab.errors import CheckpointError, ConfigError, DataError, EngineError
from xorl_lab.server.wire import error_json, to_json


def strict(text):
    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_numbers_that_json_lacks_become_null_and_are_named():
    odd = {"metrics": {"a": math.nan, "b": 1.0}, "loss_fn_outputs": [{"x": [1.0, -math.inf]}]}
    clean = strict(to_json({**odd, "info": {"warnings": ["first"]}}))
    assert clean["metrics"] == {"a": None, "b": 1.0}
    assert clean["loss_fn_outputs"] == [{"x": [1.0, None]}]
    first, second = clean["info"]["warnings"]
    assert first == "first"
    assert "metrics.a, loss_fn_outputs[0].x[1]" in second
    many = strict(to_json({"x": [math.nan] * 100}))
    assert "and 90 more" in many["info"]["warnings"][0]


def test_nan_in_a_result_over_http(api, monkeypatch):
    api.create()
    session = api.lab.models.find("default").live
    real = session.trained.optim_step

    def odd(adam):
        response = real(adam)
        response.metrics["grad_norm"] = math.nan
        return response

    monkeypatch.setattr(session.trained, "optim_step", odd)
    api.call("forward_backward", seq_id=1, forward_backward_input=gradient())
    request_id = api.send("optim_step", seq_id=2, adam_params=ADAM)
    api.fetch(request_id)
    text = api.post("/api/v1/retrieve_future", request_id=request_id).text
    answer = strict(text)
    assert answer["metrics"]["grad_norm"] is None
    assert "metrics.grad_norm" in answer["info"]["warnings"][0]


def test_categories_of_errors():
    user = (ConfigError("x"), DataError("x"), CheckpointError("checkpoint.exists", "x"))
    assert {error_json(e)["category"] for e in user} == {"user"}
    assert error_json(EngineError("x"))["category"] == "server"
    assert error_json(ValueError("secret"))["category"] == "unknown"
    assert "secret" not in error_json(pickle.PicklingError("secret"))["error"]
    assert error_json(user[2])["error"].startswith("checkpoint.exists: ")


def test_an_answer_that_is_not_there_yet(start):
    api = start(poll_seconds=0.05, gap_seconds=3.0)
    api.create()
    waits = api.send("forward", seq_id=5, forward_input=gradient())
    started = time.monotonic()
    answer = api.ask("/api/v1/retrieve_future", request_id=waits)
    assert answer["type"] == "try_again"
    assert 0.04 < time.monotonic() - started < 2.5
    assert "error" in api.fetch(waits)


def test_an_unknown_request(api):
    answer = api.ask("/api/v1/retrieve_future", request_id="req-nobody")
    assert answer["category"] == "user"
    assert "no such request" in answer["error"]


def test_a_server_that_is_being_stopped_takes_nothing_on(api):
    api.create()
    api.lab.models.closing = True
    for path, body in {
        "/api/v1/forward": {"seq_id": 1, "forward_input": gradient()},
        "/api/v1/create_model": {"base_model": "tiny", "lora_config": {"rank": 4}},
        "/generate": {"input_ids": [1]},
        "/sync_inference_weights": {},
    }.items():
        assert api.post(path, **body).status_code == 503, path
    assert api.http.get("/health").json()["status"] == "stopping"
