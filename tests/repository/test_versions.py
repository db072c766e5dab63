"""Versions of transformers that pyproject.toml admits beside the pinned one are tried."""

import os
import subprocess
import sys

import pytest

FLOOR = ["transformers==5.17.*", "huggingface-hub>=1.5,<2.0"]
"""torch has no older CPU build to install beside the pinned one, so it stays as it is."""
SGLANG = "xorl_lab/samplers/sglang/cpu/requirements.txt"
"""What a user has who puts SGLang and xorl_lab into one environment."""
OURS = ("transformers", "tokenizers", "huggingface-hub", "safetensors")
"""What of it the core uses and is not pinned to the same version here."""


def sglang_pins(root) -> list[str]:
    lines = (root / SGLANG).read_text().splitlines()
    return [line for line in lines if line.split("==")[0] in OURS]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("which", ["oldest", "sglang"])
def test_another_transformers_passes_parity_and_saving(root, tmp_path, capsys, which):
    target = tmp_path / which
    pins = FLOOR if which == "oldest" else sglang_pins(root)
    expected = {"oldest": "5.17.", "sglang": "5.19.0"}[which]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target)]
    subprocess.run([*pip, *pins], check=True, timeout=600)
    tests = [
        "tests/parity/test_float32.py",
        "tests/engine/test_saving.py",
        "tests/engine/test_gradients.py",
    ]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "not slow",
        "-k",
        "not pretrained",
        *tests,
    ]
    paths = os.pathsep.join([str(target), str(root)])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    version = subprocess.run(
        [sys.executable, "-c", "import transformers; print(transformers.__version__)"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert version.startswith(expected)
    done = subprocess.run(
        command,
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=1000,
    )
    with capsys.disabled():
        print(f"\ntransformers {version}: {done.stdout.splitlines()[-1]}")  # noqa: T201
    assert done.returncode == 0, done.stdout[-3000:]
