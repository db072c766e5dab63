"""Losses of the caller's own: one pass back through the model, and a gradient used as it is."""

import asyncio
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

import xorl_lab as xl
from tests.closeness import assert_close
from tests.engine.support import (
    ADAM,
    Tensors,
    distance,
    exactly,
    gradient,
    labelled,
    on_call,
    plain_logprobs,
    rollouts,
    same,
    sequences,
    shifted,
    step,
    supervised,
    weights,
    works,
)
from xorl_lab import losses
from xorl_lab.engine import custom, selection, trainer
from xorl_lab.engine.trainer import Trained
from xorl_lab.errors import DataError, EngineError
from xorl_lab.types import Datum

Logprobs = list[torch.Tensor]
Answer = tuple[torch.Tensor, dict[str, float]]


def column(datum: Datum, name: str, like: torch.Tensor) -> torch.Tensor:
    """(T,) an input of labelled data; its first entry has no target."""
    return torch.tensor(datum.loss_fn_inputs[name].data, dtype=like.dtype)[1:]


# Each built-in loss, written down again by hand: (logprobs, old, advantages) -> terms.


def cross_entropy(new, old, advantages):
    return -new


def importance_sampling(new, old, advantages):
    return -(new - old).exp() * advantages


def clipped(low: float, high: float):
    def terms(new, old, advantages):
        ratio = (new - old).exp()
        return torch.maximum(-ratio * advantages, -ratio.clamp(low, high) * advantages)

    return terms


def cispo(new, old, advantages):
    return -(new - old).exp().clamp(0, 4).detach() * advantages * new


def dro(new, old, advantages):
    return 0.025 * (new - old).square() - advantages * new


COPIES = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "policy_loss": clipped(0.8, 1.2),
    "ppo": clipped(0.8, 1.2),
    "cispo": cispo,
    "dro": dro,
    "drgrpo": clipped(0.8, 1.28),
}


def copy_of(name: str, divisor: float = 1.0) -> Callable[[Sequence[Datum], Logprobs], Answer]:
    def loss(data: Sequence[Datum], logprobs: Logprobs) -> Answer:
        total = torch.zeros(())
        for datum, new in zip(data, logprobs, strict=True):
            given = [column(datum, key, new) for key in ("logprobs", "advantages", "weights")]
            old, advantages, weight = given
            total = total + (weight * COPIES[name](new, old, advantages)).sum()
        return total / divisor, {"by_hand": float(total.detach())}

    return loss


def near(client: xl.TrainingClient) -> list[Datum]:
    """Rollouts of a policy close by, some within and some beyond the bounds of every clip."""
    data = rollouts()
    found = client.forward(data).result().loss_fn_outputs
    draw = np.random.default_rng(7)
    for datum, output in zip(data, found, strict=True):
        length = datum.model_input.length
        old = np.zeros(length)
        old[1:] = output.logprobs.to_numpy() + draw.normal(0, 0.3, length - 1)
        old[1::5] -= 2.0
        advantages = draw.normal(0, 1, length)
        datum.loss_fn_inputs["logprobs"] = xl.TensorData.from_numpy(old)
        datum.loss_fn_inputs["advantages"] = xl.TensorData.from_numpy(advantages)
    return data


def accumulated(client: xl.TrainingClient) -> tuple[Tensors, int]:
    """Gradient and trained tokens of the window, and nothing left of it."""
    trained = client._session.trained
    window = trained.window
    trained.drop_window()
    return window.grads, window.valid_tokens


def test_every_loss_has_its_copy():
    assert set(COPIES) == set(losses.names()) - {"causallm_loss"}


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_of_a_loss_has_its_gradient_after_the_division(client, name):
    step(client)
    data = near(client)
    client.forward_backward(data, name).result()
    built_in, tokens = accumulated(client)
    assert tokens > 20
    client.forward_backward_custom(data, copy_of(name, tokens)).result()
    mine, _ = accumulated(client)
    divided = {k: v / tokens for k, v in built_in.items()}
    assert distance(mine, divided) < 1e-6
    for key, value in divided.items():
        assert_close(mine[key], value, rtol=1e-5, atol=1e-6 * float(value.abs().max()))


