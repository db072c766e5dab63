"""Several adapters on one base model, each with a shape, an optimizer and a life of its own."""

import gc
import subprocess
import sys

import pytest
import torch

import xorl_lab as xl
from tests.closeness import assert_close
from tests.engine.support import (
    ADAM,
    exactly,
    moments,
    plain_logprobs,
    rollouts,
    same,
    step,
    supervised,
    weights,
    works,
)
from xorl_lab.errors import ConfigError, EngineError
from xorl_lab.types import LoraRunSpec

ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}
BYTES_PER_PARAMETER = 16
"""Weight, gradient and two moments, in float32."""


def lora(service: xl.ServiceClient, model_id: str, **settings) -> xl.TrainingClient:
    shape = {"rank": 4, "seed": 1, **settings}
    return service.create_lora_training_client("tiny", model_id=model_id, **shape)


def logprobs(output: xl.ForwardBackwardOutput) -> list[list[float]]:
    return [o.logprobs.tolist() for o in output.loss_fn_outputs]


def layers(client: xl.TrainingClient) -> set[str]:
    """Names of the adapted layers."""
    return {name.split(".lora_")[0].removeprefix("base_model.model.") for name in weights(client)}


def leaves(client: xl.TrainingClient) -> set[str]:
    return {name.rsplit(".", 1)[-1] for name in layers(client)}


# One base.


def test_the_base_is_held_once(service):
    clients = [lora(service, name) for name in "abc"]
    for client in clients:
        step(client)
    base = clients[0]._session.engine.base
    held = {p.data_ptr() for p in base.parameters()}
    for client in clients:
        trained = client._session.trained
        assert trained.base is base
        own = {p.data_ptr() for p in trained.parameters.values()}
        there = {p.data_ptr() for p in trained.model.parameters()}
        assert there - own == held
        assert not own & held


def test_clients_share_no_tensor_of_their_own(service):
    clients = [lora(service, name) for name in "abc"]
    for client in clients:
        step(client)
    pointers = [
        {t.data_ptr() for t in (*c._session.trained.parameters.values(), *states(c))}
        for c in clients
    ]
    assert len(set.union(*pointers)) == sum(len(p) for p in pointers)


def states(client: xl.TrainingClient) -> list[torch.Tensor]:
    return [t for t in client._session.trained.optimizer.state().values() if t.dim()]


def alive() -> dict[int, int]:
    """Bytes of every tensor that Python holds, by its storage; oneDNN's copies have none to see."""
    gc.collect()
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        if not issubclass(type(thing), torch.Tensor) or thing.device.type != "cpu":
            continue
        if not thing.is_mkldnn:
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


@pytest.mark.parametrize("window", [pytest.param(False, marks=pytest.mark.slow), True])
def test_an_adapter_takes_16_bytes_per_parameter(service, window):
    """With the gradient of an open window: weight, gradient and two moments, nothing else."""
    step(lora(service, "first"))
    data = supervised(3)
    before, clients = alive(), []
    for name in "abc":
        client = lora(service, name, rank=16)
        for _ in range(3):
            step(client, data)
        if window:
            client.forward_backward(data).result()
        clients.append(client)
    after = alive()
    added = sum(size for pointer, size in after.items() if pointer not in before)
    parameters = sum(p.numel() for c in clients for p in c._session.trained.parameters.values())
    per_parameter = BYTES_PER_PARAMETER if window else BYTES_PER_PARAMETER - 4
    assert 0.95 * per_parameter * parameters < added < 1.1 * per_parameter * parameters


MEASURE = """
import gc, resource, sys
from pathlib import Path
import torch
import xorl_lab as xl
from tests.engine.support import ADAM, supervised

def resident():
    gc.collect()
    import ctypes
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

def train(client):
    for _ in range(3):
        client.forward_backward(supervised(3)).result()
        client.optim_step(ADAM).result()
    client.forward_backward(supervised(3)).result()
    return client

service = xl.ServiceClient(home=sys.argv[1], device="cpu", dtype="float32")
make = lambda name: train(service.create_lora_training_client("tiny", 512, model_id=name, seed=1))
held = [make(f"warm{i}") for i in range(2)]
before = resident()
held += [make(name) for name in "abc"]
added = resident() - before
count = sum(p.numel() for c in held[2:] for p in c._session.trained.parameters.values())
print(added / (16 * count))
"""


