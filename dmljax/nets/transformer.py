"""The pre-norm block of transformers for images and text, and the towers for text.

A tower is a module `tower(tokens [b n]) -> [b d]`. Its vectors are compared with those of the image
tower of the same checkpoint by cosine similarity.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from dmljax import ops
from dmljax.nets import layers
from dmljax.nets.initializers import normal
from dmljax.nets.layers import Dense, Dtype
from dmljax.nets.positions import rotated
from dmljax.nets.token_attention import attention
from dmljax.ops import Array

__all__ = ["Parts", "TextTower", "gelu", "quick_gelu", "silu", "tanh_gelu"]


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


class TextTower(nn.Module, kw_only=True):
    """A transformer over `length` tokens; one token gives the vector of the text.

    With an `end` token, a token sees only itself and the tokens before it, and the vector is that
    of the first `end` (CLIP). Without it, all tokens see each other, padding included, and the
    last token gives the vector (SigLIP). `projection` is the width of the last linear layer,
    which has a bias if `projection_bias`.
    """

    vocabulary: int
    width: int
    heads: int
    depth: int = 12
    length: int = 77
    hidden: int | None = None
    activation: Callable = gelu
    epsilon: float = 1e-5
    end: int | None = None
    projection: int
    projection_bias: bool = False
    dtype: Dtype | None = None

    @nn.compact
    def __call__(self, tokens: Int[Array, "b n"]) -> Float[jax.Array, "b d"]:
        if tokens.shape[1] != self.length:
            raise ValueError(f"the tower takes {self.length} tokens, not {tokens.shape[1]}")
        parts = Parts(
            width=self.width,
            heads=self.heads,
            hidden=self.hidden or 4 * self.width,
            activation=self.activation,
            epsilon=self.epsilon,
            is_causal=self.end is not None,
            dtype=self.dtype,
        )

        def blocks(x):
            for i in range(self.depth):
                x = layers.named(str(i), parts.block, x)
            return x

        words = self.param("token_embed", normal(0.02), (self.vocabulary, self.width))
        positions = self.param("pos_embed", normal(0.01), (1, self.length, self.width))
        x = jnp.asarray(jnp.take(words, tokens, axis=0) + positions, self.dtype)
        x = parts.norm(layers.named("blocks", blocks, x), "norm")
        last = jnp.full(tokens.shape[0], self.length - 1)
        if self.end is not None:
            last = jnp.argmax(tokens == self.end, axis=1)
        x = jnp.take_along_axis(x, last.reshape(-1, 1, 1), axis=1)[:, 0]
        return ops.widen(parts.dense(x, self.projection, "proj", self.projection_bias))
