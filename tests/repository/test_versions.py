"""The oldest versions that pyproject.toml admits are tried, not only the pinned ones."""

import os
import subprocess
import sys

import pytest

FLOOR = ["transformers==5.17.*", "huggingface-hub>=1.5,<2.0"]
"""torch has no older CPU build to install beside the pinned one, so it stays as it is."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_oldest_transformers_passes_parity_and_saving(root, tmp_path, capsys):
    target = tmp_path / "floor"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target)]
    subprocess.run([*pip, *FLOOR], check=True, timeout=600)
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
    assert version.startswith("5.17.")
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, check=False, timeout=800
    )
    with capsys.disabled():
        print(f"\ntransformers {version}: {done.stdout.splitlines()[-1]}")  # noqa: T201
    assert done.returncode == 0, done.stdout[-3000:]
