"""Convolution, linear map, and the unit of convolution, batch norm and relu."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from jaxtyping import Float

from dmljax.kernels.convolution import conv
from dmljax.nets.initializers import Initializer, fan_in_uniform, glorot_uniform, kaiming_normal
from dmljax.nets.layers.normalization import BatchNorm
from dmljax.ops import Array

__all__ = ["Conv", "ConvNorm", "Dense", "Dtype", "glorot_dense", "kaiming_dense"]

Dtype = Any


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
    def __call__(self, x: Float[Array, "b h w i"]) -> Float[jax.Array, "b y x o"]:
        channels = x.shape[-1] // self.groups
        default = fan_in_uniform(self.kernel * self.kernel * channels)
        shape = (self.kernel, self.kernel, channels, self.features)
        kernel = self.param("kernel", self.kernel_init or default, shape)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init or default, (self.features,))
        x, kernel, bias = promote_dtype(x, kernel, bias, dtype=self.dtype)
        y = conv(
            x,
            kernel,
            strides=self.strides,
            padding=self.padding,
            groups=self.groups,
            impl=self.impl,
        )
        return y if bias is None else y + bias[None, None, None, :]


class Dense(nn.Module):
    """Linear map of the last axis. By default its values are drawn as in PyTorch's `Linear`."""

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
# Variance 2 / features, as the codes of Proxy-Anchor and of the multi-similarity loss draw it.
kaiming_dense = functools.partial(
    Dense, kernel_init=kaiming_normal, bias_init=nn.initializers.zeros
)


class ConvNorm(nn.Module):
    """relu(norm(conv(x))) with submodules `conv` (without bias, as the norm has one) and `bn`."""

    features: int
    kernel: int
    strides: int = 1
    padding: int = 0
    momentum: float = 0.1
    epsilon: float = 1e-5
    frozen: bool = False
    dtype: Dtype | None = None
    kernel_init: Initializer | None = kaiming_normal
    impl: str = "auto"

    @nn.compact
    def __call__(self, x: Float[Array, "b h w i"], *, train: bool) -> Float[jax.Array, "b y x o"]:
        conv = Conv(
            self.features,
            self.kernel,
            self.strides,
            self.padding,
            dtype=self.dtype,
            kernel_init=self.kernel_init,
            impl=self.impl,
            name="conv",
        )
        norm = BatchNorm(self.momentum, self.epsilon, self.frozen, dtype=self.dtype, name="bn")
        return nn.relu(norm(conv(x), train=train))
