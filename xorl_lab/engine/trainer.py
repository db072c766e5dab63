"""One trained model: its weights, its optimizer, and the gradient accumulated since the last step.

Everything here runs on the worker thread.  Losses are sums; :meth:`Trained.optim_step` divides once
by the trained tokens accumulated since the last step.
"""

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from xorl_lab import losses
from xorl_lab.engine import adapters
from xorl_lab.engine.batches import Batch
from xorl_lab.engine.custom import check_custom, custom_output, per_datum
from xorl_lab.engine.logprobs import head_of, token_entropies
from xorl_lab.engine.optimizer import Optimizer
from xorl_lab.engine.packing import MAX_ROW, PackedRow, pack
from xorl_lab.engine.selection import RowResult, Selected, collect, select
from xorl_lab.engine.sharing import clone, tensor_bytes
from xorl_lab.engine.versions import WeightsVersion
from xorl_lab.errors import EngineError
from xorl_lab.types import (
    AdamParams,
    ForwardBackwardOutput,
    LoraRunSpec,
    OptimStepResponse,
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
    custom: bool = False
    """True if the gradients are those of custom losses, which are not divided."""


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
        results: list[RowResult] = []
        with torch.no_grad():
            for row in _packed(batch, share=True):
                tick()
                results.append(_evaluate(model, batch, row, loss_fn, params)[1])
        return collect(batch, loss_fn, params, results)

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
        self._check_window(custom=False)
        grads: Grads = {}
        results: list[RowResult] = []
        draws = self._draws
        silent = _silent(batch, loss_fn, params) if draws is None else []
        loud = sorted(set(range(len(batch.rows))) - set(silent))
        with adapters.dropout(self.model, self.generator):
            for row in _packed(batch, share=draws is None, chosen=loud):
                tick()
                loss, result = _evaluate(self.model, batch, row, loss_fn, params, draws)
                _add(grads, self._gradient(loss))
                results.append(result)
            for row in _packed(batch, share=True, chosen=silent):
                tick()
                with torch.no_grad():
                    results.append(_evaluate(self.model, batch, row, loss_fn, params)[1])
            _check_finite(grads, loss_fn)
            output = collect(batch, loss_fn, params, results)
            commit()
        self._accumulate(grads, batch, custom=False)
        return output

    def forward_backward_custom(
        self,
        batch: Batch,
        loss: Callable[[list[torch.Tensor]], object],
        tick: Tick,
        commit: Tick,
    ) -> ForwardBackwardOutput:
        """Evaluate a loss of the caller's own and add its gradient to the window, undivided.

        All rows are held in one graph, so that the loss may compare them, and one backward pass
        goes through the model.

        Args:
            batch: aligned data.
            loss: gets one (T,) tensor of logprobs per datum, with gradient, 0.0 where nothing is
                trained; returns (scalar tensor, dict of metrics).
            tick: called before each micro-batch; what it raises ends the call.
            commit: called last before the window changes; what it raises ends the call.

        Raises:
            EngineError: the window holds gradients of a built-in loss, or the loss or its gradient
                is not finite; the window is as it was.
            DataError: the loss returned something else.
        """
        self._check_window(custom=True)
        draws = self._draws
        with adapters.dropout(self.model, self.generator):
            selected: list[Selected] = []
            for row in _packed(batch, share=draws is None):
                tick()
                selected.append(select(self.model, batch, row, 1.0, draws))
            logprobs = per_datum(batch, selected)
            with torch.enable_grad():
                value, metrics = check_custom(loss(logprobs))
            grads = self._gradient(value) if value.requires_grad else {}
            _check_finite(grads, "the custom loss")
            commit()
        self._accumulate(grads, batch, custom=True)
        return custom_output(float(value.detach()), logprobs, metrics, batch)

    def optim_step(self, adam: AdamParams) -> OptimStepResponse:
        """Divide the window by its trained tokens, update the weights, and empty it.

        Raises:
            EngineError: no forward_backward came before it, or the gradient is not finite: then the
                window is emptied.  Or too many older versions of the full weights are held: then
                it is kept.  Weights, moments and step count are as they were.
        """
        if not self.window.calls:
            raise EngineError(
                "optim_step has nothing to apply: call forward_backward first "
                "(each optim_step empties what was accumulated)"
            )
        if self.window.valid_tokens:
            self._release_latest()
        window, self.window = self.window, _Window()
        metrics = {"learning_rate": adam.learning_rate, "valid_tokens": float(window.valid_tokens)}
        if window.valid_tokens:
            divisor = 1 if window.custom else window.valid_tokens
            metrics |= self.optimizer.step(window.grads, divisor, adam)
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

    @property
    def _draws(self) -> torch.Generator | None:
        """Where dropout is drawn from, if there is any."""
        return self.generator if self.spec is not None and self.spec.dropout > 0 else None

    def _check_window(self, *, custom: bool) -> None:
        if self.window.calls and self.window.custom != custom:
            kinds = ("a custom loss", "a built-in loss")
            new, old = kinds if custom else reversed(kinds)
            raise EngineError(
                f"{new} cannot be accumulated onto {old}, since only the built-in ones are divided "
                "by the trained tokens: call optim_step between them"
            )

    def _accumulate(self, grads: Grads, batch: Batch, *, custom: bool) -> None:
        _add(self.window.grads, grads)
        self.window.valid_tokens += batch.valid_tokens
        self.window.calls += 1
        self.window.custom = custom

    def _gradient(self, loss: torch.Tensor) -> Grads:
        names = list(self.parameters)
        values = torch.autograd.grad(loss, list(self.parameters.values()), allow_unused=True)
        return {n: g for n, g in zip(names, values, strict=True) if g is not None}

    def _release_latest(self) -> None:
        """Before the weights move: give whoever still reads this version a copy of its own."""
        latest = self._latest() if self._latest is not None else None
        if latest is None or latest.full is None:
            self._latest = None
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
        self._latest = None


def _packed(batch: Batch, *, share: bool, chosen: Sequence[int] | None = None) -> list[PackedRow]:
    """The rows' inputs (all, or those chosen) up to the last trained position: no more matters."""
    chosen = range(len(batch.rows)) if chosen is None else chosen
    rows = [batch.rows[i] for i in chosen]
    ends = [int(row.trained[-1]) + 1 for row in rows]
    sequences = [row.tokens[:end].tolist() for row, end in zip(rows, ends, strict=True)]
    experts = [
        None if row.experts is None else row.experts[:end]
        for row, end in zip(rows, ends, strict=True)
    ]
    packed = pack(sequences, max_row=MAX_ROW, share=share, experts=experts)
    return [replace(row, members=[chosen[m] for m in row.members]) for row in packed]


def _silent(batch: Batch, loss_fn: str, params: Mapping[str, Any]) -> list[int]:
    """Rows of the batch whose gradient is zero because all their advantages are."""
    if not losses.silent_without_advantage(loss_fn, params):
        return []
    return [
        i for i, row in enumerate(batch.rows) if not row.extras["advantages"][row.trained].any()
    ]


def _evaluate(
    model: PreTrainedModel,
    batch: Batch,
    packed: PackedRow,
    loss_fn: str,
    params: Mapping[str, Any],
    draws: torch.Generator | None = None,
) -> tuple[torch.Tensor, RowResult]:
    """Loss of one packed row: the sum with gradient, and the values of each trained token."""
    temperature = float(params["logprob_temperature"])
    selected = select(model, batch, packed, temperature, draws)
    output = losses.evaluate(loss_fn, selected.grid(selected.logprobs), selected.inputs(), params)
    value = float(output.loss.detach())
    if not math.isfinite(value):
        raise EngineError(
            f"{loss_fn} is {value}, so its gradient was not accumulated: look for "
            "extreme ratios and advantages in this batch, or lower the learning rate"
        )
    terms = {name: term[selected.where] for name, term in output.terms.items()}
    wanted = params["return_terms"]
    if wanted is True or (wanted and "entropy" in wanted):
        terms["entropy"] = token_entropies(
            selected.hidden, head_of(model), temperature=temperature
        ).cpu()
    return output.loss, selected.result(terms)


def _check_finite(grads: Grads, loss: str) -> None:
    if not all(bool(torch.isfinite(g).all()) for g in grads.values()):
        raise EngineError(
            f"the gradient of {loss} is not finite, so it was not accumulated: look for "
            "extreme ratios and advantages in this batch, or lower the learning rate"
        )


def _add(total: Grads, more: Grads) -> None:
    """Add up in float32 at least: in bfloat16 a sum soon stops growing."""
    for name, grad in more.items():
        fine = grad if grad.dtype == torch.float64 else grad.float()
        total[name] = total[name] + fine if name in total else fine
