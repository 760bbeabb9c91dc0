"""Gradients of a convolution as computations that XLA does fast on CPUs.

They are exact: the same sums as XLA's own gradients, in another order.
"""

import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from dmljax.ops import Array
from dmljax.ops.devices import over_devices


def kernel_gradient(
    x: jax.Array, shape: Sequence[int], g: jax.Array, strides: int, padding: int
) -> jax.Array:
    """Computes the gradient of a kernel of this shape from the gradient `g` of the result.

    It is the convolution of the feature map by `g`, in which the images take the place of channels.
    """
    if tuple(shape[:2]) == (1, 1):
        return _product_over_pixels(x, shape, g, strides, padding)
    x = _batch_last(x)  # [i h w b]
    spans = [strides * (n - 1) + 1 for n in g.shape[1:3]]
    sides = [
        (padding, taps + span - size - padding - 1)
        for taps, span, size in zip(shape[:2], spans, x.shape[1:3], strict=True)
    ]
    total = jax.lax.conv_general_dilated(
        x,
        g,
        window_strides=(1, 1),
        padding=sides,
        rhs_dilation=(strides, strides),
        dimension_numbers=("NHWC", "IHWO", "NHWC"),
    )
    return jnp.moveaxis(total, 0, 2)


def _product_over_pixels(x, shape, g, strides, padding):
    """Computes the gradient of a 1x1 kernel as one matrix product over all pixels."""
    *_, i, o = shape
    x = jnp.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    rows, columns = (strides * (n - 1) + 1 for n in g.shape[1:3])
    pixels = over_devices(x[:, :rows:strides, :columns:strides].reshape(-1, i), batch=x.shape[0])
    g = over_devices(g.reshape(-1, o), batch=x.shape[0])
    # XLA transposes the first factor in memory, so the narrower one comes first.
    total = (g.T @ pixels).T if o < i else pixels.T @ g
    return total.reshape(tuple(shape))


def _batch_last(x: jax.Array) -> jax.Array:
    """Transposes `x [b h w i]` to `[i h w b]` in three steps that each stay in the cache.

    First whole pixels move, then images and channels change places within a pixel, then rows of
    images move. The loop keeps XLA from merging them into one transposition, which is far slower.
    """
    b, h, w, c = x.shape
    pixels = h * w
    turns = next((n for n in range(2, pixels + 1) if pixels % n == 0), 1)
    tiles = jnp.moveaxis(x, 0, 2).reshape(turns, -1, b, c)
    tiles = jax.lax.map(lambda tile: tile.swapaxes(1, 2), tiles)
    return jnp.moveaxis(tiles.reshape(h, w, c, b), 2, 0)


def input_gradient(
    shape: Sequence[int], kernel: jax.Array, g: jax.Array, strides: int, padding: int
) -> jax.Array:
    """Computes the gradient of an input `[b h w i]` of this shape: the transposed convolution.

    Pixel m of the input with m + padding = strides n + r is reached by the taps r, r + strides, ...
    of the kernel, from the outputs n, n - 1, ... So the pixels of each residue r are one dense
    convolution of `g`.
    """
    b, h, w, i = shape
    sizes = [-(-h // strides), -(-w // strides)]
    flipped = jnp.flip(kernel, (0, 1)).swapaxes(2, 3)

    def pixels(row, column):
        slices, sides = [], []
        for axis, first in enumerate((row, column)):
            n, r = divmod(first + padding, strides)
            taps = range(r, kernel.shape[axis], strides)
            if not taps:
                return jnp.zeros((b, *sizes, i), g.dtype)
            # Taps of the flipped kernel, from the last of `taps` to the first.
            start, stop = kernel.shape[axis] - 1 - taps[-1], kernel.shape[axis] - r
            slices.append(slice(start, stop, strides))
            sides.append((len(taps) - 1 - n, n + sizes[axis] - g.shape[1 + axis]))
        return jax.lax.conv_general_dilated(
            g,
            flipped[slices[0], slices[1]],
            window_strides=(1, 1),
            padding=sides,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )

    return interleaved(pixels, strides)[:, :h, :w]


def spread(
    shape: Sequence[int],
    taps: Sequence[int],
    term_fn: Callable,
    strides: int,
    padding: Sequence[tuple[int, int]],
    *maps: Array,
) -> jax.Array:
    """Sums what each window adds to the pixels of a map of this `shape`.

    `maps [b y x c]` have the numbers of the windows, and `term_fn(i, j, *maps)` is what tap i, j of
    each window adds. Row strides m + r of the padded map is row strides a + r of window m - a, and
    the same holds for columns.
    """
    counts = [-(-(n + sum(p)) // strides) for n, p in zip(shape[1:3], padding, strict=True)]
    last = [(n - 1) // strides for n in taps[:2]]
    missing = [max(0, n - m) for n, m in zip(counts, maps[0].shape[1:3], strict=True)]
    sides = ((0, 0), *zip(last, missing, strict=True), (0, 0))
    padded = [jnp.pad(x, sides) for x in maps]

    def pixels(r, q):
        total = jnp.zeros((shape[0], *counts, shape[3]), maps[0].dtype)
        for i, j in itertools.product(range(r, taps[0], strides), range(q, taps[1], strides)):
            top, left = last[0] - i // strides, last[1] - j // strides
            windows = (x[:, top : top + counts[0], left : left + counts[1]] for x in padded)
            total += term_fn(i, j, *windows)
        return total

    (top, _), (left, _) = padding
    return interleaved(pixels, strides)[:, top : top + shape[1], left : left + shape[2]]


def interleaved(pixels_fn: Callable, strides: int) -> jax.Array:
    """Joins maps `[b h w c]`: pixel (s m + r, s n + q) is pixel (m, n) of `pixels_fn(r, q)`, where
    s = `strides`.
    """
    if strides == 1:
        return pixels_fn(0, 0)
    rows = [jnp.stack([pixels_fn(r, q) for q in range(strides)], axis=3) for r in range(strides)]
    b, h, w, _, c = rows[0].shape
    return jnp.stack(rows, axis=2).reshape(b, h * strides, w * strides, c)
