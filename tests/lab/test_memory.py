"""What training will take, held against what it takes."""

import json
import subprocess
import sys

import pytest

from xorl_lab.lab.memory import Shape, amount, available, estimate

SMALL = Shape(1000, 100, 2, 8, 16, 2, 4, 50, 4)
SIZES = {"tokens": 16, "rows": 2, "row_tokens": 8}


def test_parts_grow_with_what_they_are_for():
    def part(name, **changes):
        shape = Shape(**{**{n: getattr(SMALL, n) for n in Shape.__slots__}, **changes})
        return estimate(shape, **SIZES)[name]

    assert part("weights", parameters=2000) == 2 * part("weights")
    assert part("adapter", trained=200) == 2 * part("adapter")
    assert part("activations", layers=4) == 2 * part("activations")
    assert part("logits", vocabulary=100) == 2 * part("logits")
    assert part("cache", kv_width=8) == 2 * part("cache")
    wide = estimate(SMALL, **{**SIZES, "rows": 4})
    assert wide["cache"] == 2 * estimate(SMALL, **SIZES)["cache"]


def test_free_memory_is_known_here():
    free = available()
    assert free is None or free > 2**20


def test_amounts_for_people():
    assert [amount(x) for x in (0, 2**10, 2**20, 2**30, 2.5 * 2**30)] == [
        "0.0 KiB", "1.0 KiB", "1.0 MiB", "1.0 GiB", "2.5 GiB",
    ]  # fmt: skip


MEASURE = """
import json, re, sys
import xorl_lab as xl
from xorl_lab.lab import card
from xorl_lab.lab.memory import estimate

rank, prompts, group, length = (int(x) for x in sys.argv[2:])
# Not ru_maxrss, which a child inherits from whoever started it.
peak = lambda: 1024 * int(re.search("VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
import torch, transformers, peft, xorl_lab.lab  # what is there before any model
before = peak()
lab = xl.Lab("SmolLM2-135M-Instruct", rank=rank or None, folder=sys.argv[1], device="cpu")
text = "The sea is blue and the sky is blue. " * 8
lab.grpo(
    [f"{i} {text}" for i in range(prompts)], lambda completion: len(set(completion)) / 50,
    steps=2, max_tokens=length, learning_rate=1e-4, group_size=group, prompts_per_step=prompts,
    preflight=False, quiet=True, save_every=0,
)
loaded = lab._starter.loaded()
prompt = len(loaded.tokenizer.encode(text))
trained = prompts * (prompt + group * length)  # completions of a prompt share it
parts = estimate(
    card._shape(loaded, rank or None), tokens=min(card.TOKENS, trained), rows=prompts * group,
    row_tokens=prompt + length,
)
print(json.dumps({"measured": peak() - before, "estimated": sum(parts.values()), "parts": parts}))
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("rank", "prompts", "group", "length"), [(32, 4, 8, 64), (8, 2, 4, 32), (0, 2, 4, 32)]
)
def test_the_estimate_is_within_a_factor_of_what_a_real_model_takes(
    root, tmp_path, rank, prompts, group, length
):
    sizes = [str(x) for x in (rank, prompts, group, length)]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path), *sizes], cwd=root, capture_output=True,
        text=True, timeout=1100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert 1 / 1.5 < found["estimated"] / found["measured"] < 1.5, found
