"""Max pooling with a gradient that is fast on CPUs, and deterministic on GPUs.

XLA's gradient of max pooling takes a twelfth of a ResNet-50's training step on a CPU. On a GPU it
adds in no fixed order, and is refused where `runtime.deterministic` is set. The other form keeps
which of a window's pixels was the largest; the gradient of the pixels with one residue of the
stride is then a sum over the windows' pixels that reach them. Of equal pixels the first one gets
the gradient, as in PyTorch and XLA.
"""

import functools
import itertools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float

from dmljax.nets.layers.impl import check, choose, is_portable
from dmljax.ops import Array

_Paddings = tuple[tuple[int, int], tuple[int, int]]
_MAX_SIZE = 16  # the position in a window is stored in 8 bits


def max_pool(
    x: Float[Array, "b h w c"], size: int, *, strides: int, padding: _Paddings, impl: str = "auto"
) -> Float[jax.Array, "b y x c"]:
    """Takes the maximum of each window of `size` x `size` pixels, with this padding before and
    after.

    `nets.layers.impl` explains `impl`. With "auto", CPUs take XLA's form at stride 1: in the other
    one XLA would recompute the argmax for every pixel of the gradient.
    """
    check(impl)
    if impl == "xla" or size > _MAX_SIZE:
        return xla_max_pool(x, size, strides=strides, padding=padding)
    return _max_pool(x, size, strides, padding, impl)


def xla_max_pool(
    x: Float[Array, "b h w c"], size: int, *, strides: int, padding: _Paddings
) -> Float[jax.Array, "b y x c"]:
    """Computes the plain form: XLA's max pooling, with XLA's gradient."""
    sides: _Paddings | str = padding
    if is_portable():  # ONNX exporters drop the padding of max pooling without a word
        x = jnp.pad(x, ((0, 0), *padding, (0, 0)), constant_values=-jnp.inf)
        sides = "VALID"
    window, steps = (size, size), (strides, strides)
    # By keyword: `jax2onnx` replaces the function by one that takes no other positional argument.
    return nn.max_pool(x, window_shape=window, strides=steps, padding=sides)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _max_pool(x, size, strides, padding, impl):
    def own_fn(x):
        return _max_and_argmax(x, size, strides, padding)[0]

    xla_fn = functools.partial(xla_max_pool, size=size, strides=strides, padding=padding)
    return choose(impl, cpu_fn=_cpu_fn(impl, strides, own_fn, xla_fn), xla_fn=xla_fn)(x)


def _forward(x, size, strides, padding, impl):
    def own_fn(x):
        return _max_and_argmax(x, size, strides, padding)

    def xla_fn(x):
        y = xla_max_pool(x, size, strides=strides, padding=padding)
        return y, jnp.zeros(y.shape, jnp.uint8)

    cpu_fn = _cpu_fn(impl, strides, own_fn, xla_fn)
    y, argmax = choose(impl, cpu_fn=cpu_fn, xla_fn=xla_fn, gpu_fn=own_fn)(x)
    return y, (x, argmax)


def _backward(size, strides, padding, impl, residual, g):
    def own_fn(x, argmax, g):
        return _spread(x.shape, argmax, g, size, strides, padding)

    def xla_fn(x, argmax, g):
        forward = functools.partial(xla_max_pool, size=size, strides=strides, padding=padding)
        return jax.vjp(forward, x)[1](g)[0]

    cpu_fn = _cpu_fn(impl, strides, own_fn, xla_fn)
    return (choose(impl, cpu_fn=cpu_fn, xla_fn=xla_fn, gpu_fn=own_fn)(*residual, g),)


_max_pool.defvjp(_forward, _backward)


def _cpu_fn(impl: str, strides: int, own_fn: Callable, xla_fn: Callable) -> Callable:
    return xla_fn if (impl, strides) == ("auto", 1) else own_fn


def _max_and_argmax(x, size, strides, padding):
    """Returns the maximum of each window, and its position in the window, counted row by row."""
    x = jnp.pad(x, ((0, 0), *padding, (0, 0)), constant_values=-jnp.inf)
    spans = [(n - size) // strides * strides + 1 for n in x.shape[1:3]]
    largest = argmax = None
    for k, (r, c) in enumerate(itertools.product(range(size), repeat=2)):
        tap = x[:, r : r + spans[0] : strides, c : c + spans[1] : strides]
        if largest is None:
            largest, argmax = tap, jnp.zeros(tap.shape, jnp.uint8)
            continue
        larger = (tap > largest) | jnp.isnan(tap)
        largest = jnp.where(larger, tap, largest)
        argmax = jnp.where(larger, jnp.uint8(k), argmax)
    return largest, argmax


def _spread(shape, argmax, g, size, strides, padding):
    """Places each window's gradient at the pixel that was its maximum.

    Pixel strides m + r of the padded map is pixel strides a + r of window m - a.
    """
    b, h, w, c = shape
    counts = [-(-(n + sum(pad)) // strides) for n, pad in zip((h, w), padding, strict=True)]

    def pixels(row, column):
        total = jnp.zeros((b, *counts, c), g.dtype)
        for r, q in itertools.product(range(row, size, strides), range(column, size, strides)):
            hit = jnp.where(argmax == r * size + q, g, jnp.zeros((), g.dtype))
            before = (r // strides, q // strides)
            pads = [(a, n - a - m) for a, n, m in zip(before, counts, g.shape[1:3], strict=True)]
            total += jnp.pad(hit, ((0, 0), *pads, (0, 0)))
        return total

    rows = [
        jnp.stack([pixels(y, x) for x in range(strides)], axis=3).reshape(b, counts[0], -1, c)
        for y in range(strides)
    ]
    spread = jnp.stack(rows, axis=2).reshape(b, counts[0] * strides, -1, c)
    (top, _), (left, _) = padding
    return spread[:, top : top + h, left : left + w]
