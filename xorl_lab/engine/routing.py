"""The experts of a mixture-of-experts model: what its routers chose, and making them choose it.

A router scores E experts for each token and sends it through the K best.  Where sampler and trainer
compute a little differently, a near-tie is decided differently: that token goes through other
experts, and its logprob jumps.  *Routing replay* gives the trainer the sampler's choice.  Only the
choice is given.  How much each chosen expert counts is still the router's own, with gradient:

    p = softmax(router logits),   g_k = p[e_k],   divided by sum_k p[e_k] where the family does so

All layers with experts have a ``…TopKRouter`` module that returns (logits, g, e); a forward hook on
each, there only while something is recorded or replayed, reads or replaces g and e.

Source: Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference
Routers" (rollout routing replay, R3).
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from xorl_lab.errors import ConfigError, DataError, ShapeError

Choice = npt.NDArray[np.int16]
"""(N, L, K) ids of experts: of N tokens, in L layers, K different ones each."""
FREE = -1
"""In place of ids where the router shall choose by itself."""
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Where configurations of mixtures say how many experts they have."""
PROBES = 8
"""Made-up tokens on which a router is compared with what this module computes."""


@dataclass(frozen=True, slots=True)
class Experts:
    """What a mixture-of-experts model chooses from."""

    where: tuple[int, ...]
    """The L layers that have experts, ascending; the others are dense."""
    depth: int
    """All layers of the model."""
    count: int
    """E, experts of a layer."""
    chosen: int
    """K, experts that each token goes through."""

    @property
    def layers(self) -> int:
        """L."""
        return len(self.where)

    def check(self, what: str, given: object, tokens: int) -> Choice:
        """Make sure that experts can be replayed.

        Args:
            what: how messages call them.
            given: (T, L, K) integers: array, tensor or nested lists.
            tokens: T.

        Raises:
            DataError: they are no integers, name an expert that there is not, or one twice.
            ShapeError: they are not (T, L, K).
        """
        array = _array(what, given)
        wanted = (tokens, self.layers, self.chosen)
        if array.shape != wanted:
            raise ShapeError(
                f"{what} has shape {array.shape}, but {tokens} tokens, {self.layers} layers with "
                f"experts and {self.chosen} experts per token make {wanted}: pass what the sampler "
                "returned for this very sequence, prompt included"
            )
        if array.dtype.kind not in "iu" and array.size:
            raise DataError(f"{what} is of dtype {array.dtype}: pass integers, the ids of experts")
        outside = np.argwhere((array < 0) | (array >= self.count))
        if len(outside):
            raise DataError(
                f"{what} has expert {int(array[tuple(outside[0])])} at {_place(outside[0])}, but "
                f"this model's experts are 0 to {self.count - 1}: pass what a sampler of this "
                "model returned"
            )
        ranked = np.sort(array, -1)
        twice = np.argwhere(ranked[..., 1:] == ranked[..., :-1])
        if len(twice):
            token, layer, place = twice[0]
            raise DataError(
                f"{what} has expert {int(ranked[token, layer, place])} twice at "
                f"{_place(twice[0])}: a token goes through {self.chosen} different experts"
            )
        return array.astype(np.int16)


def experts_of(model: PreTrainedModel) -> Experts:
    """What a model chooses from.

    Raises:
        ConfigError: it has no experts, or its routers weight them in another way than this module
            computes.
    """
    config = cast("Any", model.config).get_text_config()
    kind = type(model).__name__
    found = routers(model)
    if not found:
        count = next((n for name in COUNTS if (n := getattr(config, name, None))), None)
        if not count:
            raise ConfigError(f"this model has no experts ({kind} is dense)")
        raise ConfigError(
            f"the experts of a {kind} can be neither recorded nor replayed: it has none of the "
            "routers of Qwen3-MoE, OLMoE and Mixtral"
        )
    shapes = {(int(router.weight.shape[0]), int(router.top_k)) for router in found.values()}
    odd = next((r for r in found.values() if not _computed_here(r)), None)
    if odd is not None or len(shapes) != 1:
        raise ConfigError(
            f"the experts of a {kind} can be neither recorded nor replayed: its routers do not "
            "weight them by a softmax over all, as those of Qwen3-MoE, OLMoE and Mixtral do"
        )
    ((count, chosen),) = shapes
    return Experts(tuple(found), int(config.num_hidden_layers), count, chosen)


