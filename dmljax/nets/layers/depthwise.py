"""Depthwise convolution by shifted products, with gradients.

On CPUs XLA takes tens of times as long for a convolution with one group per channel. The sum here
has one term per element of the kernels: the shifted map times this element, channel by channel. A
few images are computed at a time, so that their maps stay in the cache.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Float

from dmljax.nets.layers.gradients import spread
from dmljax.nets.layers.impl import choose
from dmljax.ops import Array

_CHUNK_NUMBERS = 1 << 18  # of the input that are computed at a time
_SUMMED_ROWS = 14  # whose products one loop adds, while the sum stays in a register


def is_depthwise(channels: int, kernel_shape: tuple[int, ...], groups: int) -> bool:
    """Returns whether every channel is convolved with its own kernel and gives one channel."""
    return groups == channels == kernel_shape[3] and kernel_shape[2] == 1


def xla_conv(
    x: Float[Array, "b h w i"],
    kernel: Float[Array, "kh kw j o"],
    *,
    strides: int = 1,
    padding: int = 0,
    groups: int = 1,
) -> Float[jax.Array, "b y x o"]:
    """Computes XLA's convolution, with XLA's gradients."""
    return jax.lax.conv_general_dilated(
        jnp.asarray(x),
        jnp.asarray(kernel),
        window_strides=(strides, strides),
        padding=[(padding, padding)] * 2,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


def clip(x: Float[Array, "*s"], limits: tuple[float, float] | None) -> Float[jax.Array, "*s"]:
    """Clips `x` to `limits`. At a limit the gradient is 0, as in PyTorch's ReLU6."""
    if limits is None:
        return jnp.asarray(x)
    return jnp.where(_is_inside(x, limits), x, jax.lax.stop_gradient(jnp.clip(x, *limits)))


