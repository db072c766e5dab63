"""The loops of the seed documents run in-process, but for the lines that are printed."""

import numpy as np
import torch

import xorl_lab as xl
from tests.seeds.cut import change, cut, run

IMPORT = ("import xorl_client\n", "import xorl_lab as xorl_client\n")
SERVICE = (
    'xorl_client.ServiceClient(base_url="http://localhost:6000")',
    "xorl_client.ServiceClient()",
)
MODEL = ('base_model="Qwen/Qwen3-8B"', 'base_model="tiny"')

SFT = [IMPORT, SERVICE, MODEL]

RL = [
    ("import xorl_client\nimport requests\n", "import xorl_lab as xorl_client\n"),
    SERVICE,
    MODEL,
    (
        'xorl_client.SamplingClient(base_url="http://localhost:30000")',
        "client.save_weights_and_get_sampling_client()",
    ),
    (
        "# Register inference endpoint\n"
        'requests.post("http://localhost:6000/add_inference_endpoint", json={\n'
        '    "host": "localhost",\n'
        '    "port": 30000,\n'
        '    "worker_port": 30000,\n'
        '    "world_size": 1,\n'
        "})\n",
        "",
    ),
    ("SamplingParams(max_tokens=512)", "SamplingParams(max_tokens=24)"),
    (
        "        client.sync_inference_weights(\n"
        '            master_address="localhost",\n'
        "            master_port=29600,\n"
        "        ).result()\n",
        "        sampler = client.save_weights_and_get_sampling_client()\n",
    ),
]

PYTRIO = [
    ("import pytrio as trio\n", "import xorl_lab as trio\n"),
    ('base_model="Qwen/Qwen3.5-4B"', 'base_model="tiny"'),
]


class Watcher:
    """Looks on from the names that the code leaves open."""

    def __init__(self) -> None:
        self.names: dict[str, object] = {}
        self.weights: dict[str, torch.Tensor] = {}
        self.results: list[xl.ForwardBackwardOutput] = []

    @property
    def client(self) -> xl.TrainingClient:
        return self.names["client"]

    def look(self) -> None:
        """Keep the first weights, and the result of each step that is over."""
        if not self.weights:
            self.weights = {n: t.clone() for n, t in self._now().items()}
        result = self.names.get("result")
        if result is not None and result not in self.results:
            self.results.append(result)

    def changed(self) -> list[str]:
        now = self._now()
        assert now.keys() == self.weights.keys()
        return [n for n in now if not torch.equal(now[n], self.weights[n])]

    def _now(self) -> dict[str, torch.Tensor]:
        return self.client._session.trained.weights()


def samples_version(client: xl.SamplingClient) -> int:
    """The version that an answer of the sampler names."""
    response = client.sample("Hello", xl.SamplingParams(max_tokens=4)).result()
    return response.meta_info["weight_version"]


class TestSft:
    STEPS = 8

    def train(self, documents) -> Watcher:
        code = cut(
            documents / "training-loop-patterns.txt",
            "SFT Training Loop",
            "import xorl_client",
            "    print(f\"step={step} logprobs={result.loss_fn_outputs[0]['logprobs']}\")",
        )
        watcher = Watcher()
        batch = [
            {"input_ids": list(text), "labels": [-100] * 4 + list(text[4:])}
            for text in (b"2+2=4, and 3+3=6.", b"so it is.")
        ]

        def dataloader():
            for _ in range(self.STEPS):
                watcher.look()
                yield batch
            watcher.look()

        watcher.names["dataloader"] = dataloader()
        run(change(code, SFT, "SFT Training Loop"), watcher.names)
        return watcher

    def test_it_trains(self, documents, capsys):
        watcher = self.train(documents)
        printed = capsys.readouterr().out
        assert printed.count("logprobs=TensorData") == self.STEPS
        assert "- client = service" not in printed
        assert '+ base_model="tiny"' in printed
        losses = [r.metrics["loss:mean"] for r in watcher.results]
        assert len(losses) == self.STEPS
        assert losses[-1] < losses[0] - 0.01
        assert losses == sorted(losses, reverse=True)
        assert watcher.client.version == self.STEPS

    def test_every_tensor_of_the_adapter_has_changed(self, documents):
        watcher = self.train(documents)
        # Two matrices in each of seven linear layers of two blocks.
        assert len(watcher.changed()) == 2 * 7 * 2

    def test_the_sampler_answers_with_the_new_version(self, documents):
        client = self.train(documents).client
        assert samples_version(client.save_weights_and_get_sampling_client()) == self.STEPS


