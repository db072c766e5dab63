"""Real servers of their own: notebooks that are killed, other models, an exported checkpoint."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import xorl_lab as xl
from tests.samplers.support_processes import left, lives
from tests.samplers.support_sglang import generate, greedy
from tests.sglang import need_sglang
from xorl_lab.samplers.sglang.install import VARIABLE, interpreter
from xorl_lab.samplers.sglang.server import SGLangServer
from xorl_lab.samplers.sglang.supervisor import shared_memory

OWNER = """
import json, sys
from xorl_lab.samplers.sglang.server import SGLangServer

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
        places = {"XORL_LAB_HOME": str(home), VARIABLE: str(interpreter())}
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER, "tiny"],
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root), **places},
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


@pytest.mark.timeout(600)
def test_no_process_of_a_real_server_outlives_a_killed_notebook(notebook):
    killed = notebook()
    url, _ = killed.read_until("the end")
    family = killed.below()
    assert len(family) >= 4, "supervisor, server, scheduler, detokenizer"
    assert all(lives(process) for process in family)
    assert len(generate(url, [1, 2, 3])["output_ids"]) == 4
    shared = shared_memory(family)
    assert all(path.exists() for path in shared)
    killed.kill()
    assert left(family) == []
    assert [path for path in shared if path.exists()] == []


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
