"""Numerically safe functions: precision, square roots, logarithms of sums, unit vectors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from dmljax.ops.types import Array

__all__ = [
    "acos",
    "logsumexp",
    "matmul",
    "normalize",
    "sqrt",
    "widen",
]


def widen(x: Array) -> jax.Array:
    """`x` in float32 at least; gradients come back in the dtype of `x`."""
    x = jnp.asarray(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def matmul(x: Array, y: Array) -> jax.Array:
    """`x @ y` at the highest precision: TF32 and bfloat16 products are coarser than 1e-3."""
    return jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST)


def sqrt(x: Array) -> jax.Array:
    """Square root with gradient 0, not infinity, at 0. Negative rounding noise counts as 0."""
    positive = ~(x <= 0)  # NaN passes
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, x, 1)), 0)


def acos(x: Array) -> jax.Array:
    """Arc cosine with gradient 0, not infinity, at -1 and 1, and for rounding noise beyond them."""
    inside = ~(jnp.abs(x) >= 1)  # NaN passes
    return jnp.where(inside, jnp.arccos(jnp.where(inside, x, 0)), jnp.where(x > 0, 0, np.pi))


def logsumexp(x: Array, *, where: Array, axis: int = -1, keepdims: bool = False) -> jax.Array:
    """log sum exp over the entries that count; 0 (not -inf) where none does."""
    some = jnp.any(where, axis=axis, keepdims=True)
    where = jnp.broadcast_to(where, x.shape)
    peak = jax.lax.stop_gradient(
        jnp.max(x, axis=axis, keepdims=True, where=where, initial=-jnp.inf)
    )
    finite = jnp.abs(peak) < jnp.inf
    peak = jnp.where(finite, peak, 0)  # NaN becomes 0 here and returns below
    # Entries that do not count may overflow exp, and their gradient would be 0 * inf.
    gaps = x - peak
    # A compiler may compute x twice with other rounding, and a unit of rounding of huge x is huge:
    # the largest gap, which is 0, may come out positive, or so negative that nothing is left of 1.
    gaps = gaps - jax.lax.stop_gradient(jnp.maximum(gaps, 0))
    terms = jnp.exp(jnp.where(where, gaps, -jnp.inf))
    total = jnp.sum(terms, axis=axis, keepdims=True)
    total = total + jax.lax.stop_gradient(jnp.where(finite, jnp.maximum(1 - total, 0), 0))
    result = jnp.where(some, jnp.log(jnp.where(some, total, 1)) + peak, 0)
    return result if keepdims else jnp.squeeze(result, axis)


def normalize(x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
    """Unit vectors along the last axis. A zero vector stays zero and has gradient zero."""
    x = widen(x)
    # Dividing by the largest entry first keeps the squares from under- and overflowing.
    peak = jax.lax.stop_gradient(jnp.max(jnp.abs(x), axis=-1, keepdims=True))
    x = x / jnp.where(peak > 0, peak, 1)
    squares = jnp.sum(x * x, axis=-1, keepdims=True)
    return x * jnp.where(squares == 0, 0, jax.lax.rsqrt(jnp.where(squares == 0, 1, squares)))
