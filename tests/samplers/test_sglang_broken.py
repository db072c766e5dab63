"""A real SGLang that is killed while it answers, and while it takes weights."""

import threading
import time
from urllib.parse import urlsplit

import pytest

import xorl_lab as xl
from tests.sglang import need_sglang
from xorl_lab.client.remote_sampling import RemoteSource
from xorl_lab.engine import engine as engines
from xorl_lab.errors import SamplerError
from xorl_lab.samplers.sglang.controls import SGLang
from xorl_lab.samplers.sglang.server import SGLangServer

TEXT = [5, 6, 7, 100, 33, 248]


def start(port: int | None = None) -> SGLangServer:
    return SGLangServer.start(
        "tiny", dtype="float32", device="cpu", max_rank=8, port=port, progress=None
    )


def kill(server: SGLangServer) -> None:
    """As the kernel does when memory is short."""
    for process in server.processes():
        process.kill()


def waiting() -> list[str]:
    """Threads that wait for an answer, after a while at most."""
    end, names = time.monotonic() + 30, [""]
    while names and time.monotonic() < end:
        time.sleep(0.1)
        names = [t.name for t in threading.enumerate() if t.name.startswith("xorl-lab sample")]
    return names


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_server_that_is_killed_is_named_and_the_next_one_is_used():
    need_sglang()
    server = start()
    port = urlsplit(server.url).port
    source = RemoteSource(server.url, "", None, 300.0)
    sampler = xl.SamplingClient.of(source)
    control = SGLang(server.url, timeout=300.0)
    prompts = [xl.ModelInput.from_ints(TEXT)] * 16
    said = control.score(TEXT)

    batch = sampler.sample_batch(prompts, xl.SamplingParams(max_tokens=480), num_samples=2)
    time.sleep(0.5)
    kill(server)
    result = batch.result(120)
    assert result.cancelled == []
    assert result.failed
    for _, error in result.failed:
        assert isinstance(error, SamplerError)
        assert error.retryable
        assert "did not answer" in str(error)
    with pytest.raises(SamplerError, match="check that the server runs"):
        control.connect()
    server.stop()

    server = start(port)
    assert len(sampler.sample(prompts[0], xl.SamplingParams(max_tokens=3)).result(120).tokens) == 3
    assert control.connect().weight_version == "default"

    weights = engines.get("tiny", "cpu", "float32").base.state_dict()
    weights.pop("lm_head.weight")

    def tensors():
        for i, pair in enumerate(weights.items()):
            if i == 9:
                kill(server)
            yield pair

    with pytest.raises(SamplerError, match="undefined until weights are sent again") as caught:
        control.update_from_tensors(tensors(), "v1", 40_000)
    assert caught.value.retryable
    server.stop()

    server = start(port)
    control.update_from_tensors(weights.items(), "v1", 40_000)
    control.flush_cache()
    assert control.weight_version() == "v1"
    assert control.score(TEXT) == said
    assert len(sampler.sample(prompts[0], xl.SamplingParams(max_tokens=3)).result(120).tokens) == 3
    server.stop()
    control.close()
    source.close()
    assert waiting() == []
