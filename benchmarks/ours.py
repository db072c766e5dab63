"""The worker that measures xorl_lab.  Runs in the project's environment."""

import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from benchmarks import workload
from benchmarks.channel import Channel
from benchmarks.counting import grpo_work
from xorl_lab import AdamParams, Datum, ModelInput, SamplingParams
from xorl_lab.client import ServiceClient, TrainingClient
from xorl_lab.recipes import tasks
from xorl_lab.recipes.grpo import grpo as recipe
from xorl_lab.types import StepRecord

RANK, ALPHA = 16, 32.0
PHASES = ("sample", "score", "train", "sync")


def grpo(channel: Channel, service: ServiceClient) -> None:
    """One GRPO step per round, of the recipe as a person uses it."""
    settings = channel.job.settings
    client = _client(channel, service, seed=settings["seed"])
    texts = workload.prompts(client.get_tokenizer(), settings["prompt_tokens"])
    reward = workload.REWARDS[settings["reward"]]
    chosen = {"max_tokens": settings["max_tokens"], "seed": settings["seed"]}
    chosen |= {"prompts_per_step": 4, "group_size": 8, "learning_rate": 1e-3}
    _steps(channel, client, texts, reward, chosen)


def addition(channel: Channel, service: ServiceClient) -> None:
    """One step of the demo's main job per round."""
    client = _client(channel, service)
    task = tasks.get("addition")
    _steps(channel, client, task.training, task.reward, dict(task.settings))


def _steps(
    channel: Channel,
    client: TrainingClient,
    prompts: Sequence[Any],
    reward: Any,  # noqa: ANN401 (any function of a completion)
    settings: dict[str, Any],
) -> None:
    run = recipe(client, prompts, reward, **{**settings, "steps": 1_000_000})
    channel.ready()
    while True:
        channel.wait()
        channel.start()
        record = next(run)
        channel.stop()
        channel.answer(**_reported(record))


def _reported(record: StepRecord) -> dict[str, Any]:
    """What the table shows of a step."""
    completions = [[r.tokens for r in g.rollouts] for g in record.groups]
    prompts = [g.prompt_tokens for g in record.groups]
    return {
        "tokens": sum(len(c) for group in completions for c in group),
        "prompt_tokens": statistics.mean(len(p) for p in prompts),
        "reward": record.metrics["reward"],
        "without_signal": int(record.metrics["groups_without_signal"]),
        "phases": {p: record.metrics.get(f"seconds:{p}", 0.0) for p in PHASES},
        "work": asdict(grpo_work(prompts, completions)),
    }


def sampling(channel: Channel, service: ServiceClient) -> None:
    """Draw ``samples`` completions of ``tokens`` tokens for each of ``prompts`` prompts."""
    client = service.create_sampling_client(base_model=channel.job.model)
    tokenizer = client.get_tokenizer()
    texts = workload.openings()
    inputs = [ModelInput.from_ints(tokenizer.encode(t, add_special_tokens=False)) for t in texts]
    channel.ready()
    for seed in itertools.count():
        command = channel.wait()
        params = SamplingParams(max_tokens=command["tokens"], seed=seed)
        channel.start()
        future = client.sample_batch(inputs[: command["prompts"]], params, command["samples"])
        result = future.result()
        channel.stop()
        sequences = [s for _, response in result.completed for s in response.sequences]
        channel.answer(sum(len(s.tokens) for s in sequences))


def train(channel: Channel, service: ServiceClient) -> None:
    """forward_backward and optim_step per round, on one of several adapters."""
    clients = [
        _client(channel, service, f"adapter-{i}")
        for i in range(channel.job.settings.get("adapters", 1))
    ]
    vocabulary = clients[0].vocab_size
    channel.ready()
    while True:
        command = channel.wait()
        if "lengths" in command:
            sequences = workload.random_tokens(command["lengths"], vocabulary)
            loss, first = "cross_entropy", 1
        else:
            sequences = workload.shared(command, vocabulary)
            loss, first = "importance_sampling", command["prompt"]
        channel.start()
        losses: list[float] = []
        for client in clients:
            data = [_datum(tokens, first, vocabulary) for tokens in sequences]
            output = client.forward_backward(data, loss_fn=loss)
            client.optim_step(AdamParams(learning_rate=1e-4)).result()
            losses.append(output.result().metrics["loss:mean"])
        channel.stop()
        trained = len(clients) * sum(len(s) - first for s in sequences)
        channel.answer(trained, loss=losses[0])


def _datum(tokens: list[int], first: int, vocabulary: int) -> Datum:
    """Tokens from ``first`` on are trained; the other inputs are as for :func:`workload.old`."""
    count = len(tokens) - 1
    weights = [float(place >= first - 1) for place in range(count)]
    old, advantage = workload.old(vocabulary)
    inputs = {"target_tokens": tokens[1:], "weights": weights}
    if first > 1:
        inputs |= {"logprobs": [old] * count, "advantages": [advantage] * count}
    return Datum(ModelInput.from_ints(tokens[:-1]), inputs)


def machine(channel: Channel, _: ServiceClient) -> None:
    """What the processor does at best: products of matrices, reading of memory."""
    channel.ready()
    while True:
        channel.wait()
        channel.start()
        found = {
            "matmul_float32": _matmul(torch.float32, 2048, 2048, 2048),
            "square": _matmul(torch.bfloat16, 512, 512, 512)
            / _matmul(torch.float32, 512, 512, 512),
            "skinny": _matmul(torch.bfloat16, 32, 576, 1536)
            / _matmul(torch.float32, 32, 576, 1536),
            "read": _read_rate(),
        }
        channel.stop()
        channel.answer(0, **found)


def _matmul(dtype: torch.dtype, m: int, k: int, n: int, rounds: int = 3) -> float:
    """Operations per second of the best of some products."""
    a, b = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
    return 2 * m * k * n / _best(lambda: a @ b, rounds)


def _read_rate() -> float:
    """Bytes per second of a sum over 512 MiB."""
    values = torch.ones(1 << 27)
    return values.numel() * values.element_size() / _best(values.sum, 5)


def _best(work: Callable[[], object], rounds: int) -> float:
    seconds: list[float] = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def _client(
    channel: Channel, service: ServiceClient, name: str = "bench", seed: int = 0
) -> TrainingClient:
    return service.create_lora_training_client(
        channel.job.model, RANK, model_id=name, alpha=ALPHA, seed=seed
    )


CASES = {f.__name__: f for f in (grpo, addition, sampling, train, machine)}


def main() -> None:
    """Serve one case."""
    channel = Channel(sys.argv)
    torch.set_num_threads(channel.job.threads)
    with tempfile.TemporaryDirectory() as home:
        CASES[channel.job.case](channel, ServiceClient(home=home, dtype=channel.job.dtype))


if __name__ == "__main__":
    main()
