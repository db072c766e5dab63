"""Data, and another way to compute what the engine computes."""

import re
from collections.abc import Callable, Sequence

import numpy as np
import torch

import xorl_lab as xl
from xorl_lab import losses
from xorl_lab.engine.batches import Batch, align
from xorl_lab.engine.trainer import Trained
from xorl_lab.types import Datum, ModelInput

VOCABULARY = 259
CONTEXT = 512
ADAM = xl.AdamParams(learning_rate=1e-2)

Tensors = dict[str, torch.Tensor]


def exactly(message: str) -> str:
    """A pattern for ``pytest.raises`` that this message alone matches."""
    return f"^{re.escape(message)}$"


def sequences(count: int = 6, seed: int = 0, longest: int = 24) -> list[list[int]]:
    """Token lists of unequal length; the second half begins as the first of them does."""
    draw = np.random.default_rng(seed)
    made = [draw.integers(0, 256, draw.integers(4, longest)).tolist() for _ in range(count)]
    shared = made[0][:3]
    return [s if i < count // 2 else shared + s[3:] for i, s in enumerate(made)]


def labelled(tokens: Sequence[int], **inputs: object) -> Datum:
    """A datum in the form of ``labels``."""
    return Datum(ModelInput.from_ints(tokens), {"labels": list(tokens), **inputs})


def shifted(tokens: Sequence[int], **inputs: object) -> Datum:
    """A datum in the form of ``target_tokens``, of the same targets as ``labelled``."""
    return Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": list(tokens[1:]), **inputs})


def supervised(count: int = 6, seed: int = 0, longest: int = 24) -> list[Datum]:
    """Datums for ``cross_entropy``, with weights of all kinds."""
    data: list[Datum] = []
    for i, tokens in enumerate(sequences(count, seed, longest)):
        draw = np.random.default_rng(100 * seed + i)
        weights = draw.choice([0.0, 1.0, 0.5, 2.0], len(tokens))
        weights[2] = 1.0
        data.append(labelled(tokens, weights=weights))
    return data


def rollouts(count: int = 6, seed: int = 0, longest: int = 24) -> list[Datum]:
    """Datums for ``policy_loss``, with weights."""
    data: list[Datum] = []
    for i, tokens in enumerate(sequences(count, seed, longest)):
        draw = np.random.default_rng(100 * seed + i)
        length = len(tokens)
        weights = np.ones(length)
        weights[:3] = 0.0
        data.append(
            labelled(
                tokens,
                logprobs=-draw.uniform(3, 8, length),
                advantages=np.full(length, draw.normal()),
                weights=weights,
            )
        )
    return data


def batch(data: Sequence[Datum], loss_fn: str = "cross_entropy") -> Batch:
    """Aligned data for a small model."""
    required = losses.required_inputs(loss_fn, None)
    return align(data, required=required, vocab_size=VOCABULARY, context_length=CONTEXT)


def nothing(*_: object) -> None:
    """In place of a tick or a commit."""


def accumulate(trained: Trained, data: Sequence[Datum], loss_fn: str = "cross_entropy", **params):
    """One forward_backward, without a client."""
    checked = losses.check_params(loss_fn, params)
    return trained.forward_backward(batch(data, loss_fn), loss_fn, checked, nothing, nothing)


def gradient(
    trained: Trained, data: Sequence[Datum], loss_fn: str = "cross_entropy", **params
) -> Tensors:
    """The gradient of the sum of a loss, and nothing left accumulated."""
    trained.drop_window()
    accumulate(trained, data, loss_fn, **params)
    grads = trained.window.grads
    trained.drop_window()
    return grads


def plain_logprobs(
    model: torch.nn.Module, data: Sequence[Datum], temperature: float = 1.0
) -> torch.Tensor:
    """(B, T) logprobs of the targets of labelled data: padded rows and a whole log-softmax."""
    longest = max(d.model_input.length for d in data)
    rows = [list(d.model_input.tokens) for d in data]
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1] / temperature
    return torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def padded(data: Sequence[Datum], name: str, like: torch.Tensor) -> torch.Tensor:
    """(B, T) values of an input of length N of labelled data; 0 behind the end of a row."""
    rows = torch.zeros(like.shape, dtype=like.dtype)
    for i, datum in enumerate(data):
        values = torch.as_tensor(datum.loss_fn_inputs[name].data, dtype=like.dtype)
        rows[i, : len(values) - 1] = values[1:]
    return rows


def plain_loss(model: torch.nn.Module, data: Sequence[Datum], loss_fn: str) -> torch.Tensor:
    """The sum of a loss, written down again."""
    logprobs = plain_logprobs(model, data)
    weights = padded(data, "weights", logprobs)
    if loss_fn == "cross_entropy":
        return -(weights * logprobs).sum()
    ratio = (logprobs - padded(data, "logprobs", logprobs)).exp()
    advantages = padded(data, "advantages", logprobs)
    clipped = ratio.clamp(0.8, 1.2)
    return (weights * torch.maximum(-ratio * advantages, -clipped * advantages)).sum()


def weights(client: xl.TrainingClient) -> Tensors:
    """Copies of the weights that a client trains."""
    return {k: v.clone() for k, v in client._session.trained.weights().items()}


def moments(client: xl.TrainingClient) -> Tensors:
    """Copies of the state of a client's optimizer."""
    return {k: v.clone() for k, v in client._session.trained.optimizer.state().items()}


def same(left: Tensors, right: Tensors) -> bool:
    """Whether two sets of tensors are equal bit for bit."""
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def distance(left: Tensors, right: Tensors) -> float:
    """Relative L2 distance of two sets of tensors."""
    names = sorted(right)
    assert sorted(left) == names
    a = torch.cat([left[k].double().flatten() for k in names])
    b = torch.cat([right[k].double().flatten() for k in names])
    return float((a - b).norm() / b.norm())


def step(client: xl.TrainingClient, data: Sequence[Datum] | None = None) -> dict[str, float]:
    """One forward_backward and one optim_step, waited for."""
    client.forward_backward(data or supervised(3)).result()
    return client.optim_step(ADAM).result().metrics


def works(client: xl.TrainingClient) -> bool:
    """Whether a client still trains: a step changes weights and version."""
    before, version = weights(client), client.version
    metrics = step(client)
    return (
        client.version == version + 1
        and metrics["grad_norm"] > 0
        and not same(before, weights(client))
    )


def on_call(
    monkeypatch, owner: object, name: str, act: Callable[[int], object]
) -> Callable[[], int]:
    """Call ``act(number of the call, from 0)`` before each call of a function."""
    original = getattr(owner, name)
    calls = 0

    def wrapped(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        act(calls - 1)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, wrapped)
    return lambda: calls
