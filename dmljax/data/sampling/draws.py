"""Random draws of the samplers, each from a generator of its own."""

import functools

import numpy as np

# One number per purpose, so that no two draws use the same generator.
ROUND, CLASS_ORDER, UNIFORM, CHUNKS, CLASS_COUNT, N_PAIRS, ABE_PAIRS, OMITTED, NEAREST = range(9)


def generator(*key: int) -> np.random.Generator:
    """A generator seeded by integers such as (seed, purpose, step)."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


@functools.lru_cache(8192)
def permutation(n: int, *key: int) -> np.ndarray:
    """A random order of 0 to n - 1. Cached, since consecutive steps use the same orders."""
    order = generator(*key).permutation(n)
    order.setflags(write=False)
    return order
