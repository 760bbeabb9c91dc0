"""Layers that compute what PyTorch's and Caffe's do, so that their weights give the same numbers.

Maps are `[b h w c]`, kernels HWIO. Padding is explicit, symmetric, and part of the layer: "SAME"
would pad differently at stride 2. `dtype` is the type of the computation (None: what input and
parameters promote to); parameters and running statistics are float32 whatever it is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.dtypes import promote_dtype
from jaxtyping import Float

from dmljax.kernels.convolution import conv
from dmljax.kernels.initial import Initializer, fan_in_uniform, glorot_uniform, kaiming_normal
from dmljax.kernels.pooling import largest

__all__ = [
    "BatchNorm",
    "Conv",
    "ConvNorm",
    "Dense",
    "avg_pool",
    "check_maps",
    "conv",
    "global_max",
    "global_mean",
    "glorot_dense",
    "local_response_norm",
    "max_pool",
    "named",
    "pool",
    "shapes",
    "stage_range",
]

Array = jax.Array | np.ndarray
Dtype = Any

# --- layers -------------------------------------------------------------------------------------


class Conv(nn.Module):
    """`conv` with its parameters. Biases start at 0; `bias_init=None` is PyTorch's default."""

    features: int
    kernel: int
    strides: int = 1
    padding: int = 0
    groups: int = 1
    use_bias: bool = False
    dtype: Dtype | None = None
    kernel_init: Initializer | None = kaiming_normal
    bias_init: Initializer | None = nn.initializers.zeros

    @nn.compact
    def __call__(self, x: Float[Array, "b h w i"]) -> Float[jax.Array, "b y x o"]:
        channels = x.shape[-1] // self.groups
        default = fan_in_uniform(self.kernel * self.kernel * channels)
        shape = (self.kernel, self.kernel, channels, self.features)
        kernel = self.param("kernel", self.kernel_init or default, shape)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init or default, (self.features,))
        x, kernel, bias = promote_dtype(x, kernel, bias, dtype=self.dtype)
        y = conv(x, kernel, strides=self.strides, padding=self.padding, groups=self.groups)
        return y if bias is None else y + bias[None, None, None, :]


class Dense(nn.Module):
    """A linear map of the last axis, initialised as PyTorch's `Linear`."""

    features: int
    use_bias: bool = True
    dtype: Dtype | None = None
    kernel_init: Initializer | None = None
    bias_init: Initializer | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "*b i"]) -> Float[jax.Array, "*b o"]:
        default = fan_in_uniform(x.shape[-1])
        shape = (x.shape[-1], self.features)
        kernel = self.param("kernel", self.kernel_init or default, shape)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init or default, (self.features,))
        x, kernel, bias = promote_dtype(x, kernel, bias, dtype=self.dtype)
        y = jnp.dot(x, kernel)
        return y if bias is None else y + bias.reshape((1,) * (y.ndim - 1) + (-1,))


glorot_dense = functools.partial(Dense, kernel_init=glorot_uniform, bias_init=nn.initializers.zeros)


class BatchNorm(nn.Module):
    """Over all axes but the last, as PyTorch's (Ioffe & Szegedy, 2015).

    `momentum` is the share of the new batch in the running statistics, and the running variance is
    the unbiased one (n - 1), whereas the batch is normalised by the biased (n). Statistics are
    float32, and those of the global batch wherever its rows lie. `frozen`: the running statistics
    are used while training too, and stay as they are.
    """

    momentum: float = 0.1
    epsilon: float = 1e-5
    frozen: bool = False
    use_bias: bool = True
    use_scale: bool = True
    dtype: Dtype | None = None
    scale_init: Initializer = nn.initializers.ones

    @nn.compact
    def __call__(self, x: Float[Array, "*b c"], *, train: bool) -> Float[jax.Array, "*b c"]:
        shape = (x.shape[-1],)
        running_mean = self.variable("batch_stats", "mean", jnp.zeros, shape, jnp.float32)
        running_var = self.variable("batch_stats", "var", jnp.ones, shape, jnp.float32)
        scale = self.param("scale", self.scale_init, shape) if self.use_scale else None
        bias = self.param("bias", nn.initializers.zeros, shape) if self.use_bias else None

        def along(v):  # as an array that broadcasts with x without raising its rank
            return v.reshape((1,) * (x.ndim - 1) + shape)

        dtype = self.dtype or jnp.promote_types(x.dtype, jnp.float32)
        # Sums over a batch lose digits in bfloat16: all but the result is at least float32.
        x = jnp.asarray(x, jnp.promote_types(x.dtype, jnp.float32))
        if not train or self.frozen:
            factor = jax.lax.rsqrt(running_var.value + self.epsilon)
            factor = factor if scale is None else factor * scale
            y = (x - along(running_mean.value)) * along(factor)
        else:
            count = math.prod(x.shape[:-1])
            y, mean, var = _normalized(x, jnp.ones(shape) if scale is None else scale, self.epsilon)
            if not self.is_initializing():
                if count < 2:
                    raise ValueError(
                        f"batch norm {'/'.join(self.path)} has one value per channel to train on: "
                        "use a larger batch or images, or frozen=True"
                    )
                self._update(running_mean, mean)
                self._update(running_var, var * (count / (count - 1)))
        return jnp.asarray(y if bias is None else y + along(bias), dtype)

    def _update(self, running: nn.Variable, new: jax.Array) -> None:
        new = jax.lax.stop_gradient(new).astype(jnp.float32)
        running.value = (1 - self.momentum) * running.value + self.momentum * new


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _normalized(x, scale, epsilon):
    """`x` with mean 0 and deviation `scale` per channel, and its own mean and variance.

    The gradient is that of the first; to it the others are constants. It is written down because
    its two sums over the map are half of those that differentiating these lines would give.
    """
    return _normalized_forward(x, scale, epsilon)[0]