class Rewards:
    """Stands for a reward model: the share of letters in a completion."""

    def __init__(self, watcher: Watcher) -> None:
        self.watcher = watcher
        self.texts: list[list[str]] = []

    def score(self, texts: list[str]) -> list[float]:
        self.watcher.look()
        self.texts.append(texts)
        return [sum(c.isalpha() for c in text) / 24 for text in texts]


def mean_centred(rewards: list[float]) -> list[float]:
    return [float(r - np.mean(rewards)) for r in rewards]


class TestRl:
    STEPS = 3

    def train(self, documents, sync_every: int = 1) -> Watcher:
        code = cut(
            documents / "training-loop-patterns.txt",
            "RL Training Loop (PPO / GRPO)",
            "import xorl_client",
            "            master_port=29600,",
        )
        code += "        ).result()\n"
        watcher = Watcher()
        watcher.names |= {
            "num_steps": self.STEPS,
            "sync_every": sync_every,
            "prompts": ["Once upon", "a", "The answer is", "so it"],
            "reward_model": Rewards(watcher),
            "compute_advantages": mean_centred,
        }
        run(change(code, RL, "RL Training Loop (PPO / GRPO)"), watcher.names)
        watcher.look()
        return watcher

    def test_it_trains(self, documents):
        watcher = self.train(documents)
        assert watcher.client.version == self.STEPS
        assert len(watcher.names["reward_model"].texts) == self.STEPS
        assert len(watcher.results) == self.STEPS

    def test_every_tensor_of_the_model_has_changed(self, documents):
        watcher = self.train(documents)
        assert len(watcher.changed()) == len(watcher.weights) == 20

    def test_the_sampler_answers_with_the_new_version(self, documents):
        watcher = self.train(documents)
        assert samples_version(watcher.names["sampler"]) == self.STEPS

    def test_a_sampler_that_is_synced_less_often_lags_behind(self, documents):
        # Synced after steps 0 and 2 of 0, 1, 2; the second step draws from version 1.
        watcher = self.train(documents, sync_every=2)
        assert watcher.client.version == self.STEPS
        assert watcher.names["batch"].completed[0][1].meta_info["weight_version"] == 1

    def test_on_policy_the_ratio_is_one_and_nothing_is_clipped(self, documents):
        first = self.train(documents).results[0].metrics
        assert abs(first["ratio_mean"] - 1) < 1e-4
        assert abs(first["ratio_min"] - 1) < 1e-3
        assert abs(first["ratio_max"] - 1) < 1e-3
        assert first["pg_clipfrac"] == 0
        assert abs(first["kl_sample_train_k3"]) < 1e-6
        assert first["entropy_sample"] > 0

    def test_only_the_completions_are_trained(self, documents):
        watcher = self.train(documents)
        completions = [r for _, r in watcher.names["batch"].completed]
        trained = watcher.results[-1].metrics["valid_tokens"]
        assert trained == sum(len(r.tokens) for r in completions)


class TestPytrio:
    def train(self, documents) -> dict[str, object]:
        code = cut(
            documents / "pytrio-training-client.txt",
            "TrainingClient runs LoRA training. Create it with "
            "ServiceClient.create_lora_training_client().",
            "import pytrio as trio",
            "training_client.optim_step(trio.AdamParams(learning_rate=1e-4)).result()",
        )
        return run(change(code, PYTRIO, "pytrio.TrainingClient"), {})

    def test_it_trains(self, documents):
        names = self.train(documents)
        client = names["training_client"]
        assert client.version == 1
        b = [t for n, t in client._session.trained.weights().items() if "lora_B" in n]
        assert b
        assert all(bool(t.any()) for t in b)

    def test_the_output_has_one_logprob_per_target(self, documents):
        names = self.train(documents)
        output = names["output"]
        assert len(output.loss_fn_outputs) == 1
        assert len(output.loss_fn_outputs[0].logprobs) == len(names["target_tokens"])
        assert output.metrics["valid_tokens"] == len(names["target_tokens"])

    def test_the_sampler_answers_with_the_new_version(self, documents):
        client = self.train(documents)["training_client"]
        assert samples_version(client.save_weights_and_get_sampling_client()) == 1
