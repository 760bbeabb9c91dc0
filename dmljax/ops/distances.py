"""Distances between rows, `f(x [b d], y [n d]) -> [b n]`: the smaller, the more alike.

`y is x` (the same object) means that a batch is compared with itself: a row is then normalized
once, and its Euclidean distance to itself is exactly 0.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Float

from dmljax.ops import numerics
from dmljax.ops.loops import next_true, vary, while_true
from dmljax.ops.numerics import matmul, normalize, sqrt, widen
from dmljax.ops.types import Array, DistanceFn

__all__ = [
    "cosine",
    "cosine_similarity",
    "dot",
    "euclidean",
    "snr",
    "squared_euclidean",
    "unit",
    "unit_euclidean",
]


def squared_euclidean(x: Float[Array, "b d"], y: Float[Array, "n d"]) -> Float[Array, "b n"]:
    """Computes |x - y|^2, with value and gradient correct to rounding, for close pairs too.

    The usual form |x|^2 + |y|^2 - 2 x.y loses every digit of pairs that are closer than the
    rounding error of their norms, and rows of a trained class are that close. Close pairs are few,
    so they are subtracted one by one; all other pairs come from the matrix product.
    """
    within_batch = y is x
    x = widen(x)
    if within_batch:
        return _squared(x, x, True)
    return _squared(*vary((x, widen(y))), False)


def euclidean(
    x: Float[Array, "b d"], y: Float[Array, "n d"], *, p: float = 2, power: float = 1
) -> Float[Array, "b n"]:
    """Computes |x - y|_p ^ power, with gradient 0 at equal rows.

    Args:
        p: The norm: 2 is the Euclidean distance, 1 the sum of absolute differences. Any `p` but 2
            loops over the dimensions, so that memory stays O(b n).
        power: Exponent of the distance.
    """
    if p == 2:
        squares = squared_euclidean(x, y)
        return squares if power == 2 else numerics.power(sqrt(squares), power)

    return numerics.power(_sum_of_powers(widen(x), widen(y), p), power / p)


@functools.partial(jax.jit, static_argnums=2)
def _sum_of_powers(x, y, p):
    @jax.checkpoint
    def add(total, columns):
        gap = columns[0][:, None] - columns[1][None, :]
        return total + numerics.power(jnp.where(gap == 0, 0, jnp.abs(gap)), p), None

    zeros = jnp.zeros((len(x), len(y)), jnp.result_type(x, y))
    return jax.lax.scan(add, vary(zeros, x, y), (x.T, y.T))[0]


def cosine_similarity(x: Float[Array, "b d"], y: Float[Array, "n d"]) -> Float[Array, "b n"]:
    """Computes cos(x, y), from -1 to 1: larger means more alike. It is 0 for zero vectors."""
    unit_x = normalize(x)
    return matmul(unit_x, (unit_x if y is x else normalize(y)).T)


def cosine(x: Float[Array, "b d"], y: Float[Array, "n d"]) -> Float[Array, "b n"]:
    """Computes 1 - cos(x, y), from 0 to 2."""
    return 1 - cosine_similarity(x, y)


def dot(x: Float[Array, "b d"], y: Float[Array, "n d"]) -> Float[Array, "b n"]:
    """Computes -x.y: the dot product is negated, so that smaller means more alike."""
    return -matmul(widen(x), widen(y).T)


def snr(x: Float[Array, "b d"], y: Float[Array, "n d"]) -> Float[Array, "b n"]:
    """Computes var(x - y) / var(x), the inverse signal-to-noise ratio of anchor x, reference y.

    Variances are over the dimensions of a row. An anchor without variance has distance 0 to all.

    Reference: Yuan et al., Signal-to-Noise Ratio: A Robust Distance Metric for Deep Metric
    Learning, CVPR 2019, arXiv:1904.02616.
    """
    within_batch = y is x
    x = widen(x)
    x = x - jnp.mean(x, axis=1, keepdims=True)
    signal = jnp.sum(x * x, axis=1, keepdims=True)
    y = x if within_batch else widen(y) - jnp.mean(widen(y), axis=1, keepdims=True)
    has_signal = signal != 0
    noise = squared_euclidean(x, y)
    return jnp.where(has_signal, noise / jnp.where(has_signal, signal, 1), 0)


def unit(distance_fn: DistanceFn) -> DistanceFn:
    """Returns a function that normalizes its rows and then measures them by `distance_fn`."""

    @functools.wraps(distance_fn)
    def on_unit_vectors(x, y):
        unit_x = normalize(x)
        return distance_fn(unit_x, unit_x if y is x else normalize(y))

    return on_unit_vectors


def unit_euclidean(x: Float[Array, "b d"], y: Float[Array, "n d"]) -> Float[Array, "b n"]:
    """Computes | x/|x| - y/|y| |, from 0 to 2. Every miner reads it; most losses default to it.

    With s the cosine, it is sqrt(2 - 2 s).
    """
    return unit(euclidean)(x, y)


# Below this share of the squared norms, the product form has lost seven of its bits.
_CLOSE = 2.0**-7


def _shifted(x, y):
    """Subtracts the mean of `y`. Distances stay; norms shrink to the spread of the data."""
    shift = jnp.mean(y, axis=0, keepdims=True)
    return x - shift, y - shift


def _products(x, y):
    """Computes |x - y|^2 by the product form, and marks the pairs that are too close for it."""
    x, y = _shifted(x, y)
    norms = jnp.sum(x * x, axis=1)[:, None] + jnp.sum(y * y, axis=1)[None, :]
    squares = norms - 2 * matmul(x, y.T)
    return jnp.maximum(squares, 0), squares <= _CLOSE * norms


@functools.partial(jax.jit, inline=True)  # compiled once, also outside of the caller's jax.jit
def _set_close(squares, close, x, y):
    """Computes |x - y|^2 of the close pairs from differences and writes it to `squares`."""
    rows = jnp.arange(len(x))

    def body(carry):
        column, squares = carry
        gap = x - y.at[column].get(mode="fill", fill_value=0)
        return next_true(close, column), squares.at[rows, column].set(
            jnp.sum(gap * gap, axis=1), mode="drop", unique_indices=True
        )

    return while_true(close, body, squares)


@functools.partial(jax.jit, inline=True)
def _add_close(gradients, weights, close, x, y):
    """Adds 2 weight (x - y) of the close pairs, and its negative, to `gradients` of x and y."""
    rows = jnp.arange(len(x))

    def body(carry):
        column, (dx, dy) = carry
        gap = x - y.at[column].get(mode="fill", fill_value=0)
        gap = gap * 2 * weights.at[rows, column].get(mode="fill", fill_value=0)[:, None]
        return next_true(close, column), (dx + gap, dy.at[column].add(-gap, mode="drop"))

    return while_true(close, body, gradients)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _squared(x, y, within_batch):
    return _squared_forward(x, y, within_batch)[0]


def _squared_forward(x, y, within_batch):
    squares, close = _products(x, y)
    if within_batch:
        diagonal = jnp.eye(len(x), dtype=bool)
        squares, close = jnp.where(diagonal, 0, squares), close & ~diagonal
    return _set_close(squares, close, x, y), (x, y, close)


def _squared_backward(within_batch, residual, weights):
    del within_batch
    x, y, close = residual
    far = jnp.where(close, 0, weights)
    shifted_x, shifted_y = _shifted(x, y)
    dx = 2 * (jnp.sum(far, axis=1)[:, None] * shifted_x - matmul(far, shifted_y))
    dy = 2 * (jnp.sum(far, axis=0)[:, None] * shifted_y - matmul(far.T, shifted_x))
    return _add_close((dx, dy), weights, close, x, y)


_squared.defvjp(_squared_forward, _squared_backward)
