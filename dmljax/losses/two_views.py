"""Losses of two views or modalities: row i of `embeddings` belongs to row i of `other`.

Every loss is `f(embeddings [b d], other [b d], *, ...) -> scalar`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from dmljax import ops
from dmljax.losses._arguments import VIEW_ARGUMENTS, describe
from dmljax.losses._common import cross_entropy, matrix, row_mask
from dmljax.ops import Array, ReduceFn, Scalar

__all__ = ["clip", "siglip", "vicreg"]


@describe(VIEW_ARGUMENTS)
def clip(
    embeddings: Float[Array, "b d"],
    other: Float[Array, "b d"],
    *,
    temperature: Scalar = 0.07,
    where: Bool[Array, "b"] | None = None,
    reduce_fn: ReduceFn | None = ops.mean,
) -> Float[Array, "..."]:
    """CLIP loss, or symmetric InfoNCE: each row finds its match among all rows, in both directions.

        -(log softmax_j(s_ij / temperature)_i + log softmax_j(s_ji / temperature)_i) / 2

    per row i, with the cosines s_ij of row i of `embeddings` and row j of `other`.

    Reference: Radford et al., Learning Transferable Visual Models From Natural Language
    Supervision, ICML 2021, arXiv:2103.00020.

    Args:
        temperature: The lower, the sharper the softmax.

    >>> x = np.array([[1, 0], [0, 1]], np.float32)
    >>> print(f"{losses.clip(x, np.array([[0.8, 0.6], [0, 1]], np.float32)):.3f}")
    0.015
    """
    x, y, where = views(embeddings, other, where)
    logits = ops.cosine_similarity(x, y) / temperature
    negatives = where[:, None] & where[None, :] & ~jnp.eye(len(x), dtype=bool)
    matches = jnp.diagonal(logits)[:, None]
    entries = cross_entropy(matches, logits, negatives)
    entries = entries + cross_entropy(matches, logits.T, negatives)
    return ops.reduce(reduce_fn, entries[:, 0] / 2, where)


@describe(VIEW_ARGUMENTS)
def siglip(
    embeddings: Float[Array, "b d"],
    other: Float[Array, "b d"],
    *,
    scale: Scalar = 10.0,
    bias: Scalar = -10.0,
    where: Bool[Array, "b"] | None = None,
    reduce_fn: ReduceFn | None = ops.mean,
) -> Float[Array, "..."]:
    """SigLIP loss: each pair of rows is classified by itself as a match or not.

        sum_j softplus(-z_ij (scale s_ij + bias))

    per row i of `embeddings`, with the cosines s_ij of row i of `embeddings` and row j of `other`,
    z_ij = 1 for i = j and -1 otherwise.

    Reference: Zhai et al., Sigmoid Loss for Language Image Pre-Training, ICCV 2023,
    arXiv:2303.15343.

    Args:
        scale: Scale of the cosines; learned in the paper, starting from this value.
        bias: Added to the logits; learned in the paper, starting from this value.

    >>> x = np.array([[1, 0], [0, 1]], np.float32)
    >>> print(f"{losses.siglip(x, np.array([[0.8, 0.6], [0, 1]], np.float32)):.3f}")
    1.419
    """
    x, y, where = views(embeddings, other, where)
    logits = scale * ops.cosine_similarity(x, y) + bias
    entries = jax.nn.softplus(jnp.where(jnp.eye(len(x), dtype=bool), -logits, logits))
    return ops.reduce(reduce_fn, jnp.sum(entries, axis=1, where=where[None, :]), where)


@describe(VIEW_ARGUMENTS)
def vicreg(
    embeddings: Float[Array, "b d"],
    other: Float[Array, "b d"],
    *,
    invariance: float = 25.0,
    variance: float = 25.0,
    covariance: float = 1.0,
    eps: float = 1e-4,
    where: Bool[Array, "b"] | None = None,
) -> Float[Array, ""]:
    """VICReg: the views agree, every dimension varies, and dimensions are uncorrelated.

        invariance mean((x - y)^2) + variance mean_d([1 - sqrt(var_d + eps)]+)
        + covariance sum_{d != e} cov_de^2 / dimensions

    over rows x and y of the two views, with [a]+ = max(a, 0). The variance term is the mean over
    the two views, the covariance term the sum. Embeddings keep their length. A single row has
    variance 0.

    Reference: Bardes, Ponce and LeCun, VICReg: Variance-Invariance-Covariance Regularization for
    Self-Supervised Learning, ICLR 2022, arXiv:2105.04906.

    Args:
        invariance: Weight of the squared difference of the views.
        variance: Weight of the term that keeps standard deviations above 1.
        covariance: Weight of the squared covariances.
        eps: Added to variances before the square root.

    >>> x = np.array([[1, 0], [0, 1]], np.float32)
    >>> print(f"{losses.vicreg(x, np.array([[0.8, 0.6], [0, 1]], np.float32)):.3f}")
    13.631
    """
    x, y, where = views(embeddings, other, where)
    count = jnp.sum(where, dtype=x.dtype)
    squared_difference = ops.reduce(ops.mean, jnp.mean((x - y) ** 2, axis=1), where)
    result = invariance * squared_difference
    for side in (x, y):
        mean = jnp.sum(side, axis=0, keepdims=True) / jnp.maximum(count, 1)
        centered = jnp.where(where[:, None], side - mean, 0)
        covariances = ops.matmul(centered.T, centered) / jnp.maximum(count - 1, 1)
        deviations = jnp.sqrt(jnp.diagonal(covariances) + eps)
        collapse = jnp.mean(jax.nn.relu(1 - deviations)) / 2
        off_diagonal = jnp.where(jnp.eye(x.shape[1], dtype=bool), 0, covariances)
        redundancy = jnp.sum(off_diagonal**2) / x.shape[1]
        result = result + variance * collapse + covariance * redundancy
    return jnp.where(count > 0, result, 0)


def views(embeddings, other, where) -> tuple[Array, Array, Array]:
    """The two views and the mask of their rows, checked; 0 in rows that do not count."""
    x, y = matrix("embeddings", embeddings), matrix("other", other)
    if x.shape != y.shape:
        raise ValueError(f"embeddings {x.shape} and other {y.shape} must have the same shape")
    where = row_mask(where, x)
    return jnp.where(where[:, None], x, 0), jnp.where(where[:, None], y, 0), where
