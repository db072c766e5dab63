"""Checkpoints as a client sees them: saved, loaded, listed, expired, and read by others."""

import json
import logging
import re
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import xorl_lab as xl
from tests.closeness import assert_close
from tests.engine.support import (
    ADAM,
    exactly,
    labelled,
    moments,
    same,
    sequences,
    step,
    supervised,
    weights,
    works,
)
from xorl_lab import checkpoints
from xorl_lab.checkpoints import Address
from xorl_lab.checkpoints.catalog import disk_use
from xorl_lab.errors import CheckpointError, ConfigError, EngineError

SHAPE = {"rank": 4, "seed": 1}
KINDS: dict[str, dict[str, object] | None] = {
    "lora": {"rank": 4, "seed": 1, "dropout": 0.1},
    "some": {"rank": 2, "seed": 1, "target_modules": ["v_proj", "lm_head"], "alpha": 3.0},
    "full": None,
}
PROMPT = xl.ModelInput.from_ints([1, 2, 3])
GREEDY = xl.SamplingParams(max_tokens=4, temperature=0)


def make(service: xl.ServiceClient, kind: str, model_id: str = "default") -> xl.TrainingClient:
    settings = KINDS[kind]
    if settings is None:
        return service.create_training_client("tiny", model_id)
    return service.create_lora_training_client("tiny", model_id=model_id, **settings)


def trained(service: xl.ServiceClient, kind: str = "lora", model_id: str = "default"):
    client = make(service, kind, model_id)
    for _ in range(2):
        step(client)
    return client


def folder(service: xl.ServiceClient, path: str) -> Path:
    return Address.parse(path).folder(service.root)


def code_of(call: Callable[[], object]) -> str:
    with pytest.raises(CheckpointError) as caught:
        call()
    return caught.value.code


def logprobs(client: xl.TrainingClient) -> list[float]:
    data = [labelled(t) for t in sequences(3)]
    return [x for o in client.forward(data).result().loss_fn_outputs for x in o.logprobs.tolist()]


# Saving.


def test_what_save_state_returns(client):
    step(client)
    saved = client.save_state("step 100").result()
    assert (saved.path, saved.model) == ("xorl://default/weights/step-100", "default")


def test_without_a_name_it_is_the_number_of_steps(client):
    step(client)
    assert client.save_state().result().path == "xorl://default/weights/step-1"


@pytest.mark.parametrize("kind", KINDS)
def test_what_save_weights_for_sampler_returns(service, kind):
    client = trained(service, kind)
    saved = client.save_weights_for_sampler("a").result()
    assert (saved.path, saved.model) == ("xorl://default/sampler_weights/a", "default")
    assert saved.model_path == "sampler_weights/a"
    name = "model.safetensors" if kind == "full" else "adapter_model.safetensors"
    file = folder(service, saved.path) / name
    assert saved.size == file.stat().st_size
    assert saved.size > sum(v.numel() * 4 for v in weights(client).values())


def test_weights_to_sample_from_hold_no_optimizer(service, client):
    step(client)
    path = client.save_weights_for_sampler("a").result().path
    names = sorted(p.name for p in folder(service, path).iterdir())
    assert names == ["adapter_config.json", "adapter_model.safetensors", "state.json"]


def test_the_two_kinds_of_checkpoint_have_names_of_their_own(client):
    step(client)
    client.save_state("a").result()
    client.save_weights_for_sampler("a").result()
    assert len(client.list_checkpoints().result().checkpoints) == 2


def test_weights_to_sample_from_replace_what_had_the_name(service, client):
    paths = []
    for _ in range(2):
        step(client)
        paths.append(client.save_weights_for_sampler("a").result().path)
        saved = load_file(folder(service, paths[-1]) / "adapter_model.safetensors")
        assert same(saved, weights(client))
    assert paths[0] == paths[1]


def test_a_refused_overwrite_leaves_the_old_one(service, client):
    path = client.save_state("a").result().path
    old = weights(client)
    step(client)
    with pytest.raises(CheckpointError, match=r"^checkpoint\.exists: .*pass overwrite=True$"):
        client.save_state("a").result()
    assert same(weights(service.create_training_client_from_state(path, model_id="b")), old)
    assert works(client)


