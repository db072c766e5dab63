"""One thing under two names, and one call in all the ways in which it can be waited for."""

import asyncio
import threading
import time
from collections.abc import Coroutine
from typing import Any

import pytest

import xorl_lab as xl
from tests.engine.support import (
    ADAM,
    exactly,
    gradient,
    labelled,
    rollouts,
    same,
    sequences,
    shifted,
    step,
    supervised,
    weights,
)
from xorl_lab import losses
from xorl_lab.errors import ConfigError, DataError

PARAMS = {"eps_clip": 0.05, "eps_clip_high": 0.5, "logprob_temperature": 1.3}
PROMPT = xl.ModelInput.from_ints([1, 2, 3])
DRAW = xl.SamplingParams(max_tokens=4, seed=3)


def outputs(result: xl.ForwardBackwardOutput) -> list[tuple[float, list[float]]]:
    return [(o.loss, o.logprobs.tolist()) for o in result.loss_fn_outputs]


def grads(client: xl.TrainingClient) -> dict[str, Any]:
    """What is accumulated, and nothing left of it."""
    trained = client._session.trained
    result = dict(trained.window.grads)
    trained.drop_window()
    return result


# Names.


@pytest.mark.parametrize("call", ["forward", "forward_backward"])
def test_parameters_of_a_loss_go_by_two_names(client, call):
    method, results = getattr(client, call), []
    for names in ({"loss_fn_params": PARAMS}, {"loss_fn_config": PARAMS}, {}):
        result = method(rollouts(), "policy_loss", **names).result()
        results.append((result.metrics, outputs(result)))
        client._session.trained.drop_window()
    assert results[0] == results[1]
    assert results[0] != results[2]


@pytest.mark.parametrize("call", ["forward", "forward_backward"])
@pytest.mark.parametrize("values", [(PARAMS, PARAMS), ({}, {})])
def test_both_names_at_once_are_an_error(client, call, values):
    message = "loss_fn_params and loss_fn_config are two names of one thing: pass one of them"
    with pytest.raises(ConfigError, match=exactly(message)):
        getattr(client, call)(
            rollouts(), "policy_loss", loss_fn_params=values[0], loss_fn_config=values[1]
        )


def test_the_async_names_take_both_names_too(client):
    async def main() -> list[xl.ForwardBackwardOutput]:
        first = await client.forward_async(rollouts(), "policy_loss", PARAMS)
        second = await client.forward_async(rollouts(), "policy_loss", loss_fn_config=PARAMS)
        return [await first, await second]

    first, second = asyncio.run(main())
    assert first.metrics == second.metrics


def test_auto_shift_is_the_form_of_labels(client):
    tokens = sequences()
    whole = [
        xl.Datum(xl.ModelInput.from_ints(t), {"target_tokens": t, "weights": [1.0] * len(t)})
        for t in tokens
    ]
    labels = [labelled(t, weights=[1.0] * len(t)) for t in tokens]
    results, gradients = [], []
    for data, auto_shift in ((whole, True), (labels, False)):
        results.append(client.forward_backward(data, auto_shift=auto_shift).result())
        gradients.append(grads(client))
    assert outputs(results[0]) == outputs(results[1])
    assert results[0].metrics == results[1].metrics
    assert same(*gradients)
    assert [len(o.logprobs) for o in results[0].loss_fn_outputs] == [len(t) - 1 for t in tokens]


def test_auto_shift_shifts_the_other_inputs_as_labels_does(client):
    labels = rollouts()
    whole = [
        xl.Datum(
            d.model_input,
            {{"labels": "target_tokens"}.get(k, k): v for k, v in d.loss_fn_inputs.items()},
        )
        for d in labels
    ]
    first = client.forward(whole, "policy_loss", auto_shift=True).result()
    second = client.forward(labels, "policy_loss").result()
    assert outputs(first) == outputs(second)
    assert first.metrics == second.metrics


def test_auto_shift_of_the_form_of_labels_changes_nothing(client):
    data = supervised()
    assert outputs(client.forward(data, auto_shift=True).result()) == outputs(
        client.forward(data).result()
    )


