"""Losses on preferences: of two answers to one prompt one is preferred, and nothing else is known.

They compare whole sequences, so they are no losses of the registry, which see one token at a time:
they are called from a function that is given to ``TrainingClient.forward_backward_custom``.

Letters: P pairs; w the preferred answer of a pair ("winner"), l the other one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from xorl_lab.errors import ConfigError, ShapeError


@dataclass(frozen=True, slots=True)
class Preferences:
    """How far the policy has moved from the reference on both answers of each pair."""

    preferred: torch.Tensor
    """(P,) nats: log pi(w) - log ref(w), of whole sequences."""
    rejected: torch.Tensor
    """(P,) nats: log pi(l) - log ref(l)."""

    @property
    def margin(self) -> torch.Tensor:
        """(P,) nats: preferred - rejected.  0 = as the reference, > 0 = the right way."""
        return self.preferred - self.rejected

    def metrics(self) -> dict[str, float]:
        """Means over the pairs, and ``accuracy``, the share of pairs with a margin > 0."""
        return {
            "margin": float(self.margin.detach().mean()),
            "accuracy": float((self.margin.detach() > 0).double().mean()),
            "preferred": float(self.preferred.detach().mean()),
            "rejected": float(self.rejected.detach().mean()),
        }


def preferences(logprobs: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]) -> Preferences:
    """Sum per-token logprobs to sequences and compare them with those of the reference.

    The order is preferred, rejected, preferred, rejected, ...

    Args:
        logprobs: 2P tensors (T,), nats, of the policy, 0.0 where nothing is trained: as a custom
            loss is given them.  The only input with gradient.
        reference: 2P tensors of the same shapes, nats, of the policy before any training.

    Raises:
        ShapeError: the number of sequences is odd, or logprobs and reference disagree.

    >>> one, half = torch.tensor([-1.0]), torch.tensor([-0.5])
    >>> preferences([half, one], [one, half]).margin
    tensor([1.])
    """
    if len(logprobs) % 2 or not len(logprobs):
        raise ShapeError(
            f"there are {len(logprobs)} sequences: pass pairs, each preferred answer followed by "
            "the rejected one"
        )
    if len(reference) != len(logprobs):
        raise ShapeError(
            f"there are {len(logprobs)} sequences but {len(reference)} of the reference: pass one "
            "for each"
        )
    for index, (own, ref) in enumerate(zip(logprobs, reference, strict=True)):
        if own.shape != ref.shape:
            raise ShapeError(
                f"sequence {index} has logprobs of shape {tuple(own.shape)}, but the reference "
                f"has {tuple(ref.shape)}: evaluate both on the same data"
            )
    pairs = zip(logprobs, reference, strict=True)
    moved = torch.stack([own.sum() - ref.detach().to(own).sum() for own, ref in pairs])
    return Preferences(moved[0::2], moved[1::2])


def dpo(margin: torch.Tensor, beta: float) -> torch.Tensor:
    """Direct preference optimisation.

    loss = -log sigma(beta * margin)

    Args:
        margin: (P,) nats, of :class:`Preferences`.
        beta: > 0; the smaller, the further the policy may move from the reference.

    Returns:
        (P,) the loss of each pair; log 2 where policy and reference agree.

    Raises:
        ConfigError: beta is not > 0.

    Source: Rafailov et al. 2023, eq. 7.
    """
    return -logsigmoid(_checked(beta) * margin)


def dpo_weight(margin: torch.Tensor, beta: float) -> torch.Tensor:
    """By how much :func:`dpo` pulls at a pair: minus its derivative by beta * margin.

    weight = sigma(-beta * margin), so that the gradient of the loss is
    -beta * weight * (grad log pi(w) - grad log pi(l))

    Args:
        margin: (P,) nats.
        beta: > 0.

    Returns:
        (P,) in (0, 1), a constant: 0.5 at first, towards 0 for a pair that is learnt.

    Raises:
        ConfigError: beta is not > 0.

    Source: Rafailov et al. 2023, sec. 4.
    """
    return torch.sigmoid(-_checked(beta) * margin.detach())


def ipo(margin: torch.Tensor, beta: float) -> torch.Tensor:
    """Identity preference optimisation: a margin that is wanted, instead of ever more of it.

    loss = (margin - 1 / (2 * beta)) ** 2

    Args:
        margin: (P,) nats, of :class:`Preferences`.
        beta: > 0; the paper's tau.

    Returns:
        (P,) the loss of each pair, square nats.

    Raises:
        ConfigError: beta is not > 0.

    Source: Azar et al. 2023, eq. 17.
    """
    return (margin - 1 / (2 * _checked(beta))) ** 2


def _checked(beta: float) -> float:
    if not beta > 0:
        raise ConfigError(f"beta is {beta!r}: pass a number > 0")
    return beta
