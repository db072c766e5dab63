"""Every route of the protocol: what it takes and the shape of its answer."""

import pytest

from tests.server.support import ADAM, datum, gradient


def keys(answer):
    return set(answer)


def test_two_phase_results(api):
    assert api.create() == {"model_id": "default", "type": "create_model"}
    out = api.call("forward_backward", seq_id=1, forward_backward_input=gradient())
    assert keys(out) == {"loss_fn_output_type", "loss_fn_outputs", "metrics", "info"}
    assert out["loss_fn_output_type"] == "causallm_loss"
    (one,) = out["loss_fn_outputs"]
    assert keys(one) == {"loss", "logprobs", "elementwise_loss"}
    assert keys(one["logprobs"]) == {"data", "dtype", "shape"}
    assert one["logprobs"]["shape"] == [3]
    assert one["loss"] == pytest.approx(-sum(one["logprobs"]["data"]))
    assert out["metrics"]["valid_tokens"] == 3
    same = api.call("forward", seq_id=2, forward_input=gradient())
    assert same["loss_fn_outputs"] == out["loss_fn_outputs"]
    step = api.call("optim_step", seq_id=3, adam_params=ADAM)
    assert keys(step) == {"metrics", "info"}
    assert step["metrics"]["step"] == 1
    saved = api.call("save_weights", seq_id=4, path="step_1")
    assert saved == {"path": "xorl://default/weights/step_1"}
    unnamed = api.call("save_weights", seq_id=5, path=None)
    assert unnamed == {"path": "xorl://default/weights/step-1"}
    for_sampler = api.call("save_weights_for_sampler", seq_id=6, name="s")
    assert for_sampler["path"] == "xorl://default/sampler_weights/s"
    assert for_sampler["model_path"] == "sampler_weights/s"
    assert for_sampler["size"] > 0
    loaded = api.call("load_weights", seq_id=7, path=saved["path"], optimizer=True)
    assert loaded == {"path": saved["path"], "info": {"version": loaded["info"]["version"]}}
    gone = api.call("unload_model", model_id="default", type="unload_model")
    assert gone == {"model_id": "default", "type": "unload_model"}
    assert api.call("unload_model", model_id="default") == gone


def test_direct_answers_about_checkpoints(api):
    api.create("m")
    for seq, name in enumerate(("a", "b"), 1):
        api.call("save_weights", model_id="m", seq_id=seq, path=name)
    api.call("save_weights_for_sampler", model_id="m", seq_id=3, name="s")
    listed = api.ask("/api/v1/list_checkpoints", model_id="m")["checkpoints"]
    assert [c["checkpoint_id"] for c in listed] == ["weights/a", "weights/b", "sampler_weights/s"]
    assert [c["checkpoint_type"] for c in listed] == ["training", "training", "sampler"]
    assert {"checkpoint_id", "checkpoint_type", "time", "path", "size_bytes"} <= keys(listed[0])
    info = api.ask("/api/v1/weights_info", xorl_path="xorl://m/weights/a")
    lora = info.pop("lora")
    assert (lora["rank"], lora["alpha"]) == (4, 32.0)
    assert info == {"base_model": "tiny", "is_lora": True, "lora_rank": 4}
    runs = api.http.get("/api/v1/training_runs?limit=5&offset=0").json()
    assert runs["cursor"] == {"offset": 0, "limit": 5, "total_count": 1}
    (run,) = runs["training_runs"]
    assert (run["training_run_id"], run["base_model"], run["lora_rank"]) == ("m", "tiny", 4)
    assert run["last_checkpoint"]["path"] == "xorl://m/weights/b"
    assert run["last_sampler_checkpoint"]["path"] == "xorl://m/sampler_weights/s"

    def delete(which):
        return api.ask("/api/v1/delete_checkpoint", model_id="m", checkpoint_id=which)

    path = "xorl://m/weights/a"
    assert delete("weights/a") == {"success": True, "deleted_path": path, "error": None}
    again = delete("weights/a")
    assert not again["success"]
    assert "checkpoint.not_found" in again["error"]
    assert delete("weights/m/b")["success"], "xorl names the model inside the id too"
    assert delete("xorl://m/sampler_weights/s")["success"]
    assert api.ask("/api/v1/list_checkpoints", model_id="m") == {"checkpoints": []}
    assert api.post("/api/v1/weights_info", xorl_path="xorl://m/weights/a").status_code == 404


def test_a_checkpoint_is_found_by_each_of_its_names(api):
    api.create()
    api.call("save_weights", seq_id=1, path="a")
    names = ("a", "weights/a", "weights/default/a", "xorl://default/weights/a")
    for seq, name in enumerate(names, 2):
        assert api.call("load_weights", seq_id=seq, path=name)["path"] == name