@pytest.mark.slow
def test_three_adapters_add_that_much_to_the_process(root, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    assert 0.7 < float(done.stdout) < 1.1


# Side by side.


def test_clients_are_switched_from_call_to_call(service):
    """Interleaved, and queued together, three runs are what each is alone."""
    alone = []
    for i in range(3):
        client = lora(service, f"alone{i}", seed=i, rank=2 + i)
        for k in range(3):
            step(client, supervised(3, seed=10 * i + k))
        alone.append((weights(client), moments(client)))
    clients = [lora(service, f"m{i}", seed=i, rank=2 + i) for i in range(3)]
    futures = []
    for k in range(3):
        futures += [c.forward_backward(supervised(3, 10 * i + k)) for i, c in enumerate(clients)]
        futures += [c.optim_step(ADAM) for c in reversed(clients)]
    for future in futures:
        future.result()
    for client, (expected, moment) in zip(clients, alone, strict=True):
        assert same(weights(client), expected)
        assert same(moments(client), moment)


def test_each_client_counts_its_own_steps(service):
    clients = [lora(service, name) for name in "abc"]
    for count, client in enumerate(clients):
        for _ in range(count + 1):
            step(client)
    assert [c.version for c in clients] == [1, 2, 3]
    steps = [{float(v) for k, v in moments(c).items() if k.startswith("step.")} for c in clients]
    assert steps == [{1.0}, {2.0}, {3.0}]
    assert [c.save_state().result().path for c in clients] == [
        f"xorl://{name}/weights/step-{n}" for name, n in (("a", 1), ("b", 2), ("c", 3))
    ]


def test_each_client_has_a_window_of_its_own(service):
    first, second = lora(service, "a"), lora(service, "b")
    first.forward_backward(supervised()).result()
    with pytest.raises(EngineError, match=r"^optim_step has nothing to apply: "):
        second.optim_step(ADAM).result()
    assert first.optim_step(ADAM).result().metrics["grad_norm"] > 0


def test_a_failure_of_one_client_is_not_the_others_business(service):
    first, second = lora(service, "a"), lora(service, "b")
    second.forward_backward(supervised())
    first.forward_backward_custom(supervised(), lambda *_: 1 / 0)
    step_of_second, step_of_first = second.optim_step(ADAM), first.optim_step(ADAM)
    assert step_of_second.result().metrics["grad_norm"] > 0
    with pytest.raises(EngineError, match=r"^optim_step was not carried out"):
        step_of_first.result()


def test_policy_and_reference(service):
    """The pattern of the documents: two adapters, one of which is never trained."""
    policy, reference = lora(service, "policy", rank=8), lora(service, "reference", rank=8)
    data = rollouts()
    for _ in range(3):
        fixed = reference.forward(data).result()
        for datum, output in zip(data, fixed.loss_fn_outputs, strict=True):
            datum.loss_fn_inputs["ref_logprobs"] = output.logprobs
        params = {"kl_coef": 0.1}
        metrics = policy.forward_backward(data, "policy_loss", params).result().metrics
        policy.optim_step(ADAM).result()
    assert metrics["kl_ref"] > 0
    assert (policy.version, reference.version) == (3, 0)
    assert logprobs(reference.forward(data).result()) == logprobs(fixed)
    assert logprobs(policy.forward(data).result()) != logprobs(fixed)


def test_the_reference_is_the_base_with_adapters_off(service):
    policy, reference = lora(service, "policy"), lora(service, "reference")
    step(policy)
    data = supervised()
    assert_close(
        [x for row in logprobs(policy.forward_base(data).result()) for x in row],
        [x for row in logprobs(reference.forward(data).result()) for x in row],
        rtol=0,
        atol=1e-5,
    )


def test_base_logprobs_are_those_of_the_model_itself(service):
    client = lora(service, "policy")
    step(client)
    data = [supervised(1)[0]]
    data[0].loss_fn_inputs.pop("weights")
    got = logprobs(client.forward_base(data).result())[0]
    expected = plain_logprobs(client._session.engine.base, data)[0]
    assert_close(got, expected, rtol=0, atol=1e-5)
    assert logprobs(client.forward(data).result())[0] != got


def test_base_logprobs_of_full_weights_are_those_before_training(service):
    client = service.create_training_client("tiny", "full")
    data = supervised()
    before = logprobs(client.forward(data).result())
    step(client)
    assert logprobs(client.forward_base(data).result()) == before
    assert logprobs(client.forward(data).result()) != before


def test_base_logprobs_understand_the_temperature(service):
    client = lora(service, "a")
    params = {"logprob_temperature": 2.0}
    cold, hot = (client.forward_base(supervised(), p).result() for p in (None, params))
    assert logprobs(cold) != logprobs(hot)
    assert logprobs(hot) == logprobs(client.forward_base(supervised(), params).result())


def test_base_logprobs_accumulate_nothing(service):
    client = lora(service, "a")
    client.forward_base(supervised()).result()
    with pytest.raises(EngineError, match=r"^optim_step has nothing to apply: "):
        client.optim_step(ADAM).result()


# A name and its lives.


def test_an_unloaded_name_is_given_fresh_weights(service):
    first = lora(service, "a")
    fresh = weights(first)
    step(first)
    assert first.unload().result().model_id == "a"
    second = lora(service, "a")
    assert same(weights(second), fresh)
    assert (second.version, moments(second)) == (0, {})
    assert works(second)


def test_a_name_that_is_made_again_is_sampled_with_its_new_weights(service):
    prompt, draw = xl.ModelInput.from_ints([1, 2]), xl.SamplingParams(max_tokens=4, temperature=0)
    first = lora(service, "a")
    for _ in range(5):
        step(first)
    old = first.save_weights_and_get_sampling_client().sample(prompt, draw).result()
    first.unload().result()
    fresh = lora(service, "a").save_weights_and_get_sampling_client().sample(prompt, draw).result()
    base = service.create_sampling_client(base_model="tiny").sample(prompt, draw).result()
    assert fresh.tokens == base.tokens
    assert_close(fresh.logprobs, base.logprobs, rtol=0, atol=1e-5)
    assert old.logprobs != fresh.logprobs


def test_a_name_that_is_saved_again_is_loaded_with_its_new_weights(service):
    client = lora(service, "a")
    data = supervised()
    prompt, draw = xl.ModelInput.from_ints([1, 2]), xl.SamplingParams(max_tokens=2, temperature=0)
    seen = []
    for _ in range(2):
        step(client, data)
        path = client.save_weights_for_sampler("same").result().path
        response = client.create_sampling_client(path).sample(prompt, draw).result()
        expected = client.save_weights_and_get_sampling_client().sample(prompt, draw).result()
        assert response.logprobs == expected.logprobs
        seen.append(response.logprobs)
    assert seen[0] != seen[1]


def test_an_unloaded_client_says_so(service):
    client = lora(service, "a")
    client.unload().result()
    message = "model 'a' was unloaded: create a client for it again"
    for call in (client.unload, lambda: client.forward(supervised()), client.kill_session):
        with pytest.raises(EngineError, match=exactly(message)):
            call()


def test_unloading_comes_behind_the_calls_made_before(service):
    client = lora(service, "a")
    client.forward_backward(supervised())
    stepped, saved, gone = client.optim_step(ADAM), client.save_state("a"), client.unload()
    assert gone.result().model_id == "a"
    assert stepped.done()
    assert saved.result().path == "xorl://a/weights/a"


def test_unloading_one_leaves_the_others(service):
    first, second = lora(service, "a"), lora(service, "b")
    first.unload().result()
    assert works(second)


@pytest.mark.parametrize("save", [True, False])
def test_ending_a_session_saves_it_if_asked_to(service, save):
    client = lora(service, "a")
    step(client)
    expected = weights(client)
    answer = client.kill_session(save).result()
    assert answer.success
    if not save:
        assert answer.checkpoint_path is None
        return
    again = service.create_training_client_from_state_with_optimizer(answer.checkpoint_path)
    assert same(weights(again), expected)


# Shapes.


@pytest.mark.parametrize(
    ("switches", "expected"),
    [
        ({}, ATTENTION | MLP),
        ({"train_mlp": False}, ATTENTION),
        ({"train_attn": False}, MLP),
        ({"train_unembed": True}, ATTENTION | MLP | {"lm_head"}),
        ({"train_mlp": False, "train_attn": False, "train_unembed": True}, {"lm_head"}),
    ],
)
def test_switches_choose_the_layers(service, switches, expected):
    client = lora(service, "a", **switches)
    assert leaves(client) == expected
    assert len(layers(client)) == 2 * len(expected - {"lm_head"}) + ("lm_head" in expected)
    assert works(client)


def test_all_switches_off_is_an_error(service):
    with pytest.raises(ConfigError, match=r"^train_mlp, train_attn and train_unembed are all"):
        lora(service, "a", train_mlp=False, train_attn=False)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["q_proj"], {"model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"}),
        (["layers.1.mlp.up_proj"], {"model.layers.1.mlp.up_proj"}),
        (["layers.0.self_attn.v_proj", "lm_head"], {"model.layers.0.self_attn.v_proj", "lm_head"}),
    ],
)
def test_target_modules_choose_the_layers(service, names, expected):
    client = lora(service, "a", target_modules=names)
    assert layers(client) == expected
    assert client.lora.target_modules == tuple(names)
    assert works(client)


