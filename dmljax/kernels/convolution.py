"""Convolution that is quick on CPUs, with its gradients.

Three taps over the rows of a map, with stride 1 and many channels, are filtered minimally: half the
products of sums of rows. Of the rest, XLA computes the gradient of a kernel on the CPU as a
convolution with a window as large as the map, at a tenth of the rate of its matrix products, and
that of a strided map by spreading it out with zeros. Here the same sums are products of patches, a
few rows of the map at a time so that patches stay in the cache, and the gradient of a strided map
is one dense convolution per residue of the stride. Nothing is left out: results differ from XLA's
by rounding, of about 1e-6 of the largest. Other platforms, other types than float32 and grouped
convolutions keep XLA's own way. Like those of max pooling and batch norm here, the gradients are
reverse-mode alone: `jax.jvp` and `jacfwd` do not go through.

By default XLA gives convolutions on CPUs to YNNPACK. Its own kernels are up to twice as fast, and
then kernels larger than 1x1 have XLA's gradient, of a map that is turned around here: XLA takes
twice as long for that. `dmljax.main` runs so, by
`XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type=-individual_convolution`.
"""

from __future__ import annotations

import functools
import operator
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
        return _conv(x, kernel, strides, (padding, padding))
    return _plain(x, kernel, strides, (padding, padding), groups)


def _plain(x, kernel, strides, padding, groups=1):
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        window_strides=(strides, strides),
        padding=[(p, p) for p in padding],
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _conv(x, kernel, strides, padding):
    usual = functools.partial(_plain, strides=strides, padding=padding)
    if not _filters(x.shape, kernel.shape, strides, padding):
        return usual(x, kernel)
    on_cpu = functools.partial(_filtered, padding=padding)
    return jax.lax.platform_dependent(x, kernel, cpu=on_cpu, default=usual)


def _forward(x, kernel, strides, padding):
    return _conv(x, kernel, strides, padding), (x, kernel)


def _backward(strides, padding, residual, g):
    def usual(x, kernel, g):
        return jax.vjp(lambda x, k: _plain(x, k, strides, padding), x, kernel)[1](g)

    def on_cpu(x, kernel, g):
        if _filters(x.shape, kernel.shape, strides, padding):
            return _filtered_gradients(x, kernel, g, padding)
        own = _kernel_gradient(x, kernel.shape, g, strides, padding)
        return _map_gradient(x.shape, kernel, g, strides, padding), own

    return jax.lax.platform_dependent(*residual, g, cpu=on_cpu, default=usual)


_conv.defvjp(_forward, _backward)


# --- minimal filtering --------------------------------------------------------------------------

# F(4, 3) of Lavin and Gray, Fast algorithms for convolutional neural networks, CVPR 2016, section
# 4.3 (https://arxiv.org/abs/1509.09308), after Winograd: four outputs of three taps by six products
# instead of twelve, outputs = _OUTPUTS @ ((_TAPS @ taps) * (_INPUTS @ inputs)). Here an input is a
# row of the map, and a product is a convolution along it.
_INPUTS = (
    (4, 0, -5, 0, 1, 0),
    (0, -4, -4, 1, 1, 0),
    (0, 4, -4, -1, 1, 0),
    (0, -2, -1, 2, 1, 0),
    (0, 2, -1, -2, 1, 0),
    (0, 4, 0, -5, 0, 1),
)
_TAPS = (
    (1 / 4, 0, 0),
    (-1 / 6, -1 / 6, -1 / 6),
    (-1 / 6, 1 / 6, -1 / 6),
    (1 / 24, 1 / 12, 1 / 6),
    (1 / 24, -1 / 12, 1 / 6),
    (0, 0, 1),
)
_OUTPUTS = (
    (1, 1, 1, 1, 1, 0),
    (0, 1, -1, 2, -2, 0),
    (0, 1, 1, 4, 4, 0),
    (0, 1, -1, 8, -8, 1),
)


def _filters(shape, kernel, strides, padding):
    """Whether filtering pays: sums of rows must be cheap beside their products."""
    rows = shape[1] + 2 * padding[0] - 2
    return kernel[0] == 3 and strides == 1 and min(kernel[2:]) >= 32 and rows >= 4