def test_a_save_that_fails_is_raised_by_the_sampling_client_that_needs_it(client, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "write", full)
    with pytest.raises(OSError, match="No space left"):
        client.save_weights_and_get_sampling_client("a")


def test_a_sampling_client_may_have_its_weights_saved_too(service, client):
    step(client)
    sampler = client.save_weights_and_get_sampling_client("kept")
    (saved,) = client.list_checkpoints().result().checkpoints
    again = service.create_sampling_client(model_path=saved.path)
    first, second = (s.sample(PROMPT, GREEDY).result() for s in (sampler, again))
    assert first.tokens == second.tokens
    assert first.logprobs == second.logprobs


# Names.


@pytest.mark.parametrize(
    ("given", "name", "warned"),
    [
        ("step 100", "step-100", "changed"),
        ("two  spaces", "two--spaces", "changed"),
        ("step ", "step-", "changed"),
        ("a", "a", None),
        ("a-", "a-", None),
        ("a_", "a_", None),
        ("v1.0", "v1.0", None),
        ("a" * 200, "a" * 200, None),
        ("a" * 201, "a" * 180 + "a92efd82109373e58f9a", "shortened"),
        ("a b" * 67, ("a-b" * 67)[:180] + "d2e08a127a4bfebbe414", "shortened"),
    ],
)
def test_names_become_what_the_rules_say(client, caplog, given, name, warned):
    for save in (client.save_state, client.save_weights_for_sampler):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            path = save(given).result().path
        assert path.rsplit("/", 1)[-1] == name
        mine = [r for r in caplog.records if r.name == "xorl_lab.checkpoints.names"]
        assert bool(mine) == bool(warned)
        if warned:
            assert repr(name) in mine[-1].getMessage()
            assert warned in mine[-1].getMessage()
            assert repr(given) in mine[0].getMessage()


REFUSED = ["", " a", ".a", "a.", "-a", "_a", "é", "a/b", "a:b", "a\tb", "a\n", 3, b"a"]


@pytest.mark.parametrize("call", ["save_state", "save_weights_for_sampler"])
def test_other_names_are_refused_before_anything_is_done(client, call):
    save = getattr(client, call)
    for name in (*REFUSED, "a" * 200 + "."):
        assert code_of(lambda n=name: save(n)) == "validation.invalid_checkpoint_name", name
    assert client._session.started is False


def test_the_same_long_name_is_the_same_checkpoint(service, client):
    client.save_state("b" * 300).result()
    with pytest.raises(CheckpointError, match=r"^checkpoint\.exists"):
        client.save_state("b" * 300).result()


# Loading.

OPERATIONS: dict[str, Callable[[xl.TrainingClient], object]] = {
    "forward_backward": lambda c: c.forward_backward(supervised()),
    "forward_backward_custom": lambda c: c.forward_backward_custom(
        supervised(), lambda _, lp: (lp[0].sum(), {})
    ),
    "optim_step": lambda c: c.optim_step(ADAM),
    "save_state": lambda c: c.save_state("other"),
    "save_weights_for_sampler": lambda c: c.save_weights_for_sampler("other"),
    "load_state": lambda c: c.load_state("xorl://source/weights/a"),
    "load_state_with_optimizer": lambda c: c.load_state_with_optimizer("xorl://source/weights/a"),
}
LOADS = ["load_state", "load_state_with_optimizer"]


@pytest.fixture
def source(service) -> xl.TrainingClient:
    client = service.create_lora_training_client("tiny", model_id="source", **SHAPE)
    step(client)
    client.save_state("a").result()
    return client


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("load", LOADS)
def test_loading_is_for_the_beginning(client, source, operation, load):
    """Whether or not the operation is over, or has failed."""
    future = OPERATIONS[operation](client)
    with pytest.raises(
        CheckpointError,
        match=exactly(
            "validation.already_initialized: model 'default' has trained, saved or loaded already: "
            "use ServiceClient.create_training_client_from_state(path), which makes a client with "
            "these weights"
        ),
    ) as caught:
        getattr(client, load)("xorl://source/weights/a")
    assert caught.value.code == "validation.already_initialized"
    future.exception()


