"""Tokens and their values as a page is sent them: names in JSON, numbers in binary."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from xorl_lab.errors import LabError
from xorl_lab.widgets.characters import units
from xorl_lab.widgets.findings import plain

if TYPE_CHECKING:
    from xorl_lab.store import Reader, StoredRollout
    from xorl_lab.types import InspectorCommands, SampledSequence

UNSPELLED = (
    "Nothing here knows the tokenizer, so tokens are shown as ids: open the rollouts from a Lab "
    "with this model."
)
_FACTS = ("id", "step", "group", "sample", "prompt", "row", "text", "stop_reason", "version",
          "reward", "reward_parts", "advantage", "error")  # fmt: skip


class Spelling:
    """How tokens are written.

    Args:
        commands: that know the tokenizer; None: ids alone are known.
    """

    def __init__(self, commands: "InspectorCommands | None") -> None:
        self._commands = commands
        self.reason = UNSPELLED if commands is None else ""
        """Why there are ids alone, empty if there is more."""
        self._special: frozenset[int] = frozenset()
        if commands is not None:
            try:
                self._special = frozenset(commands.special())
            except LabError as error:
                self._commands, self.reason = None, str(error)

    def pieces(self, tokens: NDArray[np.int32]) -> list[bytes] | None:
        """The bytes of each token; None if nothing knows them.

        Raises:
            LabError: an id is not one of the tokenizer's.
        """
        return None if self._commands is None else list(self._commands.pieces(tokens.tolist()))

    def special(self, tokens: NDArray[np.int32]) -> list[int]:
        """The special ones among some ids."""
        return sorted(self._special.intersection(np.unique(tokens).tolist()))


def pack(arrays: Mapping[str, NDArray[Any] | bytes], buffers: list[bytes]) -> list[list[str]]:
    """Append arrays to the buffers of an answer.

    Returns:
        Name and type (``i4``, ``f4`` or ``u1``) of each, in the order of the buffers.
    """
    heads: list[list[str]] = []
    for name, values in arrays.items():
        if isinstance(values, bytes):
            heads.append([name, "u1"])
            buffers.append(values)
            continue
        kind = "f4" if values.dtype.kind == "f" else "i4"
        heads.append([name, kind])
        buffers.append(np.ascontiguousarray(values, f"<{kind}").tobytes())
    return heads


def rollout_answer(
    reader: "Reader",
    id: int,  # noqa: A002 (what the store calls it)
    spelling: Spelling,
    buffers: list[bytes],
) -> dict[str, Any]:
    """Everything about one rollout.

    Args:
        reader: of its run.
        id: in the store.
        spelling: of its tokens.
        buffers: to be filled with its values per token.

    Raises:
        StoreError: there is no such rollout.
    """
    stored = reader.rollout(id)
    row = reader.table([id])
    facts = {name: _json(getattr(stored, name)) for name in _FACTS}
    if not spelling.reason:  # their tokens are the text
        facts |= {"text": "", "prompt": ""}
    ids = [stored.prompt_tokens, stored.tokens, stored.top_ids.ravel()]
    return {
        "facts": facts | {"tags": list(row["tags"][0]), "note": row["note"][0]},
        "arrays": pack(_rollout_arrays(stored, spelling), buffers),
        "special": spelling.special(np.concatenate(ids)),
        "alternatives": stored.top_ids.shape[1],
        "unspelled": spelling.reason,
    }


def sequence_answer(
    sequence: "SampledSequence", spelling: Spelling, buffers: list[bytes]
) -> dict[str, Any]:
    """The same of a continuation that was just drawn; ``first`` is its first buffer."""
    first = len(buffers)
    tokens = np.array(sequence.tokens, np.int32)
    top_ids, top_logprobs = _table(sequence.top_logprobs or [])
    arrays = _written("", tokens, spelling)
    for name, values in (("logprobs", sequence.logprobs), ("entropies", sequence.entropies)):
        if values is not None:
            arrays[f"value:{name}"] = np.array(values, np.float32)
    arrays |= _alternatives(top_ids, top_logprobs, spelling)
    return {
        "first": first,
        "arrays": pack(arrays, buffers),
        "special": spelling.special(np.concatenate([tokens, top_ids.ravel()])),
        "alternatives": top_ids.shape[1],
        "stop_reason": sequence.stop_reason,
    }


def _rollout_arrays(
    rollout: "StoredRollout", spelling: Spelling
) -> dict[str, NDArray[Any] | bytes]:
    """All values per token, by name; those of the prompt begin with ``prompt``."""
    arrays = _written("prompt_", rollout.prompt_tokens, spelling)
    arrays |= _written("", rollout.tokens, spelling)
    if len(rollout.logprobs):
        arrays["value:logprobs"] = rollout.logprobs
    arrays |= {f"value:{name}": values for name, values in rollout.streams.items()}
    return arrays | _alternatives(rollout.top_ids, rollout.top_logprobs, spelling)


def _written(
    prefix: str, tokens: NDArray[np.int32], spelling: Spelling
) -> dict[str, NDArray[Any] | bytes]:
    """Ids, and where the tokenizer is known the bytes and which tokens make a character."""
    arrays: dict[str, NDArray[Any] | bytes] = {f"{prefix}tokens": tokens}
    pieces = spelling.pieces(tokens)
    if pieces is None:
        return arrays
    grouped = units(pieces)
    arrays[f"{prefix}bytes"] = b"".join(pieces)
    arrays[f"{prefix}sizes"] = np.array([len(p) for p in pieces], np.int32)
    arrays[f"{prefix}units"] = grouped.starts
    arrays[f"{prefix}chars"] = grouped.chars
    return arrays


def _alternatives(
    ids: NDArray[np.int32], logprobs: NDArray[np.float32], spelling: Spelling
) -> dict[str, NDArray[Any] | bytes]:
    """The most likely tokens at each position, (C, K), and how they are written."""
    if not ids.size:
        return {}
    arrays: dict[str, NDArray[Any] | bytes] = {
        "top_ids": ids.ravel(),
        "top_logprobs": logprobs.ravel(),
    }
    known = np.unique(ids[ids >= 0])
    pieces = spelling.pieces(known)
    if pieces is not None:
        arrays["vocabulary_tokens"] = known
        arrays["vocabulary_sizes"] = np.array([len(p) for p in pieces], np.int32)
        arrays["vocabulary_bytes"] = b"".join(pieces)
    return arrays


def _table(
    tops: Sequence[Sequence[tuple[int, float]]],
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Ids and logprobs as (C, K) arrays; -1 and NaN where a token has fewer."""
    width = max((len(top) for top in tops), default=0)
    ids = np.full((len(tops), width), -1, np.int32)
    logprobs = np.full((len(tops), width), np.nan, np.float32)
    for i, top in enumerate(tops):
        for k, (token, logprob) in enumerate(top):
            ids[i, k], logprobs[i, k] = token, logprob
    return ids, logprobs


def _json(value: Any) -> Any:  # noqa: ANN401 (a field of a rollout)
    """JSON values throughout: what is not finite in a row or a reward becomes None or text."""
    if isinstance(value, Mapping):
        return {str(k): _json(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_json(v) for v in value]
    return plain(value)
