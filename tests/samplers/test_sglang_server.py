"""Starting a server: its model, its port, its end.  Real ones where SGLang is installed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import xorl_lab as xl
from tests.closeness import assert_close
from tests.samplers.support_processes import STANDIN, left, lives, variables
from tests.sglang import need_sglang
from xorl_lab.engine import models
from xorl_lab.errors import ConfigError, SamplerError
from xorl_lab.samplers import sglang_models, sglang_plan, sglang_process, sglang_server
from xorl_lab.samplers.sglang_server import SGLangServer


@pytest.fixture
def pretend(monkeypatch, tmp_path):
    """From now on a server is a stand-in that behaves like this."""

    def put(behaviour: str) -> None:
        def command(plan, port):
            file = str(tmp_path / "file")
            return [sys.executable, str(STANDIN), behaviour, str(port), file]

        monkeypatch.setattr(sglang_server.sglang_install, "require", lambda python: sys.executable)
        monkeypatch.setattr(sglang_plan, "command", command)
        monkeypatch.setattr(sglang_plan, "environment", lambda plan, scratch: variables(scratch))

    return put


@pytest.mark.parametrize("name", ["tiny", "tiny-moe"])
def test_a_model_made_in_memory_is_written_once(empty_home, name):
    served = sglang_models.served(name)
    loaded = models.load(name, device="cpu", dtype="float32")
    assert served.folder.parent == empty_home / "models"
    assert served.context_length == 512
    assert served.experts == (name == "tiny-moe")
    again = AutoModelForCausalLM.from_pretrained(served.folder, dtype="float32")
    for key, value in loaded.model.state_dict().items():
        assert_close(again.state_dict()[key], value, atol=0, rtol=0)
    text = "Größe 3 ≠ 4"
    assert AutoTokenizer.from_pretrained(served.folder).encode(text) == list(text.encode())
    before = served.folder.stat().st_mtime_ns
    assert sglang_models.served(name) == served
    assert served.folder.stat().st_mtime_ns == before
    assert [p.name for p in (empty_home / "models").iterdir()] == [served.folder.name]


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(ConfigError, match="holds no model"):
        sglang_models.served(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="an adapter, which a server loads beside its model"):
        sglang_models.served(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="has no tokenizer"):
        sglang_models.served(tmp_path)
    with pytest.raises(ConfigError, match="neither a folder nor in the local Hugging Face cache"):
        sglang_models.served("no-such-model")


def test_a_start_shows_how_far_it_is_and_keeps_its_log(pretend, empty_home):
    pretend("healthy")
    said: list[str] = []
    with SGLangServer.start("tiny", progress=said.append) as server:
        assert server.alive
        assert server.log.parent == empty_home / "logs"
        assert server.plan.max_rank == 32
    assert not server.alive
    assert server.log.exists()
    assert said[0].startswith(f"starting SGLang on the CPU; its log is {server.log}")
    assert said[-1].startswith(f"ready at {server.url}")


def test_a_start_that_fails_leaves_nothing(pretend, empty_home):
    pretend("dies")
    with pytest.raises(SamplerError, match="ended with status 3"):
        SGLangServer.start("tiny")
    assert not sglang_process.RUNNING


def test_an_interrupt_while_it_starts_ends_it(pretend, empty_home):
    pretend("unwell")
    family: list[psutil.Process] = []

    def interrupt(line):
        if line.startswith("reading the weights"):
            (server,) = sglang_process.RUNNING
            family.extend(server.processes())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        SGLangServer.start("tiny", progress=interrupt)
    assert len(family) >= 2
    assert left(family) == []
    assert not sglang_process.RUNNING


def test_a_port_that_was_taken_meanwhile_is_exchanged(pretend, empty_home):
    pretend("taken")
    said: list[str] = []
    with SGLangServer.start("tiny", progress=said.append) as server:
        assert server.alive
    assert sum(line.startswith("starting") for line in said) == 2


def test_a_port_that_was_asked_for_is_not_exchanged(pretend, empty_home):
    pretend("taken")
    with pytest.raises(SamplerError, match="Address already in use"):
        SGLangServer.start("tiny", port=sglang_process.free_port(None))


def test_old_logs_are_cleared_away(empty_home):
    for number in range(30):
        sglang_server.new_log("tiny", number).touch()
    assert len(list((empty_home / "logs").iterdir())) == sglang_server.LOGS_KEPT


def generate(url: str, ids: list[int]) -> dict:
    import httpx

    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
    with httpx.Client(trust_env=False, timeout=60) as client:
        answer = client.post(f"{url}/generate", json=body)
    answer.raise_for_status()
    return answer.json()


def greedy(name: str, ids: list[int]) -> list[int]:
    """What the model itself says."""
    client = xl.ServiceClient(device="cpu", dtype="float32").create_sampling_client(base_model=name)
    params = xl.SamplingParams(max_tokens=4, temperature=0)
    return client.sample(xl.ModelInput.from_ints(ids), params, 1).result().sequences[0].tokens


def test_a_real_server_serves_the_model(sglang_server):
    assert sglang_server.alive
    assert sglang_process.answers_health(sglang_server.port, 30)
    answer = generate(sglang_server.url, [72, 101, 108])
    assert answer["output_ids"] == greedy("tiny", [72, 101, 108])


def test_a_real_server_is_on_this_machine_alone(sglang_server):
    found = [
        taken.laddr
        for process in sglang_server.processes()
        for taken in process.net_connections("tcp")
        if taken.status == psutil.CONN_LISTEN
    ]
    assert sglang_server.port in {address.port for address in found}
    assert {address.ip for address in found} == {"127.0.0.1"}


OWNER = """
import json, sys
from xorl_lab.samplers.sglang_server import SGLangServer

