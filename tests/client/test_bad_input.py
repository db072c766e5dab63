"""What a caller may get wrong: the exact words, and a client that goes on working."""

import re

import numpy as np
import pytest
import torch

from tests.engine.support import ADAM, exactly, labelled, rollouts, supervised, works
from xorl_lab import losses
from xorl_lab.errors import CheckpointError, ConfigError, DataError, EngineError, ShapeError
from xorl_lab.types import Datum, ModelInput

LONG = [i % 256 for i in range(600)]
LOSSES = losses.names()


@pytest.mark.parametrize(
    ("data", "kind", "message"),
    [
        ([], DataError, "data is an empty list: pass at least one Datum"),
        (None, DataError, "data is a NoneType: pass a list of Datum"),
        ("text", DataError, "data is a str: pass a list of Datum"),
        (torch.zeros(2), DataError, "data is a Tensor: pass a list of Datum"),
        ([torch.zeros(2)], DataError, "data[0] is a Tensor: pass a list of Datum"),
        (
            [labelled([])],
            DataError,
            "data[0] has 0 tokens, too few to predict one from another: with 'labels' pass at "
            "least 2",
        ),
        (
            [labelled([1, 259, 2])],
            DataError,
            "data[0] has token id 259, but this model's ids are 0 to 258: encode the text with "
            "this model's tokenizer",
        ),
        (
            [labelled(LONG)],
            DataError,
            "data[0] has 600 tokens, but the model's context holds 512: shorten it",
        ),
        (
            [labelled([1, 2, 3], weights=[1])],
            ShapeError,
            "data[0]: weights has 1 entries but there are 2 targets: pass 2 (or 3, one per token)",
        ),
        (
            [labelled([1, 2, 3], mask=[1, 1, 1])],
            DataError,
            "data[0] has unknown loss inputs ['mask']: choose from ['advantages', 'labels', "
            "'logprobs', 'ref_logprobs', 'rollout_logprobs', 'target_tokens', 'weights']",
        ),
        (
            [labelled([1, 2], logprobs=[0, -1], advantages=[0, np.nan])],
            DataError,
            "data[0]: advantages is nan at target 0: pass finite numbers, and leave out a sample "
            "whose value is not known",
        ),
    ],
)
def test_data_is_refused_at_the_call(client, data, kind, message):
    for call in (client.forward, client.forward_backward, client.forward_base):
        with pytest.raises(kind, match=exactly(message)):
            call(data)
    assert works(client)


def test_a_missing_input_names_the_loss(client):
    message = exactly(
        "data[0] lacks ['logprobs', 'advantages'], which policy_loss needs: add them to "
        "loss_fn_inputs"
    )
    with pytest.raises(DataError, match=message):
        client.forward_backward([labelled([1, 2])], " Policy_Loss ")
    assert works(client)


@pytest.mark.parametrize(
    ("loss_fn", "params", "message"),
    [
        ("ppo2", None, f"unknown loss 'ppo2': choose from {LOSSES}"),
        (None, None, f"unknown loss None: choose from {LOSSES}"),
        (
            "cross_entropy",
            {"eps_clip": 0.2},
            "cross_entropy has no parameters ['eps_clip']: choose from "
            "['logprob_temperature', 'return_terms']",
        ),
        (
            "cross_entropy",
            "eps",
            "the parameters of cross_entropy are a str: pass a dict or None",
        ),
        (
            "cross_entropy",
            {"logprob_temperature": 0},
            "logprob_temperature is 0: pass a number > 0",
        ),
    ],
)
def test_losses_and_parameters_are_refused_at_the_call(client, loss_fn, params, message):
    with pytest.raises(ConfigError, match=exactly(message)):
        client.forward_backward(supervised(), loss_fn, params)
    assert works(client)


def test_known_inputs_that_a_loss_does_not_use_are_fine(client):
    output = client.forward_backward(rollouts(), "cross_entropy").result()
    assert output.metrics["valid_tokens"] > 0


@pytest.mark.parametrize("rate", [0, -1e-4, float("nan"), None, "0.1"])
def test_a_learning_rate_that_is_not_above_zero(client, rate):
    client.forward_backward(supervised()).result()
    with pytest.raises(ConfigError, match=exactly(f"learning_rate is {rate!r}: pass a number > 0")):
        client.optim_step({"learning_rate": rate})
    # Nothing was submitted, so what was accumulated is still there.
    assert client.optim_step(ADAM).result().metrics["step"] == 1
    assert works(client)


@pytest.mark.parametrize("adam", [None, 1e-4, "adam"])
def test_adam_parameters_of_a_wrong_type(client, adam):
    message = f"adam_params is a {type(adam).__name__}: pass AdamParams(...) or a dict"
    with pytest.raises(ConfigError, match=exactly(message)):
        client.optim_step(adam)
    assert works(client)


def test_optim_step_with_nothing_accumulated(client):
    message = (
        "optim_step has nothing to apply: call forward_backward first "
        "(each optim_step empties what was accumulated)"
    )
    with pytest.raises(EngineError, match=exactly(message)):
        client.optim_step(ADAM).result()
    assert client.version == 0
    assert works(client)


