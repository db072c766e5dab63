"""The (T, V) matrix of logits is never held, in the forward or the backward pass."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from tests.engine.support import labelled, nothing
from xorl_lab import losses
from xorl_lab.engine import logprobs, trainer
from xorl_lab.engine.batches import align
from xorl_lab.engine.trainer import Trained
from xorl_lab.types import LoraRunSpec

V, ROWS, LENGTH = 50_000, 3, 500
T = ROWS * LENGTH
LIMIT = logprobs.CHUNK * V
SPECS = {
    "frozen": LoraRunSpec(rank=2, seed=1),
    "adapted": LoraRunSpec(rank=2, seed=1, train_unembed=True),
    "trained": None,
}
"""By what becomes of the head."""
every_head = pytest.mark.parametrize("head", SPECS)


class Largest(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.elements = max(self.elements, leaf.untyped_storage().nbytes() // 4)
        return result


@pytest.fixture(scope="module")
def wide() -> LlamaForCausalLM:
    """A model whose vocabulary is far wider than everything else in it."""
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=1024,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval().requires_grad_(False)


def run(trained: Trained, *, backward: bool, rows: int = ROWS) -> int:
    """Elements of the largest tensor made in one call in which every token is trained."""
    draw = np.random.default_rng(0)
    data = [labelled(draw.integers(0, V, LENGTH + 1).tolist()) for _ in range(rows)]
    batch = align(data, vocab_size=V, context_length=1024)
    assert batch.valid_tokens == rows * LENGTH
    # The entropies, which take a pass of their own, in the one kind of call only.
    params = losses.check_params("cross_entropy", {"return_terms": not backward})
    with Largest() as largest:
        if backward:
            trained.forward_backward(batch, "cross_entropy", params, nothing, nothing)
        else:
            trained.forward(batch, "cross_entropy", params, nothing)
    return largest.elements


@pytest.mark.parametrize("backward", [True, False], ids=["backward", "forward"])
@every_head
def test_no_tensor_is_larger_than_a_chunk_of_logits(wide, monkeypatch, head, backward):
    # One row holds all the data, which is the hardest case for the head.
    monkeypatch.setattr(trainer, "MAX_ROW", T)
    assert run(Trained("test", wide, SPECS[head]), backward=backward) <= LIMIT < T * V


@every_head
def test_without_chunks_the_test_would_fail(wide, monkeypatch, head):
    monkeypatch.setattr(trainer, "MAX_ROW", 1)
    monkeypatch.setitem(logprobs.token_logprobs.__kwdefaults__, "chunk", 10**9)
    trained = Trained("test", wide, SPECS[head])
    assert run(trained, backward=True, rows=1) >= LENGTH * V > LIMIT


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("chunk", [1, 2, 10**9])
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_chunks_do_not_change_the_logprobs(rows, chunk, trained):
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, 4, generator=draw, dtype=torch.float64, requires_grad=True)
    head = torch.nn.Linear(4, 9, bias=False, dtype=torch.float64)
    with torch.no_grad():
        head.weight.copy_(torch.randn(9, 4, generator=draw, dtype=torch.float64))
    head.requires_grad_(trained)
    assert logprobs.frozen(head) is not trained
    targets = torch.arange(rows)
    got = logprobs.token_logprobs(hidden, head, targets, temperature=0.5, chunk=chunk)
    whole = torch.log_softmax(head(hidden) / 0.5, -1)[torch.arange(rows), targets]
    torch.testing.assert_close(got, whole, rtol=1e-12, atol=0)
    (grad,) = torch.autograd.grad(got.sum(), hidden)
    (wanted,) = torch.autograd.grad(whole.sum(), hidden)
    torch.testing.assert_close(grad, wanted, rtol=1e-9, atol=1e-12)
    entropies = logprobs.token_entropies(hidden, head, temperature=0.5, chunk=chunk)
    full = torch.log_softmax(head(hidden) / 0.5, -1)
    torch.testing.assert_close(entropies, -(full.exp() * full).sum(-1), rtol=1e-12, atol=0)


PEAK = """
import re, sys
from pathlib import Path
from tests.engine import test_memory as m
from xorl_lab.engine import trainer, logprobs
from xorl_lab.engine.trainer import Trained
trainer.MAX_ROW = 1
if sys.argv[1] == "whole":
    logprobs.token_logprobs.__kwdefaults__["chunk"] = 10**9
    trainer.MAX_ROW = 2 * m.T
wide = m.wide.__wrapped__() if hasattr(m.wide, "__wrapped__") else m.wide._get_wrapped_function()()
def highest():
    # Not getrusage, whose peak begins with that of the process that started this one.
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
before = highest()
m.run(Trained("test", wide, m.SPECS[sys.argv[2]]), backward=True, rows=2 * m.ROWS)
print(1024 * (highest() - before))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells the peak")
@every_head
def test_what_is_alive_at_a_time_is_a_few_chunks(root, head):
    def peak(how: str) -> int:
        command = [sys.executable, "-c", PEAK, how, head]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
        return int(done.stdout)

    few, matrix = 6 * 4 * LIMIT, 2 * 4 * T * V
    assert peak("chunked") < few < matrix
    # Without chunks at least one matrix is alive, and for the head that is frozen no second one.
    # Where the process had freed memory before, a part of it does not show.
    assert peak("whole") > 0.9 * matrix > few