def say(line):
    print(json.dumps(line), flush=True)

server = SGLangServer.start(sys.argv[1], device="cpu", dtype="float32", progress=say)
say([server.url, [process.pid for process in server.processes()]])
sys.stdin.readline()
"""


class Notebook:
    """A kernel that has started a real server."""

    def __init__(self, root: Path, home: Path) -> None:
        need_sglang()
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER, "tiny"],
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root), "XORL_LAB_HOME": str(home)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def read_until(self, wanted: str) -> str:
        """Read what it says until a line begins like this."""
        while line := self.process.stdout.readline():
            said = json.loads(line)
            if isinstance(said, list) or said.startswith(wanted):
                return said
        raise AssertionError("it ended")

    def below(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def notebook(root, tmp_path):
    started: list[Notebook] = []

    def build() -> Notebook:
        started.append(Notebook(root, tmp_path))
        return started[-1]

    yield build
    for one in started:
        if one.process.returncode is None:
            one.kill()


def test_no_process_of_a_real_server_outlives_a_killed_notebook(notebook):
    killed = notebook()
    url, _ = killed.read_until("the end")
    family = killed.below()
    assert len(family) >= 4, "supervisor, server, scheduler, detokenizer"
    assert all(lives(process) for process in family)
    assert len(generate(url, [1, 2, 3])["output_ids"]) == 4
    killed.kill()
    assert left(family) == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("moment", ["starting SGLang", "loading SGLang", "laying out memory"])
def test_a_notebook_killed_while_a_real_server_starts_leaves_nothing(notebook, moment):
    killed = notebook()
    killed.read_until(moment)
    family = killed.below()
    assert family
    killed.kill()
    assert left(family) == []
    again = notebook()
    url, _ = again.read_until("the end")
    assert len(generate(url, [1, 2, 3])["output_ids"]) == 4


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_real_server_of_an_exported_full_checkpoint(tmp_path):
    need_sglang()
    service = xl.ServiceClient(home=tmp_path, device="cpu", dtype="float32")
    client = service.create_training_client("tiny")
    data = [xl.Datum(xl.ModelInput.from_ints([1, 2, 3, 4]), {"labels": [1, 2, 3, 4]})]
    for _ in range(5):
        client.forward_backward(data).result()
        client.optim_step(xl.AdamParams(learning_rate=1e-2)).result()
    client.save_weights_for_sampler("served").result()
    (folder,) = (p.parent for p in tmp_path.rglob("served/model.safetensors"))
    sampler = client.save_weights_and_get_sampling_client()
    params = xl.SamplingParams(max_tokens=4, temperature=0)
    expected = sampler.sample(xl.ModelInput.from_ints([1, 2]), params, 1).result().sequences[0]
    with SGLangServer.start(folder, max_rank=None) as server:
        assert generate(server.url, [1, 2])["output_ids"] == expected.tokens
    assert expected.tokens != greedy("tiny", [1, 2])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["SmolLM2-135M-Instruct", "tiny-moe"])
def test_a_real_server_of_our_other_models(name):
    need_sglang()
    ids = [72, 101, 108, 108, 111]
    with SGLangServer.start(name, experts=name == "tiny-moe") as server:
        assert generate(server.url, ids)["output_ids"] == greedy(name, ids)
