"""Several clients at once: every answer right, order kept, memory flat."""

import random
import threading

import httpx
import psutil
import pytest

from tests.server.support import ADAM, Api, gradient, weights

SEQUENCES = [tuple((7 * i + j) % 250 for j in range(3 + i % 5)) for i in range(12)]


def plan(seed, count):
    """A random run: forwards, gradients, steps, saves, and completions in between."""
    draw = random.Random(seed)
    operations, open_gradients = [], 0
    for _ in range(count):
        kind = draw.choices(["forward", "gradient", "step", "sample", "save"], [3, 4, 3, 3, 1])[0]
        if kind == "step" and not open_gradients:
            kind = "gradient"
        open_gradients = 0 if kind == "step" else open_gradients + (kind == "gradient")
        operations.append((kind, draw.choice(SEQUENCES), draw.random()))
    return operations


def carry_out(url, model_id, operations):
    """Pipelines a run and returns all of its answers in order."""
    with httpx.Client(base_url=url, timeout=120, trust_env=False) as http:
        api = Api(http)
        api.create(model_id)
        pending, samples, number = [], [], 0
        for index, (kind, tokens, chance) in enumerate(operations):
            if kind == "sample":
                ask = {"input_ids": list(tokens), "return_logprob": True}
                params = {"max_new_tokens": 3, "seed": index}
                samples.append(api.ask("/generate", sampling_params=params, **ask)["output_ids"])
                continue
            number += 1
            path, body = {
                "forward": ("forward", {"forward_input": gradient(tokens)}),
                "gradient": ("forward_backward", {"forward_backward_input": gradient(tokens)}),
                "step": ("optim_step", {"adam_params": ADAM}),
                "save": ("save_weights", {"path": f"n-{number}"}),
            }[kind]
            body |= {"model_id": model_id, "seq_id": number}
            sent = api.send(path, **body)
            if chance < 0.2:
                assert api.send(path, **body) == sent
            pending.append(sent)
            if chance > 0.7:
                api.fetch(sent)
        answers = [api.fetch(sent, within=120) for sent in pending]
        end = api.call("save_weights", model_id=model_id, seq_id=number + 1, path="end")["path"]
        return answers, samples, end


def without_names(answers, model_id):
    return [{k: str(v).replace(f"://{model_id}/", "://") for k, v in a.items()} for a in answers]


@pytest.mark.parametrize("count", [50, pytest.param(200, marks=pytest.mark.slow)])
def test_four_clients_get_what_each_would_get_alone(live, tmp_path, count):
    server = live()
    plans = {f"m{i}": plan(i, count) for i in range(4)}
    found = {}

    def run(model_id):
        found[model_id] = carry_out(server.url, model_id, plans[model_id])

    threads = [threading.Thread(target=run, args=(m,)) for m in plans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(250)
    assert set(found) == set(plans)
    failed = [a for answers, _, _ in found.values() for a in answers if "error" in a]
    assert failed == []
    before = psutil.Process().memory_info().rss
    for model_id, operations in list(plans.items())[: 1 if count < 100 else 4]:
        alone = carry_out(server.url, f"{model_id}-alone", operations)
        together = found[model_id]
        names = (model_id, f"{model_id}-alone")
        assert without_names(together[0], names[0]) == without_names(alone[0], names[1])
        assert together[1] == alone[1]
        assert weights(tmp_path, together[2]) == weights(tmp_path, alone[2])
    grown = psutil.Process().memory_info().rss - before
    assert grown < 100 * 2**20
