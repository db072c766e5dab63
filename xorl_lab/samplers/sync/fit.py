"""Whether a server fits a trainer: what it can take, and that the two compute the same model."""

import contextlib
from typing import TYPE_CHECKING

from xorl_lab.errors import ConfigError, SamplerError
from xorl_lab.samplers.sync.parties import Server, Trainer

if TYPE_CHECKING:
    from xorl_lab.samplers.sglang.facts import ServerFacts

EXACT = "float32"
ROUNDING = 1e-3
"""Largest mean distance of two computations of the same float32 weights, nats."""
ROUGHER = 0.15
"""The same where either computes in less than float32."""


def require(server: Server, trainer: Trainer, rank: int | None) -> "ServerFacts":
    """Make sure that a server fits, and wake one that was left paused.

    Raises:
        ConfigError: it does not fit.
        SamplerError: it does not answer.
    """

    def ask() -> "ServerFacts":
        return server.require(vocab_size=trainer.vocab_size, model=trainer.name, rank=rank)

    try:
        return ask()
    except SamplerError:
        # Perhaps whoever has sent it weights is gone, and has left it paused.
        with contextlib.suppress(SamplerError):
            server.resume()
            return ask()
        raise


def allowed(facts: "ServerFacts", trainer: Trainer) -> float:
    """Largest mean distance of server and trainer on equal weights that rounding explains, nats."""
    return ROUNDING if facts.dtype == trainer.dtype == EXACT else ROUGHER


def other_model(facts: "ServerFacts", trainer: Trainer, noise: float) -> ConfigError:
    """The refusal of a server that does not compute the model that is trained."""
    return ConfigError(
        f"the SGLang server at {facts.url} serves {facts.model_path!r}, which is not the model "
        f"that is trained ({trainer.name!r}): even with its weights the two differ by "
        f"{noise:.2g} nats a token, where {allowed(facts, trainer):g} would be rounding; serve "
        "the same model"
    )
