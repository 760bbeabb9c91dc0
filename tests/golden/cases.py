"""The batches on which losses are compared with their peers, from fixed seeds."""

import numpy as np


def cases() -> dict[str, tuple[np.ndarray, np.ndarray]]:
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
