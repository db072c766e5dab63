"""xorl_client 0.1.0 from PyPI, unmodified, runs the code of the seed documents against the server.

Only the model's name is replaced; the code's free names (data, prompts, number of steps) are
defined beside it.  Ports are those of the documents.
"""

import os
import site
import socket
import subprocess
import sys
import venv

import pytest

from tests.seeds.cut import folder
from tests.seeds.outside import roomy, run_by

pytestmark = pytest.mark.xdist_group("sglang")  # the ports are those of both files
CLIENT = "xorl-client==0.1.0"
MODEL = "Qwen/Qwen3-8B"
PATTERNS, LOSSES = "training-loop-patterns.txt", "loss-functions.txt"
BLOCKS = {
    "sft": (PATTERNS, "SFT Training Loop", "import xorl_client", "    print("),
    "rl": (PATTERNS, "RL Training Loop (PPO / GRPO)", "import xorl_client", "        ).result()"),
    "adapters": (PATTERNS, "Multi-Adapter (LoRA)", "# Create policy", "ref_logprobs = "),
    "resume": (PATTERNS, "Checkpoint Resume", "# Weights only", None),
    "sampler": (PATTERNS, "Save LoRA Weights for Inference", "service = ", "response = "),
    "causallm_loss": (LOSSES, "Causal LM Loss (causallm_loss)", "fwd = ", "fwd = "),
    "dual_clip": (LOSSES, "PPO Policy Loss (policy_loss)", "fwd = ", "})"),
    "importance_sampling": (
        LOSSES,
        "GRPO / Importance Sampling (importance_sampling)",
        "fwd = ",
        "})",
    ),
    "icepop": (LOSSES, "IcePop", "fwd = ", "})"),
    "tis": (LOSSES, "TIS — Temporal Importance Sampling", "datum = ", "})"),
}
"""Document, heading, how the first line begins, how the last does (None: the section's end)."""


def cut(documents, name):
    document, heading, first, last = BLOCKS[name]
    lines = (documents / document).read_text(encoding="utf-8").splitlines()
    assert lines.count(heading) == 1, f"{document} has no one line {heading!r}"
    lines = lines[lines.index(heading) + 1 :]
    begin = next(i for i, line in enumerate(lines) if line.startswith(first))
    if last is None:
        end = next(i for i, line in enumerate(lines) if i > begin and line == "---") - 1
    else:
        end = next(i for i, line in enumerate(lines) if i >= begin and line.startswith(last))
    return "\n".join(lines[begin : end + 1]) + "\n"


@pytest.fixture(scope="session")
def client_python(request):
    """Python of an environment of its own with xorl_client; made once."""
    place = request.config.cache.mkdir("xorl-client") / "0.1.0"
    python = place / "bin" / "python"
    if not (place / ".ready").exists():
        venv.create(place, clear=True, with_pip=False)
        # What it needs (httpx, pydantic, transformers, …) it takes from this environment.
        (packages,) = (place / "lib").glob("python*/site-packages")
        (packages / "shared.pth").write_text("\n".join(site.getsitepackages()) + "\n")
        command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps"]
        done = subprocess.run(
            [*command, "--quiet", "--disable-pip-version-check", CLIENT],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            reason = f"{CLIENT} cannot be installed: {done.stderr.strip()[-300:]}"
            if os.environ.get("CI"):
                pytest.fail(reason)
            pytest.skip(reason)
        (place / ".ready").touch()
    return python


@pytest.fixture
def model(tmp_path):
    """The tiny model as a folder, with room for the 512 tokens that the documents sample."""
    return roomy(tmp_path / "tiny-model")


def free(port):
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_code_of_the_documents_runs_as_it_is(live, tmp_path, model, client_python, full):
    documents = folder()
    for port in (6000, 30000):
        assert free(port), f"port {port}, which the documents name, is in use: free it"
    blocks = {name: cut(documents, name) for name in BLOCKS}
    assert sum(code.count(MODEL) for code in blocks.values()) == 7
    if full:
        del blocks["adapters"]
    plan = {name: code.replace(MODEL, model) for name, code in blocks.items()}
    live(model=model, full=full, port=6000, sampler_port=30000)
    runner = os.path.join(os.path.dirname(__file__), "seed_runner.py")
    check(run_by(client_python, runner, tmp_path, plan, 250), full=full)


def near(values):
    return pytest.approx(values, abs=1e-4)


def check(found, *, full):
    sft = found["sft"]
    assert sft["steps"] == 2
    assert sft["after"] != near(sft["before"])
    assert all(v < 0 for v in sft["logprobs"])

    rl = found["rl"]
    assert rl["steps"] == 2
    # Rollouts of the first step come from the base model, those of the second from the weights
    # that were published after the first; three versions are the two steps of SFT and one more.
    assert rl["versions"] == ["0", "3"]
    logprobs, version = rl["sampler"]
    assert version == "4"
    assert logprobs == near(rl["trainer"])
    assert rl["endpoints"] == 1
    assert rl["aligned"]
    assert rl["metrics"]["valid_tokens"] > 0
    assert {"kl_sample_train_k3", "ratio_mean", "pg_clipfrac"} <= set(rl["metrics"])

    losses = found["losses"]
    for name, loss in losses.items():
        assert loss["grad_norm"] > 0, name
        assert loss["moved"], name
    assert losses["causallm_loss"]["type"] == "causallm_loss"
    assert losses["importance_sampling"]["type"] == "importance_sampling"
    assert {losses[n]["type"] for n in ("dual_clip", "icepop", "tis")} == {"policy_loss"}
    assert "icepop_maskfrac" in losses["icepop"]["metrics"]
    assert losses["tis"]["metrics"]["tis_mean"] == pytest.approx(1.61, abs=0.3)

    if not full:
        adapters = found["adapters"]
        assert adapters["ranks"] == [32, 16]
        assert adapters["policy"] == near(adapters["reference"]), "both start as the base model"
        assert adapters["steps"] == [1, 0]
        assert adapters["moved"]
        assert {"policy", "reference"} <= set(found["rest"]["runs"])

    resume = found["resume"]
    assert resume["moved"] != near(resume["saved"])
    assert resume["resumed"] == resume["saved"]
    assert resume["steps"] == [resume["steps"][0]] * 2

    sampler = found["sampler"]
    assert sampler["tokens"] == sampler["logprobs"] > 0
    assert sampler["version"] == sampler["sampler"][1] != "0"
    assert sampler["sampler"][0] == near(sampler["trainer"])

    assert "replaced by a newer one" in found["replaced"]
    assert "99999" in found["bad"]
    assert found["after_bad"] > 0
    assert "weights/step_1000" in found["rest"]["checkpoints"]
    assert found["rest"]["info"] == (None if full else 32)
    assert "default" in found["rest"]["runs"]
    assert found["rest"]["deleted"]
    assert found["health"] == "healthy"
    assert found["killed"].startswith("xorl://default/weights/killed-")
    assert found["unloaded"] == "default"
