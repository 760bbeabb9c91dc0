"""The parts DVML adds to a backbone (Lin et al., ECCV 2018): three heads, a sampler, a decoder.

The features f `[b c]` of the backbone become an invariant embedding z_I, alone used at test time,
and the mean and log variance of what varies within a class, z_V. The decoder makes f of z_I + z_V.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float

from dmljax import ops
from dmljax.nets.layers import BatchNorm, glorot_dense
from dmljax.ops import Array

__all__ = ["VariationalDecoder", "VariationalHeads", "sample_variations"]


class VariationalHeads(nn.Module, kw_only=True):
    """Three linear maps of the features: "invariant", "mean", "log_variance", each `[b d]`.

    The paper has no batch norm. "shared" puts one before all three; "nested" puts a second one
    before the mean and a third before the log variance, as published code for 128 dimensions does.
    """

    features: int = 512
    norms: str = "none"
    momentum: float = 0.01
    epsilon: float = 1e-3
    frozen: bool = False
    dtype: Any = None

    @nn.compact
    def __call__(self, features: Float[Array, "b c"], *, train: bool) -> dict[str, Array]:
        if self.norms not in ("none", "shared", "nested"):
            raise ValueError(f"norms is 'none', 'shared' or 'nested', not {self.norms!r}")

        def norm(x, name):
            return BatchNorm(self.momentum, self.epsilon, self.frozen, name=name)(x, train=train)

        x = ops.widen(features)
        if self.norms != "none":
            x = norm(x, "norm")
        outputs = {}
        for name in ("invariant", "mean", "log_variance"):
            nested = self.norms == "nested" and name != "invariant"
            y = norm(x, f"norm_{name}") if nested else x
            outputs[name] = ops.widen(glorot_dense(self.features, dtype=self.dtype, name=name)(y))
        return outputs


def sample_variations(
    mean: Float[Array, "b d"],
    log_variance: Float[Array, "b d"],
    *,
    samples: int = 20,
    key: jax.Array,
) -> Float[Array, "t b d"]:
    """z_V = mean + exp(log_variance / 2) N(0, 1): gradients reach both through the sample."""
    # The divergence still reads the log variance as it is, and pulls it back from beyond 20.
    deviation = jnp.exp(jnp.clip(log_variance, -20, 20) / 2)
    noise = jax.random.normal(key, (samples, *mean.shape), mean.dtype)
    return mean[None, :, :] + deviation[None, :, :] * noise


class VariationalDecoder(nn.Module, kw_only=True):
    """From z_I + z_V back to the backbone's features: linear, `activation_fn`, linear.

    The paper has tanh between the two. `norm=True` adds a batch norm behind the activation, which
    with `activation_fn=jax.nn.relu` makes the published code's. No activation follows: the features
    are means of ReLUs and exceed 1.
    """

    features: int = 1024
    hidden: int = 512
    activation_fn: Callable = jnp.tanh
    norm: bool = False
    momentum: float = 0.01
    epsilon: float = 1e-3
    frozen: bool = False
    dtype: Any = None

    @nn.compact
    def __call__(self, z: Float[Array, "*t b d"], *, train: bool) -> Float[Array, "*t b c"]:
        x = self.activation_fn(glorot_dense(self.hidden, dtype=self.dtype, name="fc1")(z))
        if self.norm:
            norm = BatchNorm(self.momentum, self.epsilon, self.frozen, name="norm")
            x = norm(x, train=train)
        return ops.widen(glorot_dense(self.features, dtype=self.dtype, name="fc2")(x))
