"""The pre-norm block of transformers, which nets for images and towers for text share."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from dmljax import ops
from dmljax.nets import layers
from dmljax.nets.initializers import normal
from dmljax.nets.layers import Dense, Dtype
from dmljax.nets.positions import rotated
from dmljax.nets.token_attention import attention

__all__ = ["Parts", "gelu", "quick_gelu", "silu", "tanh_gelu"]


def _in_float32(activation: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Computes the activation of `x`. In half precision it computes in float32, and again for the
    gradient, which needs only `x`.
    """
    if jnp.finfo(x.dtype).bits >= 32:
        return activation(x)
    return jax.checkpoint(lambda x: activation(ops.widen(x)).astype(x.dtype))(x)


def gelu(x: jax.Array) -> jax.Array:
    """Computes GELU by the error function in float32, on CPUs in half the time of `nn.gelu`."""
    if jnp.finfo(x.dtype).bits < 32:  # the form below would round the tail of negative x
        return _in_float32(functools.partial(nn.gelu, approximate=False), x)
    return x * (0.5 + 0.5 * jax.lax.erf(x / math.sqrt(2)))


def tanh_gelu(x: jax.Array) -> jax.Array:
    """Computes GELU by the hyperbolic tangent, which differs by up to 5e-4."""
    return _in_float32(nn.gelu, x)


def quick_gelu(x: jax.Array) -> jax.Array:
    """Computes x sigmoid(1.702 x), the activation of OpenAI's CLIP."""
    return _in_float32(lambda x: x * jax.nn.sigmoid(1.702 * x), x)


def silu(x: jax.Array) -> jax.Array:
    """Computes x sigmoid(x), the gate of SwiGLU."""
    return _in_float32(nn.silu, x)


class Parts(NamedTuple):
    """What a block is made of. The methods create layers in the module that calls them.

    `biased` has the letters of the projections q, k and v that have a bias. `table` rotates queries
    and keys (`nets.positions`). With `is_causal`, a token sees itself and the tokens before it.
    `attention` is a form of `nets.token_attention`.
    """

    width: int
    heads: int
    hidden: int
    activation: Callable = gelu
    gated: bool = False
    biased: str = "qkv"
    layer_scale: bool = False
    epsilon: float = 1e-6
    table: np.ndarray | None = None
    is_causal: bool = False
    attention: str = "auto"
    dtype: Dtype | None = None

    def dense(self, x: jax.Array, features: int, name: str, use_bias: bool = True) -> jax.Array:
        init = normal(0.02), nn.initializers.zeros
        return Dense(features, use_bias, self.dtype, *init, merged=True, name=name)(x)

    def norm(self, x: jax.Array, name: str) -> jax.Array:
        return layers.layer_norm(x, name, epsilon=self.epsilon, dtype=self.dtype)

    def self_attention(self, x: jax.Array) -> jax.Array:
        fused = self.biased == "qkv"
        qkv = self.dense(x, 3 * self.width, "qkv", fused)
        if self.biased and not fused:
            qkv = _Biases(self.biased, name="bias")(qkv)
        qkv = qkv.reshape(*x.shape[:2], 3 * self.heads, self.width // self.heads)
        q, k, v = jnp.split(qkv, 3, axis=2)
        if self.table is not None:
            q, k = rotated(q, self.table), rotated(k, self.table)
        y = attention(q, k, v, is_causal=self.is_causal, form=self.attention)
        return self.dense(y.reshape(x.shape), self.width, "proj")

    def mlp(self, x: jax.Array) -> jax.Array:
        y = self.dense(x, self.hidden, "fc1")
        gate = self.dense(x, self.hidden, "gate") if self.gated else None
        y = self.activation(y) if gate is None else self.activation(gate) * y
        return self.dense(y, self.width, "fc2")

    def block(self, x: jax.Array, *, drop_path: float = 0.0) -> jax.Array:
        """Applies one block; each branch is dropped for a fraction `drop_path` of the images."""
        y = self._scaled(layers.named("attn", self.self_attention, self.norm(x, "norm1")), "ls1")
        x = layers.with_stored_gradient(x + layers.DropPath(drop_path, name="drop_path1")(y))
        y = self._scaled(layers.named("mlp", self.mlp, self.norm(x, "norm2")), "ls2")
        return layers.with_stored_gradient(x + layers.DropPath(drop_path, name="drop_path2")(y))

    def _scaled(self, x: jax.Array, name: str) -> jax.Array:
        return _Scale(name=name)(x) if self.layer_scale else x


class _Scale(nn.Module):
    """x times the vector of a LayerScale (Touvron et al., ICCV 2021)."""

    @nn.compact
    def __call__(self, x):
        gamma = self.param("gamma", nn.initializers.constant(1e-5), (x.shape[-1],))
        return x * gamma.astype(x.dtype).reshape((1,) * (x.ndim - 1) + (-1,))


class _Biases(nn.Module):
    """x plus a bias. Its channels are q, k and v; thirds that `letters` does not name get zeros."""

    letters: str

    @nn.compact
    def __call__(self, x):
        width, zeros = x.shape[-1] // 3, nn.initializers.zeros
        parts = [
            self.param(letter, zeros, (width,)) if letter in self.letters else jnp.zeros(width)
            for letter in "qkv"
        ]
        return x + jnp.concatenate(parts).astype(x.dtype).reshape(1, 1, -1)
