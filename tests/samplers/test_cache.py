"""Rows of keys and values, layer by layer."""

import numpy as np
import pytest
import torch

from tests.closeness import assert_close
from xorl_lab.samplers.cache import STRIDE, PromptCache, RowCache

SHAPES = [(2, 4, 4), (3, 6, 4), (1, 4, 6)]
"""Heads, width of keys, width of values: a model's layers need not be alike."""


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_layers_of_all_shapes_hold_what_was_written_in_them():
    prompts, cache, length = PromptCache(), RowCache(), 9
    for layer, (heads, wide, high) in enumerate(SHAPES):
        prompts.update(noise(1, heads, length, wide), noise(1, heads, length, high), layer)
    slots = [np.arange(5), np.arange(length)]
    cache.add(prompts, slots)
    positions, mask = cache.begin_step(torch.device("cpu"))
    assert positions.tolist() == [[5], [9]]
    assert mask[:, 0, 0].sum(-1).tolist() == [6, 10]
    for layer, (heads, wide, high) in enumerate(SHAPES):
        fresh = noise(2, heads, 1, wide), noise(2, heads, 1, high)
        seen = cache.update(*fresh, layer)
        for kept, source, new in zip(seen, prompts.layers[layer], fresh, strict=True):
            assert kept.shape == (2, heads, 2 * STRIDE, new.shape[-1])
            for row, nodes in enumerate(slots):
                wanted = torch.cat((source[:, nodes], new[row]), 1)
                assert_close(kept[row, :, : len(nodes) + 1], wanted, rtol=0, atol=0)
            assert kept.isfinite().all(), "what is out of sight has weight 0, not 0 times NaN"


@pytest.mark.parametrize("change", ["add", "keep", "grow"])
def test_what_is_written_is_seen_after_the_rows_have_moved(change):
    prompts, cache = PromptCache(), RowCache()
    for layer in range(2):
        prompts.update(noise(1, 2, 70, 4), noise(1, 2, 70, 4) + 1, layer)

    def step() -> None:
        cache.begin_step(torch.device("cpu"))
        for layer in range(2):
            fresh = noise(len(cache), 2, 8) + layer
            keys, values = cache.write(layer, fresh)
            for row, place in enumerate(cache.lengths.tolist()):
                both = keys[2 * row : 2 * row + 2, :, place], values[2 * row : 2 * row + 2, place]
                assert torch.equal(torch.cat(both, -1), fresh[row])
        cache.end_step()

    cache.add(prompts, [np.arange(60 if change == "grow" else 3), np.arange(7)])
    step()
    if change == "add":
        cache.add(prompts, [np.arange(70)])
    elif change == "keep":
        cache.keep([1])
    for _ in range(8):
        step()