@pytest.mark.parametrize(
    "name", ["ppo", *(pytest.param(n, marks=pytest.mark.slow) for n in COPIES if n != "ppo")]
)
def test_a_copy_of_a_loss_takes_the_same_step(service, name):
    first, second = (
        service.create_lora_training_client("tiny", rank=2, seed=1, model_id=m) for m in ("a", "b")
    )
    data = near(first)
    adam = xl.AdamParams(learning_rate=1e-2, eps=1e-4)
    tokens = first.forward_backward(data, name).result().metrics["valid_tokens"]
    expected = first.optim_step(adam).result().metrics
    second.forward_backward_custom(data, copy_of(name, tokens))
    got = second.optim_step(adam).result().metrics
    assert_close(got["grad_norm"], expected["grad_norm"], rtol=1e-5)
    assert distance(weights(second), weights(first)) < 1e-5


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_of_a_loss_has_its_value(client, name):
    data = near(client)
    expected = client.forward(data, name).result().metrics["loss:sum"]
    metrics = client.forward_backward_custom(data, copy_of(name)).result().metrics
    assert_close(metrics["by_hand"], expected, rtol=1e-5)
    assert_close(metrics["loss:sum"], expected, rtol=1e-5)


def test_the_gradient_is_not_divided(client):
    data = supervised()
    client.forward_backward_custom(data, lambda _, lp: (-sum(x.sum() for x in lp), {})).result()
    whole, tokens = accumulated(client)
    client.forward_backward_custom(
        data, lambda _, lp: (-sum(x.sum() for x in lp) / tokens, {})
    ).result()
    norm = client.optim_step(ADAM).result().metrics["grad_norm"]
    total = torch.sqrt(sum(g.double().square().sum() for g in whole.values()))
    assert_close(norm, float(total) / tokens, rtol=1e-5)


def test_gradients_of_several_calls_add_up(client):
    data = near(client)
    for part in (data[:3], data[3:]):
        client.forward_backward_custom(part, copy_of("ppo")).result()
    parts, _ = accumulated(client)
    client.forward_backward_custom(data, copy_of("ppo")).result()
    whole, _ = accumulated(client)
    assert distance(parts, whole) < 1e-6


# What the loss is given.


def test_the_logprobs_are_those_of_forward(client):
    step(client)
    data = [*supervised(3), shifted(sequences()[3]), labelled(sequences()[4])]
    seen: list[Logprobs] = []

    def loss(_: Sequence[Datum], logprobs: Logprobs) -> Answer:
        seen.append([x.detach().clone() for x in logprobs])
        return logprobs[0].sum(), {}

    output = client.forward_backward_custom(data, loss).result()
    plain = client.forward(data).result()
    assert len(seen) == 1
    for got, told, expected in zip(
        seen[0], output.loss_fn_outputs, plain.loss_fn_outputs, strict=True
    ):
        assert_close(got, expected.logprobs.to_numpy(), rtol=0, atol=1e-5)
        assert told.logprobs.tolist() == got.tolist()


def test_the_data_are_those_of_the_caller(client):
    data = near(client)
    seen: list[object] = []
    client.forward_backward_custom(
        data, lambda given, lp: (seen.extend([given, len(lp)]), (lp[0].sum(), {}))[1]
    ).result()
    given, count = seen
    assert count == len(data)
    assert all(a is b for a, b in zip(given, data, strict=True))


def test_untrained_positions_hold_zero_and_give_no_gradient(client):
    tokens = sequences()[0]
    weight = [1.0] * len(tokens)
    weight[2] = 0.0
    seen: Logprobs = []

    def loss(_: Sequence[Datum], logprobs: Logprobs) -> Answer:
        seen.append(logprobs[0].detach())
        return logprobs[0].sum() + 100 * logprobs[0][1], {}

    client.forward_backward_custom([labelled(tokens, weights=weight)], loss).result()
    mine, _ = accumulated(client)
    expected = gradient(client._session.trained, [labelled(tokens, weights=weight)])
    assert seen[0][1] == 0
    assert (seen[0] != 0).sum() == len(tokens) - 2
    assert distance({k: -v for k, v in mine.items()}, expected) < 1e-6


