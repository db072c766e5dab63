"""Parity, speed and memory on a CUDA GPU: ``benchmarks/gpu_check.sh``.

Needs torch, transformers, peft and a few packages in pure Python; fetches nothing.  Without a model
of one's own a random Llama of 1.1 billion parameters is made in place.
"""

import argparse
import gc
import importlib.util
import statistics
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import workload

if TYPE_CHECKING:
    from xorl_lab.client import TrainingClient

NEEDED = (
    "torch",
    "transformers",
    "peft",
    "numpy",
    "safetensors",
    "tokenizers",
    "huggingface_hub",
    "httpx",
    "tenacity",
)
"""What ``import xorl_lab.client`` imports."""
RANDOM = "random-1.1B"
DTYPES = ("float32", "bfloat16")
LIMITS = {"float32": ("largest", 1e-3), "bfloat16": ("mean", 0.08)}
"""Nats by which trainer and sampler may differ per token."""
TOKENS = 64
NO_GPU, MISSING = 2, 3


class Report:
    """Lines of the table, printed as they come; and whether any check failed."""

    def __init__(self) -> None:
        self.failed = False
        say("| model | dtype | what | value |\n|---|---|---|---|")

    def add(self, model: str, dtype: str, what: str, value: str) -> None:
        """One more line."""
        say(f"| {model} | {dtype} | {what} | {value} |")


def main(arguments: list[str]) -> int:
    """Check one model after another."""
    parser = argparse.ArgumentParser(prog="gpu_check.sh", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", action="append", help=f"tiny, a folder, or {RANDOM}; repeatable")
    parser.add_argument("--steps", type=int, default=3, help="GRPO steps behind one to warm up")
    parser.add_argument("--budget", type=float, default=400, help="seconds; no check starts later")
    options = parser.parse_args(arguments)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        say(f"missing here: {', '.join(missing)}: put them into a folder that PYTHONPATH names")
        return MISSING
    import torch  # noqa: PLC0415  (only once it is known to be there)
    from transformers.utils.logging import disable_progress_bar  # noqa: PLC0415

    disable_progress_bar()

    if options.device == "cuda" and not torch.cuda.is_available():
        say("there is no CUDA GPU here: try --device cpu --model tiny")
        return NO_GPU
    if options.device == "cuda":
        say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    report = Report()
    deadline = time.perf_counter() + options.budget
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.model or ["tiny", RANDOM]:
            folder = made(name, Path(scratch), options.device)
            for dtype in DTYPES:
                if time.perf_counter() > deadline:
                    report.add(name, dtype, "left out", "the time is up")
                    continue
                check(report, Path(name).name, folder, dtype, options)
    return int(report.failed)


def made(name: str, scratch: Path, device: str) -> str:
    """The model as a folder that both xorl_lab and transformers load."""
    import torch  # noqa: PLC0415
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    from xorl_lab.engine import tiny  # noqa: PLC0415

    if name not in (RANDOM, "tiny"):
        return name
    folder = scratch / name
    tiny.byte_tokenizer().save_pretrained(folder)
    if name == "tiny":
        tiny.dense(torch.float32).save_pretrained(folder)
        return str(folder)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        initializer_range=0.03,  # logits of deviation 1.4: far enough from uniform to tell errors
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=258,
    )
    torch.manual_seed(0)
    with torch.device(device):
        LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return str(folder)


def check(report: Report, name: str, folder: str, dtype: str, options: argparse.Namespace) -> None:
    """All checks of one model in one precision."""
    from xorl_lab.client import ServiceClient  # noqa: PLC0415
    from xorl_lab.engine import engine  # noqa: PLC0415

    with gauge(report, name, dtype, "peak of generate", options.device):
        peer = generate(folder, dtype, options.device)
    gc.collect()
    with tempfile.TemporaryDirectory() as home:
        service = ServiceClient(home=home, device=options.device, dtype=dtype)
        client = service.create_lora_training_client(folder, 16, alpha=32.0, seed=0)
        with gauge(report, name, dtype, "peak of GRPO", options.device):
            steps(report, name, client, options.steps)
        parity(report, name, client)
        with gauge(report, name, dtype, "peak of sampling", options.device):
            ours = draw(client)
        del client, service
        engine.close_all()
    gc.collect()
    value = f"{ours:.0f} tokens/s, generate {peer:.0f}: {ours / peer:.2f} times"
    report.add(name, dtype, f"sampling 8 x 8 x {TOKENS}", value)