def test_only_the_chosen_layers_move(service):
    client = lora(service, "a", target_modules=["v_proj"])
    base = {k: v.clone() for k, v in client._session.engine.base.state_dict().items()}
    before = weights(client)
    step(client)
    step(client)
    assert all(not torch.equal(v, before[k]) for k, v in weights(client).items())
    assert same(base, client._session.engine.base.state_dict())


def test_the_rank_is_the_inner_dimension(service):
    for rank in (1, 7):
        client = lora(service, f"r{rank}", rank=rank)
        assert {min(v.shape) for v in weights(client).values()} == {rank}


def test_alpha_scales_the_update(service):
    """With the same weights, twice the alpha is twice the difference from the base."""
    data, deltas = [supervised(1)[0]], []
    first, second = lora(service, "a", alpha=1.0), lora(service, "b", alpha=2.0)
    step(first)
    for name, value in first._session.trained.weights().items():
        second._session.trained.parameters[name].data.copy_(value)
    for client in (first, second):
        module = client._session.trained.model.model.layers[0].mlp.down_proj
        x = torch.ones(1, 128)
        deltas.append((module(x) - module.base_layer(x)).detach())
    assert_close(deltas[1], 2 * deltas[0], rtol=1e-4, atol=1e-6)
    assert logprobs(first.forward(data).result()) != logprobs(second.forward(data).result())


