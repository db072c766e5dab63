"""Asking a real server, and what the model itself says."""

import httpx

import xorl_lab as xl


def generate(url: str, ids: list[int]) -> dict:
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
    with httpx.Client(trust_env=False, timeout=60) as client:
        answer = client.post(f"{url}/generate", json=body)
    answer.raise_for_status()
    return answer.json()


def greedy(name: str, ids: list[int]) -> list[int]:
    """What the model itself says."""
    client = xl.ServiceClient(device="cpu", dtype="float32").create_sampling_client(base_model=name)
    params = xl.SamplingParams(max_tokens=4, temperature=0)
    return client.sample(xl.ModelInput.from_ints(ids), params, 1).result().sequences[0].tokens
