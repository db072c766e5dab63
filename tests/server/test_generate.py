"""``/generate`` in SGLang's shape."""

import asyncio
import threading
import time

import httpx
import pytest

from tests.server.support import ADAM, gradient

ONE = {"max_new_tokens": 4, "seed": 1}


def test_one_prompt(api):
    out = api.ask("/generate", input_ids=[1, 2, 3], sampling_params=ONE, rid="r")
    assert set(out) == {"text", "output_ids", "meta_info"}
    meta = out["meta_info"]
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("r", 3, 4)
    assert meta["finish_reason"] == {"type": "length", "length": 4}
    assert meta["weight_version"] == "0"
    assert "output_token_logprobs" not in meta
    assert len(out["output_ids"]) == 4


def test_a_list_is_answered_with_a_flat_list_prompt_by_prompt(api):
    params = {**ONE, "n": 2}
    both = api.ask("/generate", input_ids=[[1, 2], [3]], sampling_params=params, rid=["a", "b"])
    assert [o["meta_info"]["id"] for o in both] == ["a", "a", "b", "b"]
    alone = api.ask("/generate", input_ids=[3], sampling_params=params)
    assert [o["output_ids"] for o in alone] == [o["output_ids"] for o in both[2:]]
    single = api.ask("/generate", input_ids=[[3]], sampling_params=ONE)
    assert isinstance(single, list)
    assert [o["output_ids"] for o in single] == [alone[0]["output_ids"]]
    each = [ONE, {**ONE, "max_new_tokens": 2}]
    sizes = [
        o["meta_info"]["completion_tokens"]
        for o in api.ask("/generate", text=["a", "b"], sampling_params=each)
    ]
    assert sizes == [4, 2]


def test_text_is_encoded_with_the_models_tokenizer(api):
    a = api.ask("/generate", text="Hello", sampling_params=ONE)
    b = api.ask("/generate", input_ids=list(b"Hello"), sampling_params=ONE)
    assert a["output_ids"] == b["output_ids"]
    assert a["text"] == b["text"]


def test_logprobs(api):
    ask = {"input_ids": [1, 2, 3], "sampling_params": ONE, "return_logprob": True}
    out = api.ask("/generate", **ask, top_logprobs_num=2, return_text_in_logprobs=True)
    meta = out["meta_info"]
    assert [row[1] for row in meta["output_token_logprobs"]] == out["output_ids"]
    assert all(row[0] < 0 and isinstance(row[2], str) for row in meta["output_token_logprobs"])
    assert [len(top) for top in meta["output_top_logprobs"]] == [2] * 4
    assert "input_token_logprobs" not in meta
    whole = api.ask("/generate", **ask, logprob_start_len=0)["meta_info"]["input_token_logprobs"]
    assert [row[1] for row in whole] == [1, 2, 3]
    assert whole[0][0] is None
    part = api.ask("/generate", **ask, logprob_start_len=2)["meta_info"]["input_token_logprobs"]
    assert part == whole[2:]
    trained = api.call("forward", forward_input=gradient((1, 2, 3)))["loss_fn_outputs"][0]
    assert [row[0] for row in whole[1:]] == pytest.approx(trained["logprobs"]["data"], abs=1e-4)