def _normalized_forward(x, scale, epsilon):
    axes = tuple(range(x.ndim - 1))
    mean = jnp.mean(x, axis=axes, keepdims=True)
    var = jnp.mean(jnp.square(x - mean), axis=axes, keepdims=True)
    factor = jax.lax.rsqrt(var + epsilon)
    y = (x - mean) * (factor * scale.reshape(mean.shape))
    return (y, mean.reshape(-1), var.reshape(-1)), (x, scale, mean, factor)


def _normalized_backward(epsilon, residual, gradients):
    x, scale, mean, factor = residual
    g, axes = gradients[0], tuple(range(x.ndim - 1))
    shift = jnp.mean(g, axis=axes, keepdims=True)
    slope = factor * jnp.mean(g * (x - mean), axis=axes, keepdims=True)
    back = factor * scale.reshape(mean.shape) * (g - shift - (x - mean) * (factor * slope))
    return back, (slope.reshape(-1) * (x.size // len(scale))).astype(scale.dtype)


_normalized.defvjp(_normalized_forward, _normalized_backward)


class ConvNorm(nn.Module):
    """relu(norm(conv(x))), its parts called `conv` and `bn`; without bias, as the norm has one."""

    features: int
    kernel: int
    strides: int = 1
    padding: int = 0
    momentum: float = 0.1
    epsilon: float = 1e-5
    frozen: bool = False
    dtype: Dtype | None = None
    kernel_init: Initializer | None = kaiming_normal

    @nn.compact
    def __call__(self, x: Float[Array, "b h w i"], *, train: bool) -> Float[jax.Array, "b y x o"]:
        conv = Conv(
            self.features,
            self.kernel,
            self.strides,
            self.padding,
            dtype=self.dtype,
            kernel_init=self.kernel_init,
            name="conv",
        )
        norm = BatchNorm(self.momentum, self.epsilon, self.frozen, dtype=self.dtype, name="bn")
        return nn.relu(norm(conv(x), train=train))


def local_response_norm(
    x: Float[Array, "b h w c"],
    *,
    size: int = 5,
    alpha: float = 1e-4,
    beta: float = 0.75,
    k: float = 1.0,
) -> Float[jax.Array, "b h w c"]:
    """x / (k + alpha / size * sum of x^2 over `size` neighbouring channels)^beta, as in Caffe.

    TensorFlow's function does not divide alpha by `size`, which is twice its radius plus 1.
    """
    wide = jnp.asarray(x, jnp.promote_types(x.dtype, jnp.float32))
    before = (size - 1) // 2
    squares = jnp.pad(wide * wide, ((0, 0), (0, 0), (0, 0), (before, size - 1 - before)))
    total = sum(squares[..., i : i + x.shape[-1]] for i in range(size))
    return (wide * (k + alpha / size * total) ** -beta).astype(x.dtype)


# --- pooling ------------------------------------------------------------------------------------


def max_pool(
    x: Float[Array, "b h w c"], size: int, *, strides: int, padding: int = 0, ceil: bool = False
) -> Float[jax.Array, "b y x c"]:
    """Largest of each window. `ceil`: a last window may hang over the edge, as in Caffe."""
    sides = [_sides(n, size, strides, padding, ceil) for n in x.shape[1:3]]
    return largest(x, size, strides=strides, sides=tuple(sides))


def avg_pool(
    x: Float[Array, "b h w c"], size: int, *, strides: int, padding: int = 0, ceil: bool = False
) -> Float[jax.Array, "b y x c"]:
    """Mean of each window, the zeros of `padding` counted, what hangs over beyond them not."""
    sides = [_sides(n, size, strides, padding, ceil) for n in x.shape[1:3]]
    wide = jnp.asarray(x, jnp.promote_types(x.dtype, jnp.float32))
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
    """Mean over space, in float32."""
    return jnp.mean(jnp.asarray(x, jnp.promote_types(x.dtype, jnp.float32)), axis=(1, 2))


def global_max(x: Float[Array, "b h w c"]) -> Float[jax.Array, "b c"]:
    """Maximum over space, in float32; the gradient goes to the first of equals, as in PyTorch."""
    # Where a compiler computes x twice, rounded differently, no x equals its maximum, and the
    # gradient of jnp.max, which divides by how many do, is NaN.
    flat = x.reshape(len(x), -1, x.shape[3])
    found = jnp.take_along_axis(flat, jnp.argmax(flat, axis=1, keepdims=True), axis=1)[:, 0]
    return jnp.asarray(found, jnp.promote_types(x.dtype, jnp.float32))


def _sides(length: int, size: int, strides: int, padding: int, ceil: bool) -> tuple[int, int]:
    """Padding before and after, such that the windows are those of PyTorch and Caffe."""
    room = length + 2 * padding - size
    if room < 0:
        raise ValueError(
            f"a map of {length} pixels is too small for a window of {size} with padding {padding}: "
            "use larger images"
        )
    steps = room // strides
    if ceil and room % strides and (steps + 1) * strides < length + padding:
        steps += 1  # only if that window starts inside the map or its left padding
    return padding, padding + max(0, steps * strides - room)


# --- nets ---------------------------------------------------------------------------------------


class _Scope(nn.Module):
    fn: Callable

    @nn.compact
    def __call__(self, x):
        return self.fn(x)


def named(name: str, fn: Callable, x: Any, *, remat: bool = False) -> Any:
    """fn(x), where the modules that `fn` makes come under `name`, as one level of their paths.

    `fn` may be a closure or function, not a method: that would place them in its own module.
    `remat`: its inside is computed again for the gradient instead of being kept.
    """
    return (nn.remat(_Scope) if remat else _Scope)(fn, name=name)(x)


def pool(outputs: dict[str, Any], features: Any) -> dict[str, Any]:
    """`outputs` and the last map: as `features`, and its mean and maximum over space."""
    pooled = {"pooled": global_mean(features), "max_pooled": global_max(features)}
    return outputs | {"features": features} | pooled


def stage_range(net: str, stages: Sequence[str], start: str, stop: str) -> tuple[str, ...]:
    """The names from `start` to `stop`, both included."""
    for name in (start, stop):
        if name not in stages:
            raise ValueError(f"{net} has no stage {name!r}. It has: {', '.join(stages)}")
    first, last = stages.index(start), stages.index(stop)
    if first > last:
        raise ValueError(f"{net} reaches stage {stop!r} before {start!r}: exchange start and stop")
    return tuple(stages[first : last + 1])


def check_maps(net: str, x: Any, channels: int | Sequence[int], *, smallest: int = 1) -> None:
    """Raises unless `x` is float `[b h w c]` with as many channels as the stage takes."""
    allowed = (channels,) if isinstance(channels, int) else tuple(channels)
    text = " or ".join(map(str, allowed))
    if jnp.ndim(x) != 4 or x.shape[3] not in allowed:
        raise ValueError(f"{net} takes [b h w c] with {text} channels, not {list(jnp.shape(x))}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{net} takes normalised images as floats, not {x.dtype}")
    if min(x.shape[1:3]) < smallest:
        raise ValueError(
            f"{net} needs images of {smallest} pixels or more, not {x.shape[1]} x {x.shape[2]}"
        )


def shapes(net: nn.Module, image_size: int, *, channels: int = 3) -> Any:
    """Shapes and types of the variables for images of `image_size` pixels.

    Computes nothing: it is what a checkpoint or converted weights are to fill.
    """
    image = jax.ShapeDtypeStruct((1, image_size, image_size, channels), jnp.float32)
    return jax.eval_shape(lambda key, x: net.init(key, x, train=False), jax.random.key(0), image)
