"""What the way over HTTP costs, on the real model."""

import statistics
import time

import pytest

import xorl_lab as xl

MODEL = "SmolLM2-135M-Instruct"
LIMIT = 1.15
ROUNDS = 7


def data(client: xl.TrainingClient) -> list[xl.Datum]:
    """Sixteen sequences of 32 tokens, as a small step of supervised training has."""
    tokens = [[(7 * i + j) % 4000 + 100 for j in range(32)] for i in range(16)]
    return [xl.Datum(xl.ModelInput.from_ints(t), {"labels": t}) for t in tokens]


def seconds_of_a_step(client: xl.TrainingClient, batch: list[xl.Datum]) -> float:
    start = time.perf_counter()
    forward = client.forward_backward(batch)
    step = client.optim_step(xl.AdamParams(learning_rate=1e-5))
    forward.result(300)
    step.result(300)
    return time.perf_counter() - start


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_step_over_http_takes_hardly_longer(spawn, tmp_path, capsys):
    server = spawn("--model", MODEL, "--port", "0", "--sampler-port", "0")
    server.wait_ready(180)
    remote = xl.ServiceClient(base_url=server.url).create_lora_training_client(MODEL, 16, seed=1)
    here = xl.ServiceClient(home=tmp_path / "here").create_lora_training_client(MODEL, 16, seed=1)
    batch = data(here)
    times: dict[str, list[float]] = {"here": [], "http": []}
    for _ in range(ROUNDS + 1):
        times["here"].append(seconds_of_a_step(here, batch))
        times["http"].append(seconds_of_a_step(remote, batch))
    # The first round warms both up.
    medians = {name: statistics.median(values[1:]) for name, values in times.items()}
    ratio = medians["http"] / medians["here"]
    with capsys.disabled():
        print(f"\nhere {medians['here']:.3f} s, over HTTP {medians['http']:.3f} s: {ratio:.3f}")  # noqa: T201
    assert ratio < LIMIT