def test_auto_shift_leaves_the_data_of_the_caller_alone(client):
    tokens = sequences(1)[0]
    datum = xl.Datum(xl.ModelInput.from_ints(tokens), {"target_tokens": tokens})
    client.forward([datum], auto_shift=True).result()
    assert list(datum.loss_fn_inputs) == ["target_tokens"]


def test_auto_shift_of_one_token_is_refused(client):
    datum = xl.Datum(xl.ModelInput.from_ints([1]), {"target_tokens": [1]})
    with pytest.raises(DataError, match=r"^data\[0\] has 1 tokens, too few to predict one"):
        client.forward([datum], auto_shift=True)


def test_auto_shift_needs_data_as_any_other_call_does(client):
    with pytest.raises(DataError, match=r"^data\[0\] is a int: pass a list of Datum"):
        client.forward([3], auto_shift=True)


def test_auto_shift_is_not_the_default(client):
    tokens = sequences(1)[0]
    datum = shifted(tokens)
    result = client.forward([datum]).result()
    assert len(result.loss_fn_outputs[0].logprobs) == len(tokens) - 1
    assert outputs(result) == outputs(client.forward([labelled(tokens)]).result())


@pytest.mark.parametrize("name", losses.names())
def test_names_of_losses_are_stripped_and_lower_cased(client, name):
    plain = client.forward(rollouts(), name).result()
    odd = client.forward(rollouts(), f" \t{name.upper()}\n").result()
    assert odd.metrics == plain.metrics
    assert odd.loss_fn_output_type == plain.loss_fn_output_type == name


def test_metrics_go_by_the_names_of_both_clients(client):
    metrics = client.forward(supervised()).result().metrics
    assert metrics["loss_sum"] == metrics["loss:sum"]
    assert metrics["loss_mean"] == metrics["loss:mean"]
    assert metrics["token_count"] == metrics["valid_tokens"] > 0
    assert metrics["loss_mean"] == pytest.approx(metrics["loss_sum"] / metrics["token_count"])


def test_outputs_go_by_key_and_by_attribute(client):
    output = client.forward(supervised()).result().loss_fn_outputs[0]
    assert output["loss"] == output.loss
    assert output["logprobs"] is output.logprobs
    assert output["elementwise_loss"] is output.elementwise_loss
    assert dict(output) == {k: output[k] for k in ("loss", "logprobs", "elementwise_loss")}
    with pytest.raises(KeyError):
        output["entropy"]


def test_settings_of_the_optimizer_may_be_a_dict(service):
    clients = [
        service.create_lora_training_client("tiny", rank=2, seed=1, model_id=m) for m in ("a", "b")
    ]
    for each, adam in zip(clients, (ADAM, ADAM.to_dict()), strict=True):
        each.forward_backward(supervised())
        each.optim_step(adam).result()
    assert same(weights(clients[0]), weights(clients[1]))


def test_a_checkpoint_may_be_named_by_uri_or_by_kind_and_name(client):
    paths = [client.save_state(name).result().path for name in "abc"]
    assert client.delete_checkpoint("weights/a").result().deleted_path == paths[0]
    assert client.delete_checkpoint(paths[1]).result().deleted_path == paths[1]
    assert client.delete_checkpoint_from_xorl_path(paths[2]).result().deleted_path == paths[2]
    assert client.list_checkpoints().result().checkpoints == []


# Ways to wait.


