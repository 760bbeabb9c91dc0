"""Pools: from a feature map to a vector, `[b h w c] -> [b c]`.

A pool may create parameters of the module that calls it, as `learned_gem` does. `global_max` and
`class_and_mean` also name an output of a net, see `methods.assemble.pooling`.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float

from dmljax import ops
from dmljax.nets.initializers import normal
from dmljax.nets.layers import Dense, global_max, global_mean
from dmljax.ops import Array

__all__ = [
    "class_and_mean",
    "flatten",
    "gem",
    "global_max",
    "global_mean",
    "global_mean_max",
    "learned_attention",
    "learned_gem",
]


def gem(
    maps: Float[Array, "b h w c"], *, p: float | Float[Array, ""] = 3.0, epsilon: float = 1e-6
) -> Float[Array, "b c"]:
    """Computes the generalized mean over space: (mean x^p)^(1/p) (Radenovic et al., TPAMI 2019).

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
    """Computes `gem` with a learned power that starts at `p`; creates "gem" in the calling
    module.
    """
    return _GeM(p=p, epsilon=epsilon, name="gem")(maps)


class _GeM(nn.Module, kw_only=True):
    p: float
    epsilon: float

    @nn.compact
    def __call__(self, maps: Float[Array, "b h w c"]) -> Float[Array, "b c"]:
        p = self.param("p", nn.initializers.constant(self.p), (), jnp.float32)
        return gem(maps, p=p, epsilon=self.epsilon)


def learned_attention(maps: Float[Array, "b h w c"], *, heads: int = 8) -> Float[Array, "b c"]:
    """Averages the values of all positions by their attention to a learned query (Lee et al., ICML
    2019; the head of SigLIP). Creates "attention" in the calling module.

    With keys k_i = K x_i and values v_i = V x_i of the positions i, each of the `heads` has a query
    q, and its share of the channels is sum_i softmax_i(q k_i / sqrt(c / heads)) v_i. The linear
    layer of the head is the output projection.
    """
    return _Attention(heads=heads, name="attention")(maps)


class _Attention(nn.Module, kw_only=True):
    heads: int

    @nn.compact
    def __call__(self, maps: Float[Array, "b h w c"]) -> Float[Array, "b c"]:
        b, _, _, c = maps.shape
        if c % self.heads:
            raise ValueError(f"learned_attention: {self.heads} heads do not divide {c} channels")
        x = ops.widen(maps).reshape(b, -1, c)
        shape = (self.heads, c // self.heads)
        query = self.param("query", normal(0.02), shape, jnp.float32)
        keys, values = (Dense(c, name=name)(x).reshape(b, -1, *shape) for name in "kv")
        queries = jnp.broadcast_to(query, (b, 1, *shape))
        return jax.nn.dot_product_attention(queries, keys, values).reshape(b, c)


def class_and_mean(maps: Float[Array, "b h w c"]) -> Float[Array, "b n"]:
    """Concatenates the class token of a transformer and the mean of its patch tokens, `[b 2d]`.

    As in the linear evaluation of DINOv2 (Oquab et al., TMLR 2024). A map has no class token, so
    the net computes this as its output "class_and_mean", and calling the function raises.
    """
    raise ValueError("class_and_mean is an output of nets with a class token: a map has none")


def global_mean_max(maps: Float[Array, "b h w c"]) -> Float[Array, "b c"]:
    """Adds mean and maximum over space."""
    return global_mean(maps) + global_max(maps)


def flatten(maps: Float[Array, "b h w c"]) -> Float[Array, "b n"]:
    """Flattens the map to one vector, for images in which position carries meaning."""
    return ops.widen(maps).reshape(maps.shape[0], -1)
