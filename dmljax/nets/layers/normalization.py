"""Batch norm, layer norm and local response norm."""

import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from dmljax import ops
from dmljax.ops import Array

__all__ = ["BatchNorm", "batch_norm", "freeze", "frozen_batch_norm", "is_frozen"]
__all__ += ["layer_norm", "local_response_norm"]


class BatchNorm(nn.Module, kw_only=True):
    """Batch norm (Ioffe & Szegedy, 2015) over all axes but the last, as in PyTorch.

    `momentum` is the weight of the new batch in the running statistics. The batch is normalized by
    its biased variance (divided by n); the running variance is the unbiased one (divided by n - 1).
    Statistics are float32 and belong to the global batch, on however many devices its rows are.
    `frozen` uses the running statistics in training too, and does not update them.

    Rows outside `where` do not enter the statistics. If fewer than two rows count, the running
    statistics stay as they are.
    """

    momentum: float = 0.1
    epsilon: float = 1e-5
    frozen: bool = False
    use_bias: bool = True
    dtype: Any = None

    def __call__(
        self,
        x: Float[Array, "*b c"],
        *,
        train: bool,
        where: Bool[Array, "*b"] | None = None,
    ) -> Float[jax.Array, "*b c"]:
        running_mean, running_var, scale, bias = self._variables(x.shape[-1])
        shape = (x.shape[-1],)

        def broadcastable(v):
            return v.reshape((1,) * (x.ndim - 1) + shape)

        dtype = self.dtype or jnp.promote_types(x.dtype, jnp.float32)
        # Sums over a batch lose digits in bfloat16, so only the result has that type.
        if self.is_fixed(train):
            factor = self._factor(running_var, scale)
            y = (ops.widen(x) - broadcastable(running_mean.value)) * broadcastable(factor)
        else:
            momentum: float | jax.Array = self.momentum
            if where is None:
                y, mean, var = _normalized(x, scale, self.epsilon)
                count = math.prod(x.shape[:-1])
            else:
                y, mean, var, rows = _normalized_rows(ops.widen(x), scale, self.epsilon, where)
                count, momentum = jnp.maximum(rows, 2), jnp.where(rows > 1, momentum, 0)
            if not self.is_initializing():
                if where is None and count < 2:
                    raise ValueError(
                        f"batch norm {'/'.join(self.path)} has one value per channel to train on: "
                        "use a larger batch or images, or norm=frozen_batch_norm"
                    )
                _update(running_mean, mean, momentum)
                _update(running_var, var * (count / (count - 1)), momentum)
        return jnp.asarray(y if bias is None else y + broadcastable(bias), dtype)

    def is_fixed(self, train: bool) -> bool:
        """Returns whether the norm is a fixed linear function per channel: `factor_and_shift`."""
        return self.frozen or not train

    def factor_and_shift(self, channels: int) -> tuple[jax.Array, jax.Array]:
        """Returns factor and shift of norm(x) = factor x + shift with running statistics."""
        running_mean, running_var, scale, bias = self._variables(channels)
        factor = self._factor(running_var, scale)
        shift = -running_mean.value * factor
        return factor, shift if bias is None else shift + bias

    @nn.compact
    def _variables(self, channels: int):
        shape = (channels,)
        running_mean = self.variable("batch_stats", "mean", jnp.zeros, shape, jnp.float32)
        running_var = self.variable("batch_stats", "var", jnp.ones, shape, jnp.float32)
        f32 = jnp.float32  # also under jax_enable_x64
        scale = self.param("scale", nn.initializers.ones, shape, f32)
        bias = self.param("bias", nn.initializers.zeros, shape, f32) if self.use_bias else None
        return running_mean, running_var, scale, bias

    def _factor(self, running_var: nn.Variable, scale: Array) -> jax.Array:
        return jax.lax.rsqrt(running_var.value + self.epsilon) * scale


batch_norm = BatchNorm
frozen_batch_norm = functools.partial(BatchNorm, frozen=True)


def freeze(net: nn.Module) -> nn.Module:
    """Returns `net` with batch norms that keep their statistics; other nets stay as they are."""
    return net.clone(norm=functools.partial(net.norm, frozen=True)) if hasattr(net, "norm") else net


def is_frozen(net: nn.Module) -> bool:
    """Returns whether the batch norms of `net` keep their statistics."""
    return bool(getattr(getattr(net, "norm", None), "keywords", {}).get("frozen"))