def routers(model: torch.nn.Module) -> dict[int, Any]:
    """The routers of a model by the number of their layer, ascending."""
    return {
        next(int(part) for part in name.split(".") if part.isdigit()): module
        for name, module in model.named_modules()
        if type(module).__name__.lower().endswith("topkrouter")
    }


class Recorded:
    """What the routers chose, in the order in which their layers ran."""

    def __init__(self) -> None:
        self.parts: list[torch.Tensor] = []

    def choice(self) -> Choice:
        """(N, L, K) of the N tokens that the model read."""
        return torch.stack(self.parts, 1).to(torch.int16).cpu().numpy()


@contextmanager
def recorded(found: Sequence[Any]) -> Generator[Recorded]:
    """Note what routers choose while a model runs once inside the block.

    Args:
        found: the routers of all layers, in order.
    """
    result = Recorded()

    def note(_: object, __: object, output: tuple[torch.Tensor, ...]) -> None:
        result.parts.append(output[2].detach())

    handles = [router.register_forward_hook(note) for router in found]
    try:
        yield result
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def replayed(model: PreTrainedModel, choice: Choice) -> Generator[None]:
    """Make the routers of a model choose these experts inside the block.

    Args:
        model: a model for which :func:`experts_of` has an answer.
        choice: (N, L, K) for the N tokens that it will read; :data:`FREE` throughout a token leaves
            the choice to the router.
    """
    given = torch.from_numpy(choice.astype(np.int64)).to(model.device)

    def hook(layer: int) -> Any:  # noqa: ANN401  (a hook of torch's)
        wanted = given[:, layer]

        def choose(
            router: Any,  # noqa: ANN401
            _: object,
            output: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            logits, weights, own = output
            chosen = torch.where(wanted == FREE, own, wanted)
            return logits, gate_weights(router, logits, chosen).to(weights.dtype), chosen

        return choose

    found = routers(model).values()
    handles = [router.register_forward_hook(hook(i)) for i, router in enumerate(found)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def gate_weights(
    router: Any,  # noqa: ANN401  (one class per family)
    logits: torch.Tensor,
    chosen: torch.Tensor,
) -> torch.Tensor:
    """How much each chosen expert counts.

    Args:
        router: says whether the weights of a token add up to 1 (``norm_topk_prob``; if it does not
            say, they do).
        logits: (N, E).
        chosen: (N, K) int64.

    Returns:
        (N, K) float32, with gradient to the logits.
    """
    chances = torch.softmax(logits, -1, dtype=torch.float32).gather(-1, chosen)
    if not getattr(router, "norm_topk_prob", True):
        return chances
    return chances / chances.sum(-1, keepdim=True)


@torch.no_grad()
def _computed_here(router: Any) -> bool:  # noqa: ANN401
    """True if a router's own weights are what :func:`gate_weights` makes of its own choice."""
    weight = router.weight
    if weight.device.type == "meta":
        return True  # a skeleton: there is nothing to compare
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(PROBES, weight.shape[1], generator=generator, dtype=torch.float32)
    try:
        # Its hooks stay out of it: another thread may be replaying.
        logits, weights, chosen = type(router).forward(router, tokens.to(weight))
        again = gate_weights(router, logits, chosen)
        return bool(torch.allclose(weights.float(), again, rtol=1e-2, atol=1e-3))
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return False


def _array(what: str, given: object) -> npt.NDArray[Any]:
    if isinstance(given, torch.Tensor):
        return given.detach().cpu().numpy()
    try:
        return np.asarray(given)
    except ValueError:
        raise ShapeError(
            f"{what} is ragged: pass one list of experts per layer and one of layers per token"
        ) from None


def _place(where: npt.NDArray[np.int64]) -> str:
    return f"token {int(where[0])}, layer {int(where[1])}"
