"""One trained model: its weights, its optimizer, and the gradient accumulated since the last step.

Everything here runs on the worker thread.  Losses are sums; :meth:`Trained.optim_step` divides once
by the trained tokens accumulated since the last step.
"""

import math
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from xorl_lab import losses
from xorl_lab.engine import adapters
from xorl_lab.engine.batches import Batch
from xorl_lab.engine.logprobs import (
    gather_positions,
    head_of,
    run_packed,
    token_entropies,
    token_logprobs,
)
from xorl_lab.engine.optimizer import Optimizer
from xorl_lab.engine.packing import MAX_ROW, PackedRow, pack
from xorl_lab.engine.sharing import clone, tensor_bytes
from xorl_lab.engine.versions import WeightsVersion
from xorl_lab.errors import EngineError
from xorl_lab.types import (
    AdamParams,
    ForwardBackwardOutput,
    LoraRunSpec,
    LossFnOutput,
    OptimStepResponse,
    TensorData,
)

COPY_BUDGET = 16 * 2**30
"""Bytes of superseded full-weight versions that may be alive at a time."""

Grads = dict[str, torch.Tensor]
Tick = Callable[[], object]


@dataclass
class _Window:
    """What has been accumulated since the last optimizer step."""

    grads: Grads = field(default_factory=dict)
    valid_tokens: int = 0
    calls: int = 0


@dataclass
class _RowResult:
    """Per-token values of one packed row: where they belong, and what they are."""

    datum: torch.Tensor
    position: torch.Tensor
    weights: torch.Tensor
    terms: dict[str, torch.Tensor]


