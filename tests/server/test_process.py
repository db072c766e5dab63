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
from xorl_lab.errors import ConfigError
from xorl_lab.server import ServerSettings
from xorl_lab.server.run import listen
from xorl_lab.types import Datum, ModelInput


def checkpoints(home, model_id="default"):
    folder = home / "checkpoints" / model_id / "weights"
    return sorted(p.name for p in folder.glob("*")) if folder.is_dir() else []


def test_both_ports_signals_and_the_shutdown_checkpoint(spawn, http, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {"XORL_API_KEY": "secret"}
    server = spawn("--port", "0", "--sampler-port", str(port), environment=environment)
    line = server.wait_ready()
    assert line.startswith("serving tiny at http://127.0.0.1:")
    assert f"its sampler at http://127.0.0.1:{port}" in line
    assert http(server.url).get("/v1/models").status_code == 401
    for url in (server.url, f"http://127.0.0.1:{port}"):
        client = http(url)
        client.headers["Authorization"] = "Bearer secret"
        api = Api(client)
        ask = {"input_ids": [1], "sampling_params": {"max_new_tokens": 2, "seed": 1}}
        assert len(api.ask("/generate", **ask)["output_ids"]) == 2
        added = api.ask("/add_inference_endpoint", host="localhost", port=port)
        assert "embedded" in added["message"]
    api.create("a")
    # Still queued when the signal comes: finished all the same.
    for seq in range(1, 21, 2):
        body = gradient((1, 2, 3), (4, 5, 6))
        api.send("forward_backward", model_id="a", seq_id=seq, forward_backward_input=body)
        api.send("optim_step", model_id="a", seq_id=seq + 1, adam_params=ADAM)
    started = time.monotonic()
    assert server.stop(signal.SIGTERM) == 0, "".join(server.errors)
    assert time.monotonic() - started < 20
    assert "Traceback" not in "".join(server.errors)
    (name,) = checkpoints(tmp_path, "a")
    assert name.startswith("shutdown-")
    state = json.loads((tmp_path / f"checkpoints/a/weights/{name}/state.json").read_text())
    assert state["steps"] == 10


@pytest.mark.slow
def test_ctrl_c_and_a_taken_port(spawn):
    server = spawn()
    server.wait_ready()
    port = server.url.rsplit(":", 1)[1]
    second = spawn("--port", port, "--sampler-port", "0")
    assert second.stop(0) == 1
    assert f"127.0.0.1:{port} cannot be listened on" in "".join(second.errors)
    assert len("".join(second.errors).splitlines()) == 1
    assert server.stop(signal.SIGINT) == 0
    assert "Traceback" not in "".join(server.errors)


def test_a_taken_port_is_an_error_in_words(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for ports in ({"port": port}, {"port": 0, "sampler_port": port}):
            with pytest.raises(ConfigError, match=f"127.0.0.1:{port} cannot be listened on"):
                listen(ServerSettings(model="tiny", home=tmp_path, **ports))


@pytest.mark.parametrize("save", [True, False])
def test_only_unsaved_steps_are_saved(live, http, tmp_path, save):
    server = live(save_on_shutdown=save)
    api = Api(http(server.url))
    for model in ("unsaved", "saved", "fresh", "loaded"):
        api.create(model)
    for model in ("unsaved", "saved"):
        api.call("forward_backward", model_id=model, seq_id=1, forward_backward_input=gradient())
        api.call("optim_step", model_id=model, seq_id=2, adam_params=ADAM)
    path = api.call("save_weights", model_id="saved", seq_id=3, path="mine")["path"]
    api.call("load_weights", model_id="loaded", seq_id=1, path=path, optimizer=True)
    server.stop()
    assert [name[:9] for name in checkpoints(tmp_path, "unsaved")] == ["shutdown-"] * save
    assert checkpoints(tmp_path, "saved") == ["mine"]
    assert checkpoints(tmp_path, "fresh") == checkpoints(tmp_path, "loaded") == []


def test_what_cannot_be_finished_in_time_is_cancelled(live, http):
    server = live(drain_seconds=0.2)
    api = Api(http(server.url))
    api.create()
    body = gradient(*[tuple(range(1, 200))] * 60)
    ids = [
        api.send("forward_backward", seq_id=n, forward_backward_input=body) for n in range(1, 31)
    ]
    started = time.monotonic()
    server.stop()
    assert time.monotonic() - started < 15
    entries = [server.lab.requests.get(i) for i in ids]
    assert all(entry.done for entry in entries)
    assert "cancelled" in json.loads(entries[-1].body())["error"]


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


def test_a_client_that_is_killed_mid_call_leaves_nothing_behind(live, http, tmp_path, root):
    server = live()
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
