"""Pooling over windows and over the whole feature map."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from dmljax import ops
from dmljax.nets.layers import max_pooling
from dmljax.ops import Array

__all__ = ["avg_pool", "global_max", "global_mean", "max_pool"]


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
    """
    sides = [_sides(n, size, strides, padding, ceil) for n in x.shape[1:3]]
    return max_pooling.max_pool(x, size, strides=strides, padding=(sides[0], sides[1]), impl=impl)


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