def test_a_client_made_from_a_checkpoint_has_begun(service, source):
    path = "xorl://source/weights/a"
    client = service.create_training_client_from_state(path)
    assert code_of(lambda: client.load_state(path)) == "validation.already_initialized"


@pytest.mark.parametrize("load", LOADS)
def test_what_trains_nothing_does_not_stand_in_the_way(client, source, load):
    client.forward(supervised()).result()
    client.forward_base(supervised()).result()
    client.list_checkpoints().result()
    client.save_weights_and_get_sampling_client().sample(PROMPT, GREEDY).result()
    with pytest.raises(ConfigError):
        client.forward_backward(supervised(), "nothing")
    assert getattr(client, load)("xorl://source/weights/a").result() == {}
    assert same(weights(client), weights(source))
    assert works(client)


def test_load_state_starts_the_optimizer_afresh(client, source):
    client.load_state("xorl://source/weights/a").result()
    assert same(weights(client), weights(source))
    assert moments(client) == {}
    assert client._session.trained.steps == 0


def test_load_state_with_optimizer_goes_on(client, source):
    client.load_state_with_optimizer("xorl://source/weights/a").result()
    assert same(moments(client), moments(source))
    for each in (client, source):
        step(each, supervised(4, seed=9))
    assert same(weights(client), weights(source))
    assert client.save_state().result().path == "xorl://default/weights/step-2"


@pytest.mark.parametrize("load", LOADS)
def test_the_seed_is_not_compared_and_the_clients_own_is_kept(service, source, load):
    client = service.create_lora_training_client("tiny", rank=4, seed=77)
    getattr(client, load)("xorl://source/weights/a").result()
    assert client.lora.seed == 77
    path = client.save_state("b").result().path
    assert checkpoints.read(folder(service, path))["lora"]["seed"] == 77


def test_what_was_queued_behind_a_load_sees_it(client, source):
    loaded = client.load_state("xorl://source/weights/a")
    client.forward_backward(supervised(4, seed=9))
    client.optim_step(ADAM)
    source.forward_backward(supervised(4, seed=9))
    assert loaded.result() == {}
    assert client.forward_backward(supervised()).result().metrics["loss:sum"] > 0


@pytest.mark.parametrize("load", LOADS)
def test_all_differences_are_told(service, source, load):
    other = service.create_lora_training_client(
        "tiny-moe",
        model_id="other",
        rank=8,
        alpha=8.0,
        seed=5,
        train_mlp=False,
        train_unembed=True,
    )
    with pytest.raises(CheckpointError) as caught:
        getattr(other, load)("xorl://source/weights/a")
    assert caught.value.code == "validation.checkpoint_config_mismatch"
    assert caught.value.details == {
        "base_model": {"checkpoint": "tiny", "client": "tiny-moe"},
        "rank": {"checkpoint": 4, "client": 8},
        "alpha": {"checkpoint": 32.0, "client": 8.0},
        "train_mlp": {"checkpoint": True, "client": False},
        "train_unembed": {"checkpoint": False, "client": True},
    }
    assert all(name in str(caught.value) for name in caught.value.details)
    assert other._session.started is False


@pytest.mark.parametrize(
    ("changed", "details"),
    [
        ({"rank": 2}, {"rank": {"checkpoint": 4, "client": 2}}),
        ({"train_attn": False}, {"train_attn": {"checkpoint": True, "client": False}}),
        (
            {"target_modules": ["v_proj"]},
            {"target_modules": {"checkpoint": None, "client": ("v_proj",)}},
        ),
    ],
)
def test_one_difference_is_told_alone(service, source, changed, details):
    other = service.create_lora_training_client("tiny", **{**SHAPE, **changed})
    with pytest.raises(CheckpointError) as caught:
        other.load_state("xorl://source/weights/a")
    assert caught.value.details == details
    assert works(other)


def test_an_adapter_is_no_full_model(service, source):
    full = service.create_training_client("tiny", "full")
    with pytest.raises(CheckpointError) as caught:
        full.load_state("xorl://source/weights/a")
    assert caught.value.details == {"kind": {"checkpoint": "lora", "client": "full"}}
    path = full.save_state("a").result().path
    lora = service.create_lora_training_client("tiny", **SHAPE)
    with pytest.raises(CheckpointError) as caught:
        lora.load_state(path)
    assert caught.value.details == {"kind": {"checkpoint": "full", "client": "lora"}}


