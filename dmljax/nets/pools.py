"""Pools: from a feature map to a vector, `[b h w c] -> [b c]`.

A pool may create parameters of the module that calls it, as `learned_gem` does.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float

from dmljax import ops
from dmljax.nets.layers import global_max, global_mean
from dmljax.ops import Array

__all__ = ["flatten", "gem", "global_max", "global_mean", "global_mean_max", "learned_gem"]


def gem(
    maps: Float[Array, "b h w c"], *, p: float | Float[Array, ""] = 3.0, epsilon: float = 1e-6
) -> Float[Array, "b c"]:
    """Generalized mean over space: (mean x^p)^(1/p) (Radenovic et al., TPAMI 2019).

    It is the mean at p = 1 and approaches the maximum as p grows. Values below `epsilon` count as
    `epsilon`.
    """
    maps = jnp.maximum(ops.widen(maps), epsilon)
    # Dividing by the largest value keeps powers from overflowing and the gradient of p finite.
    peak = jax.lax.stop_gradient(jnp.max(maps, axis=(1, 2), keepdims=True))
    means = jnp.mean((maps / peak) ** p, axis=(1, 2))
    return means ** (1 / p) * peak[:, 0, 0, :]


def learned_gem(
    maps: Float[Array, "b h w c"], *, p: float = 3.0, epsilon: float = 1e-6
) -> Float[Array, "b c"]:
    """`gem` with a learned power that starts at `p`; creates "gem" in the module that calls it."""
    return _GeM(p=p, epsilon=epsilon, name="gem")(maps)


class _GeM(nn.Module, kw_only=True):
    p: float
    epsilon: float

    @nn.compact
    def __call__(self, maps: Float[Array, "b h w c"]) -> Float[Array, "b c"]:
        p = self.param("p", nn.initializers.constant(self.p), (), jnp.float32)
        return gem(maps, p=p, epsilon=self.epsilon)


def global_mean_max(maps: Float[Array, "b h w c"]) -> Float[Array, "b c"]:
    """The sum of mean and maximum over space."""
    return global_mean(maps) + global_max(maps)


def flatten(maps: Float[Array, "b h w c"]) -> Float[Array, "b n"]:
    """All values of the map as one vector, for images in which position carries meaning."""
    return ops.widen(maps).reshape(maps.shape[0], -1)
