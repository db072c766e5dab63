"""Weights on their way to a SGLang server, sent by value: a whole model's, or an adapter's."""

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from xorl_lab.errors import CheckpointError, LabError, SamplerError
from xorl_lab.samplers.sglang.connection import SGLangHTTP
from xorl_lab.samplers.sglang.facts import INCOMPLETE, ServerFacts
from xorl_lab.samplers.sglang.named_tensors import Named, buckets, by_value

ADAPTER_CONFIG, ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"


def send_weights(
    http: SGLangHTTP,
    facts: ServerFacts,
    tensors: Iterable[Named],
    version: str,
    bucket_bytes: int,
) -> int:
    """Replace weights by tensors.  Only one thread at a time.

    Args:
        http: the line to the server.
        facts: what it serves.
        tensors: (name, values) under Hugging Face's names, any device.
        version: what the server calls the weights once all of them are there; until then
            :data:`INCOMPLETE`.
        bucket_bytes: most bytes of one request.

    Returns:
        Bytes of tensors that were sent.

    Raises:
        SamplerError: not all of them arrived.
    """
    sent, begun = 0, False
    try:
        _begin(http)
        for bucket, last in buckets(tensors, bucket_bytes):
            payload = by_value(bucket, facts.dtype)
            body = {
                "serialized_named_tensors": [payload] * facts.tp_size,
                "flush_cache": False,
                "weight_version": version if last else INCOMPLETE,
            }
            begun = True
            http.order("/update_weights_from_tensor", body, "send weights")
            sent += sum(tensor.nbytes for _, tensor in bucket)
    except BaseException as error:
        _abandon(http, version, mixed=begun)
        if not begun or not isinstance(error, Exception):
            raise
        raise SamplerError(
            f"only {sent} bytes of version {version!r} had arrived at {http.url} when sending the "
            f"weights failed ({type(error).__name__}: {error}): what it serves is undefined until "
            "weights are sent again",
            retryable=True,
        ) from error
    http.order("/end_weight_update", {}, "finish the new weights")
    return sent


def adapter_by_value(folder: Path, facts: ServerFacts) -> dict[str, Any]:
    """What a request holds that brings an adapter along.

    Args:
        folder: of the adapter, in PEFT's form.
        facts: what the server serves.

    Raises:
        CheckpointError: there is none in the folder.
    """
    try:
        config = json.loads((folder / ADAPTER_CONFIG).read_text())
        tensors = load_file(folder / ADAPTER_FILE)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            "checkpoint.unreadable", f"{folder} holds no adapter in PEFT's form ({error})"
        ) from error
    payload = by_value(tensors.items(), facts.dtype, keyed=True)
    return {"config_dict": config, "serialized_named_tensors": [payload] * facts.tp_size}


def _begin(http: SGLangHTTP) -> None:
    try:
        http.order("/begin_weight_update", {}, "take new weights")
    except SamplerError as error:
        if "already open" not in str(error):
            raise
        # Whoever opened it has died: nobody else updates this server.
        http.order("/end_weight_update", {}, "end an update that was left open")
        http.order("/begin_weight_update", {}, "take new weights")


def _abandon(http: SGLangHTTP, version: str, *, mixed: bool) -> None:
    """Close an update that failed, so that the server is usable, and let it say so."""
    # Where it was not open, or the server is gone, there is nothing to close.
    with contextlib.suppress(LabError):
        http.order("/end_weight_update", {}, f"give version {version!r} up")
    if mixed:
        with contextlib.suppress(LabError):
            http.order("/update_weight_version", {"new_version": INCOMPLETE}, "mark it")
