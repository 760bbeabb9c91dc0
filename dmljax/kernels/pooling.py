"""The largest of each window, with a gradient that is fast on CPUs.

XLA computes the gradient of a maximum over windows on the CPU by carrying positions through it: a
twelfth of a ResNet-50's step. Here the maximum remembers which of the window's taps it came from,
and the gradient of the pixels with one residue of the stride is a sum over the taps that reach
them. The first of equals gets it, as in PyTorch and in XLA. Other platforms keep XLA's own.
"""

from __future__ import annotations

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float

from dmljax.ops import Array

__all__ = ["largest"]

_Sides = tuple[tuple[int, int], tuple[int, int]]


def largest(
    x: Float[Array, "b h w c"], size: int, *, strides: int, sides: _Sides
) -> Float[jax.Array, "b y x c"]:
    """Largest of each window of `size` x `size`; `sides` is the padding before and after."""
    # Windows at every pixel: the compiler would find their taps anew for each tap of a gradient.
    usual = strides == 1 or size > 16  # and taps have numbers of 8 bits
    return (_plain if usual else _largest)(x, size, strides, sides)


def _plain(x, size, strides, sides):
    return nn.max_pool(x, (size, size), (strides, strides), sides)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _largest(x, size, strides, sides):
    return _forward(x, size, strides, sides)[0]


def _forward(x, size, strides, sides):
    def own(x):
        return _found(x, size, strides, sides)

    def usual(x):
        y = _plain(x, size, strides, sides)
        return y, jnp.zeros(y.shape, jnp.uint8)

    y, taps = jax.lax.platform_dependent(x, cpu=own, default=usual)
    return y, (x, taps)


def _backward(size, strides, sides, residual, g):
    def own(x, taps, g):
        return _spread(x.shape, taps, g, size, strides, sides)

    def usual(x, taps, g):
        return jax.vjp(lambda x: _plain(x, size, strides, sides), x)[1](g)[0]

    return (jax.lax.platform_dependent(*residual, g, cpu=own, default=usual),)


_largest.defvjp(_forward, _backward)


def _found(x, size, strides, sides):
    """The largest of each window, and the number of its tap, row by row."""
    x = jnp.pad(x, ((0, 0), *sides, (0, 0)), constant_values=-jnp.inf)
    ends = [(n - size) // strides * strides + 1 for n in x.shape[1:3]]
    best = taps = None
    for k, (r, c) in enumerate(itertools.product(range(size), repeat=2)):
        tap = x[:, r : r + ends[0] : strides, c : c + ends[1] : strides]
        if best is None:
            best, taps = tap, jnp.zeros(tap.shape, jnp.uint8)
            continue
        better = (tap > best) | jnp.isnan(tap)
        best, taps = jnp.where(better, tap, best), jnp.where(better, jnp.uint8(k), taps)
    return best, taps


def _spread(shape, taps, g, size, strides, sides):
    """Each window's gradient at the pixel of its tap.

    Pixel strides m + r of the padded map is tap strides a + r of window m - a.
    """
    b, h, w, c = shape
    many = [-(-(n + sum(around)) // strides) for n, around in zip((h, w), sides, strict=True)]

    def pixels(row, column):
        total = jnp.zeros((b, *many, c), g.dtype)
        for r, q in itertools.product(range(row, size, strides), range(column, size, strides)):
            hit = jnp.where(taps == r * size + q, g, jnp.zeros((), g.dtype))
            before = (r // strides, q // strides)
            around = [(a, n - a - m) for a, n, m in zip(before, many, g.shape[1:3], strict=True)]
            total += jnp.pad(hit, ((0, 0), *around, (0, 0)))
        return total

    rows = [
        jnp.stack([pixels(y, x) for x in range(strides)], axis=3).reshape(b, many[0], -1, c)
        for y in range(strides)
    ]
    spread = jnp.stack(rows, axis=2).reshape(b, many[0] * strides, -1, c)
    (top, _), (left, _) = sides
    return spread[:, top : top + h, left : left + w]