class Trained:
    """The weights that a training client trains.

    Args:
        model_id: its name.
        base: the base model that it starts from; never written to.
        spec: shape of the LoRA adapter; None trains a copy of the full weights.
    """

    def __init__(self, model_id: str, base: PreTrainedModel, spec: LoraRunSpec | None) -> None:
        self.model_id = model_id
        self.base = base
        self.spec = spec
        self.generator = torch.Generator().manual_seed(spec.seed or 0 if spec else 0)
        if spec is None:
            self.model = clone(base).requires_grad_(True)
            # named_parameters lists tied weights once.
            self.parameters = dict(self.model.named_parameters())
        else:
            self.model = adapters.inject(base, spec, self.generator)
            self.parameters = adapters.parameters(self.model)
        self.optimizer = Optimizer(self.parameters)
        self.version = 0
        self.steps = 0
        self.window = _Window()
        self._latest: weakref.ref[WeightsVersion] | None = None
        self._copies: weakref.WeakSet[WeightsVersion] = weakref.WeakSet()

    def forward(
        self,
        batch: Batch,
        loss_fn: str,
        params: Mapping[str, Any],
        tick: Tick,
        *,
        adapters_off: bool = False,
    ) -> ForwardBackwardOutput:
        """Evaluate a loss without gradient.

        Args:
            batch: aligned data.
            loss_fn: name of the loss.
            params: result of ``losses.check_params``.
            tick: called before each micro-batch.
            adapters_off: use the base model in place of the trained one.
        """
        model = self.base if adapters_off else self.model
        results: list[_RowResult] = []
        with torch.no_grad():
            for row in _packed(batch, share=True):
                tick()
                results.append(_evaluate(model, batch, row, loss_fn, params)[1])
        return _collect(batch, loss_fn, params, results)

    def forward_backward(
        self,
        batch: Batch,
        loss_fn: str,
        params: Mapping[str, Any],
        tick: Tick,
        commit: Tick,
    ) -> ForwardBackwardOutput:
        """Evaluate a loss and add its gradient to the window.

        The gradient is held apart until the whole call has succeeded.

        Args:
            batch: aligned data.
            loss_fn: name of the loss.
            params: result of ``losses.check_params``.
            tick: called before each micro-batch; what it raises ends the call.
            commit: called last before the window changes; what it raises ends the call.

        Raises:
            EngineError: the loss or its gradient is not finite; the window is as it was.
        """
        grads: Grads = {}
        results: list[_RowResult] = []
        dropout = self.spec is not None and self.spec.dropout > 0
        draws = self.generator if dropout else None
        with adapters.dropout(self.model, self.generator):
            for row in _packed(batch, share=not dropout):
                tick()
                loss, result = _evaluate(self.model, batch, row, loss_fn, params, draws)
                _add(grads, self._gradient(loss))
                results.append(result)
            if not all(bool(torch.isfinite(g).all()) for g in grads.values()):
                raise EngineError(
                    f"the gradient of {loss_fn} is not finite, so it was not accumulated: look for "
                    "extreme ratios and advantages in this batch, or lower the learning rate"
                )
            output = _collect(batch, loss_fn, params, results)
            commit()
        _add(self.window.grads, grads)
        self.window.valid_tokens += batch.valid_tokens
        self.window.calls += 1
        return output

    def optim_step(self, adam: AdamParams) -> OptimStepResponse:
        """Divide the window by its trained tokens, update the weights, and empty it.

        Raises:
            EngineError: no forward_backward came before it, or the gradient is not finite.  The
                window is emptied; weights, moments and step count are as they were.
        """
        window, self.window = self.window, _Window()
        if not window.calls:
            raise EngineError(
                "optim_step has nothing to apply: call forward_backward first "
                "(each optim_step empties what was accumulated)"
            )
        metrics = {"learning_rate": adam.learning_rate, "valid_tokens": float(window.valid_tokens)}
        if window.valid_tokens:
            self._release_latest()
            metrics |= self.optimizer.step(window.grads, window.valid_tokens, adam)
            self.steps += 1
            self.version += 1
        else:
            metrics |= {"grad_norm": 0.0, "grad_scale": 1.0}
        skipped = not window.valid_tokens
        reason = "no token of the data was trained, so there was nothing to learn from"
        return OptimStepResponse(
            {**metrics, "step": float(self.steps)}, {"skipped": reason} if skipped else {}
        )

    def drop_window(self) -> None:
        """Forget what was accumulated since the last step."""
        self.window = _Window()

    def snapshot(self) -> WeightsVersion:
        """The weights as they are now, as an immutable version."""
        latest = self._latest() if self._latest is not None else None
        if latest is not None:
            return latest
        if self.spec is None:
            version = WeightsVersion(self.model_id, self.version, full=self.model)
        else:
            tensors = {name: p.detach().clone() for name, p in self.parameters.items()}
            scale = self.spec.alpha / self.spec.rank
            version = WeightsVersion(self.model_id, self.version, tensors, scale)
        self._latest = weakref.ref(version)
        return version

    def weights(self) -> dict[str, torch.Tensor]:
        """The trained tensors by name, detached, not copied."""
        return {name: p.detach() for name, p in self.parameters.items()}

    def load_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace the trained tensors; the names must be exactly those of :meth:`weights`."""
        self._release_latest()
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(tensors[name])
        self.version += 1
        self.optimizer.reset()
        self.drop_window()

    def _gradient(self, loss: torch.Tensor) -> Grads:
        names = list(self.parameters)
        values = torch.autograd.grad(loss, list(self.parameters.values()), allow_unused=True)
        return {n: g for n, g in zip(names, values, strict=True) if g is not None}

    def _release_latest(self) -> None:
        """Before the weights move: give whoever still reads this version a copy of its own."""
        latest = self._latest() if self._latest is not None else None
        self._latest = None
        if latest is None or latest.full is None:
            return
        size = tensor_bytes(self.model)
        if (len(self._copies) + 1) * size > COPY_BUDGET:
            raise EngineError(
                f"{len(self._copies) + 1} sampling clients hold older versions of the full weights "
                f"({size / 2**30:.1f} GiB each), over the budget of {COPY_BUDGET / 2**30:.0f} GiB: "
                "drop those that are no longer needed"
            )
        latest.full = clone(self.model).requires_grad_(False)
        self._copies.add(latest)


def _packed(batch: Batch, *, share: bool) -> list[PackedRow]:
    """The rows' inputs up to the last trained position; what follows it cannot matter."""
    sequences = [row.tokens[: int(row.trained[-1]) + 1].tolist() for row in batch.rows]
    return pack(sequences, max_row=MAX_ROW, share=share)