def test_sessions_and_health(api):
    health = api.http.get("/health").json()
    assert {"status", "engine_running", "active_requests", "total_requests"} <= keys(health)
    assert health["status"] == "healthy"
    assert api.http.get("/api/v1/healthz").json() == {"status": "ok"}
    session = api.ask("/api/v1/create_session")["session_id"]
    api.ask("/api/v1/session_heartbeat", session_id=session)
    assert api.ask("/api/v1/session_info", session_id=session)["known"]
    assert not api.ask("/api/v1/session_info", session_id="x")["known"]
    assert api.ask("/sleep")["success"]
    assert api.ask("/wake_up")["success"]


def test_kill_session_saves_what_is_unsaved(api):
    api.create()
    nothing = api.ask("/api/v1/kill_session", model_id="default", save_checkpoint=True)
    assert (nothing["success"], nothing["checkpoint_path"]) == (True, None)
    api.create()
    api.send("forward_backward", seq_id=1, forward_backward_input=gradient())
    api.send("optim_step", seq_id=2, adam_params=ADAM)
    killed = api.ask("/api/v1/kill_session", model_id="default", save_checkpoint=True)
    assert killed["checkpoint_path"].startswith("xorl://default/weights/killed-")
    assert api.ask("/api/v1/get_info", model_id="default")["step"] == 0
    api.create()
    resumed = api.call("load_weights", path=killed["checkpoint_path"], optimizer=True)
    assert "error" not in resumed
    assert api.ask("/api/v1/get_info", model_id="default")["step"] == 1


def test_abort_gradient_epoch(api):
    api.create()
    api.call("forward_backward", seq_id=1, forward_backward_input=gradient())
    assert api.ask("/api/v1/abort_gradient_epoch", model_id="default")["success"]
    failed = api.call("optim_step", seq_id=2, adam_params=ADAM)
    assert "nothing to apply" in failed["error"]


def test_the_default_model_is_there_without_create_model(api):
    out = api.call("forward", forward_input={"data": [datum()], "loss_fn": "cross_entropy"})
    assert out["metrics"]["valid_tokens"] == 3
    assert api.ask("/api/v1/get_info", model_id="default")["lora_rank"] == 32
    missing = api.post("/api/v1/forward", model_id="other", forward_input=gradient())
    assert missing.status_code == 404
    assert "create it with create_model" in missing.json()["detail"]


def test_full_weights_mode_tolerates_what_the_client_sends(start):
    api = start(full=True)
    config = {"rank": 32, "dropout": 0.0}
    made = api.call("create_model", model_id="d", base_model="tiny", lora_config=config)
    assert made["type"] == "create_model"
    assert not api.ask("/api/v1/get_info", model_id="d")["is_lora"]
    other = api.post("/api/v1/create_model", base_model="tiny", lora_config={"rank": 8})
    assert other.status_code == 400
    assert "--full" in other.json()["detail"]


def test_another_base_model_is_refused(api):
    answer = api.post("/api/v1/create_model", base_model="Qwen/Qwen3-8B", lora_config={})
    assert answer.status_code == 400
    assert "serves 'tiny'" in answer.json()["detail"]


def test_create_model_on_a_live_id(api):
    api.create("m")
    api.call("forward_backward", model_id="m", seq_id=1, forward_backward_input=gradient())
    api.call("optim_step", model_id="m", seq_id=2, adam_params=ADAM)
    api.create("m")
    assert api.ask("/api/v1/get_info", model_id="m")["step"] == 1, "the weights are kept"
    other = api.post("/api/v1/create_model", model_id="m", base_model="tiny", lora_config={})
    assert other.status_code == 409
    assert "rank is 4, not 32" in other.json()["detail"]
    api.call("unload_model", model_id="m")
    api.create("m", rank=2)
    assert api.ask("/api/v1/get_info", model_id="m")["lora_rank"] == 2


def test_a_model_that_cannot_be_made_does_not_stand_in_the_way(api):
    failed = api.create("m", target_modules=["nonsense"])
    assert failed["category"] == "user"
    assert "nonsense" in failed["error"]
    assert api.create("m")["type"] == "create_model"


def test_loss_parameters_go_by_two_names(api):
    rl = datum(logprobs=[0, -1, -1], advantages=[0, 0, 1, 1])
    body = {"data": [rl], "loss_fn": " Policy_Loss "}
    for name in ("loss_fn_params", "loss_fn_config"):
        out = api.call("forward", forward_input={**body, name: {"compute_kl_stats": True}})
        assert "kl_sample_train_k3" in out["metrics"]
    both = {**body, "loss_fn_params": {"eps_clip": 0.1}, "loss_fn_config": {"eps_clip": 0.1}}
    assert "two names" in api.call("forward", forward_input=both)["error"]
