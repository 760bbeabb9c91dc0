"""Penalties on embeddings or proxies, `f(x [... d], *, ...) -> scalar`, to be added to a loss."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from dmljax import ops
from dmljax.losses._common import Batch, loss_of, prepare_vectors
from dmljax.ops import Array, ReduceFn

__all__ = ["center_invariant", "lp", "regular_face", "sparse_centers", "zero_mean"]


@loss_of(prepare_vectors)
def lp(batch: Batch, *, p: float = 2.0, power: float = 1.0) -> Array:
    """Computes the Lp norm of vectors, to a power: keeps vectors short.

    |x|_p ^ power per vector x.

    Args:
        p: The norm: 2 is the Euclidean length, 1 the sum of absolute values.
        power: Exponent of the norm.

    >>> print(f"{losses.lp(np.array([[3, 4], [1, 0]], np.float32)):.3f}")
    3.000
    """
    if not 0 < p < math.inf:
        raise ValueError(f"p must be positive and finite, not {p}")
    x = batch.anchors
    magnitudes = jnp.where(x == 0, 0, jnp.abs(x))  # gradient 0 at 0, for p = 1 too
    sums = jnp.sum(ops.power(magnitudes, p), axis=1)
    return batch.reduce(ops.power(sums, power / p), batch.where)


@loss_of(prepare_vectors)
def zero_mean(batch: Batch) -> Array:
    """Computes the absolute sum of each vector's entries: keeps vectors balanced around 0.

    |sum_d x_d| per vector x.

    >>> print(f"{losses.zero_mean(np.array([[3, 4], [1, 0]], np.float32)):.3f}")
    4.000
    """
    return batch.reduce(jnp.abs(jnp.sum(batch.anchors, axis=1)), batch.where)


@loss_of(prepare_vectors)
def center_invariant(batch: Batch) -> Array:
    """Computes the squared deviation of squared lengths from their mean: evens out lengths.

    (|x|^2 - mean |x|^2)^2 / 4 per vector x.

    Reference: Wu et al., Deep Face Recognition with Center Invariant Loss, Thematic Workshops of
    ACM Multimedia 2017.

    >>> print(f"{losses.center_invariant(np.array([[3, 4], [1, 0]], np.float32)):.3f}")
    36.000
    """
    squares = jnp.sum(batch.anchors**2, axis=1)
    deviations = squares - ops.divide(*ops.mean(squares, batch.where))
    return batch.reduce(deviations**2 / 4, batch.where)


@loss_of(prepare_vectors)
def regular_face(batch: Batch) -> Array:
    """Computes the cosine of each vector with the nearest other vector: spreads proxies.

    max_{j != i} cos(x_i, x_j) per vector x_i. A single vector has no entry.

    Reference: Zhao et al., RegularFace: Deep Face Recognition via Exclusive Regularization, CVPR
    2019.

    >>> print(f"{losses.regular_face(np.array([[3, 4], [1, 0]], np.float32)):.3f}")
    0.600
    """
    x, where = batch.anchors, batch.where
    others = where[:, None] & where[None, :] & ~jnp.eye(len(x), dtype=bool)
    has_other = jnp.any(others, axis=1)
    nearest = jnp.max(ops.cosine_similarity(x, x), axis=1, where=others, initial=-jnp.inf)
    return batch.reduce(jnp.where(has_other, nearest, 0), has_other)


def sparse_centers(
    proxies: Float[Array, "c k d"],
    *,
    where: Bool[Array, "c k"] | None = None,
    reduce_fn: ReduceFn | None = ops.mean,
) -> Float[Array, "..."]:
    """Computes half the distance between unit proxies of a class: merges superfluous ones.

    |w_i - w_j| / 2 per ordered pair i != j of the k proxies of a class, with w of length 1.

    Reference: Qian et al., SoftTriple Loss: Deep Metric Learning Without Triplet Sampling, ICCV
    2019, arXiv:1909.05235: 0.2 times this is added to `soft_triple`.

    >>> proxies = np.array([[[1, 0], [0.6, 0.8]], [[0, 1], [0, 1]]], np.float32)  # [c k d]
    >>> print(f"{losses.sparse_centers(proxies):.3f}")
    0.224
    """
    proxies = jnp.asarray(proxies)
    if proxies.ndim != 3:
        raise ValueError(f"proxies must be [c k d], not of shape {proxies.shape}")
    classes, centers, _ = proxies.shape
    batch = prepare_vectors(proxies, where=where)
    where, x = batch.where, ops.normalize(batch.anchors).reshape(proxies.shape)
    where = where.reshape(classes, centers)
    # Centers do merge: `ops.euclidean` is exact for close pairs and has gradient 0 at distance 0.
    distances = jax.vmap(lambda x: ops.euclidean(x, x))(x)  # [c k k]
    pairs = where[:, :, None] & where[:, None, :] & ~np.eye(centers, dtype=bool)[None]
    return ops.reduce(reduce_fn, distances / 2, pairs)
