"""Numerically safe functions: precision, roots and powers, logarithms of sums, unit vectors."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from dmljax.ops.types import Array

__all__ = [
    "acos",
    "logsumexp",
    "matmul",
    "norm",
    "normalize",
    "power",
    "sqrt",
    "widen",
]


def widen(x: Array) -> jax.Array:
    """Converts `x` to float32, unless it is wider. Gradients come back in the dtype of `x`."""
    x = jnp.asarray(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def matmul(x: Array, y: Array) -> jax.Array:
    """Computes `x @ y` at the highest precision: TF32 and bfloat16 have errors above 1e-3."""
    return jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST)


def sqrt(x: Array) -> jax.Array:
    """Computes the square root of `x`, with gradient 0 instead of infinity at 0.

    Negative numbers, which are rounding errors of 0, count as 0. NaN stays NaN.
    """
    positive = ~(x <= 0)  # True for NaN
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, x, 1)), 0)


def power(x: Array, exponent: float) -> jax.Array:
    """Computes `x ** exponent` for x >= 0, with gradient 0 instead of infinity or NaN at 0.

    Negative numbers count as 0. NaN stays NaN. With `exponent` 1, `x` is returned unchanged.
    """
    if exponent == 1:
        return jnp.asarray(x)
    positive = ~(x <= 0)  # True for NaN
    return jnp.where(positive, jnp.where(positive, x, 1) ** exponent, 0)


def acos(x: Array) -> jax.Array:
    """Computes the arc cosine of `x`, with gradient 0 instead of infinity at -1 and 1.

    Numbers beyond -1 and 1, which are rounding errors, count as -1 and 1. NaN stays NaN.
    """
    inside = ~(jnp.abs(x) >= 1)  # True for NaN
    return jnp.where(inside, jnp.arccos(jnp.where(inside, x, 0)), jnp.where(x > 0, 0, np.pi))


def logsumexp(
    x: Float[Array, "..."], *, where: Bool[Array, "..."], axis: int = -1, keepdims: bool = False
) -> jax.Array:
    """Computes log(sum(exp(x))) along `axis`, over the entries where `where` is True.

    Where no entry counts, the result is 0, not -infinity, and has gradient 0.
    """
    any_counts = jnp.any(where, axis=axis, keepdims=True)
    where = jnp.broadcast_to(where, x.shape)
    peak = jax.lax.stop_gradient(
        jnp.max(x, axis=axis, keepdims=True, where=where, initial=-jnp.inf)
    )
    finite = jnp.abs(peak) < jnp.inf
    peak = jnp.where(finite, peak, 0)  # a NaN becomes 0 here and comes back with `gaps`
    # Entries that do not count may overflow exp, and their gradient would be 0 * inf.
    gaps = x - peak
    # XLA may compute `x` twice with different rounding, and the rounding error of a huge x is huge.
    # So the largest gap, which is 0, may come out above 0, or far enough below to lose its term.
    gaps = gaps - jax.lax.stop_gradient(jnp.maximum(gaps, 0))
    terms = jnp.exp(jnp.where(where, gaps, -jnp.inf))
    total = jnp.sum(terms, axis=axis, keepdims=True)
    total = total + jax.lax.stop_gradient(jnp.where(finite, jnp.maximum(1 - total, 0), 0))
    result = jnp.where(any_counts, jnp.log(jnp.where(any_counts, total, 1)) + peak, 0)
    return result if keepdims else jnp.squeeze(result, axis)


def norm(x: Float[Array, "*b d"]) -> Float[Array, "*b"]:
    """Computes the Euclidean length along the last axis. A zero vector has gradient 0."""
    peak = _peak(x)
    return sqrt(jnp.sum((x / peak) ** 2, axis=-1)) * peak[..., 0]


def normalize(x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
    """Divides `x` by its length along the last axis. A zero vector stays 0, with gradient 0."""
    x = widen(x)
    x = x / _peak(x)
    squares = jnp.sum(x * x, axis=-1, keepdims=True)
    return x * jnp.where(squares == 0, 0, jax.lax.rsqrt(jnp.where(squares == 0, 1, squares)))


def _peak(x: Float[Array, "*b d"]) -> Float[Array, "*b 1"]:
    """Returns the largest size of an entry: of `x` divided by it, no square overflows."""
    peak = jax.lax.stop_gradient(jnp.max(jnp.abs(x), axis=-1, keepdims=True))
    return jnp.where(peak > 0, peak, 1)