def test_weights_to_sample_from_can_be_trained_on(client, source):
    path = source.save_weights_for_sampler("s").result().path
    client.load_state(path).result()
    assert same(weights(client), weights(source))


def test_weights_to_sample_from_are_no_run_to_continue(service, client, source):
    path = source.save_weights_for_sampler("s").result().path
    message = exactly(
        "checkpoint.no_optimizer: checkpoint 's' holds weights alone: load it without the "
        "optimizer, or use one that save_state made"
    )
    with pytest.raises(CheckpointError, match=message):
        client.load_state_with_optimizer(path).result()
    with pytest.raises(CheckpointError, match=message):
        service.create_training_client_from_state_with_optimizer(path)


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("xorl://source/weights/none", "checkpoint.not_found"),
        ("xorl://nobody/weights/a", "checkpoint.not_found"),
        ("weights/a", "validation.invalid_checkpoint_path"),
        ("/tmp/a", "validation.invalid_checkpoint_path"),
        ("xorl://../weights/a", "validation.invalid_model_id"),
        ("xorl://source/weights/..", "validation.invalid_checkpoint_name"),
    ],
)
def test_a_path_that_leads_nowhere_is_an_error_at_the_call(service, client, source, path, code):
    for call in (
        client.load_state,
        client.load_state_with_optimizer,
        client.create_sampling_client,
        service.create_training_client_from_state,
        service.create_training_client_from_state_with_optimizer,
        lambda p: service.create_sampling_client(model_path=p),
        service.create_rest_client().get_weights_info_by_xorl_path,
    ):
        assert code_of(lambda call=call: call(path)) == code
    assert client.load_state("xorl://source/weights/a").result() == {}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("with_optimizer", [False, True])
def test_a_client_made_from_a_checkpoint_has_its_shape_and_weights(service, kind, with_optimizer):
    first = trained(service, kind)
    path = first.save_state("a").result().path
    rest = "_with_optimizer" if with_optimizer else ""
    again = getattr(service, f"create_training_client_from_state{rest}")(path, model_id="again")
    assert again.lora == first.lora
    assert again.model_id == "again"
    assert same(weights(again), weights(first))
    assert same(moments(again), moments(first) if with_optimizer else {})
    assert again._session.trained.steps == (2 if with_optimizer else 0)
    for each in (again, first):
        step(each, supervised(4, seed=9))
    assert same(weights(again), weights(first)) == with_optimizer


def test_a_base_model_may_be_named_if_it_is_the_right_one(service, source):
    path = "xorl://source/weights/a"
    assert service.create_training_client_from_state(path, "tiny").base_model == "tiny"


def test_lineage_is_recorded(service, source):
    path = "xorl://source/weights/a"
    client = service.create_training_client_from_state(path, model_id="child")
    step(client)
    saved = client.save_state("b").result().path
    state = checkpoints.read(folder(service, saved))
    assert (state["parent"], state["model_id"], state["steps"]) == (path, "child", 1)
    assert state["metrics"]["grad_norm"] > 0


