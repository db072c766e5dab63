"""The order of examples and the seeds of draws, all from one seed."""

from collections.abc import Iterator

import numpy as np


def endless(count: int, seed: int) -> Iterator[int]:
    """Indices 0 to count - 1 in a random order, then all of them in another one, and so on.

    >>> order = endless(3, seed=0)
    >>> sorted(next(order) for _ in range(3))
    [0, 1, 2]
    """
    generator = np.random.default_rng(seed)
    while True:
        yield from generator.permutation(count).tolist()


def derive_seed(*keys: int) -> int:
    """A seed of 31 bits that depends on all keys (integers >= 0) and on their order."""
    return int(np.random.SeedSequence(keys).generate_state(1)[0]) >> 1
