"""The whole client API, written out: names, order, kinds and defaults.

What is not in these tables is not public, and what is in them is there.
"""

import dataclasses
import inspect
from collections.abc import Callable

import pytest

import xorl_lab as xl
from xorl_lab import types
from xorl_lab.client.rest import RestClient
from xorl_lab.errors import CheckpointError, ConfigError, DataError
from xorl_lab.types import checkpoints

LOSS = (
    "(self, data, loss_fn='cross_entropy', loss_fn_params=None, auto_shift=False, *, "
    "loss_fn_config=None)"
)
FROM_STATE = "(self, checkpoint_path, base_model=None, *, model_id='default')"
ALONE = "(self)"

METHODS: dict[type, dict[str, str]] = {
    xl.TrainingClient: {
        "get_tokenizer": ALONE,
        "forward": LOSS,
        "forward_base": "(self, data, loss_fn_params=None)",
        "forward_backward": LOSS,
        "forward_backward_custom": "(self, data, loss_fn)",
        "optim_step": "(self, adam_params)",
        "save_state": "(self, name=None, ttl_seconds=None, overwrite=False)",
        "load_state": "(self, path)",
        "load_state_with_optimizer": "(self, path)",
        "save_weights_for_sampler": "(self, name, ttl_seconds=None)",
        "create_sampling_client": "(self, model_path)",
        "save_weights_and_get_sampling_client": "(self, name=None, inference_base_url=None)",
        "list_checkpoints": ALONE,
        "delete_checkpoint": "(self, checkpoint_id)",
        "delete_checkpoint_from_xorl_path": "(self, path)",
        "unload": ALONE,
        "kill_session": "(self, save_checkpoint=True)",
        "add_inference_endpoint": "(self, host, port, world_size=1)",
        "sync_inference_weights": (
            "(self, master_address=None, master_port=29600, group_name='weight_sync_group', "
            "buffer_size_mb=1024)"
        ),
        "list_inference_endpoints": ALONE,
        "remove_inference_endpoint": "(self, host, port)",
        "take_syncs": ALONE,
        "health_check": ALONE,
    },
    xl.SamplingClient: {
        "of": "(source)",
        "get_tokenizer": ALONE,
        "sample": (
            "(self, prompt, sampling_params=None, num_samples=1, return_logprobs=True, "
            "lora_path=None, *, prompt_logprobs=False, top_logprobs=0, entropies=False, "
            "timeout=None)"
        ),
        "sample_batch": (
            "(self, prompts, sampling_params=None, num_samples=1, return_logprobs=True, "
            "timeout=None, *, top_logprobs=0, entropies=False)"
        ),
    },
    xl.ServiceClient: {
        "create_training_client": "(self, base_model, model_id='default')",
        "create_lora_training_client": (
            "(self, base_model, rank=32, *, model_id='default', alpha=None, dropout=0.0, "
            "target_modules=None, seed=None, train_mlp=True, train_attn=True, train_unembed=False)"
        ),
        "create_training_client_from_state": FROM_STATE,
        "create_training_client_from_state_with_optimizer": FROM_STATE,
        "create_sampling_client": "(self, base_url=None, model_path=None, *, base_model=None)",
        "create_rest_client": "(self, model_id='default')",
        "close": "(self)",
    },
    RestClient: {
        "list_checkpoints": "(self, model_id=None)",
        "delete_checkpoint": "(self, checkpoint_id)",
        "get_weights_info": "(self, checkpoint_id)",
        "get_weights_info_by_xorl_path": "(self, xorl_path)",
        "list_training_runs": ALONE,
    },
    xl.APIFuture: {
        "completed": "(value)",
        "set_result": "(self, value)",
        "set_exception": "(self, error)",
        "result": "(self, timeout=None)",
        "exception": "(self, timeout=None)",
        "done": ALONE,
        "cancel": ALONE,
        "cancelled": ALONE,
        "add_done_callback": "(self, callback)",
    },
    xl.AdamParams: {"of": "(value)", "to_dict": ALONE},
    xl.SamplingParams: {},
    xl.Datum: {"to_dict": ALONE},
    xl.ModelInput: {
        "from_ints": "(tokens)",
        "empty": "()",
        "to_ints": ALONE,
        "append": "(self, other)",
        "append_int": "(self, token)",
    },
    xl.TensorData: {
        "from_numpy": "(array)",
        "from_list": "(data, dtype='float32')",
        "from_torch": "(tensor)",
        "from_dict": "(values)",
        "to_numpy": ALONE,
        "to_torch": ALONE,
        "to_dict": ALONE,
        "tolist": ALONE,
    },
    types.LoraRunSpec: {},
}
CLASS_METHODS = {"of", "completed", "from_ints", "empty"}

PROPERTIES: dict[type, set[str]] = {
    xl.TrainingClient: {
        "base_model",
        "model_id",
        "task_id",
        "lora",
        "version",
        "device",
        "dtype",
        "context_length",
        "vocab_size",
    },
    xl.SamplingClient: {"version", "sync", "model_id", "base_model"},
    xl.ServiceClient: {"root"},
    xl.SamplingParams: {"stop_strings", "effective_seed"},
    xl.ModelInput: {"length"},
}