def steps(report: Report, name: str, client: "TrainingClient", count: int) -> None:
    """Time GRPO steps by phase; they also make the adapter differ from none."""
    from xorl_lab.recipes.grpo import grpo  # noqa: PLC0415

    texts = workload.prompts(client.get_tokenizer(), None)
    settings: dict[str, Any] = {"max_tokens": TOKENS, "prompts_per_step": 4, "learning_rate": 1e-4}
    run = grpo(client, texts, workload.untied, steps=count + 1, **settings)
    records = list(run)[1:]
    for phase in ("total", "sample", "train", "sync"):
        seconds = statistics.median(r.metrics.get(f"seconds:{phase}", 0.0) for r in records)
        report.add(name, client.dtype, f"GRPO 4 x 8 x {TOKENS}, {phase}", f"{seconds:.3f} s")


def parity(report: Report, name: str, client: "TrainingClient") -> None:
    """What the sampler reports beside what the trainer computes, on the adapter as it is."""
    from xorl_lab import Datum, ModelInput, SamplingParams  # noqa: PLC0415

    tokenizer = client.get_tokenizer()
    texts = workload.prompts(tokenizer, None)[:8]
    prompts = [tokenizer.encode(t, add_special_tokens=False) for t in texts]
    sampler = client.save_weights_and_get_sampling_client()
    inputs = [ModelInput.from_ints(p) for p in prompts]
    result = sampler.sample_batch(inputs, SamplingParams(max_tokens=32, seed=1), 4).result()
    pairs = [(prompts[i], s) for i, response in result.completed for s in response.sequences]
    data: list[Datum] = []
    for prompt, sequence in pairs:
        whole = [*prompt, *sequence.tokens]
        weights = [0.0] * len(prompt) + [1.0] * len(sequence.tokens)
        data.append(Datum(ModelInput.from_ints(whole), {"labels": whole, "weights": weights}))
    outputs = client.forward(data, "cross_entropy").result().loss_fn_outputs
    gaps = [
        abs(float(a) - b)
        for (_, sequence), output in zip(pairs, outputs, strict=True)
        for a, b in zip(
            output.logprobs.data[-len(sequence.tokens) :], sequence.logprobs or [], strict=True
        )
    ]
    found = {"mean": statistics.mean(gaps), "largest": max(gaps)}
    kind, limit = LIMITS[client.dtype]
    met = found[kind] <= limit
    report.failed |= not met
    value = f"mean {found['mean']:.2g}, largest {found['largest']:.2g} nats"
    verdict = f"{kind} within {limit:g}" if met else f"{kind} over {limit:g}: FAILED"
    report.add(name, client.dtype, "trainer and sampler", f"{value} ({verdict})")


def draw(client: "TrainingClient") -> float:
    """Tokens per second of ours, the second time."""
    from xorl_lab import ModelInput, SamplingParams  # noqa: PLC0415

    tokenizer = client.get_tokenizer()
    texts = workload.openings()[:8]
    inputs = [ModelInput.from_ints(tokenizer.encode(t, add_special_tokens=False)) for t in texts]
    sampler = client.save_weights_and_get_sampling_client()
    rate = 0.0
    for seed in range(2):
        start = time.perf_counter()
        params = SamplingParams(max_tokens=TOKENS, seed=seed)
        result = sampler.sample_batch(inputs, params, 8).result()
        tokens = sum(len(s.tokens) for _, r in result.completed for s in r.sequences)
        rate = tokens / (time.perf_counter() - start)
    return rate


def generate(folder: str, dtype: str, device: str) -> float:
    """Tokens per second of transformers, the second time."""
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left", local_files_only=True)
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=getattr(torch, dtype),
        attn_implementation="sdpa",
        local_files_only=True,
    )
    model = model.to(device).eval()
    texts = workload.openings()[:8]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    inputs = {k: inputs[k].to(device) for k in ("input_ids", "attention_mask")}
    rate = 0.0
    for _ in range(2):
        start = time.perf_counter()
        with torch.inference_mode():
            output = model.generate(
                **inputs,
                **workload.UNTRUNCATED,
                num_return_sequences=8,
                min_new_tokens=TOKENS,
                max_new_tokens=TOKENS,
                pad_token_id=tokenizer.pad_token_id,
            ).cpu()
        rate = len(output) * TOKENS / (time.perf_counter() - start)
    return rate


@contextmanager
def gauge(report: Report, name: str, dtype: str, what: str, device: str) -> Generator[None]:
    """Report the most memory that tensors took on the GPU during the block."""
    import torch  # noqa: PLC0415

    if device != "cuda":
        yield
        return
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    yield
    report.add(name, dtype, what, f"{torch.cuda.max_memory_allocated() / 1e6:.0f} MB on the GPU")


def say(text: str) -> None:
    """Print at once: the machine may be taken back before the end."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
