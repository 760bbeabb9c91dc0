"""Convolution, linear map, and the unit of convolution, batch norm and relu."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from jaxtyping import Float

from dmljax.nets.initializers import Initializer, fan_in_uniform, glorot_uniform, kaiming_normal
from dmljax.nets.layers import gradients
from dmljax.nets.layers.depthwise import clip, depthwise_conv, is_depthwise, xla_conv
from dmljax.nets.layers.impl import check, choose
from dmljax.nets.layers.normalization import BatchNorm
from dmljax.ops import Array
from dmljax.ops.devices import divides_evenly

__all__ = [
    "Conv",
    "ConvNorm",
    "Dense",
    "Dtype",
    "centered_dense",
    "conv_norm",
    "glorot_dense",
    "kaiming_dense",
    "mlp",
    "orthogonal_dense",
]

Dtype = Any


def conv(
    x: Float[Array, "b h w i"],
    kernel: Float[Array, "kh kw j o"],
    bias: Float[Array, " o"] | None = None,
    *,
    limits: tuple[float, float] | None = None,
    strides: int = 1,
    padding: int = 0,
    groups: int = 1,
    impl: str = "auto",
) -> Float[jax.Array, "b y x o"]:
    """Convolves `x` with `padding` zeros on every side, adds `bias` and clips to `limits`.

    `nets.layers.impl` explains `impl`. Other types than float32, and groups of several channels,
    always take XLA's form, without the custom gradient, which would exclude forward mode.
    """
    check(impl)
    is_own = impl != "xla" and x.dtype == kernel.dtype == jnp.float32
    if is_own and is_depthwise(x.shape[3], kernel.shape, groups):
        return depthwise_conv(x, kernel, bias, limits, strides, padding, impl)
    if is_own and groups == 1:
        y = _conv(x, kernel, strides, padding, impl)
    else:
        y = xla_conv(x, kernel, strides=strides, padding=padding, groups=groups)
    return clip(y if bias is None else y + bias.reshape(1, 1, 1, -1), limits)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _conv(x, kernel, strides, padding, impl):
    """Convolves with XLA, with gradients that are faster than XLA's on CPUs."""
    return xla_conv(x, kernel, strides=strides, padding=padding)


def _conv_forward(x, kernel, strides, padding, impl):
    return _conv(x, kernel, strides, padding, impl), (x, kernel)


def _conv_backward(strides, padding, impl, residual, g):
    def xla_fn(x, kernel, g):
        forward = functools.partial(xla_conv, strides=strides, padding=padding)
        return jax.vjp(forward, x, kernel)[1](g)

    def cpu_fn(x, kernel, g):
        of_kernel = gradients.kernel_gradient(x, kernel.shape, g, strides, padding)
        return gradients.input_gradient(x.shape, kernel, g, strides, padding), of_kernel

    return choose(impl, cpu_fn=cpu_fn, xla_fn=xla_fn)(*residual, g)


_conv.defvjp(_conv_forward, _conv_backward)


class Conv(nn.Module):
    """Convolution with `padding` zeros on every side.

    `kernel_init=None` and `bias_init=None` draw PyTorch's default for its `Conv2d`.
    """

    features: int
    kernel: int
    strides: int = 1
    padding: int = 0
    groups: int = 1
    use_bias: bool = False
    dtype: Dtype | None = None
    kernel_init: Initializer | None = kaiming_normal
    bias_init: Initializer | None = nn.initializers.zeros
    impl: str = "auto"

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "b h w i"],
        line: tuple[Array, Array] | None = None,
        limits: tuple[float, float] | None = None,
    ) -> Float[jax.Array, "b y x o"]:
        """Computes the convolution y. With line = (factor, shift), factor y + shift, clipped to
        `limits`.
        """
        channels = x.shape[-1] // self.groups
        default = fan_in_uniform(self.kernel * self.kernel * channels)
        shape = (self.kernel, self.kernel, channels, self.features)
        kernel = self.param("kernel", self.kernel_init or default, shape)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init or default, (self.features,))
        x, kernel, bias = promote_dtype(x, kernel, bias, dtype=self.dtype)
        options: dict[str, Any] = {"strides": self.strides, "padding": self.padding}
        options |= {"groups": self.groups, "impl": self.impl}
        if line is not None:
            factor, shift = line
            shift = shift if bias is None else shift + factor * bias
            kernel = kernel * factor.reshape(1, 1, 1, -1)
            return conv(x, kernel, shift, limits=limits, **options)
        return conv(x, kernel, bias, **options)


class Dense(nn.Module):
    """Linear map of the last axis. By default its values are drawn as in PyTorch's `Linear`.

    With `merged`, for maps whose first axis is the batch, all axes but the last become one before
    the product. Otherwise XLA on CPUs copies the map for the gradient of the kernel.
    """

    features: int
    use_bias: bool = True
    dtype: Dtype | None = None
    kernel_init: Initializer | None = None
    bias_init: Initializer | None = None
    merged: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "*b i"]) -> Float[jax.Array, "*b o"]:
        default = fan_in_uniform(x.shape[-1])
        shape = (x.shape[-1], self.features)
        kernel = self.param("kernel", self.kernel_init or default, shape)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init or default, (self.features,))
        x, kernel, bias = promote_dtype(x, kernel, bias, dtype=self.dtype)
        # Merged rows of a batch that the devices do not divide evenly would move between them.
        if self.merged and divides_evenly(x.shape[0]):
            y = jnp.dot(x.reshape(-1, x.shape[-1]), kernel).reshape(*x.shape[:-1], self.features)
        else:
            y = jnp.dot(x, kernel)
        return y if bias is None else y + bias.reshape((1,) * (y.ndim - 1) + (-1,))