def step_by(client: xl.TrainingClient, way: str) -> float:
    """One step; how its two calls are waited for is all that differs."""
    if way == "result":
        client.forward_backward(supervised()).result()
        return client.optim_step(ADAM).result().metrics["grad_norm"]

    async def await_futures() -> float:
        await client.forward_backward(supervised())
        return (await client.optim_step(ADAM)).metrics["grad_norm"]

    async def gather_futures() -> float:
        both = client.forward_backward(supervised()), client.optim_step(ADAM)
        return (await asyncio.gather(*both))[1].metrics["grad_norm"]

    async def result_in_the_loop() -> float:
        client.forward_backward(supervised()).result()
        return client.optim_step(ADAM).result().metrics["grad_norm"]

    async def async_then_await() -> float:
        future = await client.forward_backward_async(supervised())
        await future
        future = await client.optim_step_async(ADAM)
        return (await future).metrics["grad_norm"]

    async def async_then_result() -> float:
        (await client.forward_backward_async(supervised())).result()
        return (await client.optim_step_async(ADAM)).result().metrics["grad_norm"]

    async def gather_async() -> float:
        both = await asyncio.gather(
            client.forward_backward_async(supervised()), client.optim_step_async(ADAM)
        )
        return (await asyncio.gather(*both))[1].metrics["grad_norm"]

    ways = [
        await_futures,
        gather_futures,
        result_in_the_loop,
        async_then_await,
        async_then_result,
        gather_async,
    ]
    return asyncio.run(next(w for w in ways if w.__name__ == way)())


@pytest.mark.parametrize(
    "way",
    [
        "await_futures",
        "gather_futures",
        "result_in_the_loop",
        "async_then_await",
        "async_then_result",
        "gather_async",
    ],
)
def test_a_step_is_the_same_however_it_is_waited_for(service, way):
    plain, other = (
        service.create_lora_training_client("tiny", rank=2, seed=1, model_id=m) for m in ("a", "b")
    )
    assert step_by(plain, "result") == step_by(other, way) > 0
    assert same(weights(plain), weights(other))


def test_a_future_can_be_waited_for_again_and_in_both_ways(client):
    future = client.forward(supervised())

    async def main() -> xl.ForwardBackwardOutput:
        assert await future is await future
        return await future

    assert asyncio.run(main()) is future.result() is future.result()
    assert future.exception() is None


def test_an_async_name_submits_when_it_is_awaited_and_not_before(client):
    call = client.forward_backward_async(supervised())
    assert client._session.started is False
    call.close()

    async def main() -> xl.APIFuture[xl.ForwardBackwardOutput]:
        return await client.forward_backward_async(supervised())

    asyncio.run(main()).result()
    assert client._session.started is True


def test_an_async_name_raises_where_the_plain_one_does(client):
    async def main() -> None:
        await client.forward_backward_async(supervised(), "nothing")

    with pytest.raises(ConfigError, match=r"^unknown loss 'nothing'"):
        asyncio.run(main())


async def run_names(rest) -> list[str]:
    runs = await (await rest.list_training_runs_async())
    return [r.training_run_id for r in runs.training_runs]


def test_every_async_name_gives_what_the_plain_one_gives(service, client):
    async def main() -> None:
        step(client)
        saved = await (await client.save_state_async("a"))
        assert saved.path == "xorl://default/weights/a"
        sampler = await (await client.save_weights_for_sampler_async("b"))
        assert sampler.path == "xorl://default/sampler_weights/b"
        base = await (await client.forward_base_async(supervised()))
        assert outputs(base) == outputs(client.forward_base(supervised()).result())
        custom = await (
            await client.forward_backward_custom_async(
                supervised(), lambda _, logprobs: (-logprobs[0].sum(), {"mine": 1.0})
            )
        )
        assert custom.metrics["mine"] == 1.0
        listed = await (await client.list_checkpoints_async())
        assert [c.path for c in listed.checkpoints] == [saved.path, sampler.path]
        assert (await client.health_check_async())["status"] == "healthy"
        fresh = await service.create_lora_training_client_async("tiny", rank=4, model_id="fresh")
        assert await (await fresh.load_state_async(saved.path)) == {}
        fresh = await service.create_lora_training_client_async("tiny", rank=4, model_id="fresh")
        assert await (await fresh.load_state_with_optimizer_async(saved.path)) == {}
        for create in (
            service.create_training_client_from_state_async,
            service.create_training_client_from_state_with_optimizer_async,
        ):
            assert same(weights(await create(saved.path, model_id="fresh")), weights(client))
        rest = await service.create_rest_client_async()
        info = await (await rest.get_weights_info_async("weights/a"))
        assert info == await (await rest.get_weights_info_by_xorl_path_async(saved.path))
        async with asyncio.timeout(60):
            # The thread that created "fresh" for asyncio holds it until it gets to run again.
            while await run_names(rest) != ["default"]:  # noqa: ASYNC110  (no event tells it)
                await asyncio.sleep(0.01)
        assert len((await (await rest.list_checkpoints_async())).checkpoints) == 2
        assert (await (await rest.delete_checkpoint_async("weights/a"))).success
        gone = await (await client.delete_checkpoint_async("sampler_weights/b"))
        assert gone.success
        missing = await (await client.delete_checkpoint_from_xorl_path_async(sampler.path))
        assert not missing.success
        full = await service.create_training_client_async("tiny", "full")
        assert (await (await full.unload_async())).model_id == "full"
        assert (await (await client.kill_session_async(False))).success

    asyncio.run(main())