# Damage.


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_flipped_byte_in_any_file_is_refused_by_name(service, kind):
    client = trained(service, kind)
    path = client.save_state("a").result().path
    place = folder(service, path)
    for file in sorted(place.iterdir()):
        whole = file.read_bytes()
        spoilt = bytearray(whole)
        spoilt[len(whole) // 2] ^= 1
        file.write_bytes(spoilt)
        for call in (
            service.create_training_client_from_state,
            service.create_training_client_from_state_with_optimizer,
            lambda p: service.create_sampling_client(model_path=p),
            lambda p: make(service, kind, "target").load_state(p).result(),
        ):
            with pytest.raises(CheckpointError) as caught:
                call(path)
            assert caught.value.code == "checkpoint.damaged"
            assert caught.value.details == {"name": "a", "file": file.name}
            assert f": {file.name}: " in str(caught.value)
        file.write_bytes(whole)
    assert works(service.create_training_client_from_state_with_optimizer(path))


def tampered(place: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Another tool's edit: the tensors change and the record of the files with them."""
    state = checkpoints.read(place)
    files = {p.name: p.read_bytes() for p in place.iterdir() if p.name != "state.json"}
    tensors = load_file(place / "adapter_model.safetensors")
    change(tensors)
    writers: dict[str, Callable[[Path], object]] = {
        name: lambda p, content=content: p.write_bytes(content) for name, content in files.items()
    }
    writers["adapter_model.safetensors"] = lambda p: save_file(tensors, p)
    facts = {k: v for k, v in state.items() if k not in ("files", "format")}
    checkpoints.write(place, writers, facts, overwrite=True)


ODD = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "odd"),
    [
        (lambda t: t.pop(ODD), ODD),
        (lambda t: t.update({"extra.lora_A.weight": torch.zeros(1)}), "extra.lora_A.weight"),
        (lambda t: t.update({ODD: torch.zeros(2, 64)}), ODD),
    ],
    ids=["missing", "extra", "other shape"],
)
def test_a_key_too_few_or_too_many_is_an_error(service, source, change, odd):
    paths = ["xorl://source/weights/a", source.save_weights_for_sampler("s").result().path]
    for path in paths:
        tampered(folder(service, path), change)
        client = service.create_lora_training_client("tiny", **SHAPE)
        before = weights(client)
        for call in (
            lambda path=path, client=client: client.load_state(path).result(),
            lambda path=path, client=client: client.create_sampling_client(path),
            lambda path=path: service.create_sampling_client(model_path=path),
            lambda path=path: service.create_training_client_from_state(path, model_id="n"),
        ):
            with pytest.raises(CheckpointError) as caught:
                call()
            assert caught.value.code == "checkpoint.tensor_mismatch"
            assert caught.value.details == {"tensors": [odd]}
            assert odd in str(caught.value)
        assert same(before, weights(client))


# Sampling from what was saved.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["save_state", "save_weights_for_sampler"])
def test_a_sampling_client_of_saved_weights_draws_as_one_of_the_present_ones(service, kind, what):
    client = trained(service, kind)
    path = getattr(client, what)("a").result().path
    present = client.save_weights_and_get_sampling_client()
    saved = [client.create_sampling_client(path), service.create_sampling_client(model_path=path)]
    step(client)
    expected = present.sample(PROMPT, GREEDY).result()
    for sampler in saved:
        response = sampler.sample(PROMPT, GREEDY).result()
        assert response.tokens == expected.tokens
        assert response.logprobs == expected.logprobs
        assert (sampler.version, sampler.model_id, sampler.base_model) == (2, "default", "tiny")


def test_a_sampling_client_needs_weights_of_the_same_base(service, source):
    other = service.create_lora_training_client("tiny-moe", rank=2, model_id="other")
    with pytest.raises(CheckpointError) as caught:
        other.create_sampling_client("xorl://source/weights/a")
    assert caught.value.code == "validation.checkpoint_config_mismatch"


# Looking after them.


def test_the_list_is_that_of_the_model_oldest_first(service, client, source):
    step(client)
    client.save_weights_for_sampler("z").result()
    client.save_state("b").result()
    client.save_state("a", ttl_seconds=3600).result()
    listed = client.list_checkpoints().result().checkpoints
    assert [c.checkpoint_id for c in listed] == ["sampler_weights/z", "weights/b", "weights/a"]
    assert [c.checkpoint_type for c in listed] == ["sampler", "training", "training"]
    for checkpoint in listed:
        place = folder(service, checkpoint.path)
        files = [p for p in place.iterdir() if p.name != "state.json"]
        assert checkpoint.size_bytes == sum(p.stat().st_size for p in files)
        assert abs(datetime.fromisoformat(checkpoint.time).timestamp() - time.time()) < 60
    assert [c.expires_at is None for c in listed] == [True, True, False]
    left = datetime.fromisoformat(listed[2].expires_at).timestamp() - time.time()
    assert 3500 < left < 3601


def test_the_list_comes_behind_the_saves_made_before(client):
    client.save_state("a")
    assert len(client.list_checkpoints().result().checkpoints) == 1


