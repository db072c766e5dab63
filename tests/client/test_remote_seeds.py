"""The code of the seed documents, run by this package's own client against ``xorl-lab serve``.

Only the import line, the model's name and the ports are replaced, by a table that is printed; the
code's free names (data, prompts, number of steps) are defined beside it.
"""

import sys

import pytest
import requests

import xorl_lab as xl
from tests.seeds.cut import cut, folder, run
from tests.seeds.outside import roomy
from tests.server.conftest import Process

PAGE = "training-loop-patterns.txt"
BLOCKS = {
    "sft": (
        "SFT Training Loop",
        "import xorl_client",
        "    print(f\"step={step} logprobs={result.loss_fn_outputs[0]['logprobs']}\")",
    ),
    "rl": ("RL Training Loop (PPO / GRPO)", "import xorl_client", "            master_port=29600,"),
    "adapters": (
        "Multi-Adapter (LoRA)",
        "# Create policy",
        'ref_logprobs = reference.forward(data, loss_fn="cross_entropy")',
    ),
    "resume": ("Checkpoint Resume", "# Weights only", "# With optimizer state (exact resume)"),
    "sampler": (
        "Save LoRA Weights for Inference",
        "service = ",
        'response = sampler.sample("Hello", xorl_client.SamplingParams(max_tokens=64)).result()',
    ),
}
REST = {
    "rl": "        ).result()\n",
    "resume": (
        "client = service.create_training_client_from_state_with_optimizer(\n"
        '    checkpoint_path="xorl://default/weights/step_1000",\n'
        '    base_model="Qwen/Qwen3-8B",\n'
        ")\n"
    ),
}
"""What follows the last line that is the only one of its kind."""
TEXT = [list(f"sample {i}".encode()) for i in range(4)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The tiny model as a folder, with room for the 512 tokens that the documents sample."""
    return roomy(tmp_path_factory.mktemp("model") / "tiny")


class Seeds:
    """A server in a process of its own, and the code of the documents for its ports."""

    def __init__(self, process, model):
        line = process.wait_ready()
        self.api = process.url
        self.sampler = line.split("sampler at ")[1].split(";")[0].strip()
        self.table = [
            ("import xorl_client\n", "import xorl_lab as xorl_client\n"),
            ("http://localhost:6000", self.api),
            ("http://localhost:30000", self.sampler),
            ('"port": 30000', f'"port": {self.sampler.rsplit(":", 1)[1]}'),
            ('"worker_port": 30000', f'"worker_port": {self.sampler.rsplit(":", 1)[1]}'),
            ("Qwen/Qwen3-8B", model),
        ]
        self.services = []

    def run(self, block, **names):
        heading, first, last = BLOCKS[block]
        code = cut(folder() / PAGE, heading, first, last) + REST.get(block, "")
        if block in REST:
            section = (folder() / PAGE).read_text(encoding="utf-8").split(f"\n{heading}\n")[1]
            assert code in section, "what is added is what the document says"
        shown = [f"{heading}: replaced"]
        for old, new in self.table:
            if old in code:
                shown += [f"  - {old.strip()}  ({code.count(old)} times)", f"  + {new.strip()}"]
                code = code.replace(old, new)
        sys.stdout.write("\n".join(shown) + "\n")
        return self.keep(run(code, {"xorl_client": xl, **names}))

    def keep(self, names):
        if isinstance(names.get("service"), xl.ServiceClient):
            self.services.append(names["service"])
        return names

    def close(self):
        for service in self.services:
            service._service.close()


def serving(root, home, model, *options):
    process = Process(
        root, home, "--model", model, "--port", "0", "--sampler-port", str(free_port()), *options
    )
    try:
        seeds = Seeds(process, model)
        yield seeds
        seeds.close()
        assert process.stop() == 0
    finally:
        if not process.process.stdout.closed:
            process.process.kill()
            process.stop()


def free_port():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def lora(root, tmp_path_factory, model):
    folder()
    yield from serving(root, tmp_path_factory.mktemp("lora"), model)


@pytest.fixture(scope="module")
def full(root, tmp_path_factory, model):
    folder()
    yield from serving(root, tmp_path_factory.mktemp("full"), model, "--full")


def trained(client):
    tokens = TEXT[0]
    data = [xl.Datum(xl.ModelInput.from_ints(tokens), {"labels": tokens})]
    return client.forward(data).result().loss_fn_outputs[0].logprobs.tolist()


def sampled(sampler):
    """The sampler's logprobs of the same tokens, and the version that it answers with."""
    prompt, params = xl.ModelInput.from_ints(TEXT[0]), xl.SamplingParams(max_tokens=1)
    response = sampler.sample(prompt, params, prompt_logprobs=True).result()
    return response.prompt_logprobs[1:], response.meta_info["weight_version"]


def near(values):
    return pytest.approx(values, abs=1e-4)


def test_fine_tuning_adapters_resume_and_weights_for_the_sampler(lora, capsys):
    batch = [{"input_ids": ids, "labels": ids} for ids in TEXT]
    names = lora.run("sft", dataloader=[batch[:2], batch[2:]])
    client, service = names["client"], names["service"]
    assert client.version == 2
    printed = capsys.readouterr().out
    assert printed.count("logprobs=TensorData") == 2
    assert "- import xorl_client  (1 times)\n  + import xorl_lab as xorl_client" in printed

    # Several adapters at a time.
    data = [
        xl.Datum(
            xl.ModelInput.from_ints(ids),
            {"labels": ids, "logprobs": [-1.0] * len(ids), "advantages": [1.0] * len(ids)},
        )
        for ids in TEXT
    ]
    pair = lora.run("adapters", service=service, data=data)
    policy, reference = pair["policy"], pair["reference"]
    before = trained(reference)
    assert trained(policy) == near(before), "both start as the base model"
    assert len(pair["fwd"].result().loss_fn_outputs) == len(data)
    policy.optim_step(xl.AdamParams(learning_rate=0.1)).result()
    assert (policy.version, reference.version) == (1, 0)
    assert trained(policy) != near(before)
    assert (
        trained(reference)
        == before
        == pytest.approx(
            pair["ref_logprobs"].result().loss_fn_outputs[0].logprobs.tolist(), abs=1e-4
        )
    )

    # Resuming.
    client.save_state("step_1000").result()
    saved = trained(client)
    client.forward_backward(data, loss_fn="policy_loss")
    client.optim_step(xl.AdamParams(learning_rate=0.1)).result()
    assert trained(client) != near(saved)
    resumed = lora.run("resume", service=service)["client"]
    assert trained(resumed) == saved
    assert resumed.lora.rank == client.lora.rank == 32

    # Weights for the sampler: those of the newest client of the model.
    names = lora.run("sampler")
    response = names["response"]
    assert len(response.tokens) == len(response.logprobs) > 0
    logprobs, version = sampled(names["sampler"])
    assert logprobs == near(saved)
    assert version == response.meta_info["weight_version"] != "0"
    names["sampler"]._source.close()


def test_reinforcement_learning(full):
    asked, texts = [], []

    class RewardModel:
        def score(self, completions):
            body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
            answer = requests.post(f"{full.sampler}/generate", json=body, timeout=60).json()
            asked.append(answer["meta_info"]["weight_version"])
            texts.extend(completions)
            return [float(i) for i in range(len(completions))]

    names = full.run(
        "rl",
        num_steps=2,
        sync_every=1,
        prompts=["Hello", "The sea", "1 + 1 ="],
        reward_model=RewardModel(),
        compute_advantages=lambda rewards: [r - sum(rewards) / len(rewards) for r in rewards],
    )
    client, sampler = names["client"], names["sampler"]
    assert client.version == 2
    assert asked == ["0", "1"], "the second rollouts come from the weights that were synced"
    assert len(texts) == 6
    metrics = names["result"].metrics
    assert {"kl_sample_train_k3", "ratio_mean", "pg_clipfrac"} <= set(metrics)
    assert metrics["valid_tokens"] == sum(len(c.tokens) for c in names["completions"])
    logprobs, version = sampled(sampler)
    assert version == "2"
    assert logprobs == near(trained(client))
    assert client.list_inference_endpoints().result().count == 1
    sampler._source.close()
