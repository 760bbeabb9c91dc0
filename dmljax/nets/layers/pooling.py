"""Pooling over windows and over the whole feature map.

XLA's gradient of max pooling takes a twelfth of a ResNet-50's training step on a CPU. On a GPU it
adds in no fixed order, and is refused where `runtime.deterministic` is set. The form here keeps
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
import numpy as np
from jaxtyping import Float

from dmljax import ops
from dmljax.nets.layers.gradients import spread
from dmljax.nets.layers.impl import check, choose, is_portable
from dmljax.ops import Array

__all__ = ["avg_pool", "global_max", "global_mean", "max_pool"]

_Paddings = tuple[tuple[int, int], tuple[int, int]]
_MAX_SIZE = 16  # the position in a window is stored in 8 bits


def max_pool(
    x: Float[Array, "b h w c"],
    size: int,
    *,
    strides: int,
    padding: int = 0,
    ceil: bool = False,
    impl: str = "auto",
) -> Float[jax.Array, "b y x c"]:
    """Takes the maximum of each window. With `ceil`, a last window may cross the edge, as in
    Caffe.

    `nets.layers.impl` explains `impl`. With "auto", CPUs take XLA's form at stride 1: in the other
    one XLA would recompute the argmax for every pixel of the gradient.
    """
    check(impl)
    rows, columns = (_sides(n, size, strides, padding, ceil) for n in x.shape[1:3])
    if impl == "xla" or size > _MAX_SIZE:
        return _xla_max_pool(x, size, strides, (rows, columns))
    return _max_pool(x, size, strides, (rows, columns), impl)


def avg_pool(
    x: Float[Array, "b h w c"], size: int, *, strides: int, padding: int = 0, ceil: bool = False
) -> Float[jax.Array, "b y x c"]:
    """Averages each window. It counts the zeros of `padding`, but nothing beyond them (`ceil`)."""
    sides = [_sides(n, size, strides, padding, ceil) for n in x.shape[1:3]]
    wide = ops.widen(x)
    total = jax.lax.reduce_window(
        wide,
        np.zeros((), wide.dtype),
        jax.lax.add,
        (1, size, size, 1),
        (1, strides, strides, 1),
        ((0, 0), *sides, (0, 0)),
    )
    rows, columns = (
        np.minimum(size, n + 2 * padding - strides * np.arange(m))
        for n, m in zip(x.shape[1:3], total.shape[1:3], strict=True)
    )
    counts = np.outer(rows, columns)[None, :, :, None].astype(wide.dtype)
    return (total / counts).astype(x.dtype)


def global_mean(x: Float[Array, "b h w c"]) -> Float[jax.Array, "b c"]:
    """Averages over space, in float32."""
    return jnp.mean(ops.widen(x), axis=(1, 2))


def global_max(x: Float[Array, "b h w c"]) -> Float[jax.Array, "b c"]:
    """Takes the maximum over space, in float32. Of equal pixels the first gets the gradient, as in
    PyTorch.

    The gradient of `jnp.max` divides by the number of pixels equal to the maximum. It is NaN where
    XLA computes `x` twice with different rounding, so that no pixel is equal.
    """
    flat = x.reshape(x.shape[0], -1, x.shape[3])
    index = jnp.argmax(flat, axis=1, keepdims=True)
    return ops.widen(jnp.take_along_axis(flat, index, axis=1)[:, 0])


def _sides(length: int, size: int, strides: int, padding: int, ceil: bool) -> tuple[int, int]:
    """Computes the padding before and after, so that the windows equal those of PyTorch and
    Caffe.
    """
    span = length + 2 * padding - size  # between the first position of a window and the last one
    if span < 0:
        raise ValueError(
            f"a map of {length} pixels is too small for a window of {size} with padding {padding}: "
            "use larger images"
        )
    steps = span // strides
    # The extra window of `ceil` must start inside the map or its padding before.
    if ceil and span % strides and (steps + 1) * strides < length + padding:
        steps += 1
    return padding, padding + max(0, steps * strides - span)


def _xla_max_pool(x: Array, size: int, strides: int, padding: _Paddings) -> jax.Array:
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

    xla_fn = functools.partial(_xla_max_pool, size=size, strides=strides, padding=padding)
    return choose(impl, cpu_fn=_cpu_fn(impl, strides, own_fn, xla_fn), xla_fn=xla_fn)(x)


def _forward(x, size, strides, padding, impl):
    def own_fn(x):
        return _max_and_argmax(x, size, strides, padding)

    def xla_fn(x):
        y = _xla_max_pool(x, size, strides, padding)
        return y, jnp.zeros(y.shape, jnp.uint8)

    cpu_fn = _cpu_fn(impl, strides, own_fn, xla_fn)
    y, argmax = choose(impl, cpu_fn=cpu_fn, xla_fn=xla_fn, gpu_fn=own_fn)(x)
    return y, (x, argmax)


def _backward(size, strides, padding, impl, residual, g):
    def own_fn(x, argmax, g):
        def hits(i, j, g, argmax):
            return jnp.where(argmax == i * size + j, g, jnp.zeros((), g.dtype))

        return spread(x.shape, (size, size), hits, strides, padding, g, argmax)

    def xla_fn(x, argmax, g):
        forward = functools.partial(_xla_max_pool, size=size, strides=strides, padding=padding)
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
