"""A server's process: started, waited for, and never left behind.  Stand-ins, no SGLang."""

import json
import os
import signal
import subprocess
import sys
import threading
from http.server import HTTPServer
from pathlib import Path

import psutil
import pytest

from tests.samplers.standin import Health
from tests.samplers.support_processes import left, lives, standin, unready
from xorl_lab.errors import ConfigError, SamplerError
from xorl_lab.samplers.sglang import process as sglang_process


@pytest.fixture(autouse=True)
def _nothing_is_left():
    yield
    for server in list(sglang_process.RUNNING):
        if server.name == "a stand-in":
            server.stop()


def scratch(server) -> Path:
    return Path(server._text().split("\nin ")[1].split("\n")[0])


def test_it_answers_and_is_gone_when_stopped(tmp_path):
    said: list[str] = []
    with unready("family", tmp_path) as server:
        server.wait_ready(60, said.append)
        family, folder = server.processes(), scratch(server)
        assert server.alive
        assert len(family) == 4, "supervisor, server, its worker and what that left behind"
        assert folder.is_dir()
        assert server.url in repr(server)
        assert "running" in repr(server)
    assert left(family) == []
    assert not folder.exists()
    assert not server.alive
    assert server.processes() == []
    assert "ended with status" in repr(server)
    assert "Load weight begin" in server.log.read_text(), "the log is kept"
    assert "PYTHONPATH is None" in server.log.read_text(), "it would find modules of ours"
    assert said[-1].startswith(f"ready at {server.url}")
    server.stop()
    server.stop()


def test_the_error_of_one_that_dies_has_the_end_of_its_log(tmp_path):
    server = unready("dies", tmp_path)
    with pytest.raises(SamplerError) as caught:
        server.wait_ready(60, lambda _: None)
    said = str(caught.value)
    assert "ended with status 3" in said
    assert "memory is short" in said
    assert str(server.log) in said
    assert said.endswith("line 99\ntorch.OutOfMemoryError: out of memory")
    assert "line 50" not in said
    assert not caught.value.retryable


@pytest.mark.parametrize("behaviour", ["silent", "unwell"])
def test_one_that_never_answers_is_an_error(tmp_path, behaviour):
    server = unready(behaviour, tmp_path)
    with pytest.raises(SamplerError, match="has not answered within 1 s: pass a longer timeout"):
        server.wait_ready(1, lambda _: None)
    family = server.processes()
    server.stop()
    assert left(family) == []


def test_another_server_on_the_port_is_not_taken_for_ours(tmp_path):
    other = HTTPServer(("127.0.0.1", 0), Health)
    thread = threading.Thread(target=other.serve_forever)
    thread.start()
    try:
        server = unready("silent", tmp_path, port=other.server_port)
        with pytest.raises(SamplerError, match="has not answered"):
            server.wait_ready(1, lambda _: None)
        with pytest.raises(ConfigError, match=f"port {other.server_port} of 127.0.0.1"):
            sglang_process.free_port(other.server_port)
    finally:
        other.shutdown()
        thread.join()
        other.server_close()


@pytest.mark.parametrize("port", [-1, 70000])
def test_a_port_that_there_is_not(port):
    with pytest.raises(ConfigError, match=f"port {port} of"):
        sglang_process.free_port(port)


def test_a_log_goes_on_and_an_error_is_of_the_last_server(tmp_path):
    unready("dies", tmp_path)._process.wait()
    server = standin("healthy", tmp_path)
    assert "out of memory" in server.log.read_text()
    assert "out of memory" not in server.tail()


def test_one_that_cannot_be_started(tmp_path):
    (tmp_path / "server.log").mkdir()
    with pytest.raises(SamplerError, match="could not be started"):
        unready("healthy", tmp_path)


def test_one_that_does_not_listen_to_asking_is_killed(tmp_path):
    server = standin("stubborn", tmp_path)
    family = server.processes()
    server.stop()
    assert left(family) == []
    assert "ended with status 137" in repr(server)


def test_several_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(sglang_process, "RUNNING", set())  # without the one that tests share
    first, second = standin("healthy", tmp_path / "a"), standin("healthy", tmp_path / "b")
    assert first.url != second.url
    first.stop()
    assert second.alive
    sglang_process.stop_all()
    assert not second.alive
    assert not {first, second} & sglang_process.RUNNING


def test_one_whose_supervisor_is_killed_ends_too(tmp_path):
    server = standin("healthy", tmp_path)
    family = server.processes()
    family[0].kill()
    assert left(family) == []
    assert not server.alive
    server.stop()


def test_one_that_ends_by_itself_takes_its_workers_along(tmp_path):
    server = standin("family", tmp_path)
    family = server.processes()
    family[1].kill()
    assert left(family) == []
    assert not server.alive
    assert "137" in repr(server)


class Owner:
    """A process that has a server, and what it said of it."""

    def __init__(self, root: Path, folder: Path, end: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.samplers.owner", end, str(folder)],
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.alive, self.family = self.state()

    def state(self) -> tuple[bool, list[psutil.Process]]:
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read()
        alive, pids = json.loads(line)
        return alive, [psutil.Process(pid) for pid in pids]

    def go_on(self) -> None:
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            stream.close()
        for process in self.family:
            if lives(process):
                process.kill()


@pytest.fixture
def own(root, tmp_path):
    """Start an owner that ends in some way."""
    owners: list[Owner] = []

    def build(end: str) -> Owner:
        owners.append(Owner(root, tmp_path, end))
        return owners[-1]

    yield build
    for owner in owners:
        owner.close()


@pytest.mark.parametrize("end", ["killed", "terminated", "raised", "at once", "left", "forked"])
def test_it_ends_with_the_process_that_started_it(own, end):
    owner = own(end)
    assert owner.alive
    assert len(owner.family) == 4
    assert all(lives(process) for process in owner.family)
    owner.go_on()
    assert left(owner.family) == []
    owner.process.wait(60)


def test_it_ends_with_the_process_even_if_a_fork_of_that_lives_on(own):
    owner = own("outlived")
    others = [
        process
        for process in psutil.Process(owner.process.pid).children(recursive=True)
        if process not in owner.family
    ]
    assert len(others) == 2
    try:
        owner.go_on()
        assert left(owner.family) == []
        assert all(lives(process) for process in others), "they had no part in it"
    finally:
        for process in others:
            process.kill()


def test_an_interrupt_of_the_notebook_does_not_reach_it(own):
    owner = own("interrupted")
    assert owner.process.stdout.readline() == "ready\n"
    os.killpg(owner.process.pid, signal.SIGINT)
    alive, family = owner.state()
    assert alive
    assert family == owner.family
    owner.go_on()
    assert left(family) == []
