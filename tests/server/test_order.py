"""Requests that come twice, too early, too late or not at all; and clients that start anew."""

import itertools
import json
import time

import pytest

from tests.server.support import ADAM, LORA, datum, gradient, weights
from xorl_lab.client import ServiceClient
from xorl_lab.errors import EngineError
from xorl_lab.types import Datum, ModelInput

STEPS = [((1, 2, 3, 4), (9, 8, 7)), ((5, 6, 7), (4, 4, 4, 4)), ((30, 31, 32), (60, 61))]


@pytest.fixture
def expected(tmp_path):
    """Weights of a run of STEPS in this process: forward_backward, forward_backward, optim_step."""
    home = tmp_path / "in-process"
    service = ServiceClient(home=home)
    client = service.create_lora_training_client("tiny", LORA["rank"], seed=LORA["seed"])
    for pair in STEPS:
        for tokens in pair:
            one = Datum(ModelInput.from_ints(tokens), {"labels": tokens})
            client.forward_backward([one], "causallm_loss")
        client.optim_step(ADAM)
    return weights(home, client.save_state("end").result().path)


def requests():
    """The same run as numbered requests."""
    numbers = itertools.count(1)
    for pair in STEPS:
        for tokens in pair:
            body = {"seq_id": next(numbers), "forward_backward_input": gradient(tokens)}
            yield "forward_backward", body
        yield "optim_step", {"seq_id": next(numbers), "adam_params": ADAM}
    yield "save_weights", {"seq_id": next(numbers), "path": "end"}


def test_as_in_process_bit_for_bit(api, expected, tmp_path):
    api.create()
    ids = [api.send(path, **body) for path, body in requests()]
    assert all("error" not in api.fetch(i) for i in ids)
    assert weights(tmp_path, "xorl://default/weights/end") == expected


def test_repeats_and_replays_do_nothing_twice(api, expected, tmp_path):
    api.create()
    everything = list(requests())
    ids = []
    for path, body in everything:
        first = api.send(path, **body)
        # The order of keys is no part of the request.
        shuffled = json.loads(json.dumps(dict(reversed(body.items()))))
        assert {api.send(path, **body), api.send(path, **shuffled)} == {first}
        ids.append(first)
    answers = [api.fetch(i) for i in ids]
    replayed = [api.call(path, **body) for path, body in everything]
    assert replayed == answers
    assert weights(tmp_path, "xorl://default/weights/end") == expected
    assert api.ask("/api/v1/get_info", model_id="default")["step"] == len(STEPS)


@pytest.mark.parametrize("order", ["reversed", "swapped"])
def test_reordered_requests_are_put_in_order(start, expected, tmp_path, order):
    api = start(gap_seconds=20)
    api.create()
    everything = list(requests())
    if order == "reversed":
        shuffled = everything[::-1]
    else:
        pairs = zip(everything[1::2], everything[::2], strict=False)
        shuffled = [r for pair in pairs for r in pair] + everything[-1:]
    ids = [api.send(path, **body) for path, body in shuffled]
    assert all("error" not in api.fetch(i) for i in ids)
    assert weights(tmp_path, "xorl://default/weights/end") == expected


def test_another_body_under_a_used_number_is_refused(api):
    api.create()
    api.call("forward", seq_id=1, forward_input=gradient())
    other = api.post("/api/v1/forward", seq_id=1, forward_input=gradient((7, 8)))
    assert other.status_code == 409
    path = api.post("/api/v1/forward_backward", seq_id=1, forward_backward_input=gradient())
    assert path.status_code == 409, "the route is a part of the request"


