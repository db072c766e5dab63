"""Starting a server: its model, its port, its log, its end.  Stand-ins, no SGLang."""

import sys

import psutil
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.closeness import assert_close
from tests.samplers.support_processes import STANDIN, left, variables
from xorl_lab.engine import models
from xorl_lab.errors import ConfigError, SamplerError
from xorl_lab.samplers.sglang import models as sglang_models
from xorl_lab.samplers.sglang import plan as sglang_plan
from xorl_lab.samplers.sglang import process as sglang_process
from xorl_lab.samplers.sglang import server as sglang_server
from xorl_lab.samplers.sglang.server import SGLangServer


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


def test_a_start_that_fails_leaves_nothing(pretend, empty_home, capsys):
    pretend("dies")
    others = set(sglang_process.RUNNING)  # the one that tests share
    with pytest.raises(SamplerError, match="ended with status 3"):
        SGLangServer.start("tiny")
    assert set(sglang_process.RUNNING) == others
    said = capsys.readouterr()
    assert said.err.startswith("starting SGLang on the CPU; its log is ")
    assert said.out == ""


def test_a_start_can_be_silent(pretend, empty_home, capsys):
    pretend("healthy")
    SGLangServer.start("tiny", progress=None).stop()
    assert capsys.readouterr() == ("", "")


def test_an_interrupt_while_it_starts_ends_it(pretend, empty_home):
    pretend("unwell")
    others = set(sglang_process.RUNNING)
    family: list[psutil.Process] = []

    def interrupt(line):
        if line.startswith("reading the weights"):
            (server,) = set(sglang_process.RUNNING) - others
            family.extend(server.processes())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        SGLangServer.start("tiny", progress=interrupt)
    assert len(family) >= 2
    assert left(family) == []
    assert set(sglang_process.RUNNING) == others


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