def test_a_loss_that_is_not_finite(client):
    message = (
        "cross_entropy is inf, so its gradient was not accumulated: look for extreme ratios and "
        "advantages in this batch, or lower the learning rate"
    )
    data = [labelled([1, 2, 3], weights=[0, 3e38, 3e38])]
    with pytest.raises(EngineError, match=exactly(message)):
        client.forward_backward(data).result()
    with pytest.raises(EngineError, match=exactly(message)):
        client.forward(data).result()
    assert works(client)


def test_a_gradient_that_is_not_finite_though_the_loss_is(service):
    client = service.create_training_client("tiny")
    data = [labelled([1, 2, 3], weights=[0, 4e37, 0])]
    loss = client.forward(data).result().metrics["loss:sum"]
    assert np.isfinite(loss)
    message = (
        "the gradient of cross_entropy is not finite, so it was not accumulated: look for extreme "
        "ratios and advantages in this batch, or lower the learning rate"
    )
    with pytest.raises(EngineError, match=exactly(message)):
        client.forward_backward(data).result()
    assert works(client)


def test_a_gradient_whose_norm_is_not_finite_though_its_entries_are(client):
    client.forward_backward([labelled([1, 2, 3], weights=[0, 1e30, 0])]).result()
    with pytest.raises(EngineError, match=r"^the gradient's norm is (inf|nan), so the step was "):
        client.optim_step(ADAM).result()
    assert client.version == 0
    assert works(client)


@pytest.mark.parametrize("name", ["", "a/b", " a", "-a", None, 5, "é"])
def test_a_checkpoint_name_that_cannot_be(client, name):
    if name is None:
        assert client.save_state(None).result().path == "xorl://default/weights/step-0"
        return
    with pytest.raises(CheckpointError) as caught:
        client.save_state(name)
    assert caught.value.code == "validation.invalid_checkpoint_name"
    assert works(client)


@pytest.mark.parametrize("ttl", [0, -1, "1", float("nan")])
def test_a_time_to_live_that_is_not_above_zero(client, ttl):
    with pytest.raises(ConfigError, match=r"^ttl_seconds is .*: pass a number > 0, or None to "):
        client.save_state("a", ttl_seconds=ttl)
    assert works(client)


def test_an_unknown_base_model(service, client):
    pattern = (
        r"^base model 'gpt-9' is neither a folder nor in the local Hugging Face cache: use one of "
        r".*tiny, tiny-moe.* \(these work offline\).*, or the path of a folder with a model in it$"
    )
    for create in (
        service.create_training_client,
        service.create_lora_training_client,
        lambda name: service.create_sampling_client(base_model=name),
    ):
        with pytest.raises(ConfigError, match=pattern):
            create("gpt-9")
    assert works(client)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "rank is 0: pass an integer >= 1"),
        ({"dropout": 1.0}, "dropout is 1.0: pass a number in [0, 1)"),
        (
            {"target_modules": ["q_proj", "nothing"]},
            "target_modules has 'nothing', which is no linear layer of this model: choose from "
            "['down_proj', 'gate_proj', 'k_proj', 'lm_head', 'o_proj', 'q_proj', 'up_proj', "
            "'v_proj']",
        ),
    ],
)
def test_an_adapter_that_cannot_be_leaves_the_older_client_alone(
    service, client, settings, message
):
    with pytest.raises(ConfigError, match=exactly(message)):
        service.create_lora_training_client("tiny", **settings)
    assert works(client)


@pytest.mark.parametrize("model_id", ["", "a b", "-a", "a/b", None, "a" * 129])
def test_a_model_id_that_cannot_be(service, client, model_id):
    message = (
        f"validation.invalid_model_id: {model_id!r} cannot name a model: use 1 to 128 letters, "
        "digits, '_' and '-', and start with a letter or digit"
    )
    with pytest.raises(CheckpointError, match=exactly(message)):
        service.create_training_client("tiny", model_id=model_id)
    assert works(client)


def test_a_resume_that_fails_leaves_the_older_client_alone(service, client, home):
    path = client.save_state("a").result().path
    with pytest.raises(CheckpointError, match=re.escape("checkpoint.not_found")):
        service.create_training_client_from_state("xorl://default/weights/b")
    file = home / "checkpoints" / "default" / "weights" / "a" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=re.escape("checkpoint.damaged")):
        service.create_training_client_from_state_with_optimizer(path)
    assert works(client)


def test_a_replaced_client_says_so(service, client):
    newer = service.create_lora_training_client("tiny", rank=2)
    message = exactly(
        "this client of model 'default' was replaced by a newer one: use that, or give each client "
        "a model_id of its own"
    )
    for call in (
        lambda: client.forward(supervised()),
        lambda: client.forward_backward(supervised()),
        lambda: client.optim_step(ADAM),
        lambda: client.save_state("a"),
        client.save_weights_and_get_sampling_client,
    ):
        with pytest.raises(EngineError, match=message):
            call()
    assert works(newer)


def test_clients_of_other_names_are_not_replaced(service, client):
    other = service.create_lora_training_client("tiny", rank=2, model_id="other")
    assert works(client)
    assert works(other)


def test_inputs_may_be_tensors_and_arrays(client):
    lists = client.forward([labelled([1, 2, 3], weights=[0.0, 1.0, 0.5])]).result()
    for make in (np.array, torch.tensor, tuple):
        datum = Datum(
            ModelInput.from_ints(make([1, 2, 3])),
            {"labels": make([1, 2, 3]), "weights": make([0.0, 1.0, 0.5])},
        )
        assert client.forward([datum]).result().metrics == lists.metrics