def test_a_rest_client_sees_other_models_too(service, client, source):
    rest = service.create_rest_client()
    assert rest.list_checkpoints().result().checkpoints == []
    (found,) = rest.list_checkpoints("source").result().checkpoints
    assert found.path == "xorl://source/weights/a"
    (found,) = service.create_rest_client("source").list_checkpoints().result().checkpoints
    assert found.path == "xorl://source/weights/a"


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_known_of_weights(service, kind):
    path = make(service, kind).save_state("a").result().path
    rest = service.create_rest_client()
    info = rest.get_weights_info("weights/a").result()
    assert info == rest.get_weights_info_by_xorl_path(path).result()
    assert info == rest.get_weights_info(path).result()
    ranks = {"lora": 4, "some": 2, "full": None}
    assert (info.base_model, info.is_lora, info.lora_rank) == ("tiny", kind != "full", ranks[kind])


def test_runs_are_the_models_held_and_those_with_checkpoints(service, source):
    saved = source.save_weights_for_sampler("s").result()
    source.unload().result()
    full = service.create_training_client("tiny", "full")
    runs = service.create_rest_client().list_training_runs().result().training_runs
    assert [r.training_run_id for r in runs] == ["full", "source"]
    held, kept = runs
    assert (held.is_lora, held.lora_rank, held.last_checkpoint) == (False, None, None)
    assert (kept.is_lora, kept.lora_rank, kept.base_model) == (True, 4, "tiny")
    assert kept.last_checkpoint.path == "xorl://source/weights/a"
    assert kept.last_sampler_checkpoint.path == saved.path
    assert full.model_id == held.training_run_id


def test_deleting(service, client):
    path = client.save_state("a").result().path
    answer = client.delete_checkpoint("weights/a").result()
    assert (answer.success, answer.deleted_path, answer.error) == (True, path, None)
    assert not folder(service, path).exists()
    assert list(folder(service, path).parent.iterdir()) == []
    assert client.save_state("a").result().path == path


def test_deleting_what_is_not_there_is_an_answer(client):
    client.save_state("a").result()
    answer = client.delete_checkpoint("weights/b").result()
    assert (answer.success, answer.deleted_path) == (False, None)
    assert answer.error == (
        "checkpoint.not_found: there is no checkpoint 'b' of this model: choose from ['a']"
    )


@pytest.mark.parametrize("which", ["a", "other/a", "weights/../a", "xorl://default/weights", ""])
def test_deleting_what_cannot_be_is_an_error(client, which):
    client.save_state("a").result()
    with pytest.raises(CheckpointError, match=r"^validation\.invalid_checkpoint_"):
        client.delete_checkpoint(which).result()
    assert len(client.list_checkpoints().result().checkpoints) == 1


def test_deleting_comes_behind_the_saves_made_before(client):
    saved, gone = client.save_state("a"), client.delete_checkpoint("weights/a")
    again = client.save_state("a")
    assert saved.result().path == again.result().path
    assert gone.result().success


def test_a_rest_client_deletes_too(service, client):
    client.save_state("a").result()
    client.save_weights_for_sampler("b").result()
    rest = service.create_rest_client()
    assert rest.delete_checkpoint("weights/a").result().success
    assert rest.delete_checkpoint("xorl://default/sampler_weights/b").result().success
    assert rest.list_checkpoints().result().checkpoints == []


# Expiry.


def test_what_has_expired_is_swept_when_a_service_opens(service, home, client):
    soon = client.save_state("soon", ttl_seconds=0.01).result().path
    sampler = client.save_weights_for_sampler("soon", ttl_seconds=0.01).result().path
    later = client.save_state("later", ttl_seconds=3600).result().path
    ever = client.save_state("ever").result().path
    time.sleep(0.02)
    xl.ServiceClient(home=home, device="cpu", dtype="float32")
    assert [folder(service, p).exists() for p in (soon, sampler, later, ever)] == [
        False,
        False,
        True,
        True,
    ]
    assert disk_use(service.root) == disk_use(folder(service, later)) + disk_use(
        folder(service, ever)
    )


def test_overwriting_sets_the_time_to_live_anew(service, home, client):
    client.save_state("a", ttl_seconds=0.01).result()
    path = client.save_state("a", overwrite=True).result().path
    time.sleep(0.02)
    xl.ServiceClient(home=home, device="cpu", dtype="float32")
    assert folder(service, path).exists()


