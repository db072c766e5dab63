"""What the documents' code needs outside this process: a model's folder, a Python of its own."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import torch

from xorl_lab.engine import tiny


def roomy(path: Path) -> str:
    """The tiny model as a folder, with room for the 512 tokens that the documents sample."""
    network = tiny.dense(torch.float32)
    network.config.max_position_embeddings = 2048
    network.save_pretrained(path)
    tiny.byte_tokenizer().save_pretrained(path)
    return str(path)


def run_by(
    python: object, runner: str, folder: Path, plan: object, seconds: float
) -> dict[str, Any]:
    """What a runner finds that is given a plan, in a Python that has nothing of this package."""
    places = folder / "plan.json", folder / "found.json"
    places[0].write_text(json.dumps(plan))
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("XORL_", "PYTHON"))}
    done = subprocess.run(
        [python, runner, *map(str, places)],
        env={**variables, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]
    return json.loads(places[1].read_text())
