"""Into how many directions the embeddings spread."""

import numpy as np
from jaxtyping import Float

from dmljax.retrieval import Embeddings
from dmljax.vectors import unit_vectors

__all__ = ["effective_rank", "participation", "rho_spectrum", "spectrum"]

_BLOCK = 4096


def spectrum(embeddings: Embeddings) -> Float[np.ndarray, "d"]:
    """The share of the variance along each principal axis, largest first.

    Eigenvalues of the centered covariance of the unit vectors, divided by their sum. Rows that hold
    a NaN are left out. All shares are 0 if all embeddings are equal.

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


def effective_rank(shares: Float[np.ndarray, "d"]) -> float:
    """exp(-sum_k p_k log p_k), the effective rank (Roy & Vetterli, 2007), of `spectrum`.

    d if the embeddings spread evenly into all directions, 1 along a line, 0 if all are equal.

    >>> metrics.effective_rank(np.array([0.5, 0.5, 0.0]))
    2.0
    """
    shares = _checked(shares)
    shares = shares[shares > 0]
    return float(np.exp(-(shares * np.log(shares)).sum())) if len(shares) else 0.0


def participation(shares: Float[np.ndarray, "d"]) -> float:
    """1 / sum_k p_k^2, the participation ratio of `spectrum`: a rank that ignores small shares.

    >>> metrics.participation(np.array([0.5, 0.5, 0.0]))
    2.0
    """
    squares = float((_checked(shares) ** 2).sum())
    return 1 / squares if squares else 0.0


def rho_spectrum(embeddings: Embeddings, *, mode: int = 1) -> float:
    """KL(uniform || S), the spectral decay (Roth et al., 2020); smaller is more even.

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
    shares = np.sqrt(values) / np.sqrt(values).sum()
    return float(-np.mean(np.log(shares * len(shares))))


def _checked(shares: Float[np.ndarray, "d"]) -> Float[np.ndarray, "d"]:
    """Raises for embeddings, whose shares are not known yet."""
    shares = np.asarray(shares)
    if shares.ndim != 1 or (shares < 0).any():
        raise ValueError(
            f"shares must be a vector of numbers from 0, not {shares.dtype} {list(shares.shape)}: "
            "give metrics.spectrum(embeddings)"
        )
    return shares


def _moments(
    embeddings: Embeddings,
) -> tuple[Float[np.ndarray, "d d"], Float[np.ndarray, "d"], int]:
    """X'X and the sum of the rows of the unit vectors X, and their number, in blocks."""
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
