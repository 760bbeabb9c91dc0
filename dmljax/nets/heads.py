"""Heads: from the feature map of a backbone to embeddings and logits.

A head is called as `(maps [b h w c] or pooled [b c], *, train, where=None)` and returns a dict in
float32:

* "pooled" `[b c]`: the map, pooled over space.
* "features" `[b d]`: the linear layer of "pooled". A classifier without a neck reads these.
* "embeddings" `[b d]`: the features as unit vectors.
* "neck" `[b d]` (with a neck): the features after a batch norm, which a classifier reads instead.
* "logits" `[b classes]` (with a classifier).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from dmljax import ops
from dmljax.nets.initializers import normal
from dmljax.nets.layers import Dense
from dmljax.nets.pools import global_mean
from dmljax.ops import Array

__all__ = [
    "BNNeck",
    "Head",
    "classify",
]


class BNNeck(nn.Module, kw_only=True):
    """Batch norm between the features that distances use and those that a classifier reads.

    (Luo et al., CVPR Workshops 2019.) By default without a bias, so that the classes stay around
    the origin. Rows outside `where` do not enter the statistics. `momentum`, `epsilon` and `frozen`
    are as in `layers.BatchNorm`.
    """

    use_bias: bool = False
    momentum: float = 0.1
    epsilon: float = 1e-5
    frozen: bool = False

    @nn.compact
    def __call__(
        self,
        features: Float[Array, "b d"],
        *,
        train: bool,
        where: Bool[Array, "b"] | None = None,
    ) -> Float[Array, "b d"]:
        shape = features.shape[1:]
        running_mean = self.variable("batch_stats", "mean", jnp.zeros, shape, jnp.float32)
        running_var = self.variable("batch_stats", "var", jnp.ones, shape, jnp.float32)
        scale = self.param("scale", nn.initializers.ones, shape, jnp.float32)
        x = ops.widen(features)
        if train and not self.frozen:
            rows = jnp.ones((len(x), 1), bool) if where is None else jnp.asarray(where)[:, None]
            count = jnp.sum(rows, dtype=x.dtype)
            mean = ops.divide(jnp.sum(x, axis=0, where=rows), count)
            deviations = jnp.where(rows, x - mean[None, :], 0)
            squares = jnp.sum(deviations * deviations, axis=0)
            var = ops.divide(squares, count)
            if not self.is_initializing():
                # The running variance is the unbiased one (n - 1), as in PyTorch. A single row has
                # no variance and leaves the statistics as they are.
                batch_stats = jax.lax.stop_gradient((mean, ops.divide(squares, count - 1)))
                share = jnp.where(count > 1, self.momentum, 0)
                for running, new in zip((running_mean, running_var), batch_stats, strict=True):
                    running.value += (share * (new - running.value)).astype(jnp.float32)
        else:
            mean, var = running_mean.value, running_var.value
        y = (x - mean[None, :]) * (jax.lax.rsqrt(var + self.epsilon) * scale)[None, :]
        if self.use_bias:
            y = y + self.param("bias", nn.initializers.zeros, shape, jnp.float32)[None, :]
        return y


class Head(nn.Module, kw_only=True):
    """Pool, linear layer and unit vectors; with a neck and a classifier if wanted.

    * `features`: width of the linear layer; None leaves it out.
    * `dense_fn(features, dtype=..., name=...)` makes the linear layer: one of `layers.Dense` (drawn
      as in PyTorch), `layers.orthogonal_dense`, `layers.kaiming_dense`, `layers.glorot_dense`,
      `layers.centered_dense` (principal directions, whitened) and `layers.mlp` (two layers with a
      batch norm). A layer that takes `train` gets it.
    * `pool_fn`: a function of `nets.pools`, or any function `[b h w c] -> [b c]`; None if the input
      is pooled already.
    * `classes`: number of classes of the classifier; None leaves it out.
    * `neck`: adds a `BNNeck`; `frozen` makes it use its running statistics.

    The parameters are called red, bottleneck and fc, as in the code of Seidenschwarz et al. (ICML
    2021).
    """

    features: int | None = 512
    dense_fn: Callable = Dense
    pool_fn: Callable | None = global_mean
    classes: int | None = None
    neck: bool = False
    frozen: bool = False
    dtype: Any = None

    @nn.compact
    def __call__(
        self,
        maps: Float[Array, "b h w c"] | Float[Array, "b c"],
        *,
        train: bool,
        where: Bool[Array, "b"] | None = None,
    ) -> dict[str, Array]:
        if jnp.ndim(maps) != (2 if self.pool_fn is None else 4):
            takes = "maps [b h w c]" if self.pool_fn else "pooled features [b c] (pool_fn=None)"
            raise ValueError(f"this head takes {takes}, not {list(jnp.shape(maps))}")
        pooled = ops.widen(maps if self.pool_fn is None else self.pool_fn(maps))
        features = pooled
        if self.features is not None:
            layer = self.dense_fn(self.features, dtype=self.dtype, name="red")
            takes_train = "train" in inspect.signature(layer).parameters
            features = ops.widen(layer(pooled, **({"train": train} if takes_train else {})))
        outputs = classify(
            features,
            classes=self.classes,
            neck=self.neck,
            frozen=self.frozen,
            dtype=self.dtype,
            train=train,
            where=where,
        )
        return {"pooled": pooled, **outputs}


def classify(
    features: Float[Array, "b d"],
    *,
    classes: int | None,
    neck: bool,
    frozen: bool = False,
    dtype: Any = None,
    train: bool,
    where: Bool[Array, "b"] | None = None,
) -> dict[str, Array]:
    """The outputs of a head from "features" on; arguments are as in `Head`.

    Creates "bottleneck" (the neck) and "fc" (the classifier) in the module that calls it.
    """
    outputs = {"features": features, "embeddings": ops.normalize(features)}
    if where is not None and (jnp.shape(where) != features.shape[:1] or where.dtype != bool):
        raise ValueError(
            f"where must be [{features.shape[0]}] bool, one per row, not {where.dtype} "
            f"{list(jnp.shape(where))}"
        )
    if neck:
        norm = BNNeck(frozen=frozen, name="bottleneck")
        features = outputs["neck"] = norm(features, train=train, where=where)
    if classes is not None:
        # After a neck the classifier has no bias: its hyperplanes go through the origin.
        kernel_init = normal(0.001) if neck else None
        linear = Dense(classes, use_bias=not neck, dtype=dtype, kernel_init=kernel_init, name="fc")
        outputs["logits"] = ops.widen(linear(features))
    return outputs
