"""The trained positions of packed rows: their logprobs going in, their values coming out."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from xorl_lab import losses
from xorl_lab.engine.batches import Batch, TokenRow
from xorl_lab.engine.logprobs import gather_positions, head_of, run_packed, token_logprobs
from xorl_lab.engine.packing import PackedRow
from xorl_lab.types import ForwardBackwardOutput, LossFnOutput, TensorData


@dataclass(frozen=True, slots=True)
class RowResult:
    """Per-token values of one packed row, (M,) each: where they belong, and what they are."""

    datum: torch.Tensor
    """Index of the datum."""
    position: torch.Tensor
    """Target position in it."""
    weights: torch.Tensor
    """Its weight, nonzero."""
    terms: dict[str, torch.Tensor]
    """The values by name."""


@dataclass(frozen=True, slots=True)
class Selected:
    """The M trained positions of one packed row of B sequences."""

    rows: list[TokenRow]
    """The B sequences."""
    hidden: torch.Tensor
    """(M, H) the states that predict the targets."""
    logprobs: torch.Tensor
    """(M,) nats, on the CPU, with gradient."""
    where: tuple[torch.Tensor, torch.Tensor]
    """(M,) each: row and position on the (B, T) grid."""

    def grid(self, values: torch.Tensor) -> torch.Tensor:
        """(M,) values on the (B, T) grid, zero elsewhere; differentiable."""
        shape = (len(self.rows), int(self.where[1].max()) + 1)
        return self.logprobs.new_zeros(shape).index_put(self.where, values)

    def inputs(self) -> dict[str, torch.Tensor]:
        """``weights`` and the extras that all rows have, on the (B, T) grid."""
        common = set.intersection(*(set(row.extras) for row in self.rows))
        names = [name for name in self.rows[0].extras if name in common]
        columns = {"weights": [row.weights for row in self.rows]}
        columns |= {name: [row.extras[name] for row in self.rows] for name in names}
        picked = {
            name: np.concatenate([v[row.trained] for v, row in zip(values, self.rows, strict=True)])
            for name, values in columns.items()
        }
        return {
            name: self.grid(torch.from_numpy(values).to(self.logprobs))
            for name, values in picked.items()
        }

    def result(self, terms: Mapping[str, torch.Tensor]) -> RowResult:
        """These (M,) values, and the logprobs, with their places in the data."""
        datum = torch.tensor([row.datum for row in self.rows])[self.where[0]]
        weights = np.concatenate([row.weights[row.trained] for row in self.rows])
        return RowResult(
            datum,
            self.where[1],
            torch.from_numpy(weights).to(self.logprobs.dtype),
            {**terms, "logprobs": self.logprobs.detach()},
        )


def select(
    model: PreTrainedModel,
    batch: Batch,
    packed: PackedRow,
    temperature: float,
    draws: torch.Generator | None = None,
) -> Selected:
    """Run one packed row and compute the logprobs of its trained targets.

    Args:
        model: the causal language model.
        batch: the data that was packed.
        packed: one of its rows.
        temperature: divides the logits.
        draws: see :func:`xorl_lab.engine.logprobs.token_logprobs`.
    """
    rows = [batch.rows[i] for i in packed.members]
    trained = [torch.from_numpy(row.trained) for row in rows]
    hidden = gather_positions(run_packed(model, packed), packed, trained)
    targets = torch.from_numpy(np.concatenate([row.targets[row.trained] for row in rows]))
    logprobs = token_logprobs(
        hidden, head_of(model), targets.to(hidden.device), temperature=temperature, draws=draws
    )
    member = torch.cat([torch.full_like(t, i) for i, t in enumerate(trained)])
    # Losses are evaluated on the CPU: a few thousand numbers.
    return Selected(rows, hidden, logprobs.cpu(), (member, torch.cat(trained)))


def collect(
    batch: Batch, loss_fn: str, params: Mapping[str, Any], results: list[RowResult]
) -> ForwardBackwardOutput:
    """Put the rows' values back in the order of the data, and compute the metrics of the call.

    Args:
        batch: the data.
        loss_fn: name of the loss.
        params: result of ``losses.check_params``.
        results: of all packed rows, in any order.
    """
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
    wanted, asked = ("logprobs", "elementwise_loss"), params["return_terms"]
    outputs: list[LossFnOutput] = []
    for length, columns in zip(batch.lengths, per_datum, strict=True):
        empty = np.zeros(length, dtype=np.float32)
        names = columns.keys() - wanted if asked is True else columns.keys() & set(asked or ())
        further = {k: TensorData.from_numpy(columns[k]) for k in columns if k in names}
        elementwise = columns.get("elementwise_loss", empty)
        outputs.append(
            LossFnOutput(
                float(elementwise.sum(dtype=np.float64)),
                TensorData.from_numpy(columns.get("logprobs", empty)),
                TensorData.from_numpy(elementwise),
                further,
            )
        )
    metrics = losses.summarize(name, terms, weights, params)
    metrics["rows_without_signal"] = float(batch.rows_without_signal)
    return ForwardBackwardOutput(outputs, metrics, name)