def test_a_number_that_never_comes_fails_what_waits_for_it(api):
    api.create()
    api.call("forward_backward", seq_id=1, forward_backward_input=gradient())
    waits = [
        api.send("forward_backward", seq_id=3, forward_backward_input=gradient((4, 5))),
        api.send("optim_step", seq_id=4, adam_params=ADAM),
    ]
    pending = api.ask("/api/v1/retrieve_future", request_id=waits[0])
    while pending.get("type") == "try_again":
        assert "waits for request 2" in pending["queue_state_reason"]
        pending = api.ask("/api/v1/retrieve_future", request_id=waits[0])
    for request_id in waits:
        assert "request 2 of model 'default' did not arrive" in api.fetch(request_id)["error"]
    late = api.post("/api/v1/forward_backward", seq_id=2, forward_backward_input=gradient())
    assert late.status_code == 409
    assert "5 is next" in late.json()["detail"]
    # Nothing of what came before the gap is left over for a step behind it.
    assert "nothing to apply" in api.call("optim_step", seq_id=5, adam_params=ADAM)["error"]
    api.call("forward_backward", seq_id=6, forward_backward_input=gradient())
    assert api.call("optim_step", seq_id=7, adam_params=ADAM)["metrics"]["step"] == 1


def test_a_notebook_that_starts_anew_gets_no_stale_answers(api, tmp_path):
    api.create()
    old = api.call("forward", seq_id=1, forward_input=gradient())
    api.call("forward_backward", seq_id=2, forward_backward_input=gradient((9, 9, 9)))
    api.call("optim_step", seq_id=3, adam_params=ADAM)
    # A gradient is under way when the kernel dies.
    api.send("forward_backward", seq_id=4, forward_backward_input=gradient((8, 8, 8)))
    api.create()
    new = api.call("forward", seq_id=1, forward_input=gradient())
    assert new["loss_fn_outputs"] != old["loss_fn_outputs"], "the weights have moved since"
    assert "nothing to apply" in api.call("optim_step", seq_id=2, adam_params=ADAM)["error"]
    api.call("forward_backward", seq_id=3, forward_backward_input=gradient((8, 8, 8)))
    step = api.call("optim_step", seq_id=4, adam_params=ADAM)
    assert step["metrics"]["valid_tokens"] == 2, "the dead kernel's gradient is not counted"
    assert step["metrics"]["step"] == 2


def test_a_failure_of_an_older_client_is_not_the_new_ones_business(api):
    api.create()
    api.send("forward_backward", seq_id=1, forward_backward_input=gradient((1, 9999)))
    api.create()
    api.send("forward_backward", seq_id=1, forward_backward_input=gradient())
    assert "error" not in api.call("optim_step", seq_id=2, adam_params=ADAM)


def test_an_older_client_is_told_that_it_was_replaced(start):
    api = start(gap_seconds=30)
    api.create()
    for seq in (1, 2, 3):
        api.call("forward", seq_id=seq, forward_input=gradient())
    api.create()
    api.call("forward", seq_id=1, forward_input=gradient())
    api.create()
    for seq in (4, 5):
        failed = api.call("forward", seq_id=seq, forward_input=gradient())
        assert "replaced by a newer one" in failed["error"]
    for seq in (1, 2, 3, 4):
        assert "error" not in api.call("forward", seq_id=seq, forward_input=gradient())


def test_a_client_of_a_server_that_was_restarted_is_told(api):
    answer = api.post("/api/v1/optim_step", seq_id=37, adam_params=ADAM)
    assert answer.status_code == 404
    assert "create the client again" in answer.json()["detail"]


BAD = [
    {"data": [datum((1, 2, 9999))], "loss_fn": "causallm_loss"},
    {"data": [datum(logprobs=[0.0])], "loss_fn": "policy_loss"},
    {"data": [], "loss_fn": "causallm_loss"},
    {"data": "x"},
    {"data": [{"model_input": {"input_ids": [1.5]}, "loss_fn_inputs": {}}]},
    {"data": [{"model_input": {"input_ids": [10**30]}, "loss_fn_inputs": {}}]},
    {"data": [datum((1, 2), labels=["a", "b"])]},
    {"data": [datum()], "loss_fn": "nonsense"},
    {"data": [datum()], "loss_fn": "causallm_loss", "loss_fn_params": {"nonsense": 1}},
    {"data": [datum((1, 2), weights=[1.0, float("nan")])]},
    7,
    None,
]