# Clients that are made while the event loop goes on.


def ticks_while(made: Coroutine[Any, Any, Any], seconds: float, release: threading.Event) -> int:
    """How often the loop comes round while something is made that has to wait that long."""

    async def main() -> int:
        task = asyncio.ensure_future(made)
        end, count = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            await asyncio.sleep(0.001)
            count += 1
        assert not task.done()
        release.set()
        await task
        return count

    return asyncio.run(main())


@pytest.mark.parametrize(
    "name",
    [
        "create_sampling_client",
        "save_weights_and_get_sampling_client",
        "create_lora_training_client",
        "create_training_client_from_state",
        "create_sampling_client_of_the_service",
    ],
)
def test_making_a_client_does_not_block_the_event_loop(service, client, name):
    path = client.save_weights_for_sampler("a").result().path
    state = client.save_state("a").result().path
    release = threading.Event()
    client._session.engine.scheduler.submit(lambda _: release.wait(30), name="hold")
    made = {
        "create_sampling_client": lambda: client.create_sampling_client_async(path),
        "save_weights_and_get_sampling_client": client.save_weights_and_get_sampling_client_async,
        "create_lora_training_client": lambda: service.create_lora_training_client_async(
            "tiny", model_id="other"
        ),
        "create_training_client_from_state": lambda: (
            service.create_training_client_from_state_async(state, model_id="other")
        ),
        "create_sampling_client_of_the_service": lambda: service.create_sampling_client_async(
            model_path=path
        ),
    }[name]()
    assert ticks_while(made, 0.2, release) > 5


def test_clients_to_sample_from_are_yielded_themselves(client):
    step(client)
    path = client.save_weights_for_sampler("a").result().path

    async def main() -> list[list[int]]:
        made = [
            await client.create_sampling_client_async(path),
            await client.create_sampling_client_async(model_path=path),
            await client.save_weights_and_get_sampling_client_async(),
        ]
        assert all(type(sampler) is xl.SamplingClient for sampler in made)
        futures = [await sampler.sample_async(PROMPT, DRAW) for sampler in made]
        batch = await (await made[0].sample_batch_async([PROMPT], DRAW))
        assert [index for index, _ in batch.completed] == [0]
        return [response.tokens for response in await asyncio.gather(*futures)]

    first, second, third = asyncio.run(main())
    assert first == second == third


def test_a_service_yields_its_clients_themselves(service):
    async def main() -> None:
        client = await service.create_lora_training_client_async("tiny", rank=2)
        assert type(client) is xl.TrainingClient
        assert client.lora.rank == 2
        sampler = await service.create_sampling_client_async(base_model="tiny")
        assert type(sampler) is xl.SamplingClient

    asyncio.run(main())


def test_gathered_clients_are_each_their_own(service):
    async def main() -> list[xl.TrainingClient]:
        return await asyncio.gather(
            *(
                service.create_lora_training_client_async("tiny", rank=r, model_id=f"m{r}")
                for r in (1, 2, 3)
            )
        )

    made = asyncio.run(main())
    assert [(c.model_id, c.lora.rank) for c in made] == [("m1", 1), ("m2", 2), ("m3", 3)]


def test_the_gradient_of_both_forms_is_one(client):
    tokens = sequences()
    trained = client._session.trained
    assert same(
        gradient(trained, [labelled(t) for t in tokens]),
        gradient(trained, [shifted(t) for t in tokens]),
    )
