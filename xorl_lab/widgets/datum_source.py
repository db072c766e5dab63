"""A rollout as Python source text of the Datum that a recipe trains on."""

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xorl_lab.store import StoredRollout

_WIDTH = 96


def datum_source(rollout: "StoredRollout") -> str:
    """The source text; run, it makes what :func:`xorl_lab.recipes.rollouts.datum` makes.

    Args:
        rollout: P tokens of prompt and C of completion; without log-probabilities of the sampler
            that input is left out.
    """
    prompt, tokens = rollout.prompt_tokens.tolist(), rollout.tokens.tolist()
    every, count = [*prompt, *tokens], len(tokens)
    before = len(prompt) - 1
    weights, advantage = rollout.weights, _number(rollout.advantage)
    ones = np.ones(count, np.float32) if weights is None else weights
    inputs = {
        "weights": f"[0.0] * {before} + [1.0] * {count}",
        "advantages": f"[0.0] * {before} + [{advantage}] * {count}",
    }
    if weights is not None:  # some tokens are an environment's
        values = _list(["1.0" if w else "0.0" for w in weights])
        inputs["weights"] = f"[0.0] * {before} + {values}"
        values = _list([advantage if w else "0.0" for w in weights])
        inputs["advantages"] = f"[0.0] * {before} + {values}"
    streams = {"logprobs": rollout.logprobs, "ref_logprobs": rollout.streams.get("ref_logprobs")}
    for name, stream in streams.items():
        if stream is not None and len(stream):
            values = [_float32(x) if w else "0.0" for x, w in zip(stream, ones, strict=True)]
            inputs[name] = f"[0.0] * {before} + {_list(values)}"
    lines = "".join(f"        {name!r}: {source},\n" for name, source in inputs.items())
    return (
        "from xorl_lab.types import Datum, ModelInput\n\n"
        f"# rollout {rollout.id}: step {rollout.step}, group {rollout.group}, "
        f"sample {rollout.sample}; {len(prompt)} + {count} tokens\n"
        f"tokens = {_list([str(t) for t in every])}\n"
        "datum = Datum(\n"
        "    ModelInput.from_ints(tokens[:-1]),\n"
        "    {\n"
        '        "target_tokens": tokens[1:],\n'
        f"{lines}"
        "    },\n"
        ")\n"
    )


def _float32(value: np.float32) -> str:
    """The shortest digits that give the same float32."""
    return _number(float(str(value)))


def _number(value: float) -> str:
    return repr(value) if math.isfinite(value) else f'float("{value}")'


def _list(items: "Sequence[str]") -> str:
    """A list over as many lines as it takes."""
    lines, line = ["["], "   "
    for item in items:
        if len(line) + len(item) + 2 > _WIDTH:
            lines.append(line)
            line = "   "
        line += f" {item},"
    return "\n".join([*lines, line, "]"]) if items else "[]"
