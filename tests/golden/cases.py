"""The inputs of the stored numbers of pytorch-metric-learning 2.9.0 (`*.npz`), in float64.

The numbers were computed by the programs in this folder at commit f609afd. `ranking.npz` has its
own inputs.
"""

import numpy as np

CLASSES, CENTERS, D = 5, 3, 6  # of proxies.npz
SIZE = 10  # of the memory: no multiple of the batch


def of_pairs() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """name -> (embeddings [b 5] float64, labels [b])."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape)  # noqa: E731
    four = np.repeat(np.arange(4), 3)
    largest = 2**31 - 1
    duplicates = normal(12, 5)
    duplicates[1], duplicates[4], duplicates[7] = duplicates[0], duplicates[3], duplicates[2]
    return {
        "balanced": (normal(12, 5), four),
        "clumped": (np.repeat(normal(4, 5), 3, axis=0) + 0.05 * normal(12, 5), four),
        "unbalanced": (normal(12, 5), np.array([0, 0, 0, 0, 0, 1, 1, 2, 3, 3, 3, 4])),
        "shuffled": (normal(12, 5), rng.permutation(four)),
        "negative labels": (normal(6, 5), np.array([-5, -5, 7, 7, -9, -9])),
        "huge labels": (normal(6, 5), np.array([largest, largest, -largest, -largest, 0, 0])),
        "one class": (normal(6, 5), np.full(6, 3)),
        "all distinct": (normal(6, 5), np.arange(6)),
        "b1": (normal(1, 5), np.array([0])),
        "b2 same": (normal(2, 5), np.array([1, 1])),
        "b2 distinct": (normal(2, 5), np.array([1, 2])),
        "long vectors": (30 * normal(12, 5), four),
        "duplicates": (duplicates, four),
    }


def references() -> tuple[np.ndarray, np.ndarray]:
    """(references [9 5], labels [9]) to go with the balanced case; one label has none there."""
    rng = np.random.default_rng(1)
    return rng.normal(size=(9, 5)), np.array([0, 1, 2, 0, 1, 2, 5, 5, 0])


def of_proxies():
    """name -> (embeddings [b d], labels [b]); none has an absent class but the unbalanced."""
    rng = np.random.default_rng(0)
    balanced = np.repeat(np.arange(4), 3)
    centers = rng.normal(size=(CLASSES, D))
    clumped = centers[balanced] + 1e-3 * rng.normal(size=(12, D))
    order = rng.permutation(12)
    twice = np.repeat(rng.normal(size=(6, D)), 2, axis=0)
    return {
        "balanced": (rng.normal(size=(12, D)), balanced),
        "clumped": (clumped, balanced),
        "unbalanced": (rng.normal(size=(12, D)), np.array([0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 2])),
        "shuffled": (rng.normal(size=(12, D)), balanced[order]),
        "duplicates": (twice, np.array([0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 0, 1])),
        "one": (rng.normal(size=(1, D)), np.array([3])),
        "two": (rng.normal(size=(2, D)), np.array([1, 4])),
    }


def proxies():
    rng = np.random.default_rng(1)
    return rng.normal(size=(CLASSES, D)), rng.normal(size=(CLASSES, CENTERS, D))


def steps():
    """Seven batches of four for a memory of ten: it wraps around twice, inside a batch too."""
    rng = np.random.default_rng(2)
    return [(rng.normal(size=(4, D)), rng.integers(0, 3, size=4)) for _ in range(7)]
