"""Runs code of the seed documents with xorl_client against a trainer and a real SGLang server.

``python seed_sglang_runner.py PLAN FOUND``: PLAN is a JSON file with the blocks of code by name,
and under ``change`` lines to put in the place of others; what was found is written to FOUND.
"""

import json
import re
import statistics
import sys
from pathlib import Path

API = "http://localhost:6000"
SAMPLER = "http://localhost:30000"
TEXT = list(b"Hello, what is 2 + 2?")


def main(plan, result):
    """Run the blocks that there are, in the order in which a reader would."""
    import requests
    import xorl_client

    blocks = json.loads(Path(plan).read_text())
    settings = blocks.pop("settings", {})
    found = {}

    def ask(path, **body):
        response = requests.post(API + path, json=body, timeout=120)
        response.raise_for_status()
        return response.json()

    def steps():
        return ask("/api/v1/get_info", model_id="default")["step"]

    def trained(client):
        """The trainer's logprobs of a sequence."""
        datum = xorl_client.Datum(xorl_client.ModelInput.from_ints(TEXT), {"labels": TEXT})
        return client.forward([datum]).result().loss_fn_outputs[0]["logprobs"].tolist()

    def sampled(**more):
        """SGLang's logprobs of the same sequence, and what it calls its weights."""
        body = {"input_ids": TEXT, "sampling_params": {"max_new_tokens": 1}, **more}
        body |= {"return_logprob": True, "logprob_start_len": 0}
        response = requests.post(f"{SAMPLER}/generate", json=body, timeout=120)
        response.raise_for_status()
        meta = response.json()["meta_info"]
        return [row[0] for row in meta["input_token_logprobs"][1:]], meta["weight_version"]

    def execute(name, names):
        exec(compile(blocks[name], name, "exec"), names)
        return names

    if "rl" in blocks:
        versions, rewards = [], []

        class RewardModel:
            def score(self, texts):
                versions.append(sampled()[1])
                scores = [reward(text) for text in texts]
                rewards.append(sum(scores) / len(scores))
                return scores

        def reward(text):
            want = settings.get("words")
            if want is None:
                return float(sum(c.isalpha() for c in text)) / max(1, len(text))
            return min(1.0, sum(word in want for word in re.findall("[a-z]+", text.lower())) / 3)

        def compute_advantages(values):
            size = settings.get("group", len(values))
            groups = [values[i : i + size] for i in range(0, len(values), size)]
            spread = [statistics.pstdev(g) or 1.0 for g in groups]
            means = [statistics.mean(g) for g in groups]
            return [
                (v - mean) / std
                for g, mean, std in zip(groups, means, spread, strict=True)
                for v in g
            ]

        before = steps()
        names = {
            "num_steps": settings.get("steps", 2),
            "sync_every": 1,
            "prompts": settings.get("prompts", ["Hello", "The sea", "1 + 1 ="]),
            "reward_model": RewardModel(),
            "compute_advantages": compute_advantages,
        }
        names = execute("rl", names)
        completions = names["completions"]
        found["rl"] = {
            "steps": steps() - before,
            "versions": versions,
            "rewards": rewards,
            "trainer": trained(names["client"]),
            "sampler": sampled(),
            "listed": requests.get(f"{API}/list_inference_endpoints", timeout=60).json(),
            "metrics": names["result"].metrics,
            "aligned": all(len(c.tokens) == len(c.logprobs) > 0 for c in completions),
            # The same weights again: nothing is sent, and the canary looks once more.
            "again": ask("/sync_inference_weights"),
        }

    if "sampler" in blocks:
        ids = [list(f"sample {i}".encode()) for i in range(4)]
        samples = [{"input_ids": i, "labels": i} for i in ids]
        execute("sft", {"dataloader": [samples[:2], samples[2:]]})
        base = sampled()
        execute("register", {"requests": requests})
        names = execute("sampler", {"xorl_client": xorl_client})
        response = names["response"]
        found["sampler"] = {
            "steps": steps(),
            "base": base[0],
            "still": sampled()[0],
            "trainer": trained(names["client"]),
            "sampler": sampled(lora_path="step_100")[0],
            "tokens": len(response.tokens),
            "logprobs": len(response.logprobs),
            "adapters": requests.get(f"{SAMPLER}/v1/models", timeout=60).json()["data"],
        }
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
