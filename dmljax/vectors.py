"""NumPy operations on embeddings that need no jax: unit length and Matryoshka prefixes."""

from collections.abc import Sequence

import numpy as np

UNIT_TOLERANCE = 1e-3  # a vector of this distance from length 1 counts as a unit vector


def unit_vectors(vectors: np.ndarray) -> np.ndarray:
    """Returns vectors [n, d] divided by their lengths, in float32. A zero vector stays zero."""
    vectors = np.asarray(vectors)
    if vectors.dtype != np.float64:
        vectors = vectors.astype(np.float32, copy=False)
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.where(norms == 0, 1, norms)).astype(np.float32)


def prefix(vectors: np.ndarray, dim: int) -> np.ndarray:
    """Returns the first `dim` numbers of vectors [n, d] as unit vectors float32 [n, dim]."""
    return unit_vectors(np.asarray(vectors)[:, :dim])


def check_prefix(prefix: int | None, prefixes: Sequence[int], model: str) -> None:
    """Raises unless `prefix` is None or one of the prefixes that the `model` was trained with."""
    if prefix is None or prefix in prefixes:
        return
    numbers = ", ".join(map(str, prefixes))
    trained = f"with the prefixes {numbers}" if numbers else "without prefixes: leave it out"
    raise ValueError(f"prefix={prefix}: {model} was trained {trained}")