def _evaluate(
    model: PreTrainedModel,
    batch: Batch,
    packed: PackedRow,
    loss_fn: str,
    params: Mapping[str, Any],
    draws: torch.Generator | None = None,
) -> tuple[torch.Tensor, _RowResult]:
    """Loss of one packed row: the sum with gradient, and the values of each trained token."""
    rows = [batch.rows[i] for i in packed.members]
    trained = [torch.from_numpy(row.trained) for row in rows]
    temperature = float(params["logprob_temperature"])
    hidden = gather_positions(run_packed(model, packed), packed, trained)
    targets = torch.from_numpy(np.concatenate([row.targets[row.trained] for row in rows]))
    head = head_of(model)
    selected = token_logprobs(
        hidden, head, targets.to(hidden.device), temperature=temperature, draws=draws
    )
    # Losses are evaluated on the CPU's (B, T) view: a few thousand numbers.
    selected = selected.cpu()
    member = torch.cat([torch.full_like(t, i) for i, t in enumerate(trained)])
    position = torch.cat(trained)
    shape = (len(rows), int(position.max()) + 1)
    where = (member, position)
    logprobs = selected.new_zeros(shape).index_put(where, selected)
    names = ["weights", *(n for n in rows[0].extras if all(n in row.extras for row in rows))]
    inputs: dict[str, torch.Tensor] = {}
    for name in names:
        values = [row.weights if name == "weights" else row.extras[name] for row in rows]
        picked = np.concatenate([v[row.trained] for v, row in zip(values, rows, strict=True)])
        inputs[name] = selected.new_zeros(shape).index_put(
            where, torch.from_numpy(picked).to(selected)
        )
    output = losses.evaluate(loss_fn, logprobs, inputs, params)
    value = float(output.loss.detach())
    if not math.isfinite(value):
        raise EngineError(
            f"{loss_fn} is {value}, so its gradient was not accumulated: look for "
            "extreme ratios and advantages in this batch, or lower the learning rate"
        )
    terms = {name: term[where] for name, term in output.terms.items()}
    terms["logprobs"] = selected.detach()
    if params["return_terms"]:
        terms["entropy"] = token_entropies(hidden, head, temperature=temperature).cpu()
    datum = torch.tensor([row.datum for row in rows])[member]
    return output.loss, _RowResult(datum, position, inputs["weights"][where], terms)


def _collect(
    batch: Batch, loss_fn: str, params: Mapping[str, Any], results: list[_RowResult]
) -> ForwardBackwardOutput:
    """Put the rows' values back in the order of the data, and compute the metrics of the call."""
    name = losses.get(loss_fn).name
    terms = {"elementwise_loss": torch.zeros(0)}
    weights = torch.zeros(0)
    per_datum: list[dict[str, np.ndarray[Any, Any]]] = [{} for _ in batch.lengths]
    if results:
        terms = {k: torch.cat([r.terms[k] for r in results]) for k in results[0].terms}
        weights = torch.cat([r.weights for r in results])
        datum = torch.cat([r.datum for r in results]).numpy()
        position = torch.cat([r.position for r in results]).numpy()
        # Back in the order of the data, so that no sum depends on how the rows were packed.
        order = np.lexsort((position, datum))
        index = torch.from_numpy(order)
        terms = {k: v[index] for k, v in terms.items()}
        weights, datum, position = weights[index], datum[order], position[order]
        for i, length in enumerate(batch.lengths):
            mine = slice(*np.searchsorted(datum, [i, i + 1]).tolist())
            for key, values in terms.items():
                column = np.zeros(length, dtype=np.float32)
                column[position[mine]] = values.numpy()[mine]
                per_datum[i][key] = column
    wanted = ("logprobs", "elementwise_loss")
    outputs: list[LossFnOutput] = []
    for length, columns in zip(batch.lengths, per_datum, strict=True):
        empty = np.zeros(length, dtype=np.float32)
        further = {k: TensorData.from_numpy(v) for k, v in columns.items() if k not in wanted}
        elementwise = columns.get("elementwise_loss", empty)
        outputs.append(
            LossFnOutput(
                float(elementwise.sum(dtype=np.float64)),
                TensorData.from_numpy(columns.get("logprobs", empty)),
                TensorData.from_numpy(elementwise),
                further if params["return_terms"] else {},
            )
        )
    metrics = losses.summarize(name, terms, weights, params)
    metrics["rows_without_signal"] = float(batch.rows_without_signal)
    return ForwardBackwardOutput(outputs, metrics, name)


def _add(total: Grads, more: Grads) -> None:
    """Add up in float32 at least: in bfloat16 a sum soon stops growing."""
    for name, grad in more.items():
        fine = grad if grad.dtype == torch.float64 else grad.float()
        total[name] = total[name] + fine if name in total else fine