def test_a_row_that_is_not_trained_has_its_place(client):
    data = [
        labelled([1, 2, 3], weights=[0, 0, 0]),
        labelled([4, 5, 6]),
        labelled([7, 8], weights=[0, 1]),
    ]
    shapes: list[list[int]] = []

    def loss(_: Sequence[Datum], logprobs: Logprobs) -> Answer:
        shapes.append([int((x != 0).sum()) for x in logprobs])
        return sum(x.sum() for x in logprobs), {}

    metrics = client.forward_backward_custom(data, loss).result().metrics
    assert shapes == [[0, 2, 1]]
    assert (metrics["valid_tokens"], metrics["rows_without_signal"]) == (3.0, 1.0)


def test_the_loss_runs_with_gradient_whatever_the_caller_has_set(client):
    with torch.no_grad():
        client.forward_backward_custom(supervised(), copy_of_mean).result()
    assert client.optim_step(ADAM).result().metrics["grad_norm"] > 0


def copy_of_mean(_: Sequence[Datum], logprobs: Logprobs) -> Answer:
    return -sum(x.mean() for x in logprobs), {"rows": float(len(logprobs))}


def test_metrics_of_the_loss_are_returned(client):
    def loss(_: Sequence[Datum], logprobs: Logprobs) -> tuple[torch.Tensor, dict[str, object]]:
        total = -sum(x.sum() for x in logprobs)
        return total, {"half": total / 2, "count": 3, "np": np.float32(1.5), "loss:mean": 0.25}

    output = client.forward_backward_custom(supervised(), loss).result()
    metrics = output.metrics
    assert metrics["half"] == metrics["loss:sum"] / 2
    assert (metrics["count"], metrics["np"], metrics["loss:mean"]) == (3.0, 1.5, 0.25)
    assert all(type(v) is float for v in metrics.values())
    assert output.loss_fn_output_type == "custom"
    assert len(output.loss_fn_outputs) == 6


def test_the_loss_belongs_to_the_call_and_not_to_a_datum(client):
    output = client.forward_backward_custom(supervised(), copy_of_mean).result()
    assert all(np.isnan(o.loss) for o in output.loss_fn_outputs)
    assert all(len(o.elementwise_loss) == 0 for o in output.loss_fn_outputs)


# Direct preference optimisation (Rafailov et al. 2023, eq. 7).

BETA = 0.3


def pairs(count: int = 4) -> list[Datum]:
    """Chosen and rejected completions of one prompt each, turn by turn."""
    made: list[Datum] = []
    for i in range(count):
        draw = np.random.default_rng(50 + i)
        prompt = draw.integers(0, 256, 3 + i).tolist()
        for length in (4 + i, 6):
            tokens = prompt + draw.integers(0, 256, length).tolist()
            made.append(labelled(tokens, weights=[0.0] * len(prompt) + [1.0] * length))
    return made


def dpo(reference: Logprobs) -> Callable[[Sequence[Datum], Logprobs], Answer]:
    sums = [r.sum() for r in reference]

    def loss(_: Sequence[Datum], logprobs: Logprobs) -> Answer:
        gains = torch.stack([lp.sum() - ref for lp, ref in zip(logprobs, sums, strict=True)])
        margins = BETA * (gains[0::2] - gains[1::2])
        accuracy = float((margins > 0).float().mean())
        return -torch.nn.functional.logsigmoid(margins).mean(), {"accuracy": accuracy}

    return loss


