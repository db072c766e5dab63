"""The one real SGLang server that all tests share, where an environment with SGLang is there."""

import os

import pytest


def required() -> bool:
    """Whether a machine without SGLang is a failure: continuous integration installs it."""
    return os.environ.get("CI") == "true"


def need_sglang() -> None:
    """Skip the test, or fail in continuous integration, if no environment has SGLang."""
    from xorl_lab.samplers.sglang.install import HOW, interpreter

    if interpreter() is None:
        if required():
            pytest.fail(f"no environment with SGLang: {HOW}", pytrace=False)
        pytest.skip(f"needs a real SGLang server: {HOW}")


@pytest.fixture(scope="session")
def sglang_server(tmp_path_factory):
    """A server of ``tiny`` in float32 on a CPU, with adapters of rank 32 at most.

    It is shared: give adapters names of your own, unload them, bring back weights that you change,
    and do not stop it.  Tests that break a server start one of their own.
    """
    need_sglang()
    from xorl_lab.samplers.sglang.server import SGLangServer

    log = tmp_path_factory.mktemp("sglang") / "server.log"
    settings = {"dtype": "float32", "device": "cpu", "max_rank": 32, "log": log}
    with SGLangServer.start("tiny", **settings, progress=None) as server:
        yield server


@pytest.fixture(autouse=True)
def still_served(request):
    """Say why, where the server that all tests share has ended in an earlier one."""
    if "sglang_server" in request.fixturenames:
        server = request.getfixturevalue("sglang_server")
        if not server.alive:
            pytest.fail(f"it ended in an earlier test: {server}\n{server.tail(100)}", pytrace=False)
