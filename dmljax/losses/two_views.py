"""Losses of two views or modalities: row i of `embeddings` belongs to row i of `other`.

Every loss is `f(embeddings [b d], other [b d], *, ..., where=None) -> scalar`; `where [b]` says
which rows count, on both sides, and masking a row equals dropping it. Gradients flow into both.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from dmljax import ops
from dmljax.losses._common import matrix, rows
from dmljax.ops import Array, ReduceFn

__all__ = ["clip", "siglip", "vicreg"]

Scalar = float | Float[Array, ""]  # may be learned


def clip(
    embeddings: Float[Array, "b d"],
    other: Float[Array, "b d"],
    *,
    temperature: Scalar = 0.07,
    where: Bool[Array, "b"] | None = None,
    reduce_fn: ReduceFn | None = ops.mean,
) -> Float[Array, "..."]:
    """Each row told from the batch's others, in both directions (Radford et al., ICML 2021).

    The mean of the cross-entropies of cosine / temperature along its rows and along its columns.
    """
    x, y, where = _prepare(embeddings, other, where)
    logits = _cosines(x, y) / temperature
    own = jnp.diagonal(logits)
    others = where[:, None] & where[None, :] & ~jnp.eye(len(x), dtype=bool)
    entries = _against(own, logits, others) + _against(own, logits.T, others)
    return ops.reduce(reduce_fn, entries / 2, where)


def siglip(
    embeddings: Float[Array, "b d"],
    other: Float[Array, "b d"],
    *,
    scale: Scalar = 10.0,
    bias: Scalar = -10.0,
    where: Bool[Array, "b"] | None = None,
    reduce_fn: ReduceFn | None = ops.mean,
) -> Float[Array, "..."]:
    """Each pair by itself is a match or is not (Zhai et al., ICCV 2023).

    sum_ij softplus(-z_ij (scale cosine + bias)) / b, with z_ij = 1 for i = j and -1 otherwise.
    `scale` and `bias` are learned, from these values on. Entries per row of `embeddings`.
    """
    x, y, where = _prepare(embeddings, other, where)
    logits = scale * _cosines(x, y) + bias
    entries = jax.nn.softplus(jnp.where(jnp.eye(len(x), dtype=bool), -logits, logits))
    return ops.reduce(reduce_fn, jnp.sum(entries, axis=1, where=where[None, :]), where)


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
    """Views agree, dimensions vary and do not repeat each other (Bardes et al., ICLR 2022).

    invariance mean((x - y)^2) + variance mean_d([1 - sqrt(var_d + eps)]+) + covariance
    sum_{d != e}(cov_de^2) / d, the variance term averaged and the covariance term summed over both
    sides. Embeddings as they are; a single row has variance 0.
    """
    x, y, where = _prepare(embeddings, other, where)
    count = jnp.sum(where, dtype=x.dtype)
    apart = ops.reduce(ops.mean, jnp.mean((x - y) ** 2, axis=1), where)
    result = invariance * apart
    for side in (x, y):
        mean = jnp.sum(side, axis=0, keepdims=True) / jnp.maximum(count, 1)
        centred = jnp.where(where[:, None], side - mean, 0)
        products = ops.matmul(centred.T, centred) / jnp.maximum(count - 1, 1)
        deviations = jnp.sqrt(jnp.diagonal(products) + eps)
        spread = jnp.mean(jax.nn.relu(1 - deviations)) / 2
        off_diagonal = jnp.where(jnp.eye(x.shape[1], dtype=bool), 0, products)
        repeated = jnp.sum(off_diagonal**2) / x.shape[1]
        result = result + variance * spread + covariance * repeated
    return jnp.where(count > 0, result, 0)


# --- pieces -------------------------------------------------------------------------------------


def _prepare(embeddings, other, where) -> tuple[Array, Array, Array]:
    x, y = matrix("embeddings", embeddings), matrix("other", other)
    if x.shape != y.shape:
        raise ValueError(f"embeddings {x.shape} and other {y.shape} must have the same shape")
    where = rows(where, x)
    return jnp.where(where[:, None], x, 0), jnp.where(where[:, None], y, 0), where


def _cosines(x, y):
    return ops.matmul(ops.normalize(x), ops.normalize(y).T)


def _against(own, logits, others):
    """-log(e^own / (e^own + sum of the others)) per row; 0 for a row alone."""
    some = jnp.any(others, axis=1)
    rivals = ops.logsumexp(logits, where=others)
    return jnp.where(some, jax.nn.softplus(rivals - own), own - own)  # a NaN stays NaN
