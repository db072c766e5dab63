"""``xorl-lab serve`` as a process: starting, being killed at, and stopping."""

import json
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest

from tests.server.support import ADAM, LORA, Api, gradient, weights
from xorl_lab.client import ServiceClient
from xorl_lab.types import Datum, ModelInput


def checkpoints(home, model_id="default"):
    folder = home / "checkpoints" / model_id / "weights"
    return sorted(p.name for p in folder.glob("*")) if folder.is_dir() else []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_server_saves_what_is_unsaved(spawn, http, tmp_path, number):
    server = spawn()
    assert server.wait_ready().startswith("serving tiny at http://127.0.0.1:")
    api = Api(http(server.url))
    api.create("a")
    api.create("saved")
    for model in ("a", "saved"):
        api.send("forward_backward", model_id=model, seq_id=1, forward_backward_input=gradient())
        api.send("optim_step", model_id=model, seq_id=2, adam_params=ADAM)
    api.call("save_weights", model_id="saved", seq_id=3, path="mine")
    # Still queued when the signal comes: finished all the same.
    for seq in range(3, 23, 2):
        body = gradient((1, 2, 3), (4, 5, 6))
        api.send("forward_backward", model_id="a", seq_id=seq, forward_backward_input=body)
        api.send("optim_step", model_id="a", seq_id=seq + 1, adam_params=ADAM)
    started = time.monotonic()
    assert server.stop(number) == 0, "".join(server.errors)
    assert time.monotonic() - started < 20
    assert "Traceback" not in "".join(server.errors)
    (name,) = checkpoints(tmp_path, "a")
    assert name.startswith("shutdown-")
    state = json.loads((tmp_path / f"checkpoints/a/weights/{name}/state.json").read_text())
    assert state["steps"] == 11
    assert checkpoints(tmp_path, "saved") == ["mine"]


def test_no_save(spawn, http, tmp_path):
    server = spawn("--no-save")
    server.wait_ready()
    api = Api(http(server.url))
    api.create()
    api.call("forward_backward", seq_id=1, forward_backward_input=gradient())
    api.call("optim_step", seq_id=2, adam_params=ADAM)
    assert server.stop() == 0
    assert checkpoints(tmp_path) == []


def test_both_ports_serve_generate_and_a_taken_port_is_a_line_in_words(spawn, http):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = spawn("--port", "0", "--sampler-port", str(port))
    assert f"its sampler at http://127.0.0.1:{port}" in server.wait_ready()
    for url in (server.url, f"http://127.0.0.1:{port}"):
        ask = {"input_ids": [1], "sampling_params": {"max_new_tokens": 2, "seed": 1}}
        assert len(Api(http(url)).ask("/generate", **ask)["output_ids"]) == 2
    added = Api(http(server.url)).ask("/add_inference_endpoint", host="localhost", port=port)
    assert "embedded" in added["message"]
    second = spawn("--port", str(port), "--sampler-port", "0")
    assert second.stop(0) == 1
    assert f"127.0.0.1:{port} cannot be listened on" in "".join(second.errors)
    assert len("".join(second.errors).splitlines()) == 1
    assert server.stop() == 0


def test_the_token_comes_from_the_environment(spawn, http):
    server = spawn(environment={"XORL_API_KEY": "secret"})
    server.wait_ready()
    client = http(server.url)
    assert client.get("/v1/models").status_code == 401
    assert client.get("/v1/models", headers={"Authorization": "Bearer secret"}).is_success
    assert server.stop() == 0
    open_to_all = spawn("--host", "0.0.0.0")
    assert open_to_all.stop(0) == 1
    assert "--token" in "".join(open_to_all.errors)


VICTIM = """
    import httpx, sys, time
    sys.path.insert(0, {root!r})
    from tests.server.support import Api, gradient
    api = Api(httpx.Client(base_url={url!r}, trust_env=False))
    api.create()
    data = [(i, i + 1, i + 2, i + 3) for i in range(1, 40)]
    first = api.send("forward_backward", seq_id=1, forward_backward_input=gradient(*data))
    print("sent", flush=True)
    api.fetch(first)
    time.sleep(60)
"""


def test_a_client_that_is_killed_mid_call_leaves_nothing_behind(spawn, http, tmp_path, root):
    server = spawn()
    server.wait_ready()
    code = textwrap.dedent(VICTIM).format(root=str(root), url=server.url)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as victim:
        assert victim.stdout.readline() == b"sent\n"
        victim.kill()
    api = Api(http(server.url))
    api.create()
    api.call("forward_backward", seq_id=1, forward_backward_input=gradient((1, 2, 3)))
    step = api.call("optim_step", seq_id=2, adam_params=ADAM)
    assert step["metrics"]["valid_tokens"] == 2
    served = api.call("save_weights", seq_id=3, path="end")["path"]

    home = tmp_path / "in-process"
    client = ServiceClient(home=home).create_lora_training_client("tiny", 4, seed=LORA["seed"])
    data = [Datum(ModelInput.from_ints((1, 2, 3)), {"labels": [1, 2, 3]})]
    client.forward_backward(data, "causallm_loss")
    client.optim_step(ADAM)
    expected = weights(home, client.save_state("end").result().path)
    assert weights(tmp_path, served) == expected
    assert server.stop() == 0