NO_TWIN = {"close", "get_tokenizer", "of", "take_syncs"}
"""Of the clients' methods; every other one has an ``…_async`` form."""
CLIENTS = [xl.TrainingClient, xl.SamplingClient, xl.ServiceClient, RestClient]

CONSTRUCTORS: dict[type, str] = {
    xl.SamplingClient: "(base_url, model_path='', api_key=None, timeout=1800.0)",
    xl.ServiceClient: (
        "(base_url=None, api_key=None, timeout=1800.0, *, home=None, device='auto', dtype='auto', "
        "sampler=None, sampler_key=None)"
    ),
    xl.AdamParams: (
        "(learning_rate=0.0001, beta1=0.9, beta2=0.95, eps=1e-12, weight_decay=0.0, "
        "grad_clip_norm=5.0)"
    ),
    xl.SamplingParams: (
        "(max_tokens=128, temperature=1.0, top_p=1.0, top_k=-1, stop=None, stop_token_ids=None, "
        "return_routed_experts=False, seed=None, sampling_seed=None)"
    ),
    xl.Datum: "(model_input, loss_fn_inputs, routed_experts=None)",
    xl.ModelInput: "(tokens)",
    xl.TensorData: "(data, dtype='float32', shape=None)",
    types.LoraRunSpec: (
        "(rank=32, alpha=32.0, dropout=0.0, seed=None, train_mlp=True, train_attn=True, "
        "train_unembed=False, target_modules=None)"
    ),
    xl.ForwardBackwardOutput: (
        "(loss_fn_outputs=<factory>, metrics=<factory>, loss_fn_output_type='', info=<factory>)"
    ),
    types.LossFnOutput: "(loss, logprobs, elementwise_loss, terms=<factory>)",
    xl.OptimStepResponse: "(metrics=<factory>, info=<factory>)",
    xl.SaveWeightsResponse: "(path, model)",
    checkpoints.SaveWeightsForSamplerResponse: "(path, model='', size=None, model_path=None)",
    xl.SampledSequence: (
        "(tokens, stop_reason='stop', logprobs=None, text=None, top_logprobs=None, entropies=None, "
        "routed_experts=None)"
    ),
    xl.SampleResponse: "(sequences, meta_info=None, prompt_logprobs=None)",
    xl.BatchSampleResult: "(completed, failed, cancelled)",
    checkpoints.Checkpoint: (
        "(checkpoint_id, checkpoint_type, time, path, size_bytes=None, expires_at=None)"
    ),
    checkpoints.CheckpointsListResponse: "(checkpoints=<factory>)",
    checkpoints.DeleteCheckpointResponse: "(success, deleted_path=None, error=None)",
    checkpoints.WeightsInfoResponse: "(base_model, is_lora=True, lora_rank=None)",
    checkpoints.UnloadModelResponse: "(model_id)",
    checkpoints.KillSessionResponse: "(success, message, checkpoint_path=None)",
    checkpoints.TrainingRun: (
        "(training_run_id, base_model, model_owner, is_lora, last_request_time, corrupted=False, "
        "lora_rank=None, last_checkpoint=None, last_sampler_checkpoint=None, user_metadata=None)"
    ),
    checkpoints.TrainingRunsResponse: "(training_runs=<factory>)",
    checkpoints.InferenceEndpoint: (
        "(host, port, worker_port, world_size=1, healthy=True, server_info=None)"
    ),
    checkpoints.InferenceEndpointResponse: "(success, message, endpoint=None)",
    checkpoints.ListInferenceEndpointsResponse: "(endpoints=<factory>, count=0)",
    checkpoints.SyncWeightsResponse: (
        "(success, message, transfer_time=0.0, total_bytes=0, num_parameters=0, num_buckets=0, "
        "endpoints_synced=<factory>)"
    ),
}

Cell = pytest.mark.parametrize(
    ("owner", "name"),
    [pytest.param(c, n, id=f"{c.__name__}.{n}") for c, table in METHODS.items() for n in table],
)


def plain(function: Callable[..., object]) -> str:
    """The signature without its annotations."""
    signature = inspect.signature(function)
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))


def fields_of(owner: type) -> set[str]:
    if dataclasses.is_dataclass(owner):
        return {f.name for f in dataclasses.fields(owner)}
    return set(getattr(owner, "__slots__", ()))


def twins_of(owner: type) -> set[str]:
    return {f"{n}_async" for n in METHODS[owner] if n not in NO_TWIN} if owner in CLIENTS else set()


@Cell
def test_a_method_has_this_signature(owner, name):
    assert plain(getattr(owner, name)) == METHODS[owner][name]