def test_alpha_is_32_whatever_the_rank(service):
    assert {lora(service, f"r{r}", rank=r).lora.alpha for r in (1, 8, 64)} == {32.0}


def test_dropout_is_on_in_training_alone(service):
    client = lora(service, "a", dropout=0.5)
    step(client)
    data = supervised()
    evaluated = [logprobs(client.forward(data).result()) for _ in range(2)]
    trained = [logprobs(client.forward_backward(data).result()) for _ in range(2)]
    assert evaluated[0] == evaluated[1]
    assert trained[0] != trained[1]
    assert evaluated[0] not in trained


def test_without_dropout_both_are_the_same(service):
    client = lora(service, "a")
    step(client)
    data = supervised()
    flat = [
        [x for row in logprobs(f.result()) for x in row]
        for f in (client.forward(data), client.forward_backward(data))
    ]
    assert_close(flat[0], flat[1], rtol=0, atol=1e-5)


def test_dropout_applies_to_custom_losses_too(service):
    client = lora(service, "a", dropout=0.5)
    step(client)
    seen = []
    for _ in range(2):
        client.forward_backward_custom(
            supervised(), lambda _, lp: (seen.append(lp[0].tolist()), (lp[0].sum(), {}))[1]
        ).result()
    assert seen[0] != seen[1]


def test_the_seed_fixes_the_first_weights(service):
    first, again, other = (lora(service, n, seed=s) for n, s in (("a", 3), ("b", 3), ("c", 4)))
    assert same(weights(first), weights(again))
    assert not same(weights(first), weights(other))
    assert [c.lora.seed for c in (first, again, other)] == [3, 3, 4]


def test_a_fresh_adapter_changes_nothing(service):
    client = lora(service, "a")
    data = supervised()
    assert_close(
        [x for row in logprobs(client.forward(data).result()) for x in row],
        [x for row in logprobs(client.forward_base(data).result()) for x in row],
        rtol=0,
        atol=1e-6,
    )


def test_the_shape_is_reported(service):
    shape = {
        "rank": 3,
        "alpha": 6.0,
        "dropout": 0.25,
        "seed": 9,
        "train_mlp": False,
        "train_attn": True,
        "train_unembed": True,
    }
    assert lora(service, "a", **shape).lora == LoraRunSpec(**shape)
