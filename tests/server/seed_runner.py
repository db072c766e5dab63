"""Runs code of the seed documents with xorl_client as it is on PyPI; started by the test.

``python seed_runner.py PLAN FOUND``: PLAN is a JSON file with the blocks of code by name; what was
found is written to FOUND.
"""

import json
import sys
from pathlib import Path

NUM_STEPS = 2
PROMPTS = ["Hello", "The sea", "1 + 1 ="]
API = "http://localhost:6000"
SAMPLER = "http://localhost:30000"


def main(plan, result):
    """Run all blocks, in the order in which a reader would."""
    import requests
    import xorl_client

    blocks = json.loads(Path(plan).read_text())
    found = {}

    def ask(path, **body):
        response = requests.post(API + path, json=body, timeout=60)
        response.raise_for_status()
        return response.json()

    def steps(model_id="default"):
        return ask("/api/v1/get_info", model_id=model_id)["step"]

    def trained(client, tokens=(72, 101, 108, 108, 111)):
        """The trainer's logprobs of a sequence."""
        tokens = list(tokens)
        datum = xorl_client.Datum(xorl_client.ModelInput.from_ints(tokens), {"labels": tokens})
        return client.forward([datum]).result().loss_fn_outputs[0]["logprobs"].tolist()

    def sampled(tokens=(72, 101, 108, 108, 111), **more):
        """The sampler's logprobs of the same sequence, and its version."""
        body = {"input_ids": list(tokens), "sampling_params": {"max_new_tokens": 1}, **more}
        body |= {"return_logprob": True, "logprob_start_len": 1}
        response = requests.post(f"{SAMPLER}/generate", json=body, timeout=60)
        meta = response.json()["meta_info"]
        return [row[0] for row in meta["input_token_logprobs"]], meta["weight_version"]

    def execute(name, names):
        exec(compile(blocks[name], name, "exec"), names)
        return names

    def adapters(service, data, adam):
        """A policy and a reference on one base model."""
        names = execute("adapters", {"service": service, "data": data})
        out, reference = names["fwd"].result(), names["ref_logprobs"].result()
        names["policy"].optim_step(adam).result()
        infos = [ask("/api/v1/get_info", model_id=m) for m in ("policy", "reference")]
        return {
            "policy": out.loss_fn_outputs[0]["logprobs"].tolist(),
            "reference": reference.loss_fn_outputs[0]["logprobs"].tolist(),
            "ranks": [info["lora_rank"] for info in infos],
            "steps": [info["step"] for info in infos],
            "moved": trained(names["policy"]) != trained(names["reference"]),
        }

    # Supervised fine-tuning.
    ids = [list(f"sample {i}".encode()) for i in range(4)]
    samples = [{"input_ids": i, "labels": i} for i in ids]
    before = sampled()[0]
    names = execute("sft", {"dataloader": [samples[:2], samples[2:]]})
    found["sft"] = {
        "steps": steps(),
        "before": before,
        "after": trained(names["client"]),
        "logprobs": names["result"].loss_fn_outputs[0]["logprobs"].tolist(),
    }

    # Reinforcement learning.
    versions = []

    class RewardModel:
        def score(self, texts):
            versions.append(sampled()[1])
            return [float(i) for i in range(len(texts))]

    def compute_advantages(rewards):
        mean = sum(rewards) / len(rewards)
        return [r - mean for r in rewards]

    names = {
        "num_steps": NUM_STEPS,
        "sync_every": 1,
        "prompts": PROMPTS,
        "reward_model": RewardModel(),
        "compute_advantages": compute_advantages,
    }
    before_rl = steps()
    execute("rl", names)
    client = names["client"]
    completions = names["completions"]
    found["rl"] = {
        "steps": steps() - before_rl,
        "versions": versions,
        "trainer": trained(client),
        "sampler": sampled(),
        "endpoints": requests.get(f"{API}/list_inference_endpoints", timeout=60).json()["count"],
        "metrics": names["result"].metrics,
        "aligned": all(len(c.tokens) == len(c.logprobs) for c in completions),
        "old": [names["data"][0].loss_fn_inputs["logprobs"].tolist()],
        "prompt": len(PROMPTS[0]),
        "completion": len(completions[0].tokens),
    }

    # Losses, one after the other, each with a step.
    data, adam = names["data"], xorl_client.AdamParams(learning_rate=1e-3)
    found["losses"] = {}
    tokens = list(b"truncated importance")
    tis = {
        "token_ids": tokens,
        "logprobs_at_last_train_step": [-1.0] * (len(tokens) - 1),
        "logprobs_at_rollout": [-1.0 - 0.5 * (i % 3) for i in range(len(tokens) - 1)],
        "advantages": [0.0] + [1.0] * (len(tokens) - 1),
    }
    for name in ("causallm_loss", "dual_clip", "importance_sampling", "icepop", "tis"):
        weights = trained(client)
        space = {"xorl_client": xorl_client, "client": client, "data": data, **tis}
        fwd = execute(name, space)["fwd"].result()
        step = client.optim_step(adam).result()
        found["losses"][name] = {
            "type": fwd.loss_fn_output_type,
            "metrics": fwd.metrics,
            "grad_norm": step.metrics["grad_norm"],
            "moved": trained(client) != weights,
        }

    if "adapters" in blocks:
        found["adapters"] = adapters(names["service"], data, adam)

    # Resuming: save, go on, and come back.
    client.save_state("step_1000").result()
    saved, count = trained(client), steps()
    client.forward_backward(data, loss_fn="policy_loss").result()
    client.optim_step(adam).result()
    moved = trained(client)
    names = execute("resume", {"service": names["service"]})
    found["resume"] = {
        "saved": saved,
        "moved": moved,
        "resumed": trained(names["client"]),
        "steps": [count, steps()],
    }

    # Weights for the sampler.
    names = execute("sampler", {"xorl_client": xorl_client})
    response = names["response"]
    found["sampler"] = {
        "text": response.text,
        "tokens": len(response.tokens),
        "logprobs": len(response.logprobs),
        "version": response.meta_info["weight_version"],
        "trainer": trained(names["client"]),
        "sampler": sampled(lora_path="step_100"),
    }

    # What the documents do not show: errors reach the caller, and the client goes on.
    try:
        client.forward(data).result(timeout=30)
        found["replaced"] = "no error"
    except xorl_client.exceptions.RequestFailedError as error:
        found["replaced"] = str(error)
    client = names["client"]
    bad = xorl_client.Datum(xorl_client.ModelInput.from_ints([1, 99999]), {"labels": [1, 99999]})
    try:
        client.forward_backward([bad], loss_fn="causallm_loss").result(timeout=30)
        found["bad"] = "no error"
    except xorl_client.exceptions.RequestFailedError as error:
        found["bad"] = str(error)
    client.forward_backward(data, loss_fn="causallm_loss").result(timeout=30)
    found["after_bad"] = client.optim_step(adam).result(timeout=30).metrics["grad_norm"]
    rest = names["service"].create_rest_client()
    found["rest"] = {
        "checkpoints": [c.checkpoint_id for c in rest.list_checkpoints().result().checkpoints],
        "info": rest.get_weights_info("xorl://default/weights/step_1000").result().lora_rank,
        "runs": [r.training_run_id for r in rest.list_training_runs().result().training_runs],
        "deleted": rest.delete_checkpoint("weights/step_1000").result().success,
    }
    found["health"] = client.health_check()["status"]
    found["killed"] = client.kill_session().result().checkpoint_path
    found["unloaded"] = client.unload().result().model_id
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
