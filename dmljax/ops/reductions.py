"""From entries to one number: functions `(entries, where) -> (total, count)`, divided once.

The entries of a loss are its values for each anchor, pair or triplet; `where` marks those that
count. Because total and count are returned apart, a loss can add them up over rounds of a loop.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from dmljax.ops.types import Array, ReduceFn, check_function

__all__ = [
    "divide",
    "mean",
    "mean_of_active",
    "reduce",
    "sum",
    "threshold",
    "weighted",
]


def reduce(
    reduce_fn: ReduceFn | None, entries: Float[Array, "..."], where: Bool[Array, "..."]
) -> Array:
    """Computes the quotient total / count of `reduce_fn(entries, where)`; 0 if nothing counts.

    With `reduce_fn=None`, the entries themselves, 0 where they do not count.
    """
    if reduce_fn is None:
        return jnp.where(where, entries, 0)
    return divide(*total_and_count(reduce_fn, entries, where))


def total_and_count(reduce_fn: ReduceFn, entries: Array, where: Array) -> tuple[Array, Array]:
    """Calls `reduce_fn(entries, where)`. Raises unless it returns a pair, unlike `jnp.mean`."""
    check_function("reduce_fn", reduce_fn, "ops.mean")
    form = "a reduce_fn takes (entries, where) and returns (total, count), as ops.mean does"
    name = getattr(reduce_fn, "__qualname__", repr(reduce_fn))
    try:
        result = reduce_fn(entries, where)
    except TypeError as error:
        raise TypeError(f"{form}; {name} fails: {error}") from error
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise TypeError(f"{form}; {name} returns {type(result).__name__}")
    return result[0], result[1]


def divide(total: Array, count: Array) -> Array:
    """Computes total / count, or returns `total` where the count is 0."""
    return total / jnp.where(count > 0, count, 1)


def mean(entries: Float[Array, "..."], where: Bool[Array, "..."]) -> tuple[jax.Array, jax.Array]:
    """Returns total and count of the mean over all entries that count."""
    return jnp.sum(entries, where=where), jnp.sum(where, dtype=entries.dtype)


def sum(entries: Float[Array, "..."], where: Bool[Array, "..."]) -> tuple[jax.Array, jax.Array]:
    """Returns the sum over all entries that count, and a count of 0: `reduce` does not divide."""
    return jnp.sum(entries, where=where), jnp.zeros((), entries.dtype)


def mean_of_active(
    entries: Float[Array, "..."], where: Bool[Array, "..."]
) -> tuple[jax.Array, jax.Array]:
    """Returns total and count of the mean over the entries above 0.

    Pairs or triplets that the loss no longer changes then do not dilute the gradient of the others.
    A NaN counts, so that it stays visible.
    """
    return mean(entries, where & ~(entries <= 0))


def threshold(low: float = -np.inf, high: float = np.inf) -> ReduceFn:
    """Returns a reduction: the mean over the entries strictly between `low` and `high`."""
    return lambda entries, where: mean(entries, where & ~(entries <= low) & ~(entries >= high))


def weighted(weights: Float[Array, "b"], reduce_fn: ReduceFn = mean) -> ReduceFn:
    """Returns a reduction: `reduce_fn` of the entries times the weights of their anchors.

    Args:
        weights: One weight per anchor; for weights per class, `class_weights[labels]`. The rows of
            `proxy_anchor` are classes, so that it takes `class_weights` themselves.
        reduce_fn: What to do with the products. `mean` divides by the number of entries, not by the
            sum of weights.
    """

    def reduce_weighted(entries, where):
        size, rows = jnp.size(weights), jnp.shape(entries)[:1]
        if size != 1 and (size,) != rows:
            raise ValueError(
                f"ops.weighted has {size} weights, but this loss needs {rows[0] if rows else 1}: "
                "one for each anchor, or in proxy_anchor for each class"
            )
        scale = jnp.reshape(weights, (-1,) + (1,) * (entries.ndim - 1))
        return reduce_fn(entries * scale.astype(entries.dtype), where)

    return reduce_weighted
