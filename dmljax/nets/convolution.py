"""Convolution with the gradients that XLA is slow at on CPUs written as matrix products.

XLA computes the gradient of a kernel on the CPU as a convolution with a window as large as the map,
at a tenth of the rate of its matrix products, and that of a strided map by spreading it out with
zeros. Here the same sums are products of patches, a few rows of the map at a time so that patches
stay in the cache, and the gradient of a strided map is one dense convolution per residue of the
stride. Everything is exact; only the order of summation differs. Other platforms, other types than
float32 and grouped convolutions keep XLA's own gradients. Like those of max pooling and batch norm
here, they are reverse-mode gradients alone: `jax.jvp` and `jacfwd` do not go through.

By default XLA gives convolutions on CPUs to YNNPACK. Its own kernels are up to twice as fast, and
then kernels larger than 1x1 have XLA's gradient, of a map that is turned around here: XLA takes
twice as long for that. `dmljax.main` runs so, by
`XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type=-individual_convolution`.
"""

from __future__ import annotations

import functools
import os

import jax
import jax.numpy as jnp
from jaxtyping import Float

from dmljax.ops import Array

__all__ = ["conv"]

_PATCHES = 1 << 19  # floats of the patches held at once: 2 MiB, the second-level cache


def conv(
    x: Float[Array, "b h w i"],
    kernel: Float[Array, "kh kw j o"],
    *,
    strides: int = 1,
    padding: int = 0,
    groups: int = 1,
) -> Float[jax.Array, "b y x o"]:
    """`kernel` over `x` with `padding` zeros on every side."""
    if groups == 1 and x.dtype == kernel.dtype == jnp.float32:
        return _conv(x, kernel, strides, padding)
    return _plain(x, kernel, strides, padding, groups)


def _plain(x, kernel, strides, padding, groups=1):
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        window_strides=(strides, strides),
        padding=((padding, padding), (padding, padding)),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _conv(x, kernel, strides, padding):
    return _plain(x, kernel, strides, padding)


def _forward(x, kernel, strides, padding):
    return _plain(x, kernel, strides, padding), (x, kernel)


def _backward(strides, padding, residual, g):
    def usual(x, kernel, g):
        return jax.vjp(lambda x, k: _plain(x, k, strides, padding), x, kernel)[1](g)

    def on_cpu(x, kernel, g):
        if kernel.shape[:2] != (1, 1) and "-individual_conv" in os.environ.get("XLA_FLAGS", ""):
            own = _kernel_convolution(x, kernel.shape, g, strides, padding)
        else:
            own = _kernel_products(x, kernel.shape, g, strides, padding)
        return _map_gradient(x.shape, kernel, g, strides, padding), own

    return jax.lax.platform_dependent(*residual, g, cpu=on_cpu, default=usual)


_conv.defvjp(_forward, _backward)


def _kernel_products(x, shape, g, strides, padding):
    """Sum over pixels of patch times gradient."""
    kh, kw, i, o = shape
    b, height, width, _ = g.shape
    x = jnp.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    # A 1x1 kernel needs no patches: one product does.
    rows = height if kh == kw == 1 else _rows(height, b * width * kh * kw * i)
    span = strides * (rows - 1) + 1

    # The compiler turns the first factor around in memory, so the narrower one comes first.
    narrow = o < kh * kw * i

    def product(part, back):
        taps = [
            part[:, r : r + span : strides, c : c + strides * (width - 1) + 1 : strides]
            for r in range(kh)
            for c in range(kw)
        ]
        patches = taps[0] if len(taps) == 1 else jnp.concatenate(taps, axis=3)
        patches, back = patches.reshape(-1, kh * kw * i), back.reshape(-1, o)
        return back.T @ patches if narrow else patches.T @ back

    def add(total, row):
        part = jax.lax.dynamic_slice_in_dim(x, row * strides, span + kh - 1, axis=1)
        back = jax.lax.dynamic_slice_in_dim(g, row, rows, axis=1)
        return total + product(part, back), None

    if rows == height:
        total = product(x, g)
    else:
        zeros = jnp.zeros((o, kh * kw * i) if narrow else (kh * kw * i, o), g.dtype)
        total, _ = jax.lax.scan(add, zeros, jnp.arange(0, height, rows))
    return (total.T if narrow else total).reshape(shape)


def _kernel_convolution(x, shape, g, strides, padding):
    """The same sum as XLA's convolution of the map by its gradient, with images as channels."""
    spans = [strides * (n - 1) + 1 for n in g.shape[1:3]]
    around = [
        (padding, taps + span - size - padding - 1)
        for taps, span, size in zip(shape[:2], spans, x.shape[1:3], strict=True)
    ]
    total = jax.lax.conv_general_dilated(
        _turned(x),
        g,
        window_strides=(1, 1),
        padding=around,
        rhs_dilation=(strides, strides),
        dimension_numbers=("NHWC", "IHWO", "NHWC"),
    )
    return jnp.moveaxis(total, 0, 2)


def _turned(x):
    """`x` as `[channels, height, width, images]`, by three moves that stay in the cache.

    Whole pixels move, then images and channels of a pixel change places, then rows of images move.
    The loop is there so that the compiler does not make one move of three, far slower.
    """
    b, h, w, c = x.shape
    pixels = h * w
    turns = next((n for n in range(2, pixels + 1) if pixels % n == 0), 1)
    tiles = jnp.moveaxis(x, 0, 2).reshape(turns, -1, b, c)
    tiles = jax.lax.map(lambda tile: tile.swapaxes(1, 2), tiles)
    return jnp.moveaxis(tiles.reshape(h, w, c, b), 2, 0)


def _rows(height: int, floats: int) -> int:
    """The most rows, dividing the height, whose patches of so many floats a row fit the cache."""
    fitting = [r for r in range(1, height + 1) if height % r == 0 and r * floats <= _PATCHES]
    return max(fitting, default=1)


def _map_gradient(shape, kernel, g, strides, padding):
    """The transposed convolution: of the pixels with one residue of the stride, a dense one each.

    Pixel m + padding = strides n + r is reached by the taps r, r + strides, ... of the kernel, from
    n, n - 1, ... of the gradient.
    """
    b, h, w, i = shape
    sides = [-(-h // strides), -(-w // strides)]
    flipped = jnp.flip(kernel, (0, 1)).swapaxes(2, 3)

    def pixels(row, column):
        parts, around = [], []
        for axis, first in enumerate((row, column)):
            n, r = divmod(first + padding, strides)
            taps = range(r, kernel.shape[axis], strides)
            if not taps:
                return jnp.zeros((b, *sides, i), g.dtype)
            # Taps of the flipped kernel, from the last of `taps` to the first.
            parts.append(slice(kernel.shape[axis] - 1 - taps[-1], kernel.shape[axis] - r, strides))
            around.append((len(taps) - 1 - n, n + sides[axis] - g.shape[1 + axis]))
        return jax.lax.conv_general_dilated(
            g,
            flipped[parts[0], parts[1]],
            window_strides=(1, 1),
            padding=around,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )

    if strides == 1:
        return pixels(0, 0)
    rows = [
        jnp.stack([pixels(y, x) for x in range(strides)], axis=3).reshape(b, sides[0], -1, i)
        for y in range(strides)
    ]
    return jnp.stack(rows, axis=2).reshape(b, sides[0] * strides, -1, i)[:, :h, :w]
