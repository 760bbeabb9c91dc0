"""Reductions `f(entries, where) -> (total, count)`; `reduce` divides once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from dmljax.ops.types import Array, ReduceFn

__all__ = [
    "divide",
    "mean",
    "mean_of_active",
    "reduce",
    "sum",
    "threshold",
    "weighted",
]


def reduce(reduce_fn: ReduceFn | None, entries: Array, where: Bool[Array, "..."]) -> jax.Array:
    """total / count, 0 where nothing counts; without `reduce_fn` the entries, 0 where masked."""
    if reduce_fn is None:
        return jnp.where(where, entries, 0)
    return divide(*reduce_fn(entries, where))


def divide(total: Array, count: Array) -> jax.Array:
    """total / count, and `total` itself where the count is 0."""
    return total / jnp.where(count > 0, count, 1)


def mean(entries: Array, where: Array) -> tuple[Array, Array]:
    """The mean over all entries that count."""
    return jnp.sum(entries, where=where), jnp.sum(where, dtype=entries.dtype)


def sum(entries: Array, where: Array) -> tuple[Array, Array]:
    """The sum over all entries that count. A count of 0 says: do not divide."""
    return jnp.sum(entries, where=where), jnp.zeros((), entries.dtype)


def mean_of_active(entries: Array, where: Array) -> tuple[Array, Array]:
    """The mean over the entries above 0, so that solved pairs do not dilute the gradient."""
    return mean(entries, where & ~(entries <= 0))  # NaN passes


def threshold(low: float = -np.inf, high: float = np.inf) -> ReduceFn:
    """The mean over the entries strictly between `low` and `high`."""
    return lambda entries, where: mean(entries, where & ~(entries <= low) & ~(entries >= high))


def weighted(weights: Float[Array, "b"], reduce_fn: ReduceFn = mean) -> ReduceFn:
    """`reduce_fn` of entries times their anchor's weight; class weights are `weights[labels]`."""

    def weigh(entries, where):
        scale = jnp.reshape(weights, (-1,) + (1,) * (entries.ndim - 1))
        return reduce_fn(entries * scale.astype(entries.dtype), where)

    return weigh
