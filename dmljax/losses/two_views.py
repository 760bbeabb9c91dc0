"""Losses of two views or modalities: row i of `embeddings` belongs to row i of `other`.

Every loss is `f(embeddings [b d], other [b d], *, ...) -> scalar`.
"""

import jax
import jax.numpy as jnp

from dmljax import ops
from dmljax.losses._common import Batch, loss_of, prepare_views
from dmljax.ops import Array, Scalar
from dmljax.ops.fold import LogSumExp, OfColumns, Sum

__all__ = ["clip", "siglip", "vicreg"]


@loss_of(prepare_views)
def clip(batch: Batch, *, temperature: Scalar = 0.07) -> Array:
    """Computes the CLIP loss, or symmetric InfoNCE: rows find their match, in both directions.

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

    def terms(block, temperature):
        logits = block.cosines() / temperature
        others = block.pairs.negatives
        return LogSumExp(logits, others), OfColumns(LogSumExp(logits.T, others.T))

    normalizers = batch.fold(terms, temperature)
    views = ops.normalize(batch.anchors), ops.normalize(batch.references)
    match = jnp.sum(views[0] * views[1], axis=1) / temperature
    images, texts = (jax.nn.softplus(normalizer - match) for normalizer in normalizers)
    return batch.reduce((images + texts) / 2, batch.where)


@loss_of(prepare_views)
def siglip(batch: Batch, *, scale: Scalar = 10.0, bias: Scalar = -10.0) -> Array:
    """Computes the SigLIP loss: each pair of rows is classified by itself as a match or not.

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

    def terms(block, scale, bias):
        logits = scale * block.cosines() + bias
        entries = jax.nn.softplus(jnp.where(block.same_positions(), -logits, logits))
        # Rows that an earlier tile has counted are outside `rows.where`.
        return (Sum(entries, block.rows.where[:, None] & block.columns.where[None, :]),)

    (entries,) = batch.fold(terms, scale, bias)
    return batch.reduce(entries, batch.where)


@loss_of(prepare_views, without=("reduce_fn", "tile"))
def vicreg(
    batch: Batch,
    *,
    invariance: float = 25.0,
    variance: float = 25.0,
    covariance: float = 1.0,
    eps: float = 1e-4,
) -> Array:
    """Computes VICReg: views agree, every dimension varies, and dimensions are uncorrelated.

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
    x, y, where = batch.anchors, batch.references, batch.where
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