@pytest.mark.parametrize("bad", BAD, ids=range(len(BAD)))
def test_a_bad_datum_is_an_error_of_its_own(api, bad):
    api.create()
    text = json.dumps({"model_id": "default", "seq_id": 1, "forward_backward_input": bad})
    headers = {"Content-Type": "application/json"}
    taken = api.http.post("/api/v1/forward_backward", content=text, headers=headers)
    assert taken.status_code == 200, taken.text
    failed = api.fetch(taken.json()["request_id"])
    assert failed["category"] == "user", failed
    out = api.call("forward_backward", seq_id=2, forward_backward_input=gradient())
    assert "error" not in out
    assert api.call("optim_step", seq_id=3, adam_params=ADAM)["metrics"]["step"] == 1


def test_a_step_behind_a_refused_gradient_is_refused_too(api):
    api.create()
    ids = [
        api.send("forward_backward", seq_id=1, forward_backward_input=gradient()),
        api.send("forward_backward", seq_id=2, forward_backward_input=gradient((1, 9999))),
        api.send("optim_step", seq_id=3, adam_params=ADAM),
    ]
    good, bad, step = map(api.fetch, ids)
    assert "error" not in good
    assert bad["category"] == "user"
    assert "was not carried out, because a call before it failed" in step["error"]
    api.call("forward_backward", seq_id=4, forward_backward_input=gradient())
    after = api.call("optim_step", seq_id=5, adam_params=ADAM)
    assert (after["metrics"]["step"], after["metrics"]["valid_tokens"]) == (1, 3)


def test_bad_optimizer_settings_leave_the_gradient(api):
    api.create()
    api.call("forward_backward", seq_id=1, forward_backward_input=gradient())
    for seq, adam in enumerate([{"learning_rate": -1}, {"nonsense": 1}, 3, {"beta1": "x"}], 2):
        assert api.call("optim_step", seq_id=seq, adam_params=adam)["category"] == "user"
    assert api.call("optim_step", seq_id=6, adam_params=ADAM)["metrics"]["step"] == 1


def test_what_is_kept_is_bounded(start):
    api = start(kept_requests=5)
    api.create()
    ids = [api.send("forward", seq_id=n, forward_input=gradient()) for n in range(1, 21)]
    for request_id in ids:
        api.fetch(request_id)
    assert "no longer kept" in api.fetch(ids[0])["error"]
    assert "error" not in api.fetch(ids[-1])
    old = api.post("/api/v1/forward", seq_id=1, forward_input=gradient())
    assert old.status_code == 409, "it was carried out, and is not carried out again"


def test_a_failure_that_nobody_has_fetched_stops_the_next_step(api, monkeypatch):
    api.create()
    session = api.lab.models.find("default").live
    real = session.trained.forward_backward
    api.call("forward_backward", seq_id=1, forward_backward_input=gradient())

    def broken(*_, **__):
        raise EngineError("no luck")

    monkeypatch.setattr(session.trained, "forward_backward", broken)
    lost = api.send("forward_backward", seq_id=2, forward_backward_input=gradient())
    while not api.lab.requests.get(lost).done:
        time.sleep(0.01)
    step = api.call("optim_step", seq_id=3, adam_params=ADAM)
    assert "a call before it failed" in step["error"]
    assert api.fetch(lost) == {"error": "no luck", "category": "server"}

    # Once the client knows, a step applies what there is.
    monkeypatch.setattr(session.trained, "forward_backward", real)
    api.call("forward_backward", seq_id=4, forward_backward_input=gradient())
    monkeypatch.setattr(session.trained, "forward_backward", broken)
    api.call("forward_backward", seq_id=5, forward_backward_input=gradient())
    api.call("forward_backward", seq_id=6, forward_backward_input=gradient((1, 9999)))
    assert api.call("optim_step", seq_id=7, adam_params=ADAM)["metrics"]["valid_tokens"] == 3


def test_names_overwriting_and_expiry_over_http(api):
    api.create()
    path = api.call("save_weights", seq_id=1, path="a", ttl_seconds=3600)["path"]
    taken = api.call("save_weights", seq_id=2, path="a")
    assert taken["category"] == "user"
    assert "checkpoint.exists" in taken["error"]
    assert api.call("save_weights", seq_id=3, path="a", overwrite=True) == {"path": path}
    assert "ttl_seconds" in api.call("save_weights", seq_id=4, path="b", ttl_seconds=-1)["error"]
    (listed,) = api.ask("/api/v1/list_checkpoints")["checkpoints"]
    assert listed["expires_at"] is None
