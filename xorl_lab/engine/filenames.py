"""Weights under the names, and in the shapes, that model files have.

In memory the experts of a layer are one tensor.  In files each expert has tensors of its own, and
that is what other programs read: SGLang leaves out in silence what it does not know.
"""

import copy
from collections.abc import Mapping
from typing import Any, cast

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

FUSED = (".experts.gate_up_proj", ".experts.down_proj")
"""How the names of experts end in memory."""
HEAD = "lm_head.weight"
"""Name of a head in files."""


def in_files(
    model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Weights by the names that they have in files; a dense model's are the same.

    Args:
        model: a mixture of experts, or a dense model.
        tensors: some or all of its weights, or others like them, by their names in memory.

    Returns:
        The experts one by one.  With the embedding of a mixture whose head is tied to it comes the
        head: SGLang's mixtures know no ties, and would leave it empty.
    """
    experts = any(name.endswith(FUSED) for name, _ in model.named_parameters())
    if not experts:
        return dict(tensors)
    # What it was loaded from may have had other names; a copy of the outside forgets them.
    shell: Any = copy.copy(model)
    shell._weight_conversions = None
    result = cast("dict[str, torch.Tensor]", revert_weight_conversion(shell, dict(tensors)))
    if cast("Any", model.config).get_text_config().tie_word_embeddings:
        embedding = next((v for k, v in tensors.items() if k.endswith("embed_tokens.weight")), None)
        if embedding is not None:
            result.setdefault(HEAD, embedding.detach().clone())
    return result
