"""xorl_client 0.1.0, unmodified, with ``xorl-lab serve`` and a real SGLang on port 30000.

The documents' RL loop trains full weights and sends them; their "Save LoRA Weights for Inference"
loads an adapter.  Only the model's name is replaced, and the number of steps given.
"""

import os
import sys

import pytest

from tests.seeds.cut import folder
from tests.seeds.outside import roomy, run_by
from tests.server.test_xorl_client import MODEL, client_python, cut, free
from tests.sglang import need_sglang
from xorl_lab.recipes.tasks import HAPPY

__all__ = ["client_python"]

pytestmark = [
    pytest.mark.xdist_group("sglang"),  # test_xorl_client.py takes the same ports
    pytest.mark.timeout(600),
]
RUNNER = os.path.join(os.path.dirname(__file__), "seed_sglang_runner.py")
CHANGED = [
    ("learning_rate=1e-6", "learning_rate=3e-5"),
    ("max_tokens=512", "max_tokens=12"),
    ("timeout=30.0", "timeout=600.0"),
]
"""What else is changed where a real model is to learn in a few minutes on a CPU."""
TOPICS = ("a dog", "the sea", "a birthday", "music")
GROUP = 8
FIRST, LAST = "# Register inference endpoint", "})"


def registration(code):
    """The lines of the loop that register the sampler."""
    lines = code.splitlines()
    begin = lines.index(FIRST)
    return "\n".join(lines[begin : lines.index(LAST, begin) + 1]) + "\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The tiny model as a folder, with room for the 512 tokens that the documents sample."""
    return roomy(tmp_path_factory.mktemp("model") / "tiny-model")


@pytest.fixture(scope="module")
def sglang(model, tmp_path_factory):
    """A real server on the documents' port."""
    need_sglang()
    from xorl_lab.samplers.sglang.server import SGLangServer

    assert free(30000), "port 30000, which the documents name, is in use: free it"
    log = tmp_path_factory.mktemp("sglang") / "server.log"
    with SGLangServer.start(
        model, max_rank=32, dtype="float32", device="cpu", port=30000, log=log
    ) as server:
        yield server


def run(client_python, tmp_path, plan):
    """What the blocks of a plan find."""
    return run_by(client_python, RUNNER, tmp_path, plan, 1500)


def near(values):
    return pytest.approx(values, abs=1e-4)


def test_the_rl_loop_trains_full_weights_and_sends_them(
    live, tmp_path, sglang, model, client_python
):
    folder()
    assert free(6000), "port 6000, which the documents name, is in use: free it"
    code = cut(folder(), "rl")
    assert code.count(MODEL) == 1
    live(model=model, full=True, port=6000, sampler_port=0)
    rl = run(client_python, tmp_path, {"rl": code.replace(MODEL, model)})["rl"]
    assert rl["steps"] == 2
    # The first rollouts come from the weights that the server was started with, the second from
    # those that were sent behind the first step; behind the second it has the third.
    first, second = rl["versions"]
    assert first == "default"
    assert second.startswith("default-v1-")
    logprobs, version = rl["sampler"]
    assert version.startswith("default-v2-")
    assert logprobs == near(rl["trainer"])
    assert rl["aligned"]
    assert rl["metrics"]["valid_tokens"] > 0
    assert abs(rl["metrics"]["ratio_mean"] - 1) < 1e-2, "sampler and trainer agree on the rollouts"
    assert rl["listed"]["count"] == 1
    (endpoint,) = rl["listed"]["endpoints"]
    assert endpoint["healthy"]
    assert endpoint["server_info"]["enable_lora"]
    (again,) = rl["again"]["endpoints_synced"]
    assert again["success"]
    assert again["sync"]["verdict"] == "agrees", again
    assert again["sync"]["bytes"] == 0


def test_a_saved_adapter_is_loaded_there(live, tmp_path, sglang, model, client_python):
    assert free(6000), "port 6000, which the documents name, is in use: free it"
    documents = folder()
    blocks = {name: cut(documents, name).replace(MODEL, model) for name in ("sft", "sampler")}
    blocks["register"] = registration(cut(documents, "rl"))
    live(model=model, full=False, port=6000, sampler_port=0)
    found = run(client_python, tmp_path, blocks)["sampler"]
    assert found["steps"] == 2
    assert found["tokens"] == found["logprobs"] > 0
    assert found["sampler"] == near(found["trainer"])
    assert found["sampler"] != near(found["still"]), "the adapter changes the answers"
    assert "step_100" in [entry["id"] for entry in found["adapters"]]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_reward_climbs_on_smollm2(live, tmp_path, client_python):
    need_sglang()
    from xorl_lab.samplers.sglang.models import served
    from xorl_lab.samplers.sglang.server import SGLangServer

    for port in (6000, 30000):
        assert free(port), f"port {port}, which the documents name, is in use: free it"
    place = str(served("SmolLM2-135M-Instruct").folder)
    code = cut(folder(), "rl").replace(MODEL, place)
    for old, new in CHANGED:
        assert code.count(old) == 1
        code = code.replace(old, new)
    prompts = [
        f"<|im_start|>user\nWrite a happy sentence about {topic}.<|im_end|>\n"
        "<|im_start|>assistant\n"
        for topic in TOPICS
        for _ in range(GROUP)
    ]
    settings = {"steps": 12, "prompts": prompts, "words": sorted(HAPPY), "group": GROUP}
    live(model=place, full=True, dtype="float32", device="cpu", port=6000, sampler_port=0)
    with SGLangServer.start(
        place, max_rank=None, dtype="float32", device="cpu", port=30000, log=tmp_path / "log"
    ):
        rl = run(client_python, tmp_path, {"rl": code, "settings": settings})["rl"]
    rewards = rl["rewards"]
    (again,) = rl["again"]["endpoints_synced"]
    sys.stdout.write(f"rewards: {[round(r, 2) for r in rewards]}\nlast sync: {again}\n")
    assert rl["steps"] == len(rewards) == 12
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.25
    assert again["sync"]["verdict"] == "agrees", again