def _filtered(x, kernel, padding):
    rows = x.shape[1] + 2 * padding[0] - 2
    taps = _combined(_TAPS, kernel)
    # Zeros that are there from the start cost less than those a convolution puts around its rows.
    x = jnp.pad(x, ((0, 0), (0, 0), (padding[1], padding[1]), (0, 0)))
    parts = _combined(_INPUTS, _sixths(x, padding[0]))
    products = [_plain(p, k[None], 1, (0, 0)) for p, k in zip(parts, taps, strict=True)]
    return _joined(_combined(_OUTPUTS, products))[:, :rows]


def _filtered_gradients(x, kernel, g, padding):
    """The same with every matrix transposed."""
    rows, columns = padding
    _, width, i, o = kernel.shape
    taps = _combined(_TAPS, kernel)
    g = jnp.pad(g, ((0, 0), (0, -g.shape[1] % 4), (0, 0), (0, 0)))
    backs = _combined(_transposed(_OUTPUTS), [g[:, r::4] for r in range(4)])
    shape = (x.shape[0], backs[0].shape[1], x.shape[2], i)
    products = [
        _map_gradient(shape, k[None], back, 1, (0, columns))
        for k, back in zip(taps, backs, strict=True)
    ]
    # The last two of six rows are the first two of the next six.
    *four, fifth, sixth = _combined(_transposed(_INPUTS), products)
    four = [jnp.pad(row, ((0, 0), (0, 1), (0, 0), (0, 0))) for row in four]
    fifth, sixth = (jnp.pad(row, ((0, 0), (1, 0), (0, 0), (0, 0))) for row in (fifth, sixth))
    map_gradient = _joined([four[0] + fifth, four[1] + sixth, *four[2:]])

    own = _own_kernels()
    gradient_fn = _kernel_convolution if own else _kernel_products
    parts = _combined(_INPUTS, _sixths(_turned(x) if own else x, rows))
    kernels = [
        gradient_fn(part, (1, width, i, o), back, 1, (0, columns))[0]
        for part, back in zip(parts, backs, strict=True)
    ]
    kernel_gradient = jnp.stack(_combined(_transposed(_TAPS), kernels))
    return map_gradient[:, rows : rows + x.shape[1]], kernel_gradient


def _combined(matrix, parts):
    """`matrix @ parts`, of arrays. What is zero costs nothing."""
    return [
        functools.reduce(operator.add, [c * p for c, p in zip(row, parts, strict=True) if c])
        for row in matrix
    ]


def _transposed(matrix):
    return tuple(zip(*matrix, strict=True))


def _sixths(x, padding):
    """Of every six rows of padded `x`, from rows 0, 4, 8, ...: the first ones, the second, ..."""
    rows = x.shape[1] + 2 * padding - 2
    tiles = -(-rows // 4)
    x = jnp.pad(x, ((0, 0), (padding, padding + 4 * tiles - rows), (0, 0), (0, 0)))
    return [x[:, r : r + 4 * tiles - 3 : 4] for r in range(6)]


def _joined(fourths):
    """The map of these rows 0, 4, 8, ...; 1, 5, 9, ...; and so on."""
    b, tiles, *rest = fourths[0].shape
    return jnp.stack(fourths, axis=2).reshape(b, 4 * tiles, *rest)


# --- gradients of other convolutions ------------------------------------------------------------


def _own_kernels():
    """Whether XLA computes convolutions by its own kernels."""
    return "-individual_conv" in os.environ.get("XLA_FLAGS", "")


def _kernel_gradient(x, shape, g, strides, padding):
    if _own_kernels() and shape[:2] != (1, 1):
        return _kernel_convolution(_turned(x), shape, g, strides, padding)
    return _kernel_products(x, shape, g, strides, padding)


def _kernel_products(x, shape, g, strides, padding):
    """Sum over pixels of patch times gradient."""
    kh, kw, i, o = shape
    b, height, width, _ = g.shape
    x = jnp.pad(x, ((0, 0), *((p, p) for p in padding), (0, 0)))
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


def _kernel_convolution(turned, shape, g, strides, padding):
    """The same sum as XLA's convolution of the map, turned, by its gradient, images as channels."""
    spans = [strides * (n - 1) + 1 for n in g.shape[1:3]]
    around = [
        (p, taps + span - size - p - 1)
        for p, taps, span, size in zip(padding, shape[:2], spans, turned.shape[1:3], strict=True)
    ]
    total = jax.lax.conv_general_dilated(
        turned,
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
            n, r = divmod(first + padding[axis], strides)
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