def _update(running, new, momentum):
    new = jax.lax.stop_gradient(new).astype(jnp.float32)
    running.value = (1 - momentum) * running.value + momentum * new


def _normalized_rows(x, scale, epsilon, where):
    """Normalizes `x` by the statistics of the rows that count; also returns the number of these
    rows.

    The gradient is the automatic one, whose sum over rows is more exact.
    """
    axes, where = tuple(range(x.ndim - 1)), where[..., None]
    rows = jnp.sum(where, dtype=x.dtype)
    mean = ops.divide(jnp.sum(x, axis=axes, where=where), rows)
    deviations = jnp.where(where, x - jnp.expand_dims(mean, axes), 0)
    var = ops.divide(jnp.sum(deviations * deviations, axis=axes), rows)
    factor = jax.lax.rsqrt(var + epsilon) * scale
    y = (x - jnp.expand_dims(mean, axes)) * jnp.expand_dims(factor, axes)
    return y, mean, var, rows


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _normalized(x, scale, epsilon):
    """Scales `x` to mean 0 and std `scale` per channel; also returns the mean and the variance of
    `x`.

    Gradients flow through the first result only. The gradient is written by hand because it needs
    two sums over the feature map, half the number that automatic differentiation needs.
    """
    return _normalized_forward(x, scale, epsilon)[0]


def _normalized_forward(narrow_x, scale, epsilon):
    x = ops.widen(narrow_x)
    axes = tuple(range(x.ndim - 1))
    mean = jnp.mean(x, axis=axes, keepdims=True)
    var = jnp.mean(jnp.square(x - mean), axis=axes, keepdims=True)
    factor = jax.lax.rsqrt(var + epsilon)
    y = (x - mean) * (factor * scale.reshape(mean.shape))
    # No float32 copy of x waits for the backward pass.
    return (y, mean.reshape(-1), var.reshape(-1)), (narrow_x, scale, mean, factor)


def _normalized_backward(epsilon, residual, gradients):
    narrow_x, scale, mean, factor = residual
    x = ops.widen(narrow_x)
    g, axes = gradients[0], tuple(range(x.ndim - 1))
    shift = jnp.mean(g, axis=axes, keepdims=True)
    slope = factor * jnp.mean(g * (x - mean), axis=axes, keepdims=True)
    back = factor * scale.reshape(mean.shape) * (g - shift - (x - mean) * (factor * slope))
    return back.astype(narrow_x.dtype), (slope.reshape(-1) * (x.size // len(scale))).astype(
        scale.dtype
    )


_normalized.defvjp(_normalized_forward, _normalized_backward)


def layer_norm(
    x: Float[Array, "*b c"], name: str, *, epsilon: float = 1e-6, dtype: Any = None
) -> Float[jax.Array, "*b c"]:
    """Applies layer norm (Ba et al., 2016) to the last axis, as a layer `name` of the calling
    module.

    It computes in float32. In half precision, its gradient computes that again from `x`, so that no
    float32 copy of `x` waits in memory for the backward pass.
    """
    layer = nn.remat(nn.LayerNorm) if _is_half(dtype or jnp.float32) else nn.LayerNorm
    return layer(epsilon, dtype=dtype, use_fast_variance=False, name=name)(x)


def _is_half(dtype: Any) -> bool:
    return jnp.finfo(dtype).bits < 32


def local_response_norm(
    x: Float[Array, "b h w c"], *, size: int = 5, alpha: float = 1e-4
) -> Float[jax.Array, "b h w c"]:
    """Computes x / (1 + alpha / size * sum of x^2 over `size` neighboring channels)^0.75, as in
    Caffe.

    TensorFlow's function of this name does not divide alpha by `size`. In half precision, the
    gradient computes the float32 values again, as the gradient of `layer_norm` does.
    """

    def normalized(x):
        wide = ops.widen(x)
        before = (size - 1) // 2
        squares = jnp.pad(wide * wide, ((0, 0), (0, 0), (0, 0), (before, size - 1 - before)))
        total = sum(squares[..., i : i + x.shape[-1]] for i in range(size))
        return (wide * (1.0 + alpha / size * total) ** -0.75).astype(x.dtype)

    return (jax.checkpoint(normalized) if _is_half(x.dtype) else normalized)(x)