@Cell
def test_what_is_called_on_the_class_is_marked_as_such(owner, name):
    on_class = name in CLASS_METHODS or (owner is xl.TensorData and name.startswith("from_"))
    assert isinstance(inspect.getattr_static(owner, name), classmethod) == on_class


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        pytest.param(c, n, id=f"{c.__name__}.{n}")
        for c in CLIENTS
        for n in METHODS[c]
        if n not in NO_TWIN
    ],
)
def test_a_method_has_an_async_twin(owner, name):
    method, twin = getattr(owner, name), getattr(owner, f"{name}_async")
    assert inspect.iscoroutinefunction(twin)
    assert inspect.signature(twin) == inspect.signature(method)
    assert (twin.__name__, twin.__qualname__) == (f"{name}_async", f"{owner.__name__}.{name}_async")
    assert name in twin.__doc__


@pytest.mark.parametrize("owner", METHODS, ids=lambda c: c.__name__)
def test_nothing_else_is_public(owner):
    names = {n for n in dir(owner) if not n.startswith("_")}
    known = set(METHODS[owner]) | twins_of(owner) | PROPERTIES.get(owner, set()) | fields_of(owner)
    assert names == known


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        pytest.param(c, n, id=f"{c.__name__}.{n}")
        for c, names in PROPERTIES.items()
        for n in sorted(names)  # workers of xdist have to agree
    ],
)
def test_a_property_is_read_only_and_described(owner, name):
    value = inspect.getattr_static(owner, name)
    assert isinstance(value, property)
    assert value.fset is None
    assert value.__doc__


@pytest.mark.parametrize("made", CONSTRUCTORS, ids=lambda c: c.__name__)
def test_a_constructor_has_this_signature(made):
    assert plain(made) == CONSTRUCTORS[made]


@pytest.mark.parametrize(
    "made", [c for c in CONSTRUCTORS if dataclasses.is_dataclass(c)], ids=lambda c: c.__name__
)
def test_a_record_has_no_fields_that_its_constructor_does_not_take(made):
    assert [f.name for f in dataclasses.fields(made)] == list(inspect.signature(made).parameters)


def test_objects_hold_nothing_public_besides(service, client):
    sampler = client.save_weights_and_get_sampling_client()
    rest = service.create_rest_client()
    public = {
        type(made).__name__: {n for n in vars(made) if not n.startswith("_")}
        for made in (service, client, sampler, rest)
    }
    assert public == {
        "ServiceClient": {"timeout", "api_key"},
        "TrainingClient": set(),
        "SamplingClient": set(),
        "RestClient": {"model_id"},
    }


def test_the_properties_of_a_lora_client(client):
    assert (client.base_model, client.model_id, client.task_id) == ("tiny", "default", "default")
    assert client.lora == types.LoraRunSpec(rank=4, seed=1)
    assert (client.version, client.device, client.dtype) == (0, "cpu", "float32")
    assert (client.context_length, client.vocab_size) == (512, 259)


def test_a_client_of_full_weights_has_no_adapter(service):
    client = service.create_training_client("tiny", "mine")
    assert client.lora is None
    assert client.task_id == "mine"


def test_every_record_of_the_checkpoints_is_in_the_table():
    there = {
        c for c in vars(checkpoints).values() if isinstance(c, type) and dataclasses.is_dataclass(c)
    }
    assert there <= set(CONSTRUCTORS)


def test_errors_are_also_what_other_clients_raise():
    assert issubclass(ConfigError, ValueError)
    assert issubclass(DataError, ValueError)
    error = CheckpointError("validation.some_code", "what happened", {"name": "a"})
    assert (error.code, error.details) == ("validation.some_code", {"name": "a"})


def test_calls_for_servers_say_what_to_do_in_this_process(client):
    calls: dict[str, Callable[[], object]] = {
        "add_inference_endpoint('h', 1, 1)": lambda: client.add_inference_endpoint("h", 1),
        "sync_inference_weights (4 settings)": client.sync_inference_weights,
        "list_inference_endpoints": client.list_inference_endpoints,
        "remove_inference_endpoint('h', 1)": lambda: client.remove_inference_endpoint("h", 1),
        "inference_base_url='http://h'": lambda: client.save_weights_and_get_sampling_client(
            inference_base_url="http://h"
        ),
    }
    for call, made in calls.items():
        with pytest.raises(ConfigError) as caught:
            made()
        assert str(caught.value) == (
            f"{call} is for training servers: this process samples from its own weights, so use "
            "save_weights_and_get_sampling_client(); to sample elsewhere pass sampler= to "
            "ServiceClient or Lab, or start `xorl-lab serve`"
        )


def test_another_adapter_for_one_request_is_for_servers(client):
    sampler = client.save_weights_and_get_sampling_client()
    with pytest.raises(ConfigError, match=r"^lora_path is 'other', but this client samples from"):
        sampler.sample("a", lora_path="other")


def test_health_says_how_it_stands(client):
    assert client.health_check() == {"status": "healthy", "engine_running": True}
    client.unload().result()
    health = client.health_check()
    assert health == {
        "status": "model 'default' was unloaded: create a client for it again",
        "engine_running": False,
    }
