"""Who may ask, from where and how much; and what must not get out."""

import json

import pytest

from tests.server.support import ADAM, gradient
from xorl_lab.errors import ConfigError
from xorl_lab.server import ServerSettings

TOKEN = "correct horse"


def test_without_the_token_nothing_but_health_answers(start):
    api = start(token=TOKEN)
    paths = api.http.get("/openapi.json", headers=bearer(TOKEN)).json()["paths"]
    assert len(paths) > 25
    for path, methods in paths.items():
        for method in methods:
            for headers in ({}, bearer("wrong"), bearer(""), {"Authorization": TOKEN}):
                answer = api.http.request(method, path, headers=headers, json={})
                expected = 200 if path == "/health" else 401
                assert answer.status_code == expected, (method, path)
    assert api.http.get("/openapi.json").status_code == 401
    assert api.http.get("/v1/models", headers=bearer(TOKEN)).status_code == 200


def bearer(token):
    return {"Authorization": f"Bearer {token}"}


def test_with_a_token_any_host_name_will_do(start):
    api = start(token=TOKEN, host="0.0.0.0")
    headers = {**bearer(TOKEN), "Host": "trainer.example.com"}
    assert api.http.get("/v1/models", headers=headers).status_code == 200


def test_other_addresses_need_a_token():
    with pytest.raises(ConfigError, match="--token"):
        ServerSettings(model="tiny", host="0.0.0.0")
    with pytest.raises(ConfigError, match="token is empty"):
        ServerSettings(model="tiny", token=" ")
    with pytest.raises(ConfigError, match="port is 70000"):
        ServerSettings(model="tiny", port=70000)
    with pytest.raises(ConfigError, match="are both 6000"):
        ServerSettings(model="tiny", sampler_port=6000)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:6000", "127.0.0.1.evil.example"])
def test_a_name_that_was_rebound_to_this_machine_is_refused(api, host):
    assert api.http.get("/health", headers={"Host": host}).status_code == 421


@pytest.mark.parametrize("host", ["localhost", "localhost:6000", "127.0.0.1:1", "[::1]:6000"])
def test_loopback_names_are_served(api, host):
    assert api.http.get("/health", headers={"Host": host}).status_code == 200


def test_web_pages_of_other_sites_are_refused(api):
    for origin in ("https://evil.example", "null", "http://[broken"):
        answer = api.http.get("/health", headers={"Origin": origin})
        assert answer.status_code == 403, origin
    local = api.http.get("/health", headers={"Origin": "http://localhost:8888"})
    assert local.status_code == 200


def test_a_body_must_say_that_it_is_json(api):
    body = json.dumps({"model_id": "default"})
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        headers = {"Content-Type": kind}
        answer = api.http.post("/api/v1/unload_model", content=body, headers=headers)
        assert answer.status_code == 415


def test_huge_bodies_are_refused_while_they_arrive(start):
    api = start(max_body_bytes=1000)
    announced = api.post("/generate", text="x" * 2000)
    assert announced.status_code == 413
    sent = []

    def stream():
        for _ in range(100):
            sent.append(1)
            yield b" " * 100

    headers = {"Content-Type": "application/json"}
    for path in ("/generate", "/api/v1/forward_backward", "/api/v1/retrieve_future"):
        assert api.http.post(path, content=stream(), headers=headers).status_code == 413
    assert api.post("/generate", text="x" * 10, sampling_params={"max_new_tokens": 1}).is_success
    lying = {**headers, "Content-Length": "-5"}
    assert api.http.post("/generate", content=b"{}", headers=lying).status_code == 400


