"""How much of the gap between trainer and sampler comes from experts chosen differently.

A token's gap is the trainer's log-probability minus that of the step that drew it.  In a mixture of
experts it has two sources: the numbers differ a little (rounding, or weights that have moved on),
and where that tips a router over, the token goes through other experts altogether.  Replaying the
sampler's experts leaves the first alone.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from xorl_lab.errors import DataError
from xorl_lab.types import Datum, ModelInput, SampledSequence, SamplingParams

if TYPE_CHECKING:
    import pandas as pd

    from xorl_lab.client import TrainingClient

Drawn = tuple[Sequence[int], SampledSequence]
"""The ids of a prompt, and a completion of it that knows its experts."""
_GREY = "#7d8590"
"""Can be read on a white page and on a dark one."""
_OWN, _REPLAYED = "#D55E00", "#0072B2"


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """N drawn tokens, judged by a trainer twice."""

    own: npt.NDArray[np.float64]
    """(N,) gaps in nats, the trainer's routers choosing the experts."""
    replayed: npt.NDArray[np.float64]
    """(N,) gaps in nats, with the sampler's experts throughout, prompt included."""
    moved: npt.NDArray[np.bool_]
    """(N, L) whether the trainer's routers chose other experts in a layer, for the token from
    which the drawn one was predicted."""

    @property
    def elsewhere(self) -> npt.NDArray[np.bool_]:
        """(N,) whether they did in any layer."""
        return np.asarray(self.moved.any(-1))

    def frame(self) -> "pd.DataFrame":
        """Number of tokens, mean and largest gap in nats: all, and by whether experts differ."""
        import pandas as pd  # noqa: PLC0415  (slow to import)

        rows = {"all": np.ones(len(self.own), bool), "same experts": ~self.elsewhere}
        rows |= {"other experts": self.elsewhere}
        sizes = {"own": np.abs(self.own), "replayed": np.abs(self.replayed)}
        columns: dict[str, list[float]] = {"tokens": [int(r.sum()) for r in rows.values()]}
        for name, gaps in sizes.items():
            kept = [gaps[row] for row in rows.values()]
            columns[f"mean gap, {name}"] = [float(k.mean()) if len(k) else np.nan for k in kept]
            columns[f"largest gap, {name}"] = [float(k.max()) if len(k) else np.nan for k in kept]
        return pd.DataFrame(columns, index=list(rows))

    def __repr__(self) -> str:
        count, gone = len(self.own), int(self.elsewhere.sum())
        own, replayed = (float(np.abs(g).mean()) for g in (self.own, self.replayed))
        return (
            f"Routes({count} tokens, {gone} through other experts; mean gap {own:.3g} nats, "
            f"replayed {replayed:.3g})"
        )

    def _repr_png_(self) -> bytes:
        """A picture for a white page and for a dark one: all gaps, and where experts differ."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  (half a second)
        from matplotlib.figure import Figure  # noqa: PLC0415

        fig: Any = Figure(figsize=(8.6, 2.9), dpi=100)
        fig.subplots_adjust(left=0.075, right=0.985, top=0.88, bottom=0.17, wspace=0.2)
        left, right = fig.subplots(1, 2, width_ratios=(2, 1))
        for gaps, colour, dash, label in (
            (self.own, _OWN, "solid", "experts of its own routers"),
            (self.replayed, _REPLAYED, (0, (6, 3)), "the sampler's experts, replayed"),
        ):
            ranked = np.sort(np.abs(gaps))[::-1]
            left.plot(ranked, color=colour, linestyle=dash, linewidth=1.6, label=label)
        left.set_yscale("log")
        left.set_ylim(bottom=max(1e-5, float(np.median(np.abs(self.replayed))) / 10))
        left.set_xlabel("drawn tokens, largest gap first")
        titled = {"loc": "left", "color": _GREY, "fontsize": 10}
        left.set_title("gap between trainer and sampler (nats)", **titled)
        left.legend(frameon=False, labelcolor=_GREY, fontsize=9)
        layers = np.arange(self.moved.shape[1])
        right.bar(layers, 100 * self.moved.mean(0), color=_OWN, width=0.6)
        right.set_xticks(layers)
        right.set_xlabel("layer with experts")
        right.set_title("tokens through other experts (%)", **titled)
        for axes in (left, right):
            axes.patch.set_alpha(0)
            axes.tick_params(colors=_GREY, labelsize=8)
            axes.xaxis.label.set(color=_GREY, fontsize=9)
            for name, spine in axes.spines.items():
                spine.set_visible(name in ("left", "bottom"))
                spine.set_color(_GREY)
        fig.patch.set_alpha(0)
        target = io.BytesIO()
        FigureCanvasAgg(fig).print_png(target)
        return target.getvalue()


def routes(client: "TrainingClient", drawn: Sequence[Drawn], temperature: float = 1.0) -> Routes:
    """Judge completions by a trainer, with and without the sampler's experts.

    Args:
        client: the trainer; its weights stay as they are.
        drawn: prompts and completions, drawn with ``return_routed_experts=True``.
        temperature: at which they were drawn.

    Raises:
        DataError: there are none, or one lacks its experts.
    """
    kept = [(list(prompt), sequence) for prompt, sequence in drawn if sequence.tokens]
    if not kept or any(s.routed_experts is None or s.logprobs is None for _, s in kept):
        raise DataError(
            "there are no completions with experts and logprobs: draw them with "
            "SamplingParams(return_routed_experts=True)"
        )
    judged = {
        replay: client.forward(
            [datum(prompt, sequence, replay=replay) for prompt, sequence in kept],
            loss_fn_params={"logprob_temperature": temperature},
        )
        for replay in (False, True)
    }
    own, replayed = (
        np.concatenate(
            [
                np.asarray(out.logprobs.data)[-len(s.tokens) :] - np.asarray(s.logprobs)
                for out, (_, s) in zip(judged[r].result().loss_fn_outputs, kept, strict=True)
            ]
        )
        for r in (False, True)
    )
    # A sampler of the trainer's weights that reads a sequence tells which experts they choose.
    reader = client.save_weights_and_get_sampling_client()
    params = SamplingParams(max_tokens=1, seed=0, return_routed_experts=True)
    wholes = [ModelInput.from_ints([*prompt, *s.tokens[:-1]]) for prompt, s in kept]
    read = reader.sample_batch(wholes, params).result()
    for _, error in read.failed:
        raise error
    moved = [
        _differ(response.sequences[0].routed_experts, s.routed_experts)[-len(s.tokens) :]
        for (_, response), (_, s) in zip(read.completed, kept, strict=True)
    ]
    return Routes(own, replayed, np.concatenate(moved))


def datum(prompt: Sequence[int], sequence: SampledSequence, *, replay: bool) -> Datum:
    """A completion as data: P + C - 1 positions, of which the last C are judged.

    Args:
        prompt: P ids.
        sequence: C tokens drawn behind it.
        replay: with the experts that the sampler chose.
    """
    tokens = [*prompt, *sequence.tokens]
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(sequence.tokens)
    inputs = {"target_tokens": tokens[1:], "weights": weights}
    given = sequence.routed_experts if replay else None
    return Datum(ModelInput.from_ints(tokens[:-1]), inputs, given)


def _differ(first: Any, second: Any) -> npt.NDArray[np.bool_]:  # noqa: ANN401  (arrays or None)
    """(T, L) whether two choices name different experts, in whatever order."""
    return (np.sort(first, -1) != np.sort(second, -1)).any(-1)