def test_stops(api):
    free = api.ask("/generate", input_ids=[5], sampling_params={"max_new_tokens": 8, "seed": 3})
    third = free["output_ids"][2]
    params = {"max_new_tokens": 8, "seed": 3, "stop_token_ids": [third]}
    cut = api.ask("/generate", input_ids=[5], sampling_params=params)
    assert cut["output_ids"] == free["output_ids"][: free["output_ids"].index(third) + 1]
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": third}
    letter = next(c for c in free["text"] if c.isascii() and c.isprintable())
    params = {"max_new_tokens": 8, "seed": 3, "stop": [letter]}
    cut = api.ask("/generate", input_ids=[5], sampling_params=params)
    assert letter not in cut["text"]
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": letter}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input_ids": [999]}, "token id 999"),
        ({"input_ids": [-1]}, "token id -1"),
        ({"input_ids": []}, "no tokens"),
        ({"input_ids": [[]]}, "no tokens"),
        ({"input_ids": [[1], 2]}, "input_ids"),
        ({"input_ids": "x"}, "input_ids"),
        ({"text": ""}, "no tokens"),
        ({"text": []}, "0 prompts"),
        ({}, "exactly one"),
        ({"text": "a", "input_ids": [1]}, "exactly one"),
        ({"input_ids": [1], "sampling_params": {"nonsense": 1}}, "nonsense"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": 0}}, "max_tokens"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": "x"}}, "max_tokens"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": 10**6}}, "context"),
        ({"input_ids": [1], "sampling_params": {"temperature": -1}}, "temperature"),
        ({"input_ids": [1], "sampling_params": {"temperature": [1]}}, "temperature"),
        ({"input_ids": [1], "sampling_params": {"top_p": 0}}, "top_p"),
        ({"input_ids": [1], "sampling_params": {"n": 0}}, "num_samples"),
        ({"input_ids": [1], "sampling_params": {"n": 10**9}}, "num_samples"),
        ({"input_ids": [1], "sampling_params": {"stop": [1]}}, "stop"),
        ({"input_ids": [1], "sampling_params": {"stop_token_ids": ["a"]}}, "stop_token_ids"),
        ({"input_ids": [1], "sampling_params": {"frequency_penalty": 0.5}}, "frequency_penalty"),
        ({"input_ids": [1], "sampling_params": [{}, {}]}, "2 entries"),
        ({"input_ids": [1], "lora_path": "nobody"}, "create_sampling_session"),
        ({"input_ids": [1], "stream": True}, "stream"),
        ({"input_ids": [1], "return_logprob": True, "top_logprobs_num": 10**6}, "top_logprobs"),
    ],
)
def test_what_cannot_be_done_is_a_400(api, body, words):
    answer = api.post("/generate", **body)
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["detail"]


def test_values_that_change_nothing_are_taken(api):
    params = {
        **ONE,
        "frequency_penalty": 0.0,
        "presence_penalty": 0,
        "repetition_penalty": 1.0,
        "min_p": 0.0,
        "skip_special_tokens": True,
        "ignore_eos": False,
        "stop": None,
        "stop_token_ids": [],
        "top_k": -1,
    }
    plain = api.ask("/generate", input_ids=[1], sampling_params=ONE)
    assert api.ask("/generate", input_ids=[1], sampling_params=params)["text"] == plain["text"]
    assert api.ask("/generate", input_ids=[1], sampling_params={**params, "stop": ""})


def slow(api, rid):
    """A request that takes seconds unless it is aborted."""
    params = {"max_new_tokens": 500, "n": 64}
    return api.ask("/generate", input_ids=[1], sampling_params=params, rid=rid)


@pytest.mark.parametrize("how", [{"rid": "long"}, {"abort_all": True}])
def test_abort(api, how):
    answers = []
    thread = threading.Thread(target=lambda: answers.extend(slow(api, "long")))
    thread.start()
    while not api.ask("/abort_request", **how)["aborted"]:
        time.sleep(0.01)
    thread.join(20)
    assert {a["meta_info"]["finish_reason"]["type"] for a in answers} == {"abort"}
    assert len(answers) == 64
    assert api.ask("/abort_request", rid="long") == {"aborted": 0}
    assert api.http.get("/health").json()["active_requests"] == 0


def test_a_client_that_hangs_up_ends_its_sampling(live, http):
    process = live()

    async def hang_up():
        body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 500, "n": 200}}
        async with httpx.AsyncClient(base_url=process.url, trust_env=False) as client:
            with pytest.raises(httpx.TimeoutException):
                await client.post("/generate", json=body, timeout=0.5)

    asyncio.run(hang_up())
    client = http(process.url)
    end = time.monotonic() + 5
    while client.get("/health").json()["active_requests"] and time.monotonic() < end:
        time.sleep(0.02)
    assert client.get("/health").json()["active_requests"] == 0