def closed_form(model: torch.nn.Module, base: torch.nn.Module, data: list[Datum]) -> torch.Tensor:
    """log(1 + exp(-beta * (difference of the gains))), from whole forward passes of its own."""
    new = plain_logprobs(model, data)
    with torch.no_grad():
        old = plain_logprobs(base, data)
    total = torch.zeros(())
    for i in range(0, len(data), 2):
        gains = []
        for k in (i, i + 1):
            trained = np.flatnonzero(data[k].loss_fn_inputs["weights"].to_numpy()[1:])
            gains.append(new[k, trained].sum() - old[k, trained].sum())
        total = total + torch.log1p(torch.exp(-BETA * (gains[0] - gains[1])))
    return total / (len(data) // 2)


def reference(client: xl.TrainingClient, data: list[Datum]) -> Logprobs:
    outputs = client.forward_base(data).result().loss_fn_outputs
    return [o.logprobs.to_torch() for o in outputs]


def test_dpo_is_its_closed_form(client):
    data = pairs()
    for _ in range(3):
        step(client)
    output = client.forward_backward_custom(data, dpo(reference(client, data))).result()
    mine, _ = accumulated(client)
    trained = client._session.trained
    value = closed_form(trained.model, client._session.engine.base, data)
    grads = torch.autograd.grad(value, list(trained.parameters.values()))
    assert_close(output.metrics["loss:sum"], float(value.detach()), rtol=1e-5)
    assert distance(mine, dict(zip(trained.parameters, grads, strict=True))) < 1e-5
    assert abs(float(value.detach()) - np.log(2)) > 0.01


def test_dpo_starts_at_the_logarithm_of_two(client):
    data = pairs()
    output = client.forward_backward_custom(data, dpo(reference(client, data))).result()
    assert_close(output.metrics["loss:sum"], np.log(2), rtol=1e-6)


def test_dpo_of_rows_in_several_micro_batches_is_the_same(client, monkeypatch):
    data = pairs()
    step(client)
    loss = dpo(reference(client, data))
    client.forward_backward_custom(data, loss).result()
    whole, _ = accumulated(client)
    monkeypatch.setattr(trainer, "MAX_ROW", 12)
    client.forward_backward_custom(data, loss).result()
    assert distance(accumulated(client)[0], whole) < 1e-5


def test_dpo_learns_what_is_preferred(client):
    data = pairs()
    loss = dpo(reference(client, data))
    for _ in range(8):
        output = client.forward_backward_custom(data, loss).result()
        client.optim_step(ADAM).result()
    assert output.metrics["accuracy"] == 1.0
    assert output.metrics["loss:sum"] < 0.5


def test_dpo_of_full_weights_is_its_closed_form(service):
    client = service.create_training_client("tiny", "full")
    data = pairs(2)
    step(client, None)
    client.forward_backward_custom(data, dpo(reference(client, data))).result()
    mine, _ = accumulated(client)
    trained = client._session.trained
    value = closed_form(trained.model, client._session.engine.base, data)
    grads = torch.autograd.grad(value, list(trained.parameters.values()))
    assert distance(mine, dict(zip(trained.parameters, grads, strict=True))) < 1e-5


# What goes wrong.


def test_an_exception_fails_that_call_alone(client):
    data = near(client)
    client.forward_backward_custom(data[:3], copy_of("ppo")).result()
    before = {k: v.clone() for k, v in client._session.trained.window.grads.items()}

    def broken(_: Sequence[Datum], __: Logprobs) -> Answer:
        raise KeyError("mine")

    failed = client.forward_backward_custom(data, broken)
    with pytest.raises(KeyError, match="mine"):
        failed.result()
    assert same(client._session.trained.window.grads, before)
    client.forward_backward_custom(data[3:], copy_of("ppo")).result()
    client.optim_step(ADAM).result()
    assert works(client)


def test_an_exception_reaches_who_awaits(client):
    async def main() -> None:
        await client.forward_backward_custom(supervised(), lambda *_: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        asyncio.run(main())


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (
            None,
            DataError,
            "the custom loss returned a NoneType: return (loss, metrics), a scalar tensor and a "
            "dict of numbers",
        ),
        (
            torch.zeros(()),
            DataError,
            "the custom loss returned a Tensor: return (loss, metrics), a scalar tensor and a "
            "dict of numbers",
        ),
        (
            (torch.zeros(()), {}, 1),
            DataError,
            "the custom loss returned a tuple: return (loss, metrics), a scalar tensor and a dict "
            "of numbers",
        ),
        ((0.5, {}), DataError, "the custom loss is float: return a tensor with one number"),
        (
            (torch.zeros(2), {}),
            DataError,
            "the custom loss is (2,): return a tensor with one number",
        ),
        (
            (torch.zeros(()), None),
            DataError,
            "the metrics of the custom loss are a NoneType: pass a dict",
        ),
        (
            (torch.zeros(()), {"a": "b"}),
            DataError,
            "metric 'a' of the custom loss is 'b': pass a number",
        ),
        (
            (torch.tensor(float("nan")), {}),
            EngineError,
            "the custom loss is nan, so its gradient was not accumulated",
        ),
        (
            (torch.tensor(float("inf")), {}),
            EngineError,
            "the custom loss is inf, so its gradient was not accumulated",
        ),
    ],
)
def test_a_wrong_answer_says_what_is_expected(client, answer, kind, message):
    future = client.forward_backward_custom(supervised(), lambda *_: answer)
    with pytest.raises(kind, match=exactly(message)):
        future.result()
    assert client._session.trained.window.calls == 0


