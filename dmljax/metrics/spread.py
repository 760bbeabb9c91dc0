"""The spread of embeddings: within classes, between classes, and over directions."""

import numpy as np
from jaxtyping import Float

from dmljax.metrics.ranking import divide
from dmljax.metrics.sides import sides
from dmljax.retrieval.inputs import Embeddings, Labels
from dmljax.vectors import unit_vectors

__all__ = ["density", "effective_rank", "participation", "rho_spectrum", "spectrum"]

_BLOCK = 4096


def density(embeddings: Embeddings, labels: Labels) -> float:
    """Computes mean distance inside a class / mean distance between class means.

    (Roth et al., 2020.) Distances are 1 - cosine, and the means of the classes are made unit
    vectors. Classes of one item count only among the means: they have no distance inside. Smaller
    is tighter.

    >>> embeddings = np.array([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [-0.6, 0.8]])
    >>> round(metrics.density(embeddings, np.array([0, 0, 1, 1])), 3)
    0.2
    """
    items = sides(embeddings, labels).queries
    classes, codes = np.unique(items.codes, return_inverse=True)
    count = len(classes)
    if count < 2:
        return float("nan")
    sums, sizes = class_sums(items.vectors, codes, count), np.bincount(codes)
    squares = np.bincount(codes, np.vecdot(items.vectors, items.vectors))
    pairs = sizes * (sizes - 1)
    inside = 1 - divide(np.vecdot(sums, sums) - squares, pairs)
    means = unit_vectors(sums)
    total = means.sum(axis=0, dtype=np.float64)
    between = 1 - (total @ total - np.vecdot(means, means).sum()) / (count * (count - 1))
    if not pairs.any() or between <= 0:
        return float("nan")
    return float(np.nanmean(inside) / between)


def spectrum(embeddings: Embeddings) -> Float[np.ndarray, "d"]:
    """Computes the fraction of the variance along each principal axis, largest first.

    Eigenvalues of the centered covariance of the unit vectors, divided by their sum. Rows that hold
    a NaN are left out. All fractions are 0 if all embeddings are equal.

    >>> metrics.spectrum(np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]]))
    array([0.5, 0.5])
    """
    gram, total, count = _moments(embeddings)
    if not count:
        return np.zeros(len(total))
    mean = total / count
    values = np.linalg.eigvalsh(gram / count - mean[:, None] * mean[None])[::-1]
    # Rounding leaves eigenvalues of about 1e-16 in directions without variance.
    values = np.where(values > 1e-12, values, 0)
    return values / values.sum() if values.any() else np.zeros(len(total))


def effective_rank(fractions: Float[np.ndarray, "d"]) -> float:
    """Computes exp(-sum_k p_k log p_k), the effective rank (Roy & Vetterli, 2007).

    d if the embeddings spread evenly into all directions, 1 along a line, 0 if all are equal.

    >>> metrics.effective_rank(np.array([0.5, 0.5, 0.0]))
    2.0
    """
    fractions = _checked(fractions)
    fractions = fractions[fractions > 0]
    return float(np.exp(-(fractions * np.log(fractions)).sum())) if len(fractions) else 0.0


def participation(fractions: Float[np.ndarray, "d"]) -> float:
    """Computes 1 / sum_k p_k^2, a rank of `spectrum` that ignores small fractions.

    >>> metrics.participation(np.array([0.5, 0.5, 0.0]))
    2.0
    """
    squares = float((_checked(fractions) ** 2).sum())
    return 1 / squares if squares else 0.0


def rho_spectrum(embeddings: Embeddings, *, mode: int = 1) -> float:
    """Computes KL(uniform || S), the spectral decay (Roth et al., 2020); smaller is more even.

    S are the singular values of the matrix of unit vectors, which is not centered, divided by their
    sum. `mode` m drops the first m - 1 of them: 1 drops none, 2 the largest, which is mostly the
    mean. Infinity if the embeddings do not span all dimensions.

    >>> embeddings = np.array([[1.0, 0.0], [0.0, 1.0]])
    >>> abs(metrics.rho_spectrum(embeddings))
    0.0
    """
    gram, total, count = _moments(embeddings)
    if not 1 <= mode <= len(total):
        raise ValueError(f"mode={mode} must lie between 1 and the {len(total)} dimensions")
    values = np.linalg.eigvalsh(gram)[::-1][mode - 1 :]
    if not count or values[-1] <= 1e-12 * count:
        return float("inf")
    fractions = np.sqrt(values) / np.sqrt(values).sum()
    return float(-np.mean(np.log(fractions * len(fractions))))


def _checked(fractions: Float[np.ndarray, "d"]) -> Float[np.ndarray, "d"]:
    """Raises for embeddings, whose fractions are not known yet."""
    fractions = np.asarray(fractions)
    if fractions.ndim != 1 or (fractions < 0).any():
        raise ValueError(
            f"fractions must be a vector of numbers from 0, not {fractions.dtype} "
            f"{list(fractions.shape)}: give metrics.spectrum(embeddings)"
        )
    return fractions


def _moments(
    embeddings: Embeddings,
) -> tuple[Float[np.ndarray, "d d"], Float[np.ndarray, "d"], int]:
    """Computes X'X, the sum of the rows and their count for the unit vectors X, in blocks."""
    vectors = np.asarray(embeddings)
    gram, total = np.zeros((vectors.shape[1], vectors.shape[1])), np.zeros(vectors.shape[1])
    count = 0
    for start in range(0, len(vectors), _BLOCK):
        rows = vectors[start : start + _BLOCK]
        rows = unit_vectors(rows[np.isfinite(rows).all(axis=1)]).astype(np.float64)
        gram += rows.T @ rows
        total += rows.sum(axis=0)
        count += len(rows)
    return gram, total, count


def class_sums(vectors: np.ndarray, codes: np.ndarray, count: int) -> Float[np.ndarray, "c d"]:
    """Computes the sum of the vectors of every code, in double precision."""
    sums = np.zeros((count, vectors.shape[1]))
    if not len(codes):
        return sums
    order = np.argsort(codes, kind="stable")
    present, starts = np.unique(codes[order], return_index=True)
    sums[present] = np.add.reduceat(vectors[order], starts, axis=0, dtype=np.float64)
    return sums