def test_about_the_sampler(api):
    assert api.http.get("/health_generate").status_code == 200
    for path in ("/model_info", "/get_model_info"):
        info = api.http.get(path).json()
        assert (info["model_path"], info["is_generation"]) == ("tiny", True)
    for path in ("/server_info", "/get_server_info"):
        info = api.http.get(path).json()
        assert (info["enable_lora"], info["tp_size"], info["context_length"]) == (True, 1, 512)


def train(api, first=1):
    api.call("forward_backward", seq_id=first, forward_backward_input=gradient((1, 2, 3)))
    assert "error" not in api.call("optim_step", seq_id=first + 1, adam_params=ADAM)


def score(api, **keywords):
    """Logprobs of a prompt, and the version that gave them."""
    ask = {"input_ids": [1, 2, 3], "sampling_params": ONE, "return_logprob": True}
    meta = api.ask("/generate", **ask, logprob_start_len=1, **keywords)["meta_info"]
    return [row[0] for row in meta["input_token_logprobs"]], meta["weight_version"]


def trainer(api):
    out = api.call("forward", forward_input=gradient((1, 2, 3)))
    return pytest.approx(out["loss_fn_outputs"][0]["logprobs"]["data"], abs=1e-4)


@pytest.mark.parametrize("full", [False, True])
def test_sync_publishes_what_is_queued_before_it(start, full):
    api = start(full=full)
    api.call("create_model", base_model="tiny", lora_config={"rank": 32})
    base, version = score(api)
    assert version == "0"
    assert base == trainer(api)
    api.send("forward_backward", seq_id=1, forward_backward_input=gradient((1, 2, 3)))
    api.send("optim_step", seq_id=2, adam_params=ADAM)
    answer = api.ask("/sync_inference_weights", master_address="localhost", master_port=29600)
    assert answer["success"]
    assert {"message", "transfer_time", "total_bytes", "num_parameters", "num_buckets"} <= set(
        answer
    )
    synced, version = score(api)
    assert version == "1"
    assert synced != base
    assert synced == trainer(api)
    train(api, 3)
    assert score(api) == (synced, "1"), "a version does not change under its readers"
    api.ask("/api/v1/sync_inference_weights")
    assert score(api)[1] == "2"
    assert score(api)[0] == trainer(api)


@pytest.mark.parametrize("full", [False, True])
def test_an_adapter_by_name_is_the_newest_of_that_name(start, full):
    api = start(full=full)
    api.call("create_model", base_model="tiny", lora_config={"rank": 32})
    train(api)
    path = api.call("save_weights_for_sampler", seq_id=3, name="now")["path"]
    made = api.ask("/api/v1/create_sampling_session", model_path=path)
    assert (made["success"], made["lora_name"], made["model_path"]) == (True, "now", path)
    first = score(api, lora_path="now")
    assert first == (trainer(api), "1")
    assert score(api, lora_path=path) == first
    assert score(api)[1] == "0", "without a name the published weights answer"
    train(api, 4)
    api.call("save_weights_for_sampler", seq_id=6, name="now")
    assert score(api, lora_path="now") == first, "until it is registered again"
    api.ask("/api/v1/create_sampling_session", model_path="sampler_weights/now")
    assert score(api, lora_path="now") == (trainer(api), "2")
    names = {m["id"]: m["parent"] for m in api.http.get("/v1/models").json()["data"]}
    assert names == {"tiny": None, "now": "tiny"}


@pytest.mark.parametrize(
    ("path", "status"),
    [("xorl://default/sampler_weights/none", 404), ("xorl://../weights/x", 400), ("x", 400)],
)
def test_an_adapter_that_is_not_there(api, path, status):
    answer = api.post("/api/v1/create_sampling_session", model_path=path)
    assert answer.status_code == status
    assert "Traceback" not in answer.text
