"""Distances between rows: `f(x [b d], y [n d]) -> [b n]`, smaller for what is more alike."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Float

from dmljax.ops.loops import next_true, while_true
from dmljax.ops.numerics import matmul, normalize, sqrt, widen
from dmljax.ops.types import Array, DistanceFn

__all__ = [
    "cosine",
    "dot",
    "euclidean",
    "snr",
    "squared_euclidean",
    "unit",
    "unit_euclidean",
]


def squared_euclidean(x: Float[Array, "b d"], y: Float[Array, "n d"]) -> Float[Array, "b n"]:
    """|x - y|^2, exact to rounding for near pairs too, in value and gradient.

    The matrix-product form |x|^2 + |y|^2 - 2 xy loses every digit once points are closer than the
    rounding of their norms, as they are in trained classes. So close pairs, which are few, are
    taken one by one as differences, and all others come from the product.
    """
    own = y is x
    x = widen(x)
    return _squared(x, x if own else widen(y), own)


def euclidean(
    x: Float[Array, "b d"], y: Float[Array, "n d"], *, p: float = 2, power: float = 1
) -> Float[Array, "b n"]:
    """|x - y|_p ^ power. Other `p` than 2 go over the dimensions one by one, in O(b n) memory."""
    if p == 2:
        squares = squared_euclidean(x, y)
        return squares if power == 2 else _power(sqrt(squares), power)

    @jax.checkpoint
    def add(total, columns):
        gap = columns[0][:, None] - columns[1][None, :]
        return total + _power(jnp.where(gap == 0, 0, jnp.abs(gap)), p), None

    x, y = widen(x), widen(y)
    zeros = jnp.zeros((len(x), len(y)), jnp.result_type(x, y))
    total, _ = jax.lax.scan(add, zeros, (x.T, y.T))
    return _power(total, power / p)


def cosine(x: Float[Array, "b d"], y: Float[Array, "n d"]) -> Float[Array, "b n"]:
    """1 - cos(x, y)."""
    unit_x = normalize(x)
    return 1 - matmul(unit_x, (unit_x if y is x else normalize(y)).T)


def dot(x: Float[Array, "b d"], y: Float[Array, "n d"]) -> Float[Array, "b n"]:
    """-x.y, so that smaller is more alike."""
    return -matmul(widen(x), widen(y).T)


def snr(x: Float[Array, "b d"], y: Float[Array, "n d"]) -> Float[Array, "b n"]:
    """var(x - y) / var(x), unbiased: the inverse signal-to-noise ratio (Yuan et al., CVPR 2019)."""
    own = y is x
    x = widen(x)
    x = x - jnp.mean(x, axis=1, keepdims=True)
    signal = jnp.sum(x * x, axis=1, keepdims=True)
    y = x if own else widen(y) - jnp.mean(widen(y), axis=1, keepdims=True)
    # An anchor without variance carries no signal; its distances are 0 rather than infinite.
    some = signal != 0
    return jnp.where(some, squared_euclidean(x, y) / jnp.where(some, signal, 1), 0)


def unit(distance_fn: DistanceFn) -> DistanceFn:
    """The distance between unit vectors: `distance_fn` after `normalize`."""

    @functools.wraps(distance_fn)
    def on_unit_vectors(x, y):
        unit_x = normalize(x)
        return distance_fn(unit_x, unit_x if y is x else normalize(y))

    return on_unit_vectors


def unit_euclidean(x: Float[Array, "b d"], y: Float[Array, "n d"]) -> Float[Array, "b n"]:
    """|x/|x| - y/|y||: what miners read, and what a loss uses unless told otherwise."""
    return unit(euclidean)(x, y)


def _power(x: Array, power: float) -> jax.Array:
    if power == 1:
        return x
    some = ~(x <= 0)
    return jnp.where(some, jnp.where(some, x, 1) ** power, 0)


# Below this share of the squared norms the product form has lost seven of its bits.
_NEAR = 2.0**-7


def _shifted(x, y):
    """Both less the mean of y: distances stay, norms shrink to the spread of the data."""
    shift = jnp.mean(y, axis=0, keepdims=True)
    return x - shift, y - shift


def _products(x, y):
    """|x - y|^2 by products, and which pairs are too near for that."""
    x, y = _shifted(x, y)
    norms = jnp.sum(x * x, axis=1)[:, None] + jnp.sum(y * y, axis=1)[None, :]
    squares = norms - 2 * matmul(x, y.T)
    return jnp.maximum(squares, 0), squares <= _NEAR * norms


def _set_near(squares, near, x, y):
    rows = jnp.arange(len(x))

    def body(carry):
        column, squares = carry
        gap = x - y.at[column].get(mode="fill", fill_value=0)
        return next_true(near, column), squares.at[rows, column].set(
            jnp.sum(gap * gap, axis=1), mode="drop"
        )

    return while_true(near, body, squares)


def _add_near(gradients, weights, near, x, y):
    """Adds the near pairs' share, 2 w (x - y) and its opposite, to the gradients of x and y."""
    rows = jnp.arange(len(x))

    def body(carry):
        column, (dx, dy) = carry
        gap = x - y.at[column].get(mode="fill", fill_value=0)
        gap = gap * 2 * weights.at[rows, column].get(mode="fill", fill_value=0)[:, None]
        return next_true(near, column), (dx + gap, dy.at[column].add(-gap, mode="drop"))

    return while_true(near, body, gradients)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _squared(x, y, own):
    return _squared_forward(x, y, own)[0]


def _squared_forward(x, y, own):
    squares, near = _products(x, y)
    if own:
        diagonal = jnp.eye(len(x), dtype=bool)
        squares, near = jnp.where(diagonal, 0, squares), near & ~diagonal
    return _set_near(squares, near, x, y), (x, y, near)


def _squared_backward(own, residual, weights):
    del own
    x, y, near = residual
    far = jnp.where(near, 0, weights)
    shifted_x, shifted_y = _shifted(x, y)
    dx = 2 * (jnp.sum(far, axis=1)[:, None] * shifted_x - matmul(far, shifted_y))
    dy = 2 * (jnp.sum(far, axis=0)[:, None] * shifted_y - matmul(far.T, shifted_x))
    return _add_near((dx, dy), weights, near, x, y)


_squared.defvjp(_squared_forward, _squared_backward)