def test_a_damaged_checkpoint_does_not_stop_a_service_from_opening(service, home, client):
    path = client.save_state("a", ttl_seconds=0.01).result().path
    (folder(service, path) / "state.json").write_text("{")
    client.save_state("b").result()
    opened = xl.ServiceClient(home=home, device="cpu", dtype="float32")
    (found,) = opened.create_rest_client().list_checkpoints().result().checkpoints
    assert found.checkpoint_id == "weights/b"


def test_a_service_opens_where_there_is_nothing(tmp_path):
    opened = xl.ServiceClient(home=tmp_path / "absent")
    assert opened.create_rest_client().list_training_runs().result().training_runs == []


# Other libraries, in a process of their own, without ours.

READ = """
import json, sys
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

def lora(folder):
    base = AutoModelForCausalLM.from_pretrained(sys.argv[1], attn_implementation="sdpa")
    return PeftModel.from_pretrained(base, folder)

def full(folder):
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="sdpa"
    )
    assert not any(report.values()), report
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    return model

for kind, folder in json.loads(sys.argv[2]):
    model = (full if kind == "full" else lora)(folder).eval()
    for tokens in json.loads(sys.argv[3]):
        ids = torch.tensor([tokens])
        with torch.no_grad():
            scores = torch.log_softmax(model(input_ids=ids).logits[0, :-1], -1)
        for value in scores.gather(-1, ids[0, 1:, None])[:, 0].tolist():
            print(folder, value)
assert not any(name.startswith("xorl") for name in sys.modules)
"""


@pytest.fixture(scope="session")
def base_folder(tmp_path_factory) -> Path:
    """The base model as transformers writes it."""
    place = tmp_path_factory.mktemp("base")
    service = xl.ServiceClient(home=place / "home", device="cpu", dtype="float32")
    client = service.create_lora_training_client("tiny", rank=1)
    client._session.engine.base.save_pretrained(place / "base")
    return place / "base"


@pytest.mark.parametrize(
    "saved",
    [
        [("lora", "save_weights_for_sampler"), ("full", "save_weights_for_sampler")],
        pytest.param(
            [
                ("lora", "save_state"),
                ("full", "save_state"),
                ("some", "save_state"),
                ("some", "save_weights_for_sampler"),
            ],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["to sample from", "others"],
)
def test_stock_libraries_compute_the_same_logprobs(service, tmp_path, base_folder, saved):
    expected: dict[str, list[float]] = {}
    jobs: list[tuple[str, str]] = []
    for i, (kind, what) in enumerate(saved):
        client = trained(service, kind, f"m{i}")
        jobs.append((kind, str(folder(service, getattr(client, what)("a").result().path))))
        expected[jobs[-1][1]] = logprobs(client)
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            READ,
            str(base_folder),
            json.dumps(jobs),
            json.dumps(sequences(3)),
        ],
        cwd=tmp_path,
        env={"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    fresh = logprobs(service.create_lora_training_client("tiny", model_id="fresh"))
    for place, ours in expected.items():
        theirs = [float(x) for x in re.findall(rf"^{re.escape(place)} (\S+)$", done.stdout, re.M)]
        assert_close(theirs, ours, rtol=0, atol=1e-5)
        assert max(abs(a - b) for a, b in zip(theirs, fresh, strict=True)) > 0.1


def test_full_weights_can_be_used_as_a_base_model(service, tmp_path):
    client = trained(service, "full")
    path = client.save_weights_for_sampler("a").result().path
    other = xl.ServiceClient(home=tmp_path / "other", device="cpu", dtype="float32")
    child = other.create_lora_training_client(str(folder(service, path)), rank=2, seed=1)
    assert_close(logprobs(child), logprobs(client), rtol=0, atol=1e-5)


def test_ending_a_client_does_not_end_its_checkpoints(service, client):
    step(client)
    path = client.save_state("a").result().path
    client.unload().result()
    with pytest.raises(EngineError, match="was unloaded"):
        client.list_checkpoints()
    assert works(service.create_training_client_from_state_with_optimizer(path))