def _is_inside(x, limits):
    return (x > limits[0]) & (x < limits[1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def depthwise_conv(x, kernel, bias, limits, strides, padding, impl):
    """Convolves every channel with its kernel, adds `bias [c]` and clips to `limits`.

    The gradient needs only the result, so the map before the clipping is not kept.
    """

    def finish_fn(y):
        return clip(y if bias is None else y + bias.reshape(1, 1, 1, -1), limits)

    options = {"strides": strides, "padding": padding}
    cpu_fn = functools.partial(_forward_form, finish_fn=finish_fn, **options)

    def xla_fn(x, kernel):
        return finish_fn(xla_conv(x, kernel, groups=x.shape[3], **options))

    return choose(impl, cpu_fn=cpu_fn, xla_fn=xla_fn)(x, kernel)


def _conv_forward(x, kernel, bias, *options):
    y = depthwise_conv(x, kernel, bias, *options)
    return y, (x, kernel, bias, y)


def _conv_backward(limits, strides, padding, impl, residual, g):
    options = {"strides": strides, "padding": padding}

    def start_fn(g, y):
        return g if limits is None else jnp.where(_is_inside(y, limits), g, 0)

    def xla_fn(x, kernel, g, y):
        g = start_fn(g, y)
        forward = functools.partial(xla_conv, groups=x.shape[3], **options)
        return *jax.vjp(forward, x, kernel)[1](g), jnp.sum(g, axis=(0, 1, 2))

    x, kernel, bias, y = residual
    cpu_fn = functools.partial(_gradients, start_fn=start_fn, **options)
    of_x, of_kernel, of_bias = choose(impl, cpu_fn=cpu_fn, xla_fn=xla_fn)(x, kernel, g, y)
    return of_x, of_kernel, None if bias is None else of_bias


depthwise_conv.defvjp(_conv_forward, _conv_backward)


def _forward_form(
    x: Float[Array, "b h w c"],
    kernel: Float[Array, "kh kw 1 c"],
    *,
    strides: int,
    padding: int,
    finish_fn: Callable,
) -> Float[jax.Array, "b y x c"]:
    """Convolves every channel with its kernel, then applies `finish_fn`, chunk by chunk."""

    def conv_chunk(x):
        rows, columns = _size(x.shape, kernel.shape, strides, padding)
        taps = _taps(_padded(x, padding), kernel.shape, strides, rows, columns)
        return finish_fn(_sum(tap * kernel[i, j, 0].reshape(1, 1, 1, -1) for i, j, tap in taps))

    return _in_chunks(conv_chunk, x)


def _gradients(
    x: Float[Array, "b h w c"],
    kernel: Float[Array, "kh kw 1 c"],
    g: Float[Array, "b y x c"],
    y: Float[Array, "b y x c"],
    *,
    strides: int,
    padding: int,
    start_fn: Callable,
) -> tuple[Float[jax.Array, "b h w c"], Float[jax.Array, "kh kw 1 c"], Float[jax.Array, " c"]]:
    """Computes the gradients of the input, of the kernel and of a bias along start_fn(g, y)."""

    def gradients_of_chunk(x, g, y):
        g = start_fn(g, y)
        padded = _padded(x, padding)
        # One more row makes XLA keep the chunk in memory instead of computing it in every sum.
        kept = jnp.pad(g, ((0, 0), (0, 1), (0, 0), (0, 0)))
        rows, columns = g.shape[1:3]
        step = next(n for n in range(min(rows, _SUMMED_ROWS), 0, -1) if rows % n == 0)

        def kernel_gradient(i, j):
            """Sums the products of `step` rows first, so that there are few reductions of short
            rows.
            """

            def product(row):
                top = strides * row + i
                last = top + strides * (rows - step), j + strides * (columns - 1)
                limits = (x.shape[0], last[0] + 1, last[1] + 1, x.shape[3])
                spans = (1, strides * step, strides, 1)
                tap = jax.lax.slice(padded, (0, top, j, 0), limits, spans)
                limits = (x.shape[0], row + rows - step + 1, columns, x.shape[3])
                return tap * jax.lax.slice(kept, (0, row, 0, 0), limits, (1, step, 1, 1))

            return jnp.sum(_sum(map(product, range(step))), axis=(0, 1, 2))

        taps = [(i, j) for i in range(kernel.shape[0]) for j in range(kernel.shape[1])]
        sums = [kernel_gradient(i, j) for i, j in taps]
        sums.append(jnp.sum(g, axis=(0, 1, 2)))

        def product(i, j, g):
            return g * kernel[i, j, 0].reshape(1, 1, 1, -1)

        sides = [(padding, padding)] * 2
        input_gradient = spread(x.shape, kernel.shape, product, strides, sides, g)
        return input_gradient, jnp.stack(sums)[None]

    input_gradient, sums = _in_chunks(gradients_of_chunk, x, g, y)
    sums = sums.sum(axis=0)
    return input_gradient, sums[:-1].reshape(kernel.shape), sums[-1]


def _padded(x, padding):
    return jnp.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0)))


def _taps(x, kernel_shape, strides, rows, columns):
    """Yields (i, j, the pixels that element i, j of the kernel multiplies) for all elements."""
    for i in range(kernel_shape[0]):
        for j in range(kernel_shape[1]):
            end = i + strides * (rows - 1) + 1, j + strides * (columns - 1) + 1
            limits = (x.shape[0], *end, x.shape[3])
            yield i, j, jax.lax.slice(x, (0, i, j, 0), limits, (1, strides, strides, 1))


def _size(shape, kernel_shape, strides, padding):
    return [
        (n + 2 * padding - k) // strides + 1
        for n, k in zip(shape[1:3], kernel_shape[:2], strict=True)
    ]


def _sum(terms):
    return functools.reduce(jnp.add, terms)


def _in_chunks(fn: Callable, x: Array, *others: Array):
    """Computes fn(x, *others) in chunks of images; results are joined along their first axis."""
    images = x.shape[0]
    if isinstance(images, int):
        limit = max(1, _CHUNK_NUMBERS // max(1, math.prod(x.shape[1:])))
        chunk = next(n for n in range(min(limit, images), 0, -1) if images % n == 0)
    else:  # the program is for batches of any size
        chunk = 1
    if chunk == images:
        return fn(x, *others)
    chunks = tuple(a.reshape(images // chunk, chunk, *a.shape[1:]) for a in (x, *others))
    results = jax.lax.map(lambda arrays: fn(*arrays), chunks)
    return jax.tree.map(lambda a: a.reshape(a.shape[0] * a.shape[1], *a.shape[2:]), results)
