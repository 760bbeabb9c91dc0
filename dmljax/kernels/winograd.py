"""Winograd's minimal filtering: a 3-row convolution with half the products.

F(4, 3) of Lavin and Gray, "Fast algorithms for convolutional neural networks", CVPR 2016, section
4.3 (https://arxiv.org/abs/1509.09308). Four outputs of three taps take six products
instead of twelve:

    outputs = OUTPUTS @ ((TAPS @ taps) * (INPUTS @ inputs))

Here an input is a row of the feature map, a tap is a row of the kernel, and a product is a
convolution along the row. The gradients use the transposed matrices.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dmljax.kernels.gradients import batch_last, input_gradient, kernel_gradient_of_batch_last

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


def is_faster(
    shape: Sequence[Any], kernel_shape: Sequence[int], strides: int, padding: int
) -> bool:
    """Returns whether this form is possible and faster: sums of rows must be cheap next to the
    products.

    The batch in `shape` may be symbolic.
    """
    rows = shape[1] + 2 * padding - 2
    return kernel_shape[0] == 3 and strides == 1 and min(kernel_shape[2:]) >= 32 and rows >= 4


def conv(x: jax.Array, kernel: jax.Array, *, padding: int) -> jax.Array:
    """Convolves `x [b h w i]` with `kernel [3 kw i o]` at stride 1."""
    rows = x.shape[1] + 2 * padding - 2
    taps = _combine(_TAPS, kernel)
    # Padding the columns once is cheaper than letting each convolution pad its rows.
    x = jnp.pad(x, ((0, 0), (0, 0), (padding, padding), (0, 0)))
    inputs = _combine(_INPUTS, _split_rows(x, padding))
    products = [
        jax.lax.conv_general_dilated(
            row, tap[None], (1, 1), [(0, 0)] * 2, dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        for row, tap in zip(inputs, taps, strict=True)
    ]
    return _interleave_rows(_combine(_OUTPUTS, products))[:, :rows]


def conv_gradients(
    x: jax.Array, kernel: jax.Array, g: jax.Array, *, padding: int
) -> tuple[jax.Array, jax.Array]:
    """Gradients of `conv` with respect to `x` and `kernel`, from the gradient `g` of its result."""
    _, width, i, o = kernel.shape
    taps = _combine(_TAPS, kernel)
    g = jnp.pad(g, ((0, 0), (0, -g.shape[1] % 4), (0, 0), (0, 0)))
    product_gradients = _combine(_transpose(_OUTPUTS), [g[:, r::4] for r in range(4)])

    shape = (x.shape[0], product_gradients[0].shape[1], x.shape[2], i)
    input_gradients = [
        input_gradient(shape, tap[None], gradient, 1, (0, padding))
        for tap, gradient in zip(taps, product_gradients, strict=True)
    ]
    # The last two of six rows are the first two of the next six.
    *four, fifth, sixth = _combine(_transpose(_INPUTS), input_gradients)
    four = [jnp.pad(row, ((0, 0), (0, 1), (0, 0), (0, 0))) for row in four]
    fifth, sixth = (jnp.pad(row, ((0, 0), (1, 0), (0, 0), (0, 0))) for row in (fifth, sixth))
    x_gradient = _interleave_rows([four[0] + fifth, four[1] + sixth, *four[2:]])

    inputs = _combine(_INPUTS, _split_rows(batch_last(x), padding))
    tap_gradients = [
        kernel_gradient_of_batch_last(row, (1, width, i, o), gradient, 1, (0, padding))[0]
        for row, gradient in zip(inputs, product_gradients, strict=True)
    ]
    kernel_gradient = jnp.stack(_combine(_transpose(_TAPS), tap_gradients))
    return x_gradient[:, padding : padding + x.shape[1]], kernel_gradient


def _combine(matrix, arrays):
    """Computes `matrix @ arrays`, skipping the zeros of the matrix."""
    return [
        functools.reduce(operator.add, [c * a for c, a in zip(row, arrays, strict=True) if c])
        for row in matrix
    ]


def _transpose(matrix):
    return tuple(zip(*matrix, strict=True))


def _split_rows(x, padding):
    """Splits `x`, padded above and below, into six arrays: array r holds the rows r, r + 4, r + 8,
    ...
    """
    rows = x.shape[1] + 2 * padding - 2
    tiles = -(-rows // 4)
    x = jnp.pad(x, ((0, 0), (padding, padding + 4 * tiles - rows), (0, 0), (0, 0)))
    return [x[:, r : r + 4 * tiles - 3 : 4] for r in range(6)]


def _interleave_rows(fourths):
    """Joins four arrays to one feature map: array r holds its rows r, r + 4, r + 8, ..."""
    b, tiles, *columns = fourths[0].shape
    return jnp.stack(fourths, axis=2).reshape(b, 4 * tiles, *columns)