class CenteredDense(nn.Module):
    """Linear map of (x - mean) / scale, without a bias.

    `mean` `[i]` and the number `scale` are statistics of the training data, not parameters. They
    are 0 and 1, and the columns of the kernel are orthonormal, until `train.start.centered` sets
    all three by the training data: the kernel starts with `features` principal directions of the
    training features, each divided by the power `whiten` of its deviation. 0 is PCA, 1 is whitening
    (Jegou and Chum, ECCV 2012), and the default is between both. With `steps=0` in a config they
    are the head, which then needs no training.
    """

    features: int
    # `train.start.centered` gets the number from the config.
    whiten: float = dataclasses.field(default=0.5, kw_only=True)
    dtype: Dtype | None = None

    def __post_init__(self):
        if not 0 <= self.whiten <= 1:
            raise ValueError(
                f"centered_dense: whiten is a number from 0 (PCA) to 1, not {self.whiten}"
            )
        super().__post_init__()

    @nn.compact
    def __call__(self, x: Float[Array, "*b i"]) -> Float[jax.Array, "*b o"]:
        width = x.shape[-1]
        mean = self.variable("batch_stats", "mean", jnp.zeros, (width,), jnp.float32).value
        scale = self.variable("batch_stats", "scale", jnp.ones, (1,), jnp.float32).value
        kernel = self.param("kernel", nn.initializers.orthogonal(), (width, self.features))
        rows = (1,) * (x.ndim - 1) + (-1,)
        centered = (x - mean.reshape(rows)) / scale.reshape(rows)
        x, kernel = promote_dtype(centered, kernel, dtype=self.dtype)
        return jnp.dot(x, kernel)


class MLP(nn.Module):
    """Linear layer without bias, batch norm, relu, linear layer (Chen et al., ICML 2020, SimCLR).

    `hidden` is the width between both; None takes the width of the input.
    """

    features: int
    hidden: int | None = dataclasses.field(default=None, kw_only=True)
    dtype: Dtype | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "b i"], *, train: bool) -> Float[jax.Array, "b o"]:
        x = Dense(self.hidden or x.shape[-1], use_bias=False, dtype=self.dtype, name="0")(x)
        x = nn.relu(BatchNorm(dtype=self.dtype, name="1")(x, train=train))
        return Dense(self.features, dtype=self.dtype, name="3")(x)


centered_dense = CenteredDense
mlp = MLP
orthogonal_dense = functools.partial(
    Dense, kernel_init=nn.initializers.orthogonal(), bias_init=nn.initializers.zeros
)
glorot_dense = functools.partial(Dense, kernel_init=glorot_uniform, bias_init=nn.initializers.zeros)
# Variance 2 / features, as the codes of Proxy-Anchor and of the multi-similarity loss draw it.
kaiming_dense = functools.partial(
    Dense, kernel_init=kaiming_normal, bias_init=nn.initializers.zeros
)


def conv_norm(
    conv: Conv,
    norm: BatchNorm,
    x: Float[Array, "b h w i"],
    *,
    train: bool,
    limits: tuple[float, float] | None = None,
) -> Float[jax.Array, "b y x o"]:
    """Computes norm(conv(x)), clipped to `limits`.

    In float32, a norm with running statistics is folded into the kernel: kernel and map are then
    multiplied in one pass, and the map before the norm is not kept. Plain form: `impl="xla"`.
    """
    is_float32 = x.dtype == jnp.float32 and conv.dtype in (None, jnp.float32)
    if norm.is_fixed(train) and is_float32 and conv.impl != "xla":
        return conv(x, norm.factor_and_shift(conv.features), limits)
    return clip(norm(conv(x), train=train), limits)


class ConvNorm(nn.Module):
    """relu(norm(conv(x))) with submodules `conv` (without bias, as the norm has one) and `bn`."""

    features: int
    kernel: int
    strides: int = 1
    padding: int = 0
    norm: Callable = BatchNorm
    dtype: Dtype | None = None
    kernel_init: Initializer | None = kaiming_normal
    impl: str = "auto"

    @nn.compact
    def __call__(self, x: Float[Array, "b h w i"], *, train: bool) -> Float[jax.Array, "b y x o"]:
        options: dict[str, Any] = {"dtype": self.dtype, "impl": self.impl}
        options["kernel_init"] = self.kernel_init
        sizes = self.features, self.kernel, self.strides, self.padding
        conv, norm = Conv(*sizes, **options, name="conv"), self.norm(dtype=self.dtype, name="bn")
        return nn.relu(norm(conv(x), train=train))