def test_a_gradient_that_is_not_finite_is_refused(client):
    def loss(_: Sequence[Datum], logprobs: Logprobs) -> Answer:
        return torch.sqrt(logprobs[0].sum() * 0.0), {}

    with pytest.raises(EngineError, match=r"^the gradient of the custom loss is not finite, so"):
        client.forward_backward_custom(supervised(), loss).result()
    assert works(client)


def test_a_loss_that_depends_on_nothing_has_no_gradient(client):
    before = weights(client)
    client.forward_backward_custom(supervised(), lambda *_: (torch.zeros(()), {})).result()
    assert client.optim_step(ADAM).result().metrics["grad_norm"] == 0
    assert same(before, weights(client))


@pytest.mark.parametrize("first", ["custom", "built-in"])
def test_mixing_with_a_built_in_loss_is_an_error(client, first):
    calls = {
        "custom": lambda: client.forward_backward_custom(supervised(), copy_of_mean),
        "built-in": lambda: client.forward_backward(supervised()),
    }
    order = sorted(calls, key=lambda kind: kind != first)
    calls[order[0]]().result()
    message = (
        f"a {order[1]} loss cannot be accumulated onto a {order[0]} loss, since only the built-in "
        "ones are divided by the trained tokens: call optim_step between them"
    )
    with pytest.raises(EngineError, match=exactly(message)):
        calls[order[1]]().result()
    assert client.optim_step(ADAM).result().metrics["grad_norm"] > 0
    calls[order[1]]().result()


def test_data_are_checked_at_the_call(client):
    with pytest.raises(DataError, match=exactly("data is an empty list: pass at least one Datum")):
        client.forward_backward_custom([], copy_of_mean)


# One pass each way.


def counted(monkeypatch) -> dict[str, Callable[[], int]]:
    def nothing(_: int) -> None:
        """Only the calls count."""

    return {
        "forward": on_call(monkeypatch, selection, "run_packed", nothing),
        "backward": on_call(monkeypatch, torch.autograd, "grad", nothing),
        "tensor.backward": on_call(monkeypatch, torch.Tensor, "backward", nothing),
    }


@pytest.mark.parametrize("max_row", [12, 4096])
def test_one_forward_per_row_and_one_backward(client, monkeypatch, max_row):
    monkeypatch.setattr(trainer, "MAX_ROW", max_row)
    data = pairs()
    loss = dpo(reference(client, data))
    rows = on_call(monkeypatch, trainer, "select", lambda _: None)
    calls = counted(monkeypatch)
    client.forward_backward_custom(data, loss).result()
    assert {name: count() for name, count in calls.items()} == {
        "forward": rows(),
        "backward": 1,
        "tensor.backward": 0,
    }
    assert (rows() > 1) == (max_row == 12)


def test_each_layer_runs_once_per_row(client, monkeypatch):
    trained: Trained = client._session.trained
    ran: list[str] = []
    for name, module in trained.model.named_modules():
        if name.endswith(("q_proj", "down_proj")):
            module.register_forward_hook(lambda *_, name=name: ran.append(name))
    client.forward_backward_custom(supervised(), copy_of_mean).result()
    assert len(ran) == len(set(ran)) == 4


def test_the_loss_is_called_once(client, monkeypatch):
    monkeypatch.setattr(trainer, "MAX_ROW", 12)
    calls: list[int] = []

    def loss(_: Sequence[Datum], logprobs: Logprobs) -> Answer:
        calls.append(len(logprobs))
        return -logprobs[0].sum(), {}

    client.forward_backward_custom(supervised(), loss).result()
    assert calls == [6]


def test_the_graph_ends_with_the_call(client):
    kept: Logprobs = []

    def loss(_: Sequence[Datum], logprobs: Logprobs) -> Answer:
        kept.extend(logprobs)
        return -logprobs[0].sum(), {}

    client.forward_backward_custom(supervised(), loss).result()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(kept[0].sum(), list(client._session.trained.parameters.values()))


def test_the_name_of_the_output_is_no_name_of_a_loss():
    assert custom.NAME not in losses.names()