@pytest.mark.parametrize("text", ["", "{", "[]", "1", '"x"', "null", "\xff", "[" * 100_000])
def test_bodies_that_are_no_objects(api, text):
    headers = {"Content-Type": "application/json"}
    for path in ("/generate", "/api/v1/create_model", "/api/v1/optim_step"):
        content = text.encode("latin-1")
        assert api.http.post(path, content=content, headers=headers).status_code == 400


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("create_model", {"base_model": 3}),
        ("create_model", {"base_model": "tiny", "model_id": 3}),
        ("create_model", {"base_model": "tiny", "lora_config": {"rank": "32"}}),
        ("create_model", {"base_model": "tiny", "lora_config": {"rank": 0}}),
        ("forward", {"forward_input": {}, "seq_id": -1}),
        ("forward", {"forward_input": {}, "seq_id": "1"}),
        ("forward", {"forward_input": {}, "seq_id": True}),
        ("forward", {"forward_input": {}, "seq_id": 2**60}),
        ("forward_backward", {}),
        ("save_weights", {"path": 7}),
        ("retrieve_future", {"request_id": ["x"]}),
        ("training_runs", None),
    ],
)
def test_wrong_types_are_a_400_in_words(api, path, body):
    if body is None:
        answer = api.http.get("/api/v1/training_runs?limit=x")
    else:
        answer = api.post(f"/api/v1/{path}", **body)
    assert answer.status_code == 400
    assert isinstance(answer.json()["detail"], str)


def test_half_a_character_is_refused(api):
    headers = {"Content-Type": "application/json"}
    for path, body in {
        "/generate": {"text": "\ud800"},
        "/remove_inference_endpoint": {"host": "\ud800", "port": 1},
        "/api/v1/create_model": {"model_id": "\ud800", "base_model": "tiny"},
    }.items():
        answer = api.http.post(path, content=json.dumps(body), headers=headers)
        assert answer.status_code == 400
        assert "half a character" in answer.json()["detail"]


NAMES = ["../x", "..", "a/../../b", "/etc/passwd", "x\0y", "a\\b", "é", "", ".hidden", "x/" * 500]


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_names_cannot_leave_their_folder(api, tmp_path, name):
    api.create()
    before = sorted(p for p in tmp_path.parent.rglob("*") if tmp_path not in p.parents)
    for number, (path, body) in enumerate(
        [
            ("save_weights", {"path": name}),
            ("save_weights_for_sampler", {"name": name}),
            ("load_weights", {"path": name}),
            ("load_weights", {"path": f"xorl://{name}/weights/x"}),
            ("load_weights", {"path": f"xorl://default/{name}/x"}),
            ("load_weights", {"path": f"xorl://default/weights/{name}"}),
            ("load_weights", {"path": f"weights/{name}/x"}),
        ],
        1,
    ):
        result = api.call(path, seq_id=number, **body)
        assert result["category"] == "user", (path, body, result)
    for path in ("create_model", "unload_model", "list_checkpoints", "get_info", "kill_session"):
        answer = api.post(f"/api/v1/{path}", model_id=name, base_model="tiny")
        assert answer.status_code == 400, path
    deleted = api.ask("/api/v1/delete_checkpoint", model_id=name, checkpoint_id="weights/x")
    assert not deleted["success"]
    for which in (name, f"weights/{name}", f"weights/{name}/{name}", f"xorl://{name}/weights/x"):
        deleted = api.ask("/api/v1/delete_checkpoint", checkpoint_id=which)
        assert not deleted["success"]
    info = api.post("/api/v1/weights_info", xorl_path=f"xorl://{name}/weights/x")
    assert info.status_code in (400, 404)
    assert sorted(p for p in tmp_path.parent.rglob("*") if tmp_path not in p.parents) == before


def test_failures_of_ours_show_no_insides(api, monkeypatch):
    def broken(*_, **__):
        raise ZeroDivisionError("secret")

    api.create()
    session = api.lab.models.find("default").live
    monkeypatch.setattr(session.trained, "optim_step", broken)
    api.call("forward_backward", seq_id=1, forward_backward_input=gradient())
    failed = api.call("optim_step", seq_id=2, adam_params=ADAM)
    assert failed["category"] == "unknown"
    assert "secret" not in json.dumps(failed)
    monkeypatch.setattr(api.lab.inference.endpoints, "listed", broken)
    answer = api.http.get("/list_inference_endpoints")
    assert answer.status_code == 500
    assert set(answer.json()) == {"detail"}
    assert "secret" not in answer.text
    assert "Traceback" not in answer.text
