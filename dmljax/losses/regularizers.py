"""Penalties on embeddings `[b d]` or proxies `[c d]` or `[c k d]`, to be added to a loss.

`where` has the shape of `x` without its last axis and says which vectors count; masking one equals
dropping it. `reduce_fn` is a mean over them unless told otherwise.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from dmljax import ops
from dmljax.losses._common import matrix, rows
from dmljax.ops import Array, ReduceFn

__all__ = ["center_invariant", "lp", "regular_face", "sparse_centers", "zero_mean"]


def lp(
    x: Float[Array, "*n d"],
    *,
    p: float = 2.0,
    power: float = 1.0,
    where: Bool[Array, "*n"] | None = None,
    reduce_fn: ReduceFn | None = ops.mean,
) -> Float[Array, "..."]:
    """|x|_p ^ power: keeps vectors short."""
    if not 0 < p < math.inf:
        raise ValueError(f"p must be positive and finite, not {p}")
    x, where = _vectors(x, where)
    return ops.reduce(reduce_fn, _power(jnp.sum(_power(jnp.abs(x), p), axis=1), power / p), where)


def zero_mean(
    x: Float[Array, "*n d"],
    *,
    where: Bool[Array, "*n"] | None = None,
    reduce_fn: ReduceFn | None = ops.mean,
) -> Float[Array, "..."]:
    """|sum of a vector's entries|: keeps vectors balanced around 0."""
    x, where = _vectors(x, where)
    return ops.reduce(reduce_fn, jnp.abs(jnp.sum(x, axis=1)), where)


def center_invariant(
    x: Float[Array, "*n d"],
    *,
    where: Bool[Array, "*n"] | None = None,
    reduce_fn: ReduceFn | None = ops.mean,
) -> Float[Array, "..."]:
    """(|w|^2 - mean |w|^2)^2 / 4: no class gets longer proxies (Wu et al., 2017)."""
    x, where = _vectors(x, where)
    squares = jnp.sum(x * x, axis=1)
    deviations = squares - ops.divide(*ops.mean(squares, where))
    return ops.reduce(reduce_fn, deviations**2 / 4, where)


def regular_face(
    x: Float[Array, "*n d"],
    *,
    where: Bool[Array, "*n"] | None = None,
    reduce_fn: ReduceFn | None = ops.mean,
) -> Float[Array, "..."]:
    """The cosine with the nearest other vector: spreads proxies (Zhao et al., CVPR 2019).

    A vector without another has no entry.
    """
    x, where = _vectors(x, where)
    x = ops.normalize(x)
    others = where[:, None] & where[None, :] & ~jnp.eye(len(x), dtype=bool)
    some = jnp.any(others, axis=1)
    nearest = jnp.max(ops.matmul(x, x.T), axis=1, where=others, initial=-jnp.inf)
    return ops.reduce(reduce_fn, jnp.where(some, nearest, 0), some)


def sparse_centers(
    proxies: Float[Array, "c k d"],
    *,
    where: Bool[Array, "c k"] | None = None,
    reduce_fn: ReduceFn | None = ops.mean,
) -> Float[Array, "..."]:
    """Half the distance between the unit centres of a class: merges the superfluous ones.

    The regulariser of `dmljax.losses.soft_triple` (Qian et al., ICCV 2019), per ordered pair of
    centres; the paper weighs it by 0.2.
    """
    proxies = jnp.asarray(proxies)
    if proxies.ndim != 3:
        raise ValueError(f"proxies must be [c k d], not of shape {proxies.shape}")
    classes, centres, _ = proxies.shape
    x, where = _vectors(proxies, where)
    x = ops.normalize(x).reshape(proxies.shape)
    where = where.reshape(classes, centres)
    # Centres do merge, so their distances must be exact, and harmless at 0, for near pairs too.
    distances = jax.vmap(lambda x: ops.euclidean(x, x))(x)  # [c k k]
    pairs = where[:, :, None] & where[:, None, :] & ~np.eye(centres, dtype=bool)[None]
    return ops.reduce(reduce_fn, distances / 2, pairs)


# --- pieces -------------------------------------------------------------------------------------


def _vectors(x: Array, where: Array | None) -> tuple[Array, Array]:
    """All vectors as one matrix, 0 where they do not count, and which do."""
    x = jnp.asarray(x)
    if where is not None and jnp.shape(where) != x.shape[:-1]:
        raise ValueError(f"where must be bool {list(x.shape[:-1])}, not {list(jnp.shape(where))}")
    x = matrix("x", x.reshape(-1, x.shape[-1]) if x.ndim > 2 else x)
    where = rows(None if where is None else jnp.reshape(where, -1), x)
    return jnp.where(where[:, None], x, 0), where


def _power(x: Array, exponent: float) -> jax.Array:
    """x^exponent of x >= 0 with slope 0, not infinity, at 0."""
    some = ~(x <= 0)  # NaN passes
    return jnp.where(some, jnp.where(some, x, 1) ** exponent, 0)
